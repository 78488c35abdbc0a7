"""What all streams have in common: their lines, and their keep-alive comments while there is nothing to send."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from anthropic import APIStatusError
from openai import APIError

from motet.api.http.event_stream import PING, Pings, with_escaped_line_ends
from motet.errors import EngineError
from tests.api.serving import ROUTES, Served, Serving, WatchedEngine, saying, streamed_or_not
from tests.api.text_models import TextServing
from tests.error_response import assert_error
from tests.peers.openai_script import CHAT, COMPLETIONS, Behaviour, FixedAnswer

pytestmark = pytest.mark.anyio

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
STREAMS: dict[str, dict[str, object]] = {
    **ROUTES,
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 60},
    "/generate": {"text": "hi", "sampling_params": {}},
}
"""All routes with streams, and a body for each."""
every_stream = pytest.mark.parametrize("path", list(STREAMS))
SEPARATORS = "\u2028\u2029\u0085"


def lines_of(response: httpx.Response) -> list[str]:
    """Returns the lines as clients see them that split a text at all line ends of Unicode."""
    return [line for line in response.text.splitlines() if line]


@every_stream
async def test_no_line_ends_within_an_event(serve: Serving, path: str) -> None:
    """Regression: U+2028, U+2029 and U+0085 of an answer divided its events for clients that use `str.splitlines`."""
    served = await serve(saying(f"a{SEPARATORS}b", f"{SEPARATORS}c{SEPARATORS}"))
    stream = await served.http.post(path, json={**STREAMS[path], "stream": True})
    data = [line.removeprefix("data: ") for line in lines_of(stream) if not line.startswith("event: ")]
    whole = "".join(str(json.loads(line)) for line in data if line != "[DONE]")
    assert path == "/inference/v1/generate" or all(ascii(end)[1:-1] in whole for end in SEPARATORS)
    assert all(line.startswith(("data: ", "event: ")) for line in lines_of(stream))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_no_line_ends_within_an_event_of_a_text_upstream(serve_texts: TextServing, path: str) -> None:
    gateway = await serve_texts(Behaviour())
    body = gateway.body(stream=True) if path == CHAT else {"model": "texts", "stream": True}
    prompt = f"a{SEPARATORS}b"
    body |= {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    stream = await gateway.served.http.post(path, json=body)
    assert all(line.startswith("data: ") for line in lines_of(stream))
    assert "\\u2028" in stream.text


@every_stream
async def test_no_line_ends_within_an_error_event(serve: Serving, path: str) -> None:
    served = await serve(engine=WatchedEngine(fail_after={1: EngineError(f"broken{SEPARATORS}here")}))
    stream = await served.http.post(path, json={**STREAMS[path], "stream": True})
    assert stream.status_code == 200
    assert all(line.startswith(("data: ", "event: ")) for line in lines_of(stream))
    assert "broken\\u2028\\u2029\\u0085here" in stream.text


def test_other_characters_stay_as_they_are() -> None:
    text = "data: é\u0084\u0086\u2027\u202a日本😀\n\n".encode()
    assert with_escaped_line_ends(text) == text


class Waiting:
    """A stream to a client, whose engine takes no step before `go`."""

    def __init__(self, served: Served, engine: WatchedEngine, response: httpx.Response) -> None:
        self.served, self.engine, self.response = served, engine, response
        self.received = ""
        self._pieces = response.aiter_text()

    async def read_pings(self, count: int) -> None:
        """Reads until this number of further comments has arrived."""
        count += self.received.count(PING.decode())
        while self.received.count(PING.decode()) < count:
            self.received += await anext(self._pieces)

    async def read_rest(self) -> str:
        """Returns the body without its comments."""
        self.received += "".join([piece async for piece in self._pieces])
        return self.received.replace(PING.decode(), "")


@asynccontextmanager
async def waiting(serve: Serving, path: str) -> AsyncIterator[Waiting]:
    engine = WatchedEngine(gated=True)
    served = await serve(engine=engine, sse_ping_s=0.01)
    async with served.http.stream("POST", path, json={**STREAMS[path], "stream": True}) as response:
        yield Waiting(served, engine, response)


@every_stream
async def test_a_stream_that_waits_sends_headers_and_comments(serve: Serving, path: str) -> None:
    async with waiting(serve, path) as stream:
        assert stream.response.status_code == 200
        await stream.read_pings(2)
        assert stream.received == 2 * PING.decode()
        stream.engine.go(3)
        while len(stream.received.replace(PING.decode(), "")) == 0:
            await stream.read_pings(1)
        await stream.read_pings(1)  # in the middle of the answer, too
        stream.engine.go()
        rest = await stream.read_rest()
    undisturbed = await (await serve()).http.post(path, json={**STREAMS[path], "stream": True})
    if path == "/generate":  # it joins the steps that come while it sends
        rest, undisturbed_text = rest.split("\n\n")[-3], undisturbed.text.split("\n\n")[-3]
        assert json.loads(rest[6:])["text"] == json.loads(undisturbed_text[6:])["text"] == "hello 0"
    else:
        assert len(rest) == len(undisturbed.text)


@every_stream
async def test_an_error_after_a_comment_is_an_event(serve: Serving, path: str) -> None:
    async with waiting(serve, path) as stream:
        await stream.read_pings(1)
        stream.engine.die()
        rest = await stream.read_rest()
    *_, last = [line for line in rest.splitlines() if line.startswith("data: {")]
    error = json.loads(last.removeprefix("data: "))
    if path == "/v1/responses":
        assert [json.loads(line[6:])["type"] for line in rest.splitlines() if line.startswith("data: ")] == [
            "response.created",
            "response.in_progress",
            "error",
            "response.failed",
        ]
        error = error["response"]
    assert error["error"]["message"] == "the engine is gone"
    assert path in ("/v1/responses", "/v1/messages") or rest.endswith("data: [DONE]\n\n")
    counted = 'motet:groups_total{model_name="tiny",status="503"} 1.0'
    assert counted in await stream.served.metrics()


async def test_the_official_clients_read_comments_and_errors_after_them(serve: Serving) -> None:
    engine = WatchedEngine(gated=True)
    served = await serve(engine=engine, sse_ping_s=0.01)
    chat = await served.openai.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    message = await served.anthropic.messages.create(model="tiny", max_tokens=9, messages=MESSAGES, stream=True)
    response = await served.openai.responses.create(model="tiny", input="hi", stream=True)
    engine.go(3)
    first = [await anext(aiter(stream)) for stream in (chat, message, response)]
    assert len(first) == 3
    engine.die()
    for stream, error in ((chat, APIError), (message, APIStatusError)):
        with pytest.raises(error, match="the engine is gone"):
            async for _ in stream:
                pass
    assert [event.type async for event in response][-2:] == ["error", "response.failed"]


@every_stream
async def test_a_refusal_has_its_own_status_however_soon_comments_are_sent(serve: Serving, path: str) -> None:
    served = await serve(engine=WatchedEngine(gated=True), sse_ping_s=1e-9, max_waiting_groups=1)
    body = {**STREAMS[path], "stream": True}
    refused = await served.http.post(path, json={**body, "stream": 5})
    assert refused.status_code == 400
    async with served.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        overloaded = await served.http.post(path, json=body)
        assert (overloaded.status_code, overloaded.headers["retry-after"]) == (503, "1")


@streamed_or_not
async def test_without_a_comment_an_error_has_its_own_status(serve: Serving, stream: bool) -> None:
    """An answer that is not streamed never has comments. With 0 a stream has none, either."""
    engine = WatchedEngine(gated=True)
    served = await serve(engine=engine, sse_ping_s=0.0 if stream else 1e-9)
    answer = await engine.start_request(served.chat(stream=stream))
    await asyncio.sleep(0.02)
    engine.die()
    assert_error(await answer, status=503, code="engine_died")


@every_stream
async def test_a_client_that_leaves_after_a_comment_ends_its_group(serve: Serving, path: str) -> None:
    async with waiting(serve, path) as stream:
        await stream.read_pings(1)
        assert len(stream.engine.open) == 1
    await stream.served.until_empty()


async def test_one_ping_is_sent_at_a_time_and_it_ends_with_the_stream() -> None:
    started, cancelled = 0, False

    async def ping() -> None:
        nonlocal started, cancelled
        started += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled = True
            raise

    async with Pings(1e-9, ping):
        for _ in range(50):
            await asyncio.sleep(0)
        assert started == 1
    assert cancelled


BUSY_EVENT = (
    b': ping\n\ndata: {"error":{"message":"busy","type":"overloaded_error","param":null,"code":"overloaded"}}\n\n'
)


async def test_a_text_upstream_that_refuses_after_a_comment_is_replaced(serve_texts: TextServing) -> None:
    """The refusal comes in an event, because the upstream has sent its headers. A client must not notice it."""
    refusal = FixedAnswer(200, BUSY_EVENT, (("content-type", "text/event-stream"),))
    gateway = await serve_texts(Behaviour(), Behaviour())
    for peer in gateway.peers:
        peer.behaviour.next_errors = [refusal] if peer is gateway.peers[0] else []
    answers = [await gateway.chat(stream=True) for _ in range(2)]
    assert not gateway.peers[0].behaviour.next_errors
    assert [answer.status_code for answer in answers] == [200, 200]
    assert all("error" not in answer.text for answer in answers)

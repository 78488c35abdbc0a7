"""The HTTP client of the Python API: what it sends again, its limit, and the exceptions for the errors of servers."""

import asyncio
import doctest
from collections.abc import AsyncIterator, Sequence

import httpx
import msgspec
import pytest

from motet.errors import (
    ConfigError,
    EngineClosedError,
    EngineDiedError,
    ModelNotFoundError,
    MotetError,
    OverloadedError,
    RequestError,
    UnauthorizedError,
)
from motet.llm import failures
from motet.llm.client import RetryRule, ServerClient
from motet.llm.failures import error_of
from motet.llm.limit import ChoiceLimit
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.anyio

NO_PAUSES = RetryRule(first_pause_s=0.0)


def error_body(code: str, *, param: str | None = None) -> bytes:
    return msgspec.json.encode({"error": {"message": f"about {code}", "type": "t", "param": param, "code": code}})


def client_of(
    responses: Sequence[httpx.Response | Exception], *, retry: RetryRule = NO_PAUSES
) -> tuple[ServerClient, list[httpx.Request]]:
    """Returns a client whose server has these responses, and the list of the requests that it gets."""
    rest, seen = iter(responses), list[httpx.Request]()

    def respond(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        response = next(rest)
        if isinstance(response, Exception):
            raise response
        return response

    return ServerClient(
        "http://server/v1/", api_key="k", retry=retry, transport=lambda: httpx.MockTransport(respond)
    ), seen


async def test_refused_and_broken_requests_are_sent_again_until_they_are_answered() -> None:
    client, seen = client_of(
        [
            httpx.Response(503, content=error_body("overloaded"), headers={"retry-after": "0"}),
            httpx.ConnectError("refused"),
            httpx.Response(429, content=error_body("rate_limit_exceeded"), headers={"retry-after": "0"}),
            httpx.Response(503, content=error_body("engine_died")),
            httpx.RemoteProtocolError("the server disconnected"),
            httpx.Response(200, content=b'{"a":[1,2]}'),
        ]
    )
    async with client:
        assert await client.post("/route", {"n": 1}, answer=dict[str, list[int]], num_choices=3) == {"a": [1, 2]}
    assert {(str(request.url), request.headers["authorization"]) for request in seen} == {
        ("http://server/route", "Bearer k")
    }
    assert {request.content for request in seen} == {b'{"n":1}'}
    assert client.limit.choices < ChoiceLimit().choices


@pytest.mark.parametrize(
    ("response", "kind"),
    [
        (httpx.Response(503, content=error_body("engine_closed")), EngineClosedError),
        (httpx.Response(503, content=error_body("overloaded")), OverloadedError),
        (httpx.Response(400, content=error_body("invalid_value", param="sampling_params.top_p")), RequestError),
        (httpx.ConnectError("refused"), EngineDiedError),
    ],
)
async def test_an_error_that_does_not_pass_is_raised(
    response: httpx.Response | Exception, kind: type[MotetError]
) -> None:
    client, seen = client_of([response], retry=RetryRule(busy_s=0, down_s=0, first_pause_s=0.001))
    with pytest.raises(kind) as raised:
        await client.post("/route", {}, answer=dict)
    assert len(seen) == 1
    if isinstance(raised.value, RequestError):
        assert raised.value.param == "top_p"


@pytest.mark.parametrize("error", [httpx.ConnectError("refused"), httpx.ConnectTimeout("late")], ids=repr)
async def test_a_server_that_was_never_reached_is_given_up_soon(error: httpx.TransportError) -> None:
    client, seen = client_of([error], retry=RetryRule(absent_s=0, first_pause_s=0.001))
    with pytest.raises(EngineDiedError, match="http://server cannot be reached: "):
        await client.get("/route", answer=dict)
    assert len(seen) == 1


@pytest.mark.parametrize(
    "sign",
    [httpx.Response(200, content=b"{}"), httpx.Response(404), httpx.ReadError("reset")],
    ids=["answer", "error", "broken"],
)
async def test_a_server_that_was_reached_has_the_time_of_a_restart(sign: httpx.Response | Exception) -> None:
    starting = httpx.Response(503, content=error_body("engine_closed"))
    client, seen = client_of(
        [sign, httpx.ConnectError("refused"), starting, httpx.Response(200, content=b"{}")],
        retry=RetryRule(absent_s=0, first_pause_s=0.001),
    )
    while len(seen) < 4:
        await client.send("/route", {})


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (404, "model_not_found", ModelNotFoundError),
        (401, "invalid_api_key", UnauthorizedError),
        (401, "a_code_of_another_server", UnauthorizedError),
        (409, "unknown", RequestError),
        (500, "engine_error", MotetError),
    ],
)
async def test_errors_have_the_class_of_their_code_or_status(status: int, code: str, kind: type[MotetError]) -> None:
    error = error_of(status, error_body(code, param="n"), retry_after="7")
    assert isinstance(error, kind)
    assert (error.status, error.code, error.message, error.retry_after_s) == (status, code, f"about {code}", 7)


async def test_a_body_without_an_error_is_quoted() -> None:
    error = error_of(502, b"<html>\nBad gateway")
    assert error.status == 502 and "status 502: <html> Bad gateway" in error.message


def chunk(*events: str) -> bytes:
    return "".join(f"data: {event}\n\n" for event in events).encode()


async def test_a_stream_has_its_events_however_it_is_cut() -> None:
    content = b": ping\n\n" + chunk('{"a":1}', '{"b":2}') + b": ping\n\n" + chunk('{"c":3}', "[DONE]")

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(content), 7):
            yield content[start : start + 7]

    client, _ = client_of(
        [httpx.Response(503, content=error_body("overloaded")), httpx.Response(200, content=pieces())]
    )
    steps = [step async for step in client.stream("/route", {"stream": True})]
    assert [event for step in steps for event in step] == [b'{"a":1}', b'{"b":2}', b'{"c":3}']


@pytest.mark.parametrize(
    ("content", "kind"), [(chunk('{"a":1}'), EngineDiedError), (chunk('{"a":1}') + b"data: ", EngineDiedError)]
)
async def test_a_stream_that_breaks_off_raises(content: bytes, kind: type[MotetError]) -> None:
    client, _ = client_of([httpx.Response(200, content=content)])
    with pytest.raises(kind):
        _ = [step async for step in client.stream("/route", {})]


async def test_an_error_in_the_middle_of_a_stream_is_raised() -> None:
    event = error_body("overloaded").decode()
    client, _ = client_of([httpx.Response(200, content=chunk('{"a":1}', event, "[DONE]"))])
    with pytest.raises(OverloadedError):
        _ = [step async for step in client.stream("/route", {})]


async def test_the_limit_admits_in_order_and_adapts() -> None:
    limit, started = ChoiceLimit(choices=8, requests=3), list[int]()
    release = [asyncio.Event() for _ in range(4)]

    async def hold(number: int, choices: int) -> None:
        async with limit.hold(choices):
            started.append(number)
            await release[number].wait()

    async def settle() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(hold(number, choices)) for number, choices in enumerate((6, 100, 2, 2))]
    await settle()
    assert started == [0]  # the second request has more than the limit: it runs alone, and the others come after it
    release[0].set()
    await settle()
    assert started == [0, 1]
    tasks[1].cancel()
    await settle()
    assert started == [0, 1, 2, 3]
    limit.refused(now_s=10.0)
    limit.refused(now_s=10.1)
    assert limit.choices == 8  # the minimum; the two refusals of one moment count once
    for number in range(4):
        release[number].set()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with limit.hold(1000):
        pass


async def test_a_cancelled_request_leaves_its_place() -> None:
    limit = ChoiceLimit(choices=1)
    async with limit.hold(1):
        waiting = asyncio.create_task(hold_once(limit))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.wait_for(hold_once(limit), 1)


async def hold_once(limit: ChoiceLimit) -> None:
    async with limit.hold(1):
        pass


async def test_connections_are_used_again_and_a_cancelled_request_closes_its_own() -> None:
    """The bug: one pool for all connections took 12 ms of processor time for each of 256 requests in progress."""
    opened, closed, answering = 0, asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                await answering.wait()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        except asyncio.IncompleteReadError:
            closed.set()
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with ServerClient(f"http://127.0.0.1:{port}") as client:
            waiting = asyncio.create_task(client.get("/", answer=dict))
            while not opened:  # noqa: ASYNC110  the server runs in this loop
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait_for(closed.wait(), PATIENCE_S)
            answering.set()
            for _ in range(5):
                assert await client.get("/", answer=dict) == {}
            assert opened == 2
            await asyncio.gather(*(client.get("/", answer=dict) for _ in range(3)))
            assert opened <= 4
        server.close()


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "http://", "http://[::1", "http://256.1.1.1"])
def test_a_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="url="):
        ServerClient(url)


def test_the_examples_of_the_docstrings_are_true() -> None:
    results = doctest.testmod(failures)
    assert results.attempted and not results.failed

"""The limits of an API key count a request from before its first group to the end of its answer, whatever ends it."""

import asyncio
import json

import httpx
import pytest
from starlette.types import Message

from motet.api.http.admission import ANONYMOUS, Admission, ClientLoad, KeyLimits
from motet.errors import EngineError, MotetError, OverloadedError, RateLimitedError
from tests.api.serving import ROUTES, Served, Serving, WatchedEngine
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio

ONE, OTHER = "sk-one", "sk-other"


def test_one_request_too_many_is_refused_and_not_counted() -> None:
    limits = KeyLimits(max_requests=2, max_choices=0)
    limits.enter("a", 100)
    limits.enter("a", 1)
    with pytest.raises(RateLimitedError) as raised:
        limits.enter("a", 1)
    assert raised.value.message == (
        "Rate limit reached for requests of your API key: 2 in progress and 1 more requested, while at most 2 are "
        "allowed at a time. Try again when some have ended."
    )
    assert (raised.value.status, raised.value.type, raised.value.retry_after_s) == (429, "rate_limit_error", 1)
    assert limits.clients == {"a": ClientLoad(2, 101)}
    limits.leave("a", 100)
    limits.enter("a", 1)


def test_choices_are_accepted_up_to_the_last_one() -> None:
    limits = KeyLimits(max_requests=0, max_choices=8)
    limits.enter("a", 5)
    limits.check("a", 3)
    with pytest.raises(RateLimitedError, match="for choices of your API key: 5 in progress and 4 more requested"):
        limits.check("a", 4)
    limits.enter("a", 3)
    assert limits.clients == {"a": ClientLoad(2, 8)}


def test_each_client_has_limits_of_its_own() -> None:
    limits = KeyLimits(max_requests=1, max_choices=1)
    limits.enter("a", 1)
    limits.enter("b", 1)
    limits.enter(ANONYMOUS, 1)
    with pytest.raises(RateLimitedError, match="for requests of your API key: 1 in progress"):
        limits.enter("a", 1)
    with pytest.raises(OverloadedError, match="overloaded: requests: 1 in progress and 1 more"):
        limits.enter(ANONYMOUS, 1)


def test_a_request_that_left_is_not_counted_and_cannot_leave_twice() -> None:
    limits = KeyLimits(max_requests=0, max_choices=0)
    limits.enter("a", 2)
    limits.enter("b", 3)
    assert limits.num_choices == 5
    limits.leave("a", 2)
    assert (limits.clients, limits.num_choices) == ({"b": ClientLoad(1, 3)}, 3)
    with pytest.raises(AssertionError):
        limits.leave("a", 2)


async def limited(serve: Serving, engine: WatchedEngine, *, requests: int = 0, choices: int = 0) -> Served:
    return await serve(engine=engine, api_keys=(ONE, OTHER), key_max_requests=requests, key_max_choices=choices)


async def post(served: Served, key: str, **fields: object) -> httpx.Response:
    body = {"prompt": "hi", **fields}
    return await served.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})


async def started(served: Served, engine: WatchedEngine, key: str, **fields: object) -> asyncio.Task[httpx.Response]:
    return await engine.start_request(post(served, key, **fields))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_key_at_its_limit_is_refused_and_the_other_is_not(serve: Serving, stream: bool) -> None:
    engine = WatchedEngine(gated=True)
    served = await limited(serve, engine, requests=1)
    running = await started(served, engine, ONE, stream=stream)
    refused = await post(served, ONE)
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "at most 1 are allowed" in error["message"]
    other = await started(served, engine, OTHER)
    engine.go()
    assert [(await task).status_code for task in (running, other)] == [200, 200]
    assert len(engine.requests) == 2  # the refused request was never submitted
    engine.go()
    assert (await post(served, ONE)).status_code == 200


async def test_choices_are_counted_over_all_prompts(serve: Serving) -> None:
    engine = WatchedEngine(gated=True)
    served = await limited(serve, engine, choices=6)
    running = await started(served, engine, ONE, prompt=["a", "b"], n=2)
    assert "choices of your API key: 4 in progress" in (await post(served, ONE, n=3)).json()["error"]["message"]
    for path, body in (("/v1/chat/completions", {"n": 3}), ("/inference/v1/generate", {"sampling_params": {"n": 3}})):
        refused = await served.http.post(path, json=ROUTES[path] | body, headers={"authorization": f"Bearer {ONE}"})
        assert refused.status_code == 429
    assert len(engine.requests) == 2
    engine.go()
    assert (await running).status_code == 200


async def test_an_invalid_request_is_refused_before_its_limits_are_checked(serve: Serving) -> None:
    served = await limited(serve, WatchedEngine(), choices=2)
    for path in ("/v1/completions", "/v1/chat/completions"):
        headers = {"authorization": f"Bearer {ONE}"}
        assert_error(
            await served.http.post(path, json=ROUTES[path] | {"n": 1000}, headers=headers), status=400, param="n"
        )


async def test_the_prompt_of_a_key_at_its_limit_is_not_read(serve: Serving) -> None:
    served = await serve(key_max_choices=2)
    too_long = "a" * 5000
    for response in (await served.complete(too_long, n=3), await served.chat(too_long, n=3)):
        assert_error(response, status=400, code="too_many_choices")
    assert (await served.complete(too_long, n=2)).json()["error"]["code"] == "context_length_exceeded"


def test_places_of_a_full_server_are_shared_by_weight_and_every_client_has_one() -> None:
    admission = Admission(8, weights={"heavy": 3.0, "light": 0.01})
    admission.admit(8, client="many")
    admission.admit(*[1] * 6, client="heavy")
    with pytest.raises(OverloadedError, match="14 groups wait for their first token and this request has 1"):
        admission.check_capacity(1, client="heavy")
    (slot,) = admission.admit(1, client="light")
    with pytest.raises(OverloadedError):
        admission.check_capacity(1, client="light")
    slot.leave()
    admission.check_capacity(1, client="light")
    admission.check()


async def test_an_answer_that_fails_releases_its_share(serve: Serving) -> None:
    served = await limited(serve, WatchedEngine(fail_after={1: EngineError("broke")}), requests=1)
    for stream in (True, False, True):
        assert (await post(served, ONE, stream=stream)).status_code == (200 if stream else 500)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failing", [{}, {1: EngineError("broke")}])
async def test_a_client_that_has_the_last_byte_can_send_the_next_request(
    serve: Serving, stream: bool, failing: dict[int, MotetError]
) -> None:
    """The client can be faster than the server, which has not noticed the end of the request."""
    served = await limited(serve, WatchedEngine(fail_after=failing), requests=1)
    body = json.dumps({"prompt": "hi", "stream": stream}).encode()
    counted: list[int] = []

    async def receive() -> Message:
        if counted or not unread:
            await asyncio.Event().wait()  # the task is cancelled after the end of the answer
        return unread.pop()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            counted.append(len(served.service.key_limits.clients))

    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    headers = [(b"authorization", f"Bearer {ONE}".encode()), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    await served.app({**scope, "client": ("127.0.0.1", 1), "state": {}}, receive, send)
    assert counted == [0]


async def test_a_request_that_finds_no_place_releases_its_share(serve: Serving) -> None:
    served = await serve(key_max_requests=1)
    served.service.start_drain()
    body = {"token_ids": [5], "sampling_params": {}}
    for _ in range(2):
        assert (await served.http.post("/inference/v1/generate", json=body)).json()["error"]["code"] == "draining"
    assert served.service.key_limits.clients == {}


async def test_a_client_that_leaves_releases_its_share(serve: Serving) -> None:
    engine = WatchedEngine(gated=True)
    served = await limited(serve, engine, requests=1)
    task = await started(served, engine, ONE)
    assert served.service.key_limits.clients == {"key-0": ClientLoad(1, 1)}
    task.cancel()
    await served.until_empty()
    engine.go()
    assert (await post(served, ONE)).status_code == 200


async def test_without_keys_all_clients_are_one_and_the_server_is_busy(serve: Serving) -> None:
    """Trainers retry after a 503, as from vLLM, but treat a 429 as their own mistake."""
    served = await serve(engine=WatchedEngine(gated=True), key_max_requests=1, key_max_choices=2)
    running = await served.engine.start_request(served.chat())
    assert_error(await post(served, "any"), status=503, retry_after="1", code="overloaded")
    assert_error(await post(served, "any", n=3), status=503, code="overloaded")
    served.engine.go()
    assert (await running).status_code == 200
    assert_error(await post(served, "any", n=3), status=400, code="too_many_choices")

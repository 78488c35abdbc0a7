"""Request bodies that are large, without an end, or without a key: the limits of their cost for a server and for other
clients."""

import asyncio
import time
import tracemalloc
from collections.abc import Awaitable

import httpx
import pytest

from bench.hostile.large_requests import REFUSED
from motet.api.http.body import MAX_LEVELS
from tests.api.serving import Served, Serving, WatchedEngine
from tests.attack.hostile import MIB, flood, status
from tests.deploy.listening import left, serving
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio

CHUNK = b"10000\r\n" + b"a" * 65536 + b"\r\n"
KIB = 1024
FAST = (
    *("long numbers", "lists in arguments", "values without tokens", "tools in namespaces"),
    "a worker with lists for an address",
)
"""Cases that the fast tests send. Most other cases send 7 MB each."""


async def test_open_bodies_have_one_budget_and_short_ones_are_accepted_in_addition(serve: Serving) -> None:
    served = await serve(max_open_body_bytes=200 * KIB)
    _reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n" + b" " * 250 * KIB
    )
    await writer.drain()
    long = "x" * (80 * KIB)
    while (response := await served.complete(long)).status_code != 503:
        pass  # until the received part of the other body has been read
    assert_error(response, status=503, retry_after="1", code="overloaded")
    assert (await served.complete("x")).status_code == 200
    await left(writer)
    while (await served.complete(long)).status_code == 503:
        pass
    for _ in range(5):  # each returns its part of the budget
        assert (await served.complete(long)).status_code != 503


async def test_a_body_counts_only_until_its_request_is_parsed(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(gated=True), max_open_body_bytes=200 * KIB)
    padding = {"metadata": {"x": "x" * (200 * KIB)}}
    running = [await served.engine.start_request(served.complete("x", **padding)) for _ in range(3)]
    served.engine.go()
    assert [(await task).status_code for task in running] == [200] * 3


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/tokenize", "/engine/generate", "/nowhere"])
async def test_without_a_key_a_body_is_not_read(serve: Serving, path: str) -> None:
    served = await serve(api_keys=("right",), worker_key="worker")
    async with serving(served.app) as (_, reader, writer):
        writer.write(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        tracemalloc.start()
        try:
            flooding = asyncio.create_task(flood(writer, CHUNK, total=16 * MIB))
            assert await status(reader) == 401
            await flooding
            assert tracemalloc.get_traced_memory()[1] < 4 * MIB
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in FAST else pytest.mark.slow) for case in REFUSED]
)
async def test_a_body_with_too_many_parts_is_refused_by_its_field_before_it_is_parsed(
    serve: Serving, case: str
) -> None:
    served = await serve()
    path, make, param = REFUSED[case]
    body = make()
    started_s = time.thread_time()
    response = await served.http.post(path, content=body, headers={"content-type": "application/json"})
    busy_s = time.thread_time() - started_s
    assert response.status_code == 400
    assert response.json()["error"].get("param") == param
    assert busy_s < 0.15  # CPU time of the event loop's thread, in which the client sends megabytes too


async def test_levels_of_a_body_have_a_limit_that_does_not_depend_on_the_version_of_python(served: Served) -> None:
    def body(levels: int) -> str:
        """Returns a body whose other levels are the body itself and the field."""
        inner = "[" * (levels - 2) + "]" * (levels - 2)
        return f'{{"messages": [{{"role": "user", "content": "["}}], "chat_template_kwargs": {{"a": {inner}}}}}'

    def post(levels: int) -> Awaitable[httpx.Response]:
        headers = {"content-type": "application/json"}
        return served.http.post("/v1/chat/completions", content=body(levels), headers=headers)

    assert (await post(MAX_LEVELS)).status_code == 200
    for levels in (MAX_LEVELS + 1, 950, 1050, 9000):  # Python 3.11 reads 990 levels, Python 3.13 reads 9000
        message = (
            f"Invalid 'chat_template_kwargs': the body can have at most {MAX_LEVELS} levels of objects and arrays."
        )
        assert_error(await post(levels), status=400, message=message)


async def test_text_that_looks_like_many_parts_is_not_refused(served: Served) -> None:
    for text in ('{"a": [1, 2]}, ' * 12_000, '\\"{[:' * 20_000, "\\" * 50_001 + "{[" * 9000):
        response = await served.http.post("/tokenize", json={"prompt": text, "return_token_strs": False})
        assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_long_bodies_are_parsed_like_short_ones(serve: Serving) -> None:
    """Long bodies have a separate decoder."""
    served = await serve()
    pad = {"metadata": {"x": "x" * 70_000}}
    for fields in ({}, {"seed": 2**64}, {"temperature": 1.5}, {"seed": 10**30}, {"stop": ["\u00e9", "\U0001f600"]}):
        short, long = [await served.complete("x", **fields, **more) for more in ({}, pad)]
        assert short.status_code == long.status_code
        assert short.json().get("error") == long.json().get("error")

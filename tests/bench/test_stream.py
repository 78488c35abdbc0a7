"""The client of the benchmarks reads an answer wherever it is cut, and reports errors of the server."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
import pytest

from bench.client.stream import LineBuffer, bytes_of, follow
from motet.errors import EngineError

pytestmark = pytest.mark.anyio
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = [b"data: a\n\n", b"data: b\n\ndata: \xc3\xa9\n\n", b"data: [DONE]\n\n"]
EXPECTED = ["data: a", "data: b", "data: é", "data: [DONE]"]


def chunked(*events: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"


@asynccontextmanager
async def answering(*pieces: bytes) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client of a server that answers with these pieces and disconnects."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        yield client


async def lines_of(pieces: Sequence[bytes]) -> list[str]:
    lines: list[str] = []
    async with answering(*pieces) as client:
        await follow(client, "/v1/completions", {"n": 1}, lines.append)
    return lines


@pytest.mark.parametrize("cut", [1, 7, 64, 10_000])
async def test_lines_are_the_same_however_the_answer_is_cut(cut: int) -> None:
    answer = HEAD + chunked(*EVENTS)
    pieces = [answer[at : at + cut] for at in range(0, len(answer), cut)]
    assert await lines_of(pieces) == EXPECTED


async def test_comments_are_left_out() -> None:
    assert await lines_of([HEAD, chunked(b": ping\n\n", *EVENTS[:1], b": ping\n\n", *EVENTS[1:])]) == EXPECTED


def test_lines_are_complete_wherever_a_piece_ends() -> None:
    text = b"data: a\r\n\r\ndata: b\n\ndata: c\n"
    for cut in range(len(text)):
        lines = LineBuffer()
        assert [*lines.feed(text[:cut]), *lines.feed(text[cut:])] == [b"data: a", b"data: b", b"data: c"]


async def test_the_error_of_a_refusal_has_the_servers_message() -> None:
    answer = b"HTTP/1.1 503 Busy\r\ncontent-length: 8\r\n\r\ntoo many"
    with pytest.raises(EngineError, match="503: too many"):
        await lines_of([answer])


async def test_a_connection_that_closes_in_mid_answer_is_an_error() -> None:
    with pytest.raises(ConnectionError, match="before the end of its answer"):
        await lines_of([HEAD, b"9\r\ndata: a\n\n\r\n"])


async def test_an_answer_that_is_not_http_is_an_error() -> None:
    with pytest.raises(EngineError, match="did not answer in HTTP"):
        await lines_of([b"hello\r\n\r\n"])


async def test_an_error_in_the_reader_of_lines_reaches_the_caller() -> None:
    def refuse(_: str) -> None:
        raise EngineError("the server failed: out of memory")

    async with answering(HEAD, chunked(*EVENTS)) as client:
        with pytest.raises(EngineError, match="out of memory"):
            await follow(client, "/v1/completions", {}, refuse)


async def test_a_request_has_its_body_and_key_and_closes_its_connection() -> None:
    async with httpx.AsyncClient(base_url="http://motet:8000/at", headers={"Authorization": "Bearer k"}) as client:
        request = client.build_request("POST", "/v1/completions", json={"n": 8}, headers={"Connection": "close"})
    head, body = bytes_of(request).split(b"\r\n\r\n")
    assert body == b'{"n":8}'
    assert head.split(b"\r\n")[0] == b"POST /at/v1/completions HTTP/1.1"
    headers = [line.lower() for line in head.split(b"\r\n")[1:]]
    assert {b"host: motet:8000", b"content-length: 7", b"authorization: bearer k", b"connection: close"} <= {*headers}

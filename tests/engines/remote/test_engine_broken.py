"""Fake workers on raw sockets that break off, hang or send nonsense: each leads to the error that describes it."""

import asyncio

import msgspec
import pytest

from motet.engine_orders import ApplyWeights, Done, DropWeights, EngineFacts, EngineOrder, OrderAnswer
from motet.engines.http import Client, server_client
from motet.engines.remote import EngineServer, RemoteEngine
from motet.engines.wire import PROTOCOL, EngineReport, frame
from motet.errors import EngineDiedError, EngineError, EngineSilentError, MotetError, OtherServerError, WorkerFaultError
from motet.testing.fake_engine import fake_info
from motet.types import ChoiceDelta, Finish, FinishReason, GroupDelta
from tests.engines.remote.worker import LAST_CHUNK, REPORT, group, read_request, response, scripted

pytestmark = pytest.mark.anyio

GROUP = group(n=2)
FIRST = GroupDelta(GROUP.request_id, (ChoiceDelta(0, (5,)), ChoiceDelta(1, (6,))))
LAST = GroupDelta(
    GROUP.request_id,
    (ChoiceDelta(0, (7,), None, Finish(FinishReason.STOP, 7)), ChoiceDelta(1, (8,), None, Finish(FinishReason.LENGTH))),
)
OK = "200 OK"


async def first_then_error(sent: bytes) -> MotetError:
    """Returns the error that ends a group if the server sends these bytes after the first delta."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(response(OK, frame(FIRST)) + sent)
        if not sent.endswith(LAST_CHUNK):
            await reader.read()  # until the other side closes

    async with scripted(converse) as engine:
        stream = engine.generate(GROUP)
        try:
            assert await anext(stream) == FIRST
            await anext(stream)
        except MotetError as error:
            return error
    raise AssertionError("the stream did not end")


@pytest.mark.parametrize(
    ("sent", "kind", "message"),
    [
        (LAST_CHUNK, EngineDiedError, r"ended its answer before the end of choices \[0, 1\]"),
        (b"5\r\n" + frame(LAST)[:5] + b"\r\n" + LAST_CHUNK, EngineDiedError, "ended its answer before"),
        (b"7\r\n\0\0\0\2\0\xc1\xc1\r\n", WorkerFaultError, f"a frame of engine protocol {PROTOCOL} cannot be read"),
        (b"5\r\n\0\0\0\0\x09\r\n", WorkerFaultError, f"not a frame of engine protocol {PROTOCOL}: kind 9"),
        (b"5\r\n\xff\xff\xff\xff\0\r\n", WorkerFaultError, "4294967295 bytes"),
    ],
    ids=["neat end too early", "half a frame", "garbage", "unknown kind", "huge frame"],
)
async def test_a_broken_stream_ends_with_the_reason(sent: bytes, kind: type[MotetError], message: str) -> None:
    error = await first_then_error(sent)
    assert type(error) is kind
    assert error.may_retry
    with pytest.raises(kind, match=message):
        raise error


async def test_a_connection_that_is_cut_in_mid_answer_means_a_dead_worker() -> None:
    cut = asyncio.Event()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(response(OK, frame(FIRST)))
        await cut.wait()
        writer.transport.abort()

    async with scripted(converse) as engine:
        stream = engine.generate(GROUP)
        assert await anext(stream) == FIRST
        cut.set()
        with pytest.raises(EngineDiedError, match="was lost in the middle of its answer"):
            await anext(stream)


async def test_frames_that_come_byte_by_byte_are_put_together() -> None:
    complete = frame(FIRST) + frame(LAST)

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(response(OK))
        for place in range(len(complete)):
            writer.write(b"1\r\n" + complete[place : place + 1] + b"\r\n")
            await writer.drain()
        await reader.read()  # until the other side closes: the group has ended without the last chunk

    async with scripted(converse) as engine:
        assert [delta async for delta in engine.generate(GROUP)] == [FIRST, LAST]


async def test_the_next_group_uses_the_connection_of_an_answer_that_was_read_to_its_end() -> None:
    heads: list[bytes] = []
    connections: list[asyncio.StreamWriter] = []

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        for _ in range(2):
            heads.append(await read_request(reader))
            writer.write(response(OK, frame(LAST)) + LAST_CHUNK)

    async with scripted(converse) as engine:
        for _ in range(2):
            assert [delta async for delta in engine.generate(GROUP)] == [LAST]
    assert (len(heads), len(connections)) == (2, 1)
    assert all(f"x-motet-engine-protocol: {PROTOCOL}".encode() in head.lower() for head in heads)


async def test_an_address_without_a_listener_means_a_dead_worker() -> None:
    listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    listener.close()
    await listener.wait_closed()
    async with server_client() as client:
        engine = RemoteEngine(EngineServer(f"http://127.0.0.1:{port}/v1/", client), REPORT)
        with pytest.raises(EngineDiedError, match=f"the worker http://127.0.0.1:{port} did not answer"):
            await anext(engine.generate(GROUP))
        for question in (engine.prefill(GROUP), engine.stats(), engine.server.report()):
            with pytest.raises(EngineDiedError):
                await question
        await engine.close()


async def test_a_client_that_was_closed_too_early_raises() -> None:
    """Such a mistake in Motet must not look like a dead worker, nor be waited for."""
    client = server_client()
    engine = RemoteEngine(EngineServer("http://127.0.0.1:1", client), REPORT)
    await client.close()
    with pytest.raises(RuntimeError, match="closed"):
        await anext(engine.generate(GROUP))
    await engine.close()


@pytest.mark.parametrize("url", ["no url", "http://a..b:8000", f"http://{'x' * 64}:8000"])
async def test_an_invalid_url_does_not_mean_a_dead_worker(url: str) -> None:
    """The bug: an invalid host name ended the gateway, also when an operator added the worker."""
    async with server_client() as client:
        with pytest.raises(EngineError, match="is not valid") as caught:
            await EngineServer(url, client).report()
    assert type(caught.value) is EngineError


async def test_a_worker_that_hangs_is_silent_after_the_reports_time_out() -> None:
    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with scripted(converse) as engine:
        with pytest.raises(EngineSilentError):
            await engine.server.report(timeout_s=0.01)


async def report_of(body: bytes) -> EngineReport:
    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(response(OK, body) + LAST_CHUNK)

    async with scripted(converse) as engine:
        return await engine.server.report()


async def test_the_error_for_another_protocol_has_both_numbers() -> None:
    both = rf"\(Motet 9.1\) speaks engine protocol {PROTOCOL + 1}, and this server {PROTOCOL}"
    with pytest.raises(EngineError, match=both) as caught:
        await report_of(msgspec.msgpack.encode({"protocol": PROTOCOL + 1, "version": "9.1", "all": "different"}))
    assert type(caught.value) is EngineError


@pytest.mark.parametrize("body", [b"\x80", b"<html>", b"\xc1", msgspec.msgpack.encode({"protocol": PROTOCOL})])
async def test_an_answer_that_is_not_a_report_means_another_kind_of_server(body: bytes) -> None:
    with pytest.raises(OtherServerError, match="sent an answer that this server cannot read"):
        await report_of(body)


async def test_fields_that_a_newer_worker_adds_are_ignored() -> None:
    assert await report_of(msgspec.msgpack.encode({**msgspec.to_builtins(REPORT), "added": [1]})) == REPORT


class Preparing(EngineServer):
    """A worker that never answers an order to drop weights."""

    def __init__(self, client: Client) -> None:
        super().__init__("http://127.0.0.1:1", client)
        self.dropped: asyncio.Queue[str] = asyncio.Queue()

    async def send(self, order: EngineOrder) -> OrderAnswer:
        assert isinstance(order, DropWeights)
        self.dropped.put_nowait(order.digest)
        await asyncio.Event().wait()
        raise AssertionError


async def test_an_order_to_drop_weights_is_sent_and_not_waited_for() -> None:
    async with server_client() as client:
        server = Preparing(client)
        engine = RemoteEngine(server, REPORT)
        for digest in ("whole", ""):
            assert await engine.send(DropWeights(digest)) == Done()
            assert await server.dropped.get() == digest
        await engine.close()


@pytest.mark.parametrize("answer", [Done(), EngineFacts(msgspec.structs.replace(fake_info(), num_blocks=0))])
async def test_an_answer_that_cannot_belong_to_the_order_means_a_broken_worker(answer: OrderAnswer) -> None:
    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(response(OK, msgspec.msgpack.encode(answer)) + LAST_CHUNK)

    async with scripted(converse) as engine:
        with pytest.raises(WorkerFaultError, match=r"answered Done to ApplyWeights|reports num_blocks 0"):
            await engine.send(ApplyWeights("1"))
        assert engine.info == REPORT.info

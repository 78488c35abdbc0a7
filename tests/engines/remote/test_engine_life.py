"""A server as an engine, apart from its groups: lost, closed, draining, full, prefilling, and connecting to other
servers."""

import asyncio

import msgspec
import pytest

from motet.engine import WorkerState
from motet.engine_orders import Connect
from motet.engines.remote import RemoteEngine
from motet.errors import (
    DrainingError,
    EngineClosedError,
    EngineDiedError,
    EngineError,
    EngineSilentError,
    OverloadedError,
)
from motet.settings.server_config import ServerConfig
from motet.testing.fake_engine import NOWHERE, FakeEngine, FakeLeases
from motet.transfer.ticket import TransferAddress, is_for_prompt
from motet.types import Role
from tests.api.serving import MODEL, Served, Serving, WatchedEngine
from tests.engines.remote.worker import (
    LAST_CHUNK,
    ReportingEngine,
    counting,
    deltas_of,
    endless,
    engine_at,
    group,
    read_request,
    response,
    scripted,
)
from tests.routing.scene import ControlledPrefill

pytestmark = pytest.mark.anyio


async def cancel_prefill(engine: RemoteEngine, started: asyncio.Event) -> None:
    """Cancels a prefill as soon as the server has started it."""
    prefilling = asyncio.ensure_future(engine.prefill(group()))
    await started.wait()
    prefilling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await prefilling


async def test_lost_ends_groups_and_prefills_with_its_error(serve: Serving) -> None:
    controlled = ControlledPrefill()
    served = await serve(engine=WatchedEngine(endless, role=Role.PREFILL, gated=True, during_prefill=controlled))
    async with engine_at(served.url) as engine:
        unread, read = engine.generate(group("unread")), engine.generate(group("read"))
        reading = asyncio.ensure_future(anext(read))
        prefilling = asyncio.ensure_future(engine.prefill(group("prefilled")))
        for _ in range(2):
            await served.engine.submitted.acquire()
        await controlled.entered.wait()
        engine.lost(EngineSilentError("it hangs"))
        engine.lost(EngineDiedError("said twice"))
        for waiting in (reading, prefilling, asyncio.ensure_future(anext(unread))):
            with pytest.raises(EngineSilentError, match="it hangs"):
                await waiting
        await served.until_empty()
        assert (await engine.server.report()).state is WorkerState.READY


async def test_a_group_that_starts_after_lost_is_sent_as_usual(serve: Serving) -> None:
    served = await serve(counting)
    async with engine_at(served.url) as engine:
        engine.lost(EngineSilentError("it hangs"))
        assert await deltas_of(engine, group()) == await deltas_of(FakeEngine(counting), group())


@pytest.mark.slow
async def test_close_ends_everything_and_sends_nothing_more(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(endless, gated=True))
    async with engine_at(served.url) as engine:
        stream = engine.generate(group())
        await served.engine.submitted.acquire()
        await engine.close()
        await engine.close()
        with pytest.raises(EngineClosedError, match="is closing"):
            await anext(stream)
        with pytest.raises(EngineClosedError, match="is closing"):
            engine.generate(group("late"))
        for question in (engine.stats(), engine.prefill(group())):
            with pytest.raises(EngineClosedError):
                await question
        await served.until_empty()


async def test_a_draining_server_refuses_groups_with_its_reason(serve: Serving) -> None:
    served = await serve()
    async with engine_at(served.url) as engine:
        served.service.start_drain()
        with pytest.raises(DrainingError, match=r"answered 503: .*draining"):
            await deltas_of(engine, group())
        assert (await engine.server.report()).state is WorkerState.DRAINING


async def test_a_full_server_is_overloaded_and_not_dead(serve: Serving) -> None:
    config = ServerConfig(served_model_name=MODEL, max_waiting_groups=1)
    served = await serve(engine=WatchedEngine(endless, gated=True), config=config)
    async with engine_at(served.url) as engine:
        waiting = engine.generate(group())
        await served.engine.submitted.acquire()
        with pytest.raises(OverloadedError) as caught:
            await deltas_of(engine, group("too-many"))
        assert type(caught.value) is OverloadedError
        await waiting.aclose()
        await served.until_empty()


async def test_a_refusal_has_the_servers_message(served: Served) -> None:
    async with engine_at(served.url) as engine:
        with pytest.raises(EngineError, match="answered 400: prompt contains token id 99999") as caught:
            await deltas_of(engine, group(prompt=(5, 99999)))
        assert not caught.value.may_retry


async def test_the_key_is_sent(serve: Serving) -> None:
    served = await serve(config=ServerConfig(served_model_name=MODEL, api_keys=("client",), worker_key="k1"))
    async with engine_at(served.url, worker_key="k1") as engine:
        assert len(await deltas_of(engine, group())) > 1
    with pytest.raises(EngineError, match=r"answered 401.*with the same --worker-key"):
        async with engine_at(served.url):
            pass


async def test_a_prefill_returns_a_ticket_and_release_ends_its_lease(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(role=Role.PREFILL))
    async with engine_at(served.url) as engine:
        ticket = await engine.prefill(group(n=8), readers=3)
        assert list(served.engine.leases.held.values()) == [ticket]
        assert (ticket.readers, is_for_prompt(ticket, group().prompt)) == (3, True)
        await engine.release(ticket, trace="trace-2")
        assert (served.engine.released, served.engine.record.release_traces) == ([ticket], ["trace-2"])
        assert served.engine.requests == []


async def test_a_cancelled_prefill_is_freed(serve: Serving) -> None:
    controlled = ControlledPrefill()
    served = await serve(engine=WatchedEngine(role=Role.PREFILL, during_prefill=controlled))
    async with engine_at(served.url) as engine:
        await cancel_prefill(engine, controlled.entered)
        await served.until_empty()


async def test_the_error_of_a_cancelled_prefill_does_not_reach_the_event_loop(serve: Serving) -> None:
    """The bug: `asyncio.shield` of Python 3.14 logged the server's refusal. In a test, anyio raises what reaches the
    event loop."""
    controlled = ControlledPrefill()
    served = await serve(engine=WatchedEngine(role=Role.PREFILL, during_prefill=controlled))
    async with engine_at(served.url) as engine:
        before = asyncio.all_tasks()
        await cancel_prefill(engine, controlled.entered)
        await asyncio.wait(asyncio.all_tasks() - before)
        engine.check()


async def test_a_ticket_on_its_way_when_its_prefill_is_cancelled_is_released() -> None:
    """The bug: its lease was left to expire. The calls have the client's request id."""
    traced: list[bool] = []
    running, stopped, released = asyncio.Event(), asyncio.Event(), asyncio.Event()
    ticket = FakeLeases().grant(group(), NOWHERE, readers=1, block_size=16)

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await read_request(reader)
        if b"/engine/prefill" in head:
            running.set()
            await stopped.wait()  # too late: the ticket has been sent
            writer.write(response("200 OK", msgspec.msgpack.encode(ticket)) + LAST_CHUNK)
            return
        writer.write(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n")
        traced.append(b"x-request-id: trace-g" in head.lower())
        (stopped if b"/engine/stop" in head else released).set()
        assert b"/engine/stop" in head or b"/engine/release" in head

    async with scripted(converse) as engine:
        await cancel_prefill(engine, running)
        await released.wait()
    assert traced == [True, True]


async def test_a_cancelled_prefill_ends_with_its_connection_if_the_server_does_not_answer() -> None:
    running, ended = asyncio.Event(), asyncio.Event()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"/engine/prefill" in await read_request(reader):
            running.set()
            assert await reader.read() == b""
            ended.set()

    async with scripted(converse) as engine:
        await cancel_prefill(engine, running)
        await ended.wait()


async def test_the_ticket_of_a_group_that_was_closed_at_once_is_released(serve: Serving) -> None:
    """The gateway does not know if the worker has read the request, and so would release the ticket itself."""
    server_engine = ReportingEngine(role=Role.DECODE)
    served = await serve(engine=server_engine)
    ticket = server_engine.leases.grant(group(), NOWHERE, readers=1, block_size=16)
    async with engine_at(served.url) as engine:
        stream = engine.generate(msgspec.structs.replace(group(), ticket=ticket))
        await stream.aclose()
        await server_engine.ticket_released.wait()
    assert (server_engine.released, server_engine.requests) == ([ticket], [])


async def test_the_ticket_of_a_group_is_sent(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(role=Role.DECODE))
    ticket = served.engine.leases.grant(group(), NOWHERE, readers=1, block_size=16)
    async with engine_at(served.url) as engine:
        assert len(await deltas_of(engine, msgspec.structs.replace(group(), ticket=ticket))) > 1
    assert (served.engine.record.pulls, served.engine.released) == (1, [])


async def test_a_worker_connects_to_another_one_by_order(serve: Serving) -> None:
    served = await serve()
    async with engine_at(served.url) as engine:
        with pytest.raises(EngineError, match=r"answered 404: .*does not connect to other workers"):
            await engine.send(Connect(NOWHERE))
        met: list[TransferAddress] = []

        async def connect(address: TransferAddress) -> None:
            met.append(address)

        served.service.connect = connect
        await engine.send(Connect(NOWHERE))
        assert met == [NOWHERE]

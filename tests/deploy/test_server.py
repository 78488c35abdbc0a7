"""The start and the end of a server."""

import asyncio
import os
import signal
from pathlib import Path
from typing import NoReturn

import httpx
import pytest

from motet.deploy.listen import listen, port_of
from motet.deploy.server import Outcome
from motet.deploy.shutdown import SIGNALS, StopSignals
from motet.errors import ConfigError, ModelLoadError
from motet.types import Role
from tests.deploy.dying import Starter
from tests.deploy.running import EXPECTED, Running, is_complete, texts
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_a_server_serves_and_stops_at_a_signal(folder: Path) -> None:
    async with Running(folder) as server:
        server.engine.let_run()
        assert is_complete((await server.chat()).text)
        status = (await server.http.get("/status")).json()
        assert status["workers"][0]["address"] == f"127.0.0.1:{server.http.base_url.port}"
        server.signals.receive()
        assert await server.outcome() is Outcome.STOPPED
        assert server.engine.closed
        with pytest.raises(httpx.ConnectError):
            await server.http.get("/health")


async def test_after_the_first_signal_answers_finish_and_new_requests_are_refused(folder: Path) -> None:
    async with Running(folder) as server:
        running = await server.started_chat()
        server.signals.receive()
        refused = await server.chat()
        assert refused.status_code == 503
        assert (await server.http.get("/ready")).status_code == 503
        assert (await server.http.get("/health")).status_code == 200
        server.engine.let_run()
        assert is_complete((await running.aread()).decode())
        assert await server.outcome() is Outcome.STOPPED


async def test_the_second_signal_does_not_wait_for_answers(folder: Path) -> None:
    async with Running(folder) as server:
        running = await server.started_chat()
        server.signals.receive()
        server.signals.receive()
        assert await server.outcome() is Outcome.STOPPED
        server.engine.check()
        await running.aclose()


async def test_answers_that_outlast_the_drain_end_with_an_error(folder: Path) -> None:
    async with Running(folder, drain_timeout_s=0.05) as server:
        running = await server.started_chat()
        waiting = await server.submitted_chat()
        server.signals.receive()
        stream = (await running.aread()).decode()
        assert '"engine_closed"' in stream
        assert stream.endswith("data: [DONE]\n\n")
        assert (await waiting).status_code == 503
        assert await server.outcome() is Outcome.STOPPED


async def test_a_server_that_is_drained_finishes_its_answers_and_ends(folder: Path) -> None:
    async with Running(folder) as server:
        running = await server.started_chat()
        assert (await server.http.post("/drain")).json() == {"draining": True, "groups_open": 1}
        assert (await server.chat()).status_code == 503
        server.engine.let_run()
        assert '"finish_reason":"stop"' in (await running.aread()).decode()
        assert await server.outcome() is Outcome.STOPPED


async def test_an_engine_that_dies_is_restarted_and_its_answers_continue(folder: Path) -> None:
    async with Running(folder, restarts=1) as server:
        first = server.engine
        running = await server.started_chat()
        first.die()
        second = await server.starter.engine(1)
        second.let_run()
        assert texts((await running.aread()).decode()) == EXPECTED
        assert first.closed
        second.die()
        assert await server.outcome() is Outcome.ENGINE_DIED


async def test_a_dead_engine_ends_answers_with_an_error_then_the_server(folder: Path) -> None:
    async with Running(folder, linger_s=PATIENCE_S) as server:
        running = await server.started_chat()
        server.engine.die()
        stream = (await running.aread()).decode()
        assert '"engine_died"' in stream
        assert stream.endswith("data: [DONE]\n\n")
        assert (await server.http.get("/health")).status_code == 503
        assert (await server.chat()).status_code == 503
        server.signals.receive()
        assert await server.outcome() is Outcome.ENGINE_DIED


async def test_a_signal_before_it_is_ready_ends_the_start_of_the_engine(folder: Path) -> None:
    starter = Starter(hangs=[Role.BOTH])
    running = Running(folder, starter=starter)
    running.signals.receive()
    async with running as server:
        assert await server.outcome() is Outcome.STOPPED_BEFORE_READY
        assert starter.cancelled


async def test_a_start_that_is_cancelled_ends_the_start_of_the_engine(folder: Path) -> None:
    """Regression: the start continued without an owner."""
    starter = Starter(hangs=[Role.BOTH])
    running = Running(folder, starter=starter)
    entering = asyncio.create_task(running.__aenter__())
    await starter.hanging.wait()
    running.ended.cancel()
    await entering
    assert starter.cancelled


async def test_a_taken_port_is_reported_before_the_engine_starts(folder: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        starter = Starter(hangs=[Role.BOTH])
        async with Running(folder, starter=starter, port=port_of(taken)) as server:
            with pytest.raises(ConfigError, match="--port"):
                await server.outcome()


async def test_a_broken_tokenizer_is_reported_before_the_engine_starts(tmp_path: Path) -> None:
    starter = Starter(hangs=[Role.BOTH])
    async with Running(tmp_path, starter=starter) as server:
        with pytest.raises(ModelLoadError):
            await server.outcome()


async def test_the_first_signal_of_the_process_drains_and_the_second_stops_at_once() -> None:
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        await signals.drain.wait()
        assert not signals.at_once.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        await signals.at_once.wait()


async def test_signals_are_handled_where_the_event_loop_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise NotImplementedError

    loop, before = asyncio.get_running_loop(), [signal.getsignal(number) for number in SIGNALS]
    monkeypatch.setattr(type(loop), "add_signal_handler", refuse)
    monkeypatch.setattr(type(loop), "remove_signal_handler", refuse)
    await test_the_first_signal_of_the_process_drains_and_the_second_stops_at_once()
    assert [signal.getsignal(number) for number in SIGNALS] == before


async def test_the_end_of_standard_input_stops_at_once() -> None:
    reading, writing = os.pipe()
    signals = StopSignals()
    with os.fdopen(reading) as stdin:
        signals.watch_stdin(stdin)
        os.write(writing, b"typed by accident\n")
        os.close(writing)
        await signals.at_once.wait()
        assert signals.drain.is_set()

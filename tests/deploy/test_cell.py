"""The start, the losses and the end of a cell of prefill and decode engines."""

import asyncio
import logging
from pathlib import Path

import pytest

from bench.servers.ports import free_port
from motet.deploy.listen import listen
from motet.deploy.server import Outcome
from motet.engine import WorkerState
from motet.errors import KVMemoryError
from motet.settings.server_config import CellConfig
from motet.types import Role
from tests.api.serving import group_lines
from tests.deploy.dying import Starter
from tests.deploy.running import CELL, Running, is_complete
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

TWO_BY_TWO = CellConfig(prefill=2, decode=2, bypass_tokens=0)


async def test_a_prompt_is_prefilled_on_one_engine_and_answered_by_the_other(folder: Path) -> None:
    async with Running(folder, cell=CELL) as server:
        server.engine.let_run()
        assert is_complete((await server.chat()).text)
        (prefill,), (decode,) = server.starter.of(Role.PREFILL), server.starter.of(Role.DECODE)
        assert (len(prefill.prefills), len(prefill.requests)) == (1, 0)
        assert (decode.record.pulls, len(decode.requests)) == (1, 1)
        server.signals.receive()
        assert await server.outcome() is Outcome.STOPPED
        assert prefill.closed and decode.closed
        prefill.check()
        decode.check()


async def test_the_status_lists_the_workers_of_a_cell_with_their_side_channels(folder: Path) -> None:
    async with Running(folder, cell=TWO_BY_TWO) as server:
        workers = (await server.http.get("/status")).json()["workers"]
        assert [(worker["id"], worker["role"], worker["address"]) for worker in workers] == [
            ("prefill-0", "prefill", "127.0.0.1:1"),
            ("prefill-1", "prefill", "127.0.0.1:2"),
            ("decode-0", "decode", "127.0.0.1:3"),
            ("decode-1", "decode", "127.0.0.1:4"),
        ]


async def test_decode_engines_connect_to_all_prefill_engines_before_the_server_is_ready(folder: Path) -> None:
    async with Running(folder, cell=TWO_BY_TWO) as server:
        assert [[address.port for address in engine.connected] for engine in server.starter.of(Role.DECODE)] == [
            [1, 2]
        ] * 2
        assert [engine.connected for engine in server.starter.of(Role.PREFILL)] == [[], []]


async def test_a_restarted_engine_is_connected_only_to_running_engines(folder: Path) -> None:
    async with Running(folder, cell=CELL, restarts=1) as server:
        (prefill,), (decode,) = server.starter.of(Role.PREFILL), server.starter.of(Role.DECODE)
        decode.die()
        prefill.die()
        fleet = server.cell.router.fleet
        while len(server.starter.engines) < 4 or any(one.state is not WorkerState.READY for one in fleet.members):
            await fleet.changes.wait()
        assert server.starter.of(Role.DECODE)[1].connected == [server.starter.of(Role.PREFILL)[1].info.transfer]


async def test_engines_that_cannot_be_connected_are_a_warning_only(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with Running(folder, cell=CELL, starter=Starter(connect=False)) as server:
            assert (await server.http.get("/health")).status_code == 200
    assert "decode-0 cannot fetch from prefill-0" in caplog.text
    assert "no server answers there" in caplog.text


async def test_an_engine_that_cannot_start_ends_the_others_and_frees_the_port(folder: Path) -> None:
    port = free_port()
    starter = Starter(errors={Role.DECODE: KVMemoryError("too small")})
    async with Running(folder, cell=CellConfig(prefill=2, decode=1), starter=starter, port=port) as server:
        with pytest.raises(KVMemoryError, match="too small"):
            await server.outcome()
    assert [engine.closed for engine in starter.engines] == [True, True]
    listen("127.0.0.1", port).close()


async def test_a_signal_during_the_start_ends_ready_engines_and_cancels_the_others(folder: Path) -> None:
    starter = Starter(hangs=[Role.DECODE])
    running = Running(folder, cell=TWO_BY_TWO, starter=starter)

    async def signal_during_the_start() -> None:
        await starter.hanging.wait()
        running.signals.receive()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(signal_during_the_start())
        async with running as server:
            assert await server.outcome() is Outcome.STOPPED_BEFORE_READY
    assert [engine.closed for engine in starter.engines] == [True, True]
    assert starter.cancelled == 2


async def test_without_its_prefill_engines_a_cell_continues(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with Running(folder, cell=CELL) as server:
        server.engine.let_run()
        server.starter.of(Role.PREFILL)[0].die()
        assert is_complete((await server.chat()).text)
        assert (await server.http.get("/health")).status_code == 200
        assert (await server.http.get("/status")).json()["totals"]["bypasses"] == 1
        assert not server.ended.done()
    assert "prefill-0" in caplog.text


async def test_an_error_before_the_first_token_names_the_worker_that_failed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each engine dies while it computes the prompt. The last one is named."""
    caplog.set_level("INFO", logger="motet.api")
    async with Running(folder, cell=CellConfig(decode=2), linger_s=PATIENCE_S) as server:
        answer = asyncio.ensure_future(server.chat())
        died: list[str] = []
        while len(died) < 2:
            for engine, member in zip(server.starter.engines, server.cell.router.fleet.members, strict=True):
                if engine.requests and member.id not in died:
                    died.append(member.id)
                    engine.die()
            await asyncio.sleep(0)
        refused = await answer
        assert refused.status_code == 503
        assert (refused.json()["error"]["code"], refused.headers["x-motet-worker"]) == ("engine_died", died[-1])
        assert sorted(died) == ["decode-0", "decode-1"]
        (line,) = group_lines(caplog)
        assert (line["worker"], line["status"]) == (died[-1], 503)


async def test_one_decode_engine_is_enough(folder: Path) -> None:
    async with Running(folder, cell=TWO_BY_TWO) as server:
        first, second = server.starter.of(Role.DECODE)
        first.die()
        second.let_run()
        for _ in range(3):
            assert is_complete((await server.chat()).text)
        assert (await server.http.get("/health")).status_code == 200


async def test_a_cell_ends_when_its_last_decode_engine_dies(folder: Path) -> None:
    async with Running(folder, cell=TWO_BY_TWO, linger_s=PATIENCE_S) as server:
        first, second = server.starter.of(Role.DECODE)
        first.die()
        second.die()
        await asyncio.wait_for(server.cell.death(), timeout=PATIENCE_S)
        assert (await server.http.get("/health")).status_code == 503
        server.signals.receive()
        assert await server.outcome() is Outcome.ENGINE_DIED
        assert all(engine.closed for engine in server.starter.engines)


async def test_the_prefill_worker_is_named_in_a_header_and_in_the_log(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="motet.api")
    async with Running(folder, cell=CELL) as server:
        server.engine.let_run()
        answer = await server.chat()
        names = [answer.headers.get(name) for name in ("x-motet-worker", "x-motet-prefill-worker")]
        assert names == ["decode-0", "prefill-0"]
        server.starter.of(Role.PREFILL)[0].die()
        alone = await server.chat()
        assert (alone.headers["x-motet-worker"], "x-motet-prefill-worker" in alone.headers) == ("decode-0", False)
    lines = group_lines(caplog)
    assert [(line["worker"], line["prefill_worker"]) for line in lines] == [
        ("decode-0", "prefill-0"),
        ("decode-0", None),
    ]


async def test_running_answers_finish_before_the_engines_of_a_cell_are_closed(folder: Path) -> None:
    async with Running(folder, cell=CELL) as server:
        running = await server.started_chat()
        server.signals.receive()
        assert (await server.chat()).status_code == 503
        assert not any(engine.closed for engine in server.starter.engines)
        server.engine.let_run()
        assert is_complete((await running.aread()).decode())
        assert await server.outcome() is Outcome.STOPPED
        assert all(engine.closed for engine in server.starter.engines)


async def test_restarts_are_counted(folder: Path) -> None:
    async with Running(folder, cell=CELL, restarts=1) as server:
        assert 'motet:engine_restarts_total{model_name="tiny",worker="decode-0"} 0.0' in await metrics(server)
        server.engine.die()
        restarted = await server.starter.engine(2)
        while all(worker.engine is not restarted for worker in server.cell.workers):
            await server.cell.router.fleet.changes.wait()
        assert 'motet:engine_restarts_total{model_name="tiny",worker="decode-0"} 1.0' in await metrics(server)


async def metrics(server: Running) -> str:
    return (await server.http.get("/metrics")).text

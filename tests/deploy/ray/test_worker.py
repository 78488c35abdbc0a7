"""A prefill or decode replica from its start to its end: whom it meets, what it says of itself, and what is left."""

import asyncio
import socket
from pathlib import Path

import httpx
import pytest

from bench.ports import free_port
from motet.config import EngineConfig
from motet.deploy.listen import listen, port_of
from motet.deploy.ray.directory import Stage
from motet.deploy.ray.worker import WorkerLimits
from motet.errors import DirectoryError, EngineDiedError, ModelLoadError, PortTakenError
from motet.types import Role
from tests.deploy.dying import DyingEngine, Starter
from tests.deploy.ray.directories import AWAY, FakeDirectory, worker
from tests.deploy.ray.workers import Belongings, RunningWorker

pytestmark = pytest.mark.anyio


class ListeningStarter(Starter):
    """Its engines listen on their side-channel port as those of processes do."""

    def __init__(self) -> None:
        super().__init__()
        self.listening: list[socket.socket] = []

    async def __call__(self, config: EngineConfig) -> DyingEngine:
        assert config.side_channel_port is not None
        self.listening.append(listen(config.side_channel_host, config.side_channel_port))
        return await super().__call__(config)

    def close(self) -> None:
        for one in self.listening:
            one.close()


async def test_two_that_start_at_the_same_time_meet_before_both_are_ready(folder: Path) -> None:
    belongings, directory, starter = Belongings(), FakeDirectory(), Starter()
    prefill = RunningWorker(folder, directory, Role.PREFILL, starter=starter)
    decode = RunningWorker(folder, directory, Role.DECODE, starter=starter)
    await asyncio.gather(prefill.worker.start(), decode.worker.start())
    for one in (prefill, decode):
        assert directory.stages(one.id) == [Stage.MEETING, Stage.READY]
    assert decode.engine.met == [prefill.engine.info.transfer]
    await asyncio.gather(prefill.worker.close(), decode.worker.close())
    await decode.worker.close()
    assert directory.book.listing().workers == ()
    for one in (prefill, decode):
        assert directory.stages(one.id) == [Stage.MEETING, Stage.READY, Stage.LEAVING]
    assert all(engine.closed for engine in starter.engines)
    belongings.check()


async def test_who_comes_later_is_met_at_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It waits until decode says so, which has something new to say, and not only every few seconds."""
    directory, starter = FakeDirectory(), Starter()
    seldom = WorkerLimits(announce_s=3600.0, meet_s=10.0, farewell_s=0.05)
    async with (
        RunningWorker(folder, directory, Role.DECODE, starter=starter, limits=seldom) as decode,
        RunningWorker(folder, directory, Role.PREFILL, starter=starter, limits=seldom) as prefill,
    ):
        assert decode.announced_met == {prefill.engine_id}
    assert "ready all the same" not in caplog.text


async def test_who_was_started_again_is_met_again(folder: Path) -> None:
    """A prefill worker has another engine then, and a decode worker one that has met nobody."""
    directory, starter = FakeDirectory(), Starter()
    async with (
        RunningWorker(folder, directory, Role.DECODE, starter=starter, restarts=1) as decode,
        RunningWorker(folder, directory, Role.PREFILL, starter=starter, restarts=1) as prefill,
    ):
        assert prefill.engine_id in decode.announced_met  # it was not ready before
        prefill.engine.die()
        again = await starter.engine(2)
        await directory.until(lambda: again.info.transfer in decode.engine.met)
        decode.engine.die()
        newer = await starter.engine(3)
        await newer.has_met.wait()
        assert newer.met == [again.info.transfer]
        prefill.worker.check()
        decode.worker.check()


async def test_a_prefill_worker_is_not_ready_before_it_was_met_and_being_cancelled_then_leaves_nothing(
    folder: Path,
) -> None:
    belongings, directory, starter = Belongings(), FakeDirectory(), Starter()
    directory.book.announce(worker("decode", Role.DECODE, Stage.READY))
    prefill = RunningWorker(folder, directory, Role.PREFILL, starter=starter)
    start = asyncio.create_task(prefill.worker.start())
    await directory.until(lambda: len(directory.announced) == 3)
    start.cancel()
    await asyncio.wait([start])
    assert start.cancelled()
    assert directory.stages(prefill.id) == [Stage.MEETING, Stage.LEAVING]
    assert directory.withdrawn == [prefill.id]
    assert starter.engines[0].closed
    belongings.check()


async def test_being_cancelled_while_the_engine_starts_leaves_nothing(folder: Path) -> None:
    belongings, directory, starter = Belongings(), FakeDirectory(), Starter(hangs=[Role.BOTH])
    start = asyncio.create_task(RunningWorker(folder, directory, Role.BOTH, starter=starter).worker.start())
    await starter.hanging.wait()
    start.cancel()
    await asyncio.wait([start])
    assert starter.cancelled == 1
    assert directory.announced == []
    belongings.check()


async def test_an_engine_that_cannot_start_says_why_and_leaves_nothing(folder: Path) -> None:
    belongings, directory = Belongings(), FakeDirectory()
    starter = Starter(errors={Role.BOTH: ModelLoadError("the disk is gone")})
    with pytest.raises(ModelLoadError, match="the disk is gone"):
        await RunningWorker(folder, directory, Role.BOTH, starter=starter).worker.start()
    assert (directory.announced, directory.withdrawn) == ([], [])
    belongings.check()


async def test_a_port_that_is_taken_is_tried_one_step_on(folder: Path) -> None:
    directory, starter = FakeDirectory(), ListeningStarter()
    with listen("127.0.0.1", 0) as taken:
        first = port_of(taken)
        async with RunningWorker(folder, directory, Role.DECODE, starter=starter, ports=range(first, first + 64)):
            (engine,) = starter.configs
            assert engine.side_channel_port is not None
            assert first < engine.side_channel_port < first + 64
        starter.close()


async def test_when_all_ports_are_taken_it_is_said_which_flag_helps(folder: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = port_of(taken)
        start = RunningWorker(
            folder, FakeDirectory(), Role.PREFILL, starter=Starter(), ports=range(port, port + 1)
        ).worker.start()
        with pytest.raises(PortTakenError, match=rf"--prefill-port: .* {port} to {port} are taken on 127.0.0.1"):
            await start


async def test_a_port_that_somebody_took_meanwhile_is_left_for_the_next_one(folder: Path) -> None:
    """The engine finds out, for it binds only when its model is loaded."""
    errors = {Role.PREFILL: PortTakenError("taken")}
    starter = Starter(errors=errors)
    free = free_port()
    with pytest.raises(PortTakenError, match="--prefill-port"):
        await RunningWorker(
            folder, FakeDirectory(), Role.PREFILL, starter=starter, ports=range(free, free + 3)
        ).worker.start()
    tried = [config.side_channel_port for config in starter.configs]
    assert len(tried) >= 2
    assert set(tried) <= set(range(free, free + 3))


async def test_a_directory_that_does_not_answer_ends_the_start_after_its_limit(folder: Path) -> None:
    belongings, directory, starter = Belongings(), FakeDirectory(), Starter()
    directory.hangs = True
    limits = WorkerLimits(reach_s=0.05, farewell_s=0.01)
    with pytest.raises(DirectoryError, match=r"does not answer; it was tried for 0\.05 s"):
        await RunningWorker(folder, directory, Role.PREFILL, starter=starter, limits=limits).worker.start()
    assert starter.engines[0].closed
    belongings.check()


async def test_a_directory_that_is_away_at_first_and_at_the_end_holds_up_nothing(folder: Path) -> None:
    """A model that has been loaded is not loaded again because the directory is being started again."""
    belongings, directory = Belongings(), FakeDirectory()
    directory.fails = AWAY
    decode = RunningWorker(folder, directory, Role.DECODE, starter=Starter())
    start = asyncio.create_task(decode.worker.start())
    await directory.until(lambda: len(directory.announced) == 1)
    directory.fails = None
    await start
    directory.hangs = True
    await decode.worker.close()
    assert directory.stages(decode.id) == [Stage.MEETING, Stage.READY, Stage.LEAVING]
    assert directory.withdrawn == [decode.id]
    belongings.check()


async def test_a_worker_whose_engine_is_lost_for_good_says_so_and_is_listed_no_more(folder: Path) -> None:
    directory = FakeDirectory()
    async with RunningWorker(folder, directory, Role.BOTH, starter=Starter()) as both:
        async with httpx.AsyncClient(base_url=both.url, verify=False) as http:
            assert (await http.get("/health")).status_code == 200
        both.worker.check()
        both.engine.die()
        await directory.until(lambda: directory.withdrawn != [])
        with pytest.raises(EngineDiedError):
            both.worker.check()
        assert directory.book.listing().workers == ()
    assert directory.stages(both.id) == [Stage.MEETING, Stage.READY]

"""A prefill or decode replica: its ports, its connections, its reports, and its end."""

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from bench.servers.ports import free_port
from motet.deploy.listen import listen, port_of
from motet.deploy.ray.directory import Announcement, DirectoryCopy, DirectoryVersion, Listing, WorkerStage
from motet.deploy.ray.scaling import CHOICES, FULLNESS, PROMPTS
from motet.deploy.ray.worker import MAX_PORTS, Announcer, WorkerLimits, is_free, side_channel_ports
from motet.errors import DirectoryError, EngineDiedError, ModelLoadError, PortTakenError
from motet.metrics.stats import EngineStats
from motet.settings.engine_config import EngineConfig
from motet.settings.ray_config import RayConfig
from motet.types import Role
from tests.clock import settle
from tests.deploy.dying import DEAD, DyingEngine, Starter
from tests.deploy.ray.directories import UNAVAILABLE, FakeDirectory, ended, worker
from tests.deploy.ray.workers import QUICK, LeakCheck, RunningWorker
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.anyio


class ListeningStarter(Starter):
    """Starts engines that listen on their side-channel port, as engine processes do."""

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


@pytest.mark.slow
async def test_two_workers_that_start_at_the_same_time_connect_before_both_are_ready(folder: Path) -> None:
    leaks, directory, starter = LeakCheck(), FakeDirectory(), Starter()
    prefill = RunningWorker(folder, directory, Role.PREFILL, starter=starter)
    decode = RunningWorker(folder, directory, Role.DECODE, starter=starter)
    await asyncio.gather(prefill.worker.start(), decode.worker.start())
    for one in (prefill, decode):
        assert directory.stages(one.id) == [WorkerStage.CONNECTING, WorkerStage.READY]
    assert decode.engine.connected == [prefill.engine.info.transfer]
    await asyncio.gather(prefill.worker.close(), decode.worker.close())
    await decode.worker.close()
    assert directory.inner.listing().workers == ()
    for one in (prefill, decode):
        assert directory.stages(one.id) == [WorkerStage.CONNECTING, WorkerStage.READY, WorkerStage.LEAVING]
    assert all(engine.closed for engine in starter.engines)
    leaks.check()


@pytest.mark.slow
async def test_a_worker_that_comes_later_is_connected_at_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Prefill waits until decode announces the connection, which it does at once."""
    directory, starter = FakeDirectory(), Starter()
    slow = WorkerLimits(announce_s=3600.0, connect_s=PATIENCE_S, leave_s=0.05)
    async with (
        RunningWorker(folder, directory, Role.DECODE, starter=starter, limits=slow) as decode,
        RunningWorker(folder, directory, Role.PREFILL, starter=starter, limits=slow) as prefill,
    ):
        assert decode.announced_connections == {prefill.engine_id}
    assert "reports ready without them" not in caplog.text


@pytest.mark.slow
async def test_a_restarted_engine_is_connected_again(folder: Path) -> None:
    """A prefill worker then has another engine, and a decode worker an engine without connections."""
    directory, starter = FakeDirectory(), Starter()
    async with (
        RunningWorker(folder, directory, Role.DECODE, starter=starter, restarts=1) as decode,
        RunningWorker(folder, directory, Role.PREFILL, starter=starter, restarts=1) as prefill,
    ):
        assert prefill.engine_id in decode.announced_connections  # prefill is ready only then
        prefill.engine.die()
        new_prefill = await starter.engine(2)
        await directory.until(lambda: new_prefill.info.transfer in decode.engine.connected)
        decode.engine.die()
        new_decode = await starter.engine(3)
        await new_decode.has_connected.wait()
        assert new_decode.connected == [new_prefill.info.transfer]
        prefill.worker.check()
        decode.worker.check()


async def test_a_prefill_worker_is_not_ready_before_it_is_connected_and_can_be_cancelled(
    folder: Path,
) -> None:
    leaks, directory, starter = LeakCheck(), FakeDirectory(), Starter()
    directory.inner.announce(worker("decode", Role.DECODE, WorkerStage.READY))
    prefill = RunningWorker(folder, directory, Role.PREFILL, starter=starter)
    start = asyncio.create_task(prefill.worker.start())
    await directory.until(lambda: len(directory.announced) >= 3)
    start.cancel()
    await asyncio.wait([start])
    assert start.cancelled()
    assert directory.stages(prefill.id) == [WorkerStage.CONNECTING, WorkerStage.LEAVING]
    assert directory.withdrawn == [prefill.id]
    assert starter.engines[0].closed
    leaks.check()


async def test_cancelling_the_start_of_the_engine_leaves_nothing(folder: Path) -> None:
    leaks, directory, starter = LeakCheck(), FakeDirectory(), Starter(hangs=[Role.BOTH])
    start = asyncio.create_task(RunningWorker(folder, directory, Role.BOTH, starter=starter).worker.start())
    await starter.hanging.wait()
    start.cancel()
    await asyncio.wait([start])
    assert starter.cancelled == 1
    assert directory.announced == []
    leaks.check()


async def test_an_engine_that_cannot_start_raises_its_reason_and_leaves_nothing(folder: Path) -> None:
    leaks, directory = LeakCheck(), FakeDirectory()
    starter = Starter(errors={Role.BOTH: ModelLoadError("the disk is gone")})
    with pytest.raises(ModelLoadError, match="the disk is gone"):
        await RunningWorker(folder, directory, Role.BOTH, starter=starter).worker.start()
    assert (directory.announced, directory.withdrawn) == ([], [])
    leaks.check()


async def test_if_a_port_is_taken_the_next_one_is_used(folder: Path) -> None:
    directory, starter = FakeDirectory(), ListeningStarter()
    with listen("127.0.0.1", 0) as taken:
        first = port_of(taken)
        async with RunningWorker(folder, directory, Role.DECODE, starter=starter, ports=range(first, first + 64)):
            (engine,) = starter.configs
            assert engine.side_channel_port is not None
            assert first < engine.side_channel_port < first + 64
        starter.close()


async def test_if_all_ports_are_taken_the_error_names_the_flag(folder: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = port_of(taken)
        start = RunningWorker(
            folder, FakeDirectory(), Role.PREFILL, starter=Starter(), ports=range(port, port + 1)
        ).worker.start()
        with pytest.raises(PortTakenError, match=rf"--prefill-port: .* {port} to {port} are taken on 127.0.0.1"):
            await start


async def test_if_the_port_is_taken_when_the_engine_binds_it_the_next_one_is_used(folder: Path) -> None:
    """An engine binds its port only after it has loaded its model."""
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
    leaks, directory, starter = LeakCheck(), FakeDirectory(), Starter()
    directory.hangs = True
    limits = WorkerLimits(reach_s=0.05, leave_s=0.01)
    with pytest.raises(DirectoryError, match=r"does not answer; tried for 0\.05 s"):
        await RunningWorker(folder, directory, Role.PREFILL, starter=starter, limits=limits).worker.start()
    assert starter.engines[0].closed
    leaks.check()


async def test_a_directory_that_is_unavailable_at_the_start_and_the_end_delays_nothing(folder: Path) -> None:
    """A loaded model is not loaded again because the directory restarts."""
    leaks, directory = LeakCheck(), FakeDirectory()
    directory.fails = UNAVAILABLE
    decode = RunningWorker(folder, directory, Role.DECODE, starter=Starter())
    start = asyncio.create_task(decode.worker.start())
    await directory.until(lambda: len(directory.announced) == 1)
    directory.fails = None
    await start
    directory.hangs = True
    await decode.worker.close()
    assert directory.stages(decode.id) == [WorkerStage.CONNECTING, WorkerStage.READY, WorkerStage.LEAVING]
    assert directory.withdrawn == [decode.id]
    leaks.check()


async def test_a_worker_that_has_lost_its_engine_fails_its_check_and_leaves_the_list(folder: Path) -> None:
    directory = FakeDirectory()
    async with RunningWorker(folder, directory, Role.BOTH, starter=Starter()) as both:
        async with httpx.AsyncClient(base_url=both.url, verify=False, timeout=PATIENCE_S) as http:
            assert (await http.get("/health")).status_code == 200
        both.worker.check()
        both.engine.die()
        await directory.until(lambda: directory.withdrawn != [])
        with pytest.raises(EngineDiedError):
            both.worker.check()
        assert directory.inner.listing().workers == ()
    assert directory.stages(both.id) == [WorkerStage.CONNECTING, WorkerStage.READY]


NEVER_S = 3600.0


class AnnouncedWorker:
    """A worker that announces itself."""

    def __init__(self, directory: FakeDirectory | None = None, *, period_s: float = NEVER_S) -> None:
        self.connected: tuple[str, ...] = ()
        self.directory = directory or FakeDirectory()
        self.copy = DirectoryCopy(self.directory)
        limits = WorkerLimits(announce_s=period_s, retry_s=0.01)
        self.announcer = Announcer(self.copy, self._announcement, limits=limits)

    @property
    def sent(self) -> list[tuple[WorkerStage, tuple[str, ...]]]:
        return [(announcement.stage, announcement.connected) for announcement in self.directory.announced]

    def _announcement(self, stage: WorkerStage) -> Announcement:
        return worker("a", Role.DECODE, stage, connected=self.connected)


async def test_a_worker_waits_for_the_directorys_answer_before_anything_else() -> None:
    """If two start at the same time, the second one knows the first one before it continues."""
    announced = AnnouncedWorker()
    announced.directory.inner.announce(worker("other"))
    await announced.announcer.reach(WorkerStage.CONNECTING, limit_s=NEVER_S)
    assert [known.id for known in announced.copy.workers] == ["other", "a"]


async def test_changes_are_announced_at_once_and_the_rest_every_few_seconds() -> None:
    announced = AnnouncedWorker(period_s=0.01)
    await announced.announcer.reach(WorkerStage.READY, limit_s=NEVER_S)
    keeping = asyncio.create_task(announced.announcer.keep())
    await announced.directory.until(lambda: len(announced.sent) >= 3)
    await ended(keeping)
    assert set(announced.sent) == {(WorkerStage.READY, ())}
    quiet = AnnouncedWorker()
    keeping = asyncio.create_task(quiet.announcer.keep())
    for number in range(1, 3):
        quiet.connected += (str(number),)
        quiet.announcer.record_change()
        await quiet.directory.until(lambda number=number: len(quiet.sent) == number)  # type: ignore[misc]
    await settle()
    await ended(keeping)
    assert quiet.sent == [(WorkerStage.CONNECTING, ("1",)), (WorkerStage.CONNECTING, ("1", "2"))]


class SlowDirectory(FakeDirectory):
    """A directory that answers an announcement when the test permits it."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = asyncio.Semaphore(0)

    async def announce(self, announcement: Announcement, known: DirectoryVersion) -> Listing:
        listing = await super().announce(announcement, known)
        await self.permits.acquire()
        return listing


async def test_a_change_during_an_announcement_is_announced_next() -> None:
    directory = SlowDirectory()
    announced = AnnouncedWorker(directory)
    keeping = asyncio.create_task(announced.announcer.keep())
    announced.announcer.record_change()
    await directory.until(lambda: len(announced.sent) == 1)
    announced.connected = ("new",)
    announced.announcer.record_change()
    directory.permits.release()
    await directory.until(lambda: len(announced.sent) == 2)
    await ended(keeping)
    assert announced.sent == [(WorkerStage.CONNECTING, ()), (WorkerStage.CONNECTING, ("new",))]


async def test_an_announcement_waits_for_the_previous_one() -> None:
    """Two announcements at a time could arrive in reverse order, and a leaving worker would be listed as ready."""
    directory = SlowDirectory()
    announced = AnnouncedWorker(directory)
    keeping = asyncio.create_task(announced.announcer.keep())
    announced.announcer.record_change()
    await directory.until(lambda: len(announced.sent) == 1)
    leaving = asyncio.create_task(announced.announcer.reach(WorkerStage.LEAVING, limit_s=NEVER_S))
    await asyncio.sleep(0)
    assert len(announced.sent) == 1
    directory.permits.release()
    directory.permits.release()
    await leaving
    await ended(keeping)
    assert announced.sent == [(WorkerStage.CONNECTING, ()), (WorkerStage.LEAVING, ())]


async def test_a_directory_that_was_briefly_unavailable_gets_the_announcement_afterwards() -> None:
    announced = AnnouncedWorker()
    announced.directory.fails = UNAVAILABLE
    reaching = asyncio.create_task(announced.announcer.reach(WorkerStage.CONNECTING, limit_s=NEVER_S))
    await announced.directory.until(lambda: len(announced.sent) == 1)
    announced.directory.fails = None
    await reaching
    assert len(announced.sent) == 2


@pytest.mark.parametrize("hangs", [False, True])
async def test_waiting_for_an_unavailable_directory_ends_after_the_limit(hangs: bool) -> None:
    announced = AnnouncedWorker()
    announced.directory.hangs, announced.directory.fails = hangs, None if hangs else UNAVAILABLE
    reason = "does not answer" if hangs else "it is unavailable"
    with pytest.raises(DirectoryError, match=rf"{reason}; tried for 0\.02 s"):
        await announced.announcer.reach(WorkerStage.READY, limit_s=0.02)


async def test_an_announcement_that_was_lost_is_repeated() -> None:
    announced = AnnouncedWorker(period_s=0.01)
    announced.directory.fails = UNAVAILABLE
    keeping = asyncio.create_task(announced.announcer.keep())
    await announced.directory.until(lambda: len(announced.sent) >= 2)
    announced.directory.fails = None
    count = len(announced.sent)
    await announced.directory.until(lambda: len(announced.sent) > count + 1)
    await ended(keeping)
    assert [known.id for known in announced.directory.inner.listing().workers] == ["a"]


STATS = EngineStats(groups_running=2, choices_running=8, choices_waiting=4, prompt_tokens=100, blocks_total=10)
LOAD = {CHOICES: 12.0, PROMPTS: 2.0, FULLNESS: 8 / 256}


class ReportingEngine(DyingEngine):
    """An engine that reports these figures, or None while it is in a long step."""

    reported: EngineStats | None = STATS

    async def stats(self) -> EngineStats:
        if self.death is not None:
            raise self.death
        if self.reported is None:
            await asyncio.Event().wait()
        return self.reported or STATS


class ReportingStarter(Starter):
    def __init__(self) -> None:
        super().__init__()
        self.engine_of_all = ReportingEngine()

    async def __call__(self, config: EngineConfig) -> DyingEngine:
        return self.engine_of_all


def running(folder: Path, starter: ReportingStarter) -> RunningWorker:
    return RunningWorker(folder, FakeDirectory(), Role.BOTH, starter=starter, limits=replace(QUICK, stats_s=0.05))


async def test_a_replica_reports_the_load_of_its_engine(folder: Path) -> None:
    starter = ReportingStarter()
    async with running(folder, starter) as one:
        assert await one.worker.load() == LOAD
        starter.engine_of_all.reported = EngineStats(prompt_tokens=100, blocks_total=10)
        assert await one.worker.load() == {CHOICES: 0.0, PROMPTS: 0.0, FULLNESS: 0.0}


async def test_during_a_long_step_a_replica_reports_its_last_load(folder: Path) -> None:
    """Without a report, Serve would assume that the busiest replica has no load, and end it."""
    starter = ReportingStarter()
    async with running(folder, starter) as one:
        assert await one.worker.load() == LOAD
        starter.engine_of_all.reported = None
        assert await one.worker.load() == LOAD


async def test_a_replica_whose_engine_is_lost_does_not_fail(folder: Path) -> None:
    starter = ReportingStarter()
    async with running(folder, starter) as one:
        starter.engine_of_all.death = DEAD
        assert await one.worker.load() == {}


@pytest.mark.parametrize(
    ("role", "rank", "first"),
    [(Role.PREFILL, 0, 20000), (Role.PREFILL, 3, 20003), (Role.DECODE, 1, 22001)],
)
def test_a_port_is_the_first_port_of_its_role_plus_the_rank(role: Role, rank: int, first: int) -> None:
    assert side_channel_ports(role, rank, ray=RayConfig()) == range(first, first + MAX_PORTS)


def test_first_ports_can_be_configured() -> None:
    config = RayConfig(prefill_port=30000, decode_port=40000)
    assert side_channel_ports(Role.PREFILL, 1, ray=config)[0] == 30001
    assert side_channel_ports(Role.DECODE, 1, ray=config)[0] == 40001


def test_port_zero_and_a_role_without_fetching_workers_use_any_free_port() -> None:
    assert list(side_channel_ports(Role.DECODE, 5, ray=RayConfig(decode_port=0))) == [0]
    assert list(side_channel_ports(Role.BOTH, 5, ray=RayConfig())) == [0]


def test_ports_end_at_the_maximum() -> None:
    assert side_channel_ports(Role.DECODE, 30, ray=RayConfig(decode_port=65500)) == range(65530, 65536)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_is_free_unless_a_program_listens_there(host: str) -> None:
    with listen(host, 0) as taken:
        assert not is_free(host, port_of(taken))
    assert is_free(host, port_of_closed(host))


def port_of_closed(host: str) -> int:
    with listen(host, 0) as listener:
        return port_of(listener)


def test_a_port_whose_last_connection_has_just_ended_is_free() -> None:
    """A replica can use the port of the replica that it replaces."""
    with listen("127.0.0.1", 0) as listener:
        port = port_of(listener)
        with socket.create_connection(("127.0.0.1", port)):
            listener.accept()[0].close()  # closed first here, so the connection lingers at this end
    assert is_free("127.0.0.1", port)


def test_an_address_of_another_machine_is_not_reported_as_taken_ports() -> None:
    """Regression: all its ports were reported as taken. The engine reports that no interface has that address."""
    assert is_free("192.0.2.1", 20000)

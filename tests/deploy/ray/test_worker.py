"""A prefill or decode replica: where it listens, whom it meets, what it reports, and what is left at its end."""

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
from motet.deploy.ray.worker import TRIES, Announcer, WorkerLimits, is_free, side_channel_ports
from motet.errors import DirectoryError, EngineDiedError, ModelLoadError, PortTakenError
from motet.metrics.stats import EngineStats
from motet.settings.ray_config import RayConfig
from motet.settings.server_config import EngineConfig
from motet.types import Role
from tests.deploy.dying import DEAD, DyingEngine, Starter
from tests.deploy.ray.directories import AWAY, FakeDirectory, ended, worker
from tests.deploy.ray.workers import QUICK, Belongings, RunningWorker
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.anyio


class ListeningStarter(Starter):
    """Its engines listen on their side-channel port, as engine processes do."""

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


async def test_two_workers_that_start_at_the_same_time_meet_before_both_are_ready(folder: Path) -> None:
    belongings, directory, starter = Belongings(), FakeDirectory(), Starter()
    prefill = RunningWorker(folder, directory, Role.PREFILL, starter=starter)
    decode = RunningWorker(folder, directory, Role.DECODE, starter=starter)
    await asyncio.gather(prefill.worker.start(), decode.worker.start())
    for one in (prefill, decode):
        assert directory.stages(one.id) == [WorkerStage.MEETING, WorkerStage.READY]
    assert decode.engine.met == [prefill.engine.info.transfer]
    await asyncio.gather(prefill.worker.close(), decode.worker.close())
    await decode.worker.close()
    assert directory.book.listing().workers == ()
    for one in (prefill, decode):
        assert directory.stages(one.id) == [WorkerStage.MEETING, WorkerStage.READY, WorkerStage.LEAVING]
    assert all(engine.closed for engine in starter.engines)
    belongings.check()


async def test_a_worker_that_comes_later_is_met_at_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Prefill waits until decode reports the meeting, which is news and does not wait a few seconds."""
    directory, starter = FakeDirectory(), Starter()
    seldom = WorkerLimits(announce_s=3600.0, meet_s=PATIENCE_S, farewell_s=0.05)
    async with (
        RunningWorker(folder, directory, Role.DECODE, starter=starter, limits=seldom) as decode,
        RunningWorker(folder, directory, Role.PREFILL, starter=starter, limits=seldom) as prefill,
    ):
        assert decode.announced_met == {prefill.engine_id}
    assert "reports ready without them" not in caplog.text


async def test_a_worker_that_was_started_again_is_met_again(folder: Path) -> None:
    """A prefill worker then has another engine, and a decode worker one that has met nobody."""
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


async def test_a_prefill_worker_is_not_ready_before_it_is_connected_and_cancels_cleanly(
    folder: Path,
) -> None:
    belongings, directory, starter = Belongings(), FakeDirectory(), Starter()
    directory.book.announce(worker("decode", Role.DECODE, WorkerStage.READY))
    prefill = RunningWorker(folder, directory, Role.PREFILL, starter=starter)
    start = asyncio.create_task(prefill.worker.start())
    await directory.until(lambda: len(directory.announced) >= 3)
    start.cancel()
    await asyncio.wait([start])
    assert start.cancelled()
    assert directory.stages(prefill.id) == [WorkerStage.MEETING, WorkerStage.LEAVING]
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


async def test_if_all_ports_are_taken_the_error_names_the_flag_that_helps(folder: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = port_of(taken)
        start = RunningWorker(
            folder, FakeDirectory(), Role.PREFILL, starter=Starter(), ports=range(port, port + 1)
        ).worker.start()
        with pytest.raises(PortTakenError, match=rf"--prefill-port: .* {port} to {port} are taken on 127.0.0.1"):
            await start


async def test_if_somebody_took_the_port_meanwhile_the_next_one_is_tried(folder: Path) -> None:
    """The engine finds out, since it binds only after it has loaded its model."""
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
    """A model that is loaded is not loaded again because the directory is starting again."""
    belongings, directory = Belongings(), FakeDirectory()
    directory.fails = AWAY
    decode = RunningWorker(folder, directory, Role.DECODE, starter=Starter())
    start = asyncio.create_task(decode.worker.start())
    await directory.until(lambda: len(directory.announced) == 1)
    directory.fails = None
    await start
    directory.hangs = True
    await decode.worker.close()
    assert directory.stages(decode.id) == [WorkerStage.MEETING, WorkerStage.READY, WorkerStage.LEAVING]
    assert directory.withdrawn == [decode.id]
    belongings.check()


async def test_a_worker_whose_engine_is_lost_for_good_fails_its_check_and_leaves_the_list(folder: Path) -> None:
    directory = FakeDirectory()
    async with RunningWorker(folder, directory, Role.BOTH, starter=Starter()) as both:
        async with httpx.AsyncClient(base_url=both.url, verify=False, timeout=PATIENCE_S) as http:
            assert (await http.get("/health")).status_code == 200
        both.worker.check()
        both.engine.die()
        await directory.until(lambda: directory.withdrawn != [])
        with pytest.raises(EngineDiedError):
            both.worker.check()
        assert directory.book.listing().workers == ()
    assert directory.stages(both.id) == [WorkerStage.MEETING, WorkerStage.READY]


NEVER_S = 3600.0


class Speaker:
    """A worker that announces itself."""

    def __init__(self, directory: FakeDirectory | None = None, *, period_s: float = NEVER_S) -> None:
        self.met: tuple[str, ...] = ()
        self.directory = directory or FakeDirectory()
        self.following = DirectoryCopy(self.directory)
        self.announcing = Announcer(self.following, self._say, limits=WorkerLimits(announce_s=period_s, retry_s=0.01))

    @property
    def said(self) -> list[tuple[WorkerStage, tuple[str, ...]]]:
        return [(said.stage, said.met) for said in self.directory.announced]

    def _say(self, stage: WorkerStage) -> Announcement:
        return worker("a", Role.DECODE, stage, met=self.met)


async def test_a_worker_waits_for_the_directory_s_answer_before_anything_else() -> None:
    """If two start at once, the second one sees the first one before it goes on."""
    speaker = Speaker()
    speaker.directory.book.announce(worker("other"))
    await speaker.announcing.reach(WorkerStage.MEETING, limit_s=1.0)
    assert [known.id for known in speaker.following.workers] == ["other", "a"]


async def test_news_is_announced_at_once_and_the_rest_every_few_seconds() -> None:
    speaker = Speaker(period_s=0.01)
    await speaker.announcing.reach(WorkerStage.READY, limit_s=1.0)
    keeping = asyncio.create_task(speaker.announcing.keep())
    await speaker.directory.until(lambda: len(speaker.said) >= 3)
    await ended(keeping)
    assert set(speaker.said) == {(WorkerStage.READY, ())}
    quiet = Speaker()
    keeping = asyncio.create_task(quiet.announcing.keep())
    for number in range(1, 3):
        quiet.met += (str(number),)
        quiet.announcing.has_news()
        await quiet.directory.until(lambda number=number: len(quiet.said) == number)  # type: ignore[misc]
    await asyncio.wait([keeping], timeout=0.01)
    await ended(keeping)
    assert quiet.said == [(WorkerStage.MEETING, ("1",)), (WorkerStage.MEETING, ("1", "2"))]


class SlowDirectory(FakeDirectory):
    """A directory that answers an announcement when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = asyncio.Semaphore(0)

    async def announce(self, announcement: Announcement, known: DirectoryVersion) -> Listing:
        listing = await super().announce(announcement, known)
        await self.may_answer.acquire()
        return listing


async def test_news_during_an_announcement_follows_right_after() -> None:
    directory = SlowDirectory()
    speaker = Speaker(directory)
    keeping = asyncio.create_task(speaker.announcing.keep())
    speaker.announcing.has_news()
    await directory.until(lambda: len(speaker.said) == 1)
    speaker.met = ("new",)
    speaker.announcing.has_news()
    directory.may_answer.release()
    await directory.until(lambda: len(speaker.said) == 2)
    await ended(keeping)
    assert speaker.said == [(WorkerStage.MEETING, ()), (WorkerStage.MEETING, ("new",))]


async def test_an_announcement_waits_for_the_one_before() -> None:
    """If two were on their way, they could arrive in the other order, and a worker that leaves would be ready again."""
    directory = SlowDirectory()
    speaker = Speaker(directory)
    keeping = asyncio.create_task(speaker.announcing.keep())
    speaker.announcing.has_news()
    await directory.until(lambda: len(speaker.said) == 1)
    leaving = asyncio.create_task(speaker.announcing.reach(WorkerStage.LEAVING, limit_s=NEVER_S))
    await asyncio.sleep(0)
    assert len(speaker.said) == 1
    directory.may_answer.release()
    directory.may_answer.release()
    await leaving
    await ended(keeping)
    assert speaker.said == [(WorkerStage.MEETING, ()), (WorkerStage.LEAVING, ())]


async def test_a_directory_that_was_briefly_away_gets_the_announcement_afterwards() -> None:
    speaker = Speaker()
    speaker.directory.fails = AWAY
    reaching = asyncio.create_task(speaker.announcing.reach(WorkerStage.MEETING, limit_s=NEVER_S))
    await speaker.directory.until(lambda: len(speaker.said) == 1)
    speaker.directory.fails = None
    await reaching
    assert len(speaker.said) == 2


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_directory_that_is_away_is_not_waited_for_longer_than_its_limit(hangs: bool) -> None:
    speaker = Speaker()
    speaker.directory.hangs, speaker.directory.fails = hangs, None if hangs else AWAY
    why = "does not answer" if hangs else "it is away"
    with pytest.raises(DirectoryError, match=rf"{why}; it was tried for 0\.02 s"):
        await speaker.announcing.reach(WorkerStage.READY, limit_s=0.02)


async def test_an_announcement_that_got_lost_is_repeated() -> None:
    speaker = Speaker(period_s=0.01)
    speaker.directory.fails = AWAY
    keeping = asyncio.create_task(speaker.announcing.keep())
    await speaker.directory.until(lambda: len(speaker.said) >= 2)
    speaker.directory.fails = None
    count = len(speaker.said)
    await speaker.directory.until(lambda: len(speaker.said) > count + 1)
    await ended(keeping)
    assert [known.id for known in speaker.directory.book.listing().workers] == ["a"]


STATS = EngineStats(groups_running=2, choices_running=8, choices_waiting=4, prompt_tokens=100, blocks_total=10)
LOAD = {CHOICES: 12.0, PROMPTS: 2.0, FULLNESS: 8 / 256}


class AskedEngine(DyingEngine):
    """An engine that reports this much work, or is in a step that takes long."""

    told: EngineStats | None = STATS

    async def stats(self) -> EngineStats:
        if self.death is not None:
            raise self.death
        if self.told is None:
            await asyncio.Event().wait()
        return self.told or STATS


class Asked(Starter):
    def __init__(self) -> None:
        super().__init__()
        self.asked = AskedEngine()

    async def __call__(self, config: EngineConfig) -> DyingEngine:
        return self.asked


def running(folder: Path, starter: Asked) -> RunningWorker:
    return RunningWorker(folder, FakeDirectory(), Role.BOTH, starter=starter, limits=replace(QUICK, tell_s=0.05))


async def test_a_replica_reports_the_load_of_its_engine(folder: Path) -> None:
    starter = Asked()
    async with running(folder, starter) as one:
        assert await one.worker.load() == LOAD
        starter.asked.told = EngineStats(prompt_tokens=100, blocks_total=10)
        assert await one.worker.load() == {CHOICES: 0.0, PROMPTS: 0.0, FULLNESS: 0.0}


async def test_during_a_long_step_a_replica_reports_the_load_that_it_had(folder: Path) -> None:
    """Without its report Serve would think that it has no load, and end the replica that has most to do."""
    starter = Asked()
    async with running(folder, starter) as one:
        assert await one.worker.load() == LOAD
        starter.asked.told = None
        assert await one.worker.load() == LOAD


async def test_a_replica_whose_engine_is_lost_does_not_fail(folder: Path) -> None:
    starter = Asked()
    async with running(folder, starter) as one:
        starter.asked.death = DEAD
        assert await one.worker.load() == {}


@pytest.mark.parametrize(
    ("role", "rank", "first"),
    [(Role.PREFILL, 0, 20000), (Role.PREFILL, 3, 20003), (Role.DECODE, 1, 22001)],
)
def test_a_port_is_the_first_of_its_role_and_the_rank(role: Role, rank: int, first: int) -> None:
    assert side_channel_ports(role, rank, ray=RayConfig()) == range(first, first + TRIES)


def test_first_ports_may_be_others() -> None:
    config = RayConfig(prefill_port=30000, decode_port=40000)
    assert side_channel_ports(Role.PREFILL, 1, ray=config)[0] == 30001
    assert side_channel_ports(Role.DECODE, 1, ray=config)[0] == 40001


def test_port_zero_and_a_role_that_nobody_asks_take_any_free_port() -> None:
    assert list(side_channel_ports(Role.DECODE, 5, ray=RayConfig(decode_port=0))) == [0]
    assert list(side_channel_ports(Role.BOTH, 5, ray=RayConfig())) == [0]


def test_no_port_is_beyond_the_last_one() -> None:
    assert side_channel_ports(Role.DECODE, 30, ray=RayConfig(decode_port=65500)) == range(65530, 65536)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_is_free_unless_somebody_listens_there(host: str) -> None:
    with listen(host, 0) as taken:
        assert not is_free(host, port_of(taken))
    assert is_free(host, port_of_closed(host))


def port_of_closed(host: str) -> int:
    with listen(host, 0) as listener:
        return port_of(listener)


def test_a_port_whose_last_connection_is_just_over_is_free() -> None:
    """A replica takes the port of the one that it replaces."""
    with listen("127.0.0.1", 0) as listener:
        port = port_of(listener)
        with socket.create_connection(("127.0.0.1", port)):
            listener.accept()[0].close()  # closed first here, so the connection lingers at this end
    assert is_free("127.0.0.1", port)


def test_a_foreign_address_is_not_reported_as_taken_ports() -> None:
    """All its ports used to be called taken. The engine says that no interface has that address."""
    assert is_free("192.0.2.1", 20000)

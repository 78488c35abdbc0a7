"""A keeper restarts its engine, after a longer wait each time, up to a limit. Several keepers start all engines or
none."""

import asyncio

import pytest

from motet.control.engine_control import EngineControl
from motet.deploy.block_events import BlockEvents
from motet.deploy.cell import STEADY_S, LocalEngine, LocalKeeper, RestartSeries, start_all
from motet.engine import Worker, WorkerState
from motet.errors import ModelLoadError, StartupError
from motet.kv_events.changes import Stored
from motet.routing.router import Router
from motet.routing.workers.fleet import Fleet
from motet.settings.engine_config import EngineConfig
from motet.settings.server_config import KVEventsConfig
from motet.transfer.ticket import TransferAddress
from motet.types import Role
from tests.deploy.dying import DyingEngine, Starter

pytestmark = pytest.mark.anyio

PREFILL = TransferAddress("prefill", "127.0.0.1", 1)


class Scene:
    """A keeper whose clock advances only while it sleeps."""

    def __init__(self, *, restarts: int = 3, starter: Starter | None = None) -> None:
        self.now_s = 0.0
        self.sleeps_s: list[float] = []
        self.starter = starter or Starter()
        self.fleet = Fleet(clock=lambda: self.now_s)
        self.config = EngineConfig(model_path="", model_name="tiny", role=Role.DECODE)
        self.keeper = LocalKeeper(
            "decode-0",
            self.config,
            fleet=self.fleet,
            start_engine=self.starter,
            block_events=BlockEvents(KVEventsConfig(kv_events_port=0)),
            control=EngineControl(Router(self.fleet)),
            restarts=RestartSeries(restarts, longest_backoff_s=30.0, clock=lambda: self.now_s),
            sleep=self._sleep,
        )

    async def __aenter__(self) -> "Scene":
        self.fleet.expect("prefill-0", "-", role=Role.PREFILL)
        self.fleet.put(Worker("prefill-0", DyingEngine(role=Role.PREFILL, transfer=PREFILL), "-"))
        self.fleet.expect("decode-0", "-", role=Role.DECODE)
        await self.keeper.start()
        await self.keeper.join()
        self.keeping = asyncio.create_task(self.keeper.keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.keeping.cancel()
        await asyncio.wait([self.keeping])
        await self.keeper.close()

    @property
    def state(self) -> WorkerState:
        return self.fleet.reports()[1].state

    async def ready_again(self, number: int) -> DyingEngine:
        """Waits until the fleet has the engine that was started with this number, and returns it."""
        engine = await self.starter.engine(number)
        while (worker := self.fleet.reports()[1].worker) is None or worker.engine is not engine:
            await self.fleet.changes.wait()
        assert engine.connected == [PREFILL]  # it is connected to prefill before it gets a group
        return engine

    async def _sleep(self, wait_s: float) -> None:
        self.sleeps_s.append(wait_s)
        self.now_s += wait_s


async def test_an_engine_that_dies_is_restarted_as_the_same_worker() -> None:
    async with Scene() as scene:
        first = scene.starter.engines[0]
        first.die()
        second = await scene.ready_again(1)
        assert scene.state is WorkerState.READY
        assert first.closed and not second.closed
        assert [engine.connected for engine in (first, second)] == [[PREFILL], [PREFILL]]
        # The index, and the publisher.
        assert [len(engine.record.block_listeners) for engine in (first, second)] == [2, 2]
        assert scene.keeper.restarted == 1
    assert second.closed


async def test_the_keeper_waits_longer_each_time_and_then_stops() -> None:
    async with Scene(restarts=3) as scene:
        for number in range(3):
            (await scene.ready_again(number)).die()
        last = await scene.ready_again(3)
        assert scene.sleeps_s == [0.25, 0.5, 1.0]
        last.die()
        await scene.keeper.given_up.wait()
        assert (scene.state, scene.fleet.catalog.serving().worker_expected) == (WorkerState.DEAD, False)
        assert [engine.closed for engine in scene.starter.engines] == [True] * 4


async def test_an_engine_that_ran_for_long_has_all_its_restarts_again() -> None:
    async with Scene(restarts=2) as scene:
        for number in range(5):
            engine = await scene.ready_again(number)
            scene.now_s += STEADY_S
            engine.die()
        await scene.ready_again(5)
        assert scene.sleeps_s == [0.25] * 5


async def test_without_restarts_an_engine_is_not_started_again() -> None:
    async with Scene(restarts=0) as scene:
        scene.starter.engines[0].die()
        await scene.keeper.given_up.wait()
        assert len(scene.starter.configs) == 1


async def test_an_engine_that_cannot_start_is_retried(caplog: pytest.LogCaptureFixture) -> None:
    errors: dict[Role, ModelLoadError] = {}
    async with Scene(restarts=2, starter=Starter(errors=errors)) as scene:
        errors[Role.DECODE] = ModelLoadError("the disk is gone")
        scene.starter.engines[0].die()
        await scene.keeper.given_up.wait()
        assert scene.sleeps_s == [0.25, 0.5]
        assert len(scene.starter.configs) == 3
    assert "the disk is gone" in caplog.text


async def test_closing_a_keeper_while_its_engine_starts_leaves_nothing() -> None:
    hangs: list[Role] = []
    async with Scene(starter=Starter(hangs=hangs)) as scene:
        hangs.append(Role.DECODE)
        scene.starter.engines[0].die()
        await scene.starter.hanging.wait()
        assert scene.state is WorkerState.STARTING
    assert scene.starter.cancelled == 1


async def test_the_cached_blocks_of_an_engine_are_known_until_it_dies() -> None:
    async with Scene() as scene:
        first = scene.starter.engines[0]
        for listener in first.record.block_listeners:
            listener([Stored((b"name",), None, (1,) * first.info.block_size)])
        assert scene.fleet.cached_blocks.blocks("decode-0") == 1
        first.die()
        await scene.ready_again(1)
        assert scene.fleet.cached_blocks.blocks("decode-0") == 0


def test_the_wait_is_bounded() -> None:
    series = RestartSeries(101, longest_backoff_s=30.0)
    waits_s = [series.next_backoff_s() for _ in range(101)]
    assert [waits_s[k] for k in (0, 1, 6, 7, 8, 100)] == [0.25, 0.5, 16.0, 30.0, 30.0, 30.0]


CONFIGS = {name: EngineConfig(model_path="", model_name=name) for name in ("a", "b", "c")}


class SlowStarts:
    """Starts that run until they are cancelled. Each one takes longer than the previous one to clean up."""

    def __init__(self, *, fails: str = "") -> None:
        self.started: list[str] = []
        self.all_started = asyncio.Event()
        self.cleaned_up: list[str] = []
        self._fails = fails

    async def __call__(self, config: EngineConfig) -> LocalEngine:
        self.started.append(config.model_name)
        if len(self.started) == len(CONFIGS):
            self.all_started.set()
        if config.model_name == self._fails:
            raise StartupError("no memory")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            for _ in range(len(self.started) * list(CONFIGS).index(config.model_name)):
                await asyncio.sleep(0)
            self.cleaned_up.append(config.model_name)
            raise
        raise AssertionError


def keepers(starts: SlowStarts) -> list[LocalKeeper]:
    events, fleet = BlockEvents(KVEventsConfig()), Fleet()
    return [
        LocalKeeper(
            id,
            config,
            fleet=fleet,
            start_engine=starts,
            block_events=events,
            control=EngineControl(Router(fleet)),
            restarts=RestartSeries(0, longest_backoff_s=30.0),
        )
        for id, config in CONFIGS.items()
    ]


async def test_a_start_that_is_cancelled_lets_every_engine_clean_up() -> None:
    starts = SlowStarts()
    starting = asyncio.create_task(start_all(keepers(starts)))
    await starts.all_started.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert starts.cleaned_up == ["a", "b", "c"]


async def test_an_engine_that_cannot_start_ends_the_others() -> None:
    starts = SlowStarts(fails="b")
    with pytest.raises(StartupError, match="no memory"):
        await start_all(keepers(starts))
    assert starts.cleaned_up == ["a", "c"]

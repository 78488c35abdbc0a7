"""A cell that sleeps: the memory that its engines release and restore, and the order of both, whatever happens."""

import asyncio

import msgspec
import pytest

from motet.control.cell_sleep import CellSleep, SleepTag
from motet.control.engine_control import EngineControl
from motet.engine import Worker
from motet.engine_orders import (
    EngineFacts,
    EngineOrder,
    ForgetPrefixes,
    Hold,
    PrepareWeights,
    Sleep,
    Wake,
)
from motet.errors import EngineError, MotetError, RequestError
from motet.routing.router import Router
from motet.routing.workers.fleet import Fleet
from motet.types import PauseMode
from tests.control.controlled import DIED, NEW, OLD, SOME, OrderedEngine

pytestmark = pytest.mark.anyio

WEIGHTS, KV_CACHE, SCHEDULING = SleepTag


class SleepingCell:
    def __init__(self, *engines: OrderedEngine) -> None:
        self.router = Router(Fleet())
        for number, engine in enumerate(engines):
            self.router.fleet.put(Worker(f"decode-{number}", engine, "-"))
        self.control = EngineControl(self.router)
        self.weights = self.control.weights

    @property
    def sleep(self) -> CellSleep:
        assert self.control.sleep is not None
        return self.control.sleep

    async def fall_asleep(self, level: int) -> None:
        await self.sleep.sleep(level, PauseMode.KEEP)


def on_cpu(fails: dict[type[EngineOrder], MotetError] | None = None) -> OrderedEngine:
    return OrderedEngine(fails=fails, device="cpu")


class ChangedFolder(OrderedEngine):
    """An engine whose `model_digest` is the content of the folders at that moment."""

    def __init__(self) -> None:
        super().__init__(device="cpu")
        self.holds = "some"

    def apply(self, version: str) -> EngineFacts:
        super().apply(version)
        self.info = msgspec.structs.replace(self.info, model_digest=self.holds)
        return EngineFacts(self.info)


async def test_at_level_0_a_cell_is_paused_and_keeps_its_memory() -> None:
    one = on_cpu()
    cell = SleepingCell(one)
    await cell.fall_asleep(0)
    assert (cell.sleep.asleep, cell.control.engines.paused, one.held, one.has_kv) == (True, True, True, True)
    assert await cell.sleep.wake([SCHEDULING])
    assert (cell.sleep.asleep, one.held) == (False, False)


async def test_at_level_1_all_engines_release_kv_and_keep_their_weights() -> None:
    engines = on_cpu(), on_cpu()
    cell = SleepingCell(*engines)
    await cell.fall_asleep(1)
    assert [(one.held, one.has_kv, one.has_weights) for one in engines] == [(True, False, True)] * 2
    assert (cell.router.waiting.paused, cell.sleep.asleep) == (True, True)
    assert await cell.sleep.wake(())
    assert [(one.held, one.has_kv, one.read) for one in engines] == [(False, True, [])] * 2
    assert (cell.router.waiting.paused, cell.sleep.asleep) == (False, False)


@pytest.mark.parametrize("order", [(WEIGHTS, KV_CACHE), (KV_CACHE, WEIGHTS)])
async def test_groups_continue_when_everything_is_awake(order: tuple[SleepTag, SleepTag]) -> None:
    one = on_cpu()
    cell = SleepingCell(one)
    await cell.fall_asleep(2)
    assert (one.has_kv, one.has_weights) == (False, False)
    assert not await cell.sleep.wake([SCHEDULING])
    assert not await cell.sleep.wake([order[0]])
    assert (one.has_kv, one.has_weights) == (order[0] is KV_CACHE, order[0] is WEIGHTS)
    assert (one.held, cell.sleep.asleep) == (True, True)
    assert await cell.sleep.wake([SCHEDULING, order[1]])
    assert (one.held, cell.sleep.asleep, one.read) == (False, False, [OLD])


async def test_at_level_2_weights_are_read_again_from_their_source() -> None:
    one = on_cpu()
    cell = SleepingCell(one)
    for folder in (SOME, SOME):
        await cell.weights.update(folder, None)
    one.read.clear()
    before = one.info
    await cell.fall_asleep(2)
    await cell.sleep.wake(())
    assert (one.read, one.info) == ([OLD, SOME, SOME], before)
    await cell.weights.update(NEW, "whole")
    one.read.clear()
    await cell.fall_asleep(2)
    await cell.sleep.wake(())
    assert (one.read, one.info.weight_version) == ([NEW], "whole")


async def test_weights_that_a_trainer_brings_during_the_sleep_are_not_read_again() -> None:
    one = on_cpu()
    cell = SleepingCell(one)
    await cell.fall_asleep(2)
    await cell.weights.update(NEW, None)
    assert (one.has_weights, one.has_kv, one.held) == (True, False, True)
    assert await cell.sleep.wake(())
    assert (one.read, one.info.weight_version) == ([NEW], "1")


@pytest.mark.parametrize(
    ("level", "woken", "has_kv", "has_weights"),
    [(1, None, False, True), (2, None, False, False), (2, KV_CACHE, True, False), (2, WEIGHTS, False, True)],
)
async def test_a_restarted_engine_sleeps_as_the_others_do(
    level: int, woken: SleepTag | None, has_kv: bool, has_weights: bool
) -> None:
    cell = SleepingCell(on_cpu())
    await cell.weights.update(NEW, None)
    await cell.fall_asleep(level)
    if woken:
        await cell.sleep.wake([woken])
    again = on_cpu()
    await cell.control.sync(again)
    assert (again.held, again.has_kv, again.has_weights) == (True, has_kv, has_weights)
    cell.router.fleet.put(Worker("decode-0", again, "-"))
    assert await cell.sleep.wake(())
    assert (again.held, again.has_kv, again.has_weights, again.info.weight_version) == (False, True, True, "1")


async def test_engines_that_die_delay_no_others() -> None:
    one, two = on_cpu(), on_cpu(dict.fromkeys((Sleep, Wake, PrepareWeights, Hold, ForgetPrefixes), DIED))
    cell = SleepingCell(one, two)
    await cell.control.forget_prefixes(recompute=True)
    await cell.fall_asleep(2)
    assert not one.has_kv
    assert await cell.sleep.wake(())
    assert (one.has_kv, one.has_weights, one.emptied) == (True, True, [True])


async def test_if_weights_cannot_be_read_again_the_cell_sleeps_until_an_update() -> None:
    one = on_cpu({PrepareWeights: EngineError("the weights of the start are gone")})
    cell = SleepingCell(one)
    await cell.fall_asleep(2)
    with pytest.raises(EngineError, match="the weights of the start are gone"):
        await cell.sleep.wake(())
    assert cell.sleep.asleep and one.held
    one.fails.clear()
    await cell.weights.update(NEW, None)
    assert await cell.sleep.wake(())
    assert one.read == [NEW]


async def test_a_missing_folder_of_weights_is_not_the_fault_of_the_client() -> None:
    one = on_cpu()
    cell = SleepingCell(one)
    await cell.weights.update(NEW, None)
    await cell.fall_asleep(2)
    one.fails[PrepareWeights] = RequestError("Invalid 'weight_dir': new has no weights")
    with pytest.raises(EngineError, match=r"cannot be read again: .*new has no weights"):
        await cell.sleep.wake(())


async def test_groups_continue_with_new_weights_though_the_old_ones_could_not_wake() -> None:
    """The engine has the weights of the start by then, and groups have started with the weights of the update."""
    one = on_cpu()
    cell = SleepingCell(one)
    await cell.weights.update(SOME, None)
    started_with = one.info.model_digest
    await cell.fall_asleep(2)
    one.unreadable = SOME
    with pytest.raises(EngineError):
        await cell.sleep.wake(())
    await cell.weights.update(NEW, None)
    assert await cell.sleep.wake(())
    assert cell.router.fleet.successors.present(started_with) == one.info.model_digest == "new"


async def test_a_server_that_stops_is_not_delayed_by_weights_that_cannot_wake() -> None:
    one = on_cpu({PrepareWeights: EngineError("gone")})
    cell = SleepingCell(one)
    await cell.fall_asleep(2)
    await cell.sleep.let_groups_end()
    assert cell.sleep.asleep
    one.fails.clear()
    await cell.sleep.let_groups_end()
    assert not one.held


async def test_a_folder_that_holds_other_weights_by_now_wakes_no_engine() -> None:
    one = ChangedFolder()
    cell = SleepingCell(one)
    await cell.weights.update(SOME, None)
    await cell.fall_asleep(2)
    one.holds = "others"
    with pytest.raises(EngineError, match="some does not contain the weights of version 1 any more"):
        await cell.sleep.wake(())
    assert cell.sleep.asleep and one.held


async def test_a_sleeping_cell_refuses_to_resume_and_names_the_route_that_wakes_it() -> None:
    one = on_cpu()
    cell = SleepingCell(one)
    await cell.fall_asleep(1)
    with pytest.raises(RequestError, match="POST /wake_up") as refused:
        await cell.control.resume()
    assert (refused.value.code, one.held) == ("asleep", True)


async def test_a_gateway_can_neither_resume_sleeping_engines_nor_get_their_checksums() -> None:
    one = on_cpu()
    cell = SleepingCell(one)
    await cell.fall_asleep(1)
    with pytest.raises(RequestError, match="asleep"):
        await cell.control.obey(Hold(False))
    await cell.control.obey(Hold(True))
    assert await cell.weights.checksums() == {"a": "old"}
    await cell.fall_asleep(2)
    with pytest.raises(RequestError, match="asleep"):
        await cell.weights.checksums()
    await cell.sleep.wake(())
    assert await cell.weights.checksums() == {"a": "old"}
    await cell.control.obey(Hold(False))
    assert not one.held


async def test_engines_resumed_between_the_pause_and_the_sleep_are_held_again() -> None:
    one = on_cpu()
    cell = SleepingCell(one)
    async with cell.control.engines.lock:
        sleeping = asyncio.create_task(cell.fall_asleep(1))
        await asyncio.sleep(0)
        resuming = asyncio.create_task(cell.control.resume())
        await asyncio.sleep(0)
    await asyncio.gather(sleeping, resuming)
    assert (one.held, one.has_kv, cell.control.engines.paused, cell.router.waiting.paused) == (True, False, True, True)


async def test_an_order_is_carried_out_completely_if_its_caller_leaves() -> None:
    one = on_cpu()
    cell = SleepingCell(one)
    await cell.fall_asleep(2)
    async with cell.control.engines.lock:
        leaving = asyncio.create_task(cell.sleep.wake(()))
        await asyncio.sleep(0)
        leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    async with cell.control.engines.lock:  # comes after it
        assert (one.held, cell.sleep.asleep) == (False, False)


async def test_engines_on_a_gpu_are_only_paused() -> None:
    one = on_cpu()
    one.info = msgspec.structs.replace(one.info, device="cuda:0")
    cell = SleepingCell(one)
    with pytest.raises(RequestError, match="/sleep releases memory of engines on the CPU only") as refused:
        await cell.fall_asleep(1)
    assert (refused.value.param, one.held, cell.sleep.asleep) == ("level", False, False)
    await cell.fall_asleep(0)
    assert one.held and one.has_kv


async def test_all_prefix_caches_are_emptied_at_once() -> None:
    engines = on_cpu(), on_cpu()
    cell = SleepingCell(*engines)
    await cell.control.forget_prefixes(recompute=False)
    await cell.control.forget_prefixes(recompute=True)
    assert [one.emptied for one in engines] == [[False, True]] * 2

"""New weights for the engines of a cell: all get them or none, whatever goes wrong with one of them."""

import asyncio

import msgspec
import pytest

from motet.control.engine_control import EngineControl
from motet.engine import Worker, WorkerState
from motet.engine_orders import (
    ApplyWeights,
    EngineOrder,
    Hold,
    OrderAnswer,
    PreparedWeights,
    PrepareWeights,
    SumWeights,
)
from motet.errors import EngineError, MotetError, NoWorkerError, RequestError, StartupError
from motet.models.checkpoint import Checkpoint, max_checkpoint_bytes
from motet.models.memory_file import MemoryFile
from motet.routing.router import Router
from motet.routing.workers.fleet import Fleet
from motet.types import PauseMode
from tests.clock import settle
from tests.control.controlled import DIED, NEW, OLD, SOME, OrderedEngine
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.anyio


def cell(*engines: OrderedEngine) -> tuple[EngineControl, Fleet]:
    router = Router(Fleet())
    fleet = router.fleet
    for number, engine in enumerate(engines):
        fleet.put(Worker(f"decode-{number}", engine, "-"))
    return EngineControl(router), fleet


def versions(*engines: OrderedEngine) -> list[str]:
    return [engine.info.weight_version for engine in engines]


async def test_all_engines_get_the_new_weights_and_their_version() -> None:
    one, two = OrderedEngine(), OrderedEngine()
    control, fleet = cell(one, two)
    assert (await control.weights.update(NEW, None)).version == "1"
    assert (await control.weights.update(NEW, "step 2")).version == control.weights.version == "step 2"
    assert (await control.weights.update(NEW, None)).version == "3"
    assert versions(one, two) == ["3", "3"] and not one.held and not two.held
    assert fleet.successors.present("old") == "new"


@pytest.mark.parametrize("error", [RequestError("tensor a is wrong"), DIED])
async def test_if_one_engine_cannot_prepare_them_none_gets_them(error: MotetError) -> None:
    one, two = OrderedEngine(), OrderedEngine(fails={PrepareWeights: error})
    control, fleet = cell(one, two)
    with pytest.raises(type(error), match=error.message):
        await control.weights.update(NEW, None)
    assert versions(one, two) == ["0", "0"] and one.prepared is None
    assert (control.weights.version, fleet.successors.present("old")) == ("0", "old")


async def test_while_an_engine_is_missing_nothing_is_updated() -> None:
    one, two = OrderedEngine(), OrderedEngine()
    control, fleet = cell(one, two)
    fleet.mark("decode-1", WorkerState.DEAD)
    with pytest.raises(NoWorkerError, match="the worker decode-1 is dead"):
        await control.weights.update(NEW, None)
    assert versions(one, two) == ["0", "0"]


async def test_an_engine_that_dies_during_an_update_has_the_weights_when_it_is_back() -> None:
    one, two = OrderedEngine(), OrderedEngine(fails={ApplyWeights: DIED, Hold: DIED})
    control, _ = cell(one, two)
    assert (await control.weights.update(NEW, None)).version == "1"
    again = OrderedEngine()
    await control.sync(again)
    assert versions(one, again) == ["1", "1"] and again.info.model_digest == one.info.model_digest


async def test_if_all_die_the_version_stays_and_the_error_is_raised() -> None:
    control, _ = cell(OrderedEngine(fails={ApplyWeights: DIED}))
    with pytest.raises(EngineError, match=DIED.message):
        await control.weights.update(NEW, None)
    assert control.weights.version == "0"


async def test_updates_are_counted_with_their_time() -> None:
    router = Router(Fleet())
    one = OrderedEngine()
    router.fleet.put(Worker("engine-0", one, "-"))
    control = EngineControl(router)
    await control.weights.update(NEW, None)
    await control.weights.update(NEW, None)
    one.fails[PrepareWeights] = RequestError("tensor a is wrong")
    with pytest.raises(RequestError):
        await control.weights.update(NEW, None)
    figures = router.figures()
    assert figures.weight_updates == {"applied": 2, "failed": 1}
    assert sum(figures.weight_update_seconds) == 2 and figures.weight_update_seconds_sum > 0


async def test_a_restarted_engine_reads_the_checkpoints_that_still_matter() -> None:
    """The last folder with all tensors, and those with some that came after it."""
    one = OrderedEngine()
    control, _ = cell(one)
    for folder in (SOME, OLD, NEW, SOME, SOME):
        await control.weights.update(folder, None)
    again = OrderedEngine()
    await control.sync(again)
    assert again.info.model_digest == one.info.model_digest == "new+some+some"
    assert again.info.weight_version == "5"


async def test_an_engine_does_not_serve_if_a_folder_holds_other_weights_by_now() -> None:
    one = OrderedEngine()
    control, _ = cell(one)
    await control.weights.update(SOME, None)
    other = OrderedEngine()
    other.info = msgspec.structs.replace(other.info, model_digest="another start")
    with pytest.raises(StartupError, match="some does not contain the weights of version 1 any more"):
        await control.sync(other)


async def test_a_pause_holds_all_engines_and_new_ones_and_outlasts_an_update() -> None:
    one, two = OrderedEngine(), OrderedEngine(fails={Hold: DIED})
    control, _ = cell(one, two)
    await control.pause(PauseMode.KEEP)
    await control.pause(PauseMode.KEEP)
    new = OrderedEngine()
    await control.sync(new)
    await control.weights.update(NEW, None)
    assert (control.engines.paused, one.held, new.held) == (True, True, True)
    await control.resume()
    assert (control.engines.paused, one.held) == (False, False)


class SlowReader(OrderedEngine):
    """An engine that reads weights until `read_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.read_on = asyncio.Event(), asyncio.Event()

    async def send(self, order: EngineOrder) -> OrderAnswer:
        if isinstance(order, PrepareWeights):
            self.reads.set()
            await self.read_on.wait()
        return await super().send(order)


async def test_pauses_start_and_end_while_weights_are_read() -> None:
    """The bug: a read that hung held the lock, so `/pause` and then `/resume` hung too, and no group was admitted."""
    one = SlowReader()
    control, _ = cell(one)
    update = asyncio.create_task(control.weights.update(NEW, None))
    await one.reads.wait()
    async with asyncio.timeout(PATIENCE_S):
        await control.pause(PauseMode.KEEP)
        assert (one.held, control.engines.paused) == (True, True)
        await control.forget_prefixes(recompute=False)
        await control.resume()
        assert (one.held, control.engines.paused) == (False, False)
        await control.pause(PauseMode.ABORT)
        assert control.sleep is not None and await control.sleep.wake(())
        await control.obey(Hold(True))
    one.read_on.set()
    await update
    assert (one.held, versions(one)) == (True, ["1"]), "the pause lasts"
    await control.obey(Hold(False))
    assert (one.held, control.engines.paused) == (False, False)


class SlowSummer(SlowReader):
    """An engine that also computes checksums until `sum_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.sums, self.sum_on = asyncio.Event(), asyncio.Event()

    async def send(self, order: EngineOrder) -> OrderAnswer:
        if isinstance(order, SumWeights):
            self.sums.set()
            await self.sum_on.wait()
        return await super().send(order)


async def test_checksums_do_not_wait_for_an_update_that_reads_and_are_of_the_weights_before_it() -> None:
    """The bug: `/weight_checker` waited for minutes while another update read its files."""
    one = SlowSummer()
    control, _ = cell(one)
    update = asyncio.create_task(control.weights.update(NEW, None))
    await one.reads.wait()
    async with asyncio.timeout(PATIENCE_S):
        checking = asyncio.create_task(control.weights.checksums())
        await one.sums.wait()
        one.read_on.set()
        await settle()
        assert (versions(one), one.held) == (["0"], False), "the new weights wait for the checksums"
        await control.pause(PauseMode.KEEP)
        await control.resume()
        one.sum_on.set()
        assert await checking == {"a": "old"}
        await update
    assert (await control.weights.checksums(), versions(one)) == ({"a": "new"}, ["1"])


async def test_a_pause_does_not_drop_weights_that_a_gateway_has_prepared() -> None:
    one = OrderedEngine()
    control, _ = cell(one)
    await control.weights.prepare(NEW)
    async with asyncio.timeout(PATIENCE_S):
        await control.obey(Hold(True))
    await control.weights.apply("1", digest="new")
    assert (one.held, versions(one)) == (True, ["1"])


async def test_an_engine_that_reads_weights_while_it_joins_gets_the_end_of_a_pause() -> None:
    control, fleet = cell(OrderedEngine())
    await control.weights.update(NEW, None)
    await control.pause(PauseMode.KEEP)
    joining = SlowReader()

    async def join() -> None:
        async with control.joining(joining):
            held = joining.held
            await control.resume()
            assert (held, joining.held) == (True, False)
            fleet.put(Worker("decode-1", joining, "-"))

    joined = asyncio.create_task(join())
    await joining.reads.wait()
    async with asyncio.timeout(PATIENCE_S):
        await control.resume()
        await control.pause(PauseMode.KEEP)
    joining.read_on.set()
    await joined
    assert (versions(joining), joining.held) == (["1"], False)


async def test_a_pause_whose_caller_leaves_does_not_stop_new_groups() -> None:
    control, _ = cell(OrderedEngine())
    async with control.engines.step_lock:
        leaving = asyncio.create_task(control.pause(PauseMode.KEEP))
        await asyncio.sleep(0)
        leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert control.engines.pause_s is None


async def test_an_update_is_completed_if_its_caller_leaves() -> None:
    one = OrderedEngine()
    control, _ = cell(one)
    async with control.engines.lock:
        leaving = asyncio.create_task(control.weights.update(NEW, None))
        await asyncio.sleep(0)
        leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    async with control.engines.lock:  # comes after it
        pass
    assert versions(one) == ["1"]


async def test_an_engine_that_reads_different_weights_ends_the_update() -> None:
    class Elsewhere(OrderedEngine):
        def prepare(self, order: PrepareWeights) -> PreparedWeights:
            return msgspec.structs.replace(super().prepare(order), digest="another folder")

    one, two = OrderedEngine(), Elsewhere()
    control, _ = cell(one, two)
    with pytest.raises(EngineError, match="decode-1 has read other weights in new than decode-0"):
        await control.weights.update(NEW, None)
    assert versions(one, two) == ["0", "0"] and one.prepared is two.prepared is None


async def test_a_gateway_requests_the_two_steps_separately_and_can_drop_the_first() -> None:
    one = OrderedEngine()
    control, _ = cell(one)
    assert (await control.weights.prepare(NEW)).digest == "new"
    assert (await control.weights.prepare(OLD)).digest == "old", "the first were not dropped"
    await control.weights.drop("new")  # it comes late
    assert one.prepared == OLD
    with pytest.raises(EngineError, match="these weights are not prepared"):
        await control.weights.apply("1", digest="new")
    await control.weights.drop("old")
    assert not one.prepared
    with pytest.raises(EngineError, match="these weights are not prepared"):
        await control.weights.apply("1")
    await control.weights.prepare(NEW)
    await control.weights.apply("7")
    assert (control.weights.version, versions(one), one.held) == ("7", ["7"], False)


async def test_prepared_weights_are_forgotten_after_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motet.control.weight_updates.PREPARED_S", 0.0)
    one = OrderedEngine()
    control, _ = cell(one)
    await control.weights.prepare(NEW)
    assert (await control.weights.update(OLD, None)).version == "1"  # waits for the lock that they hold
    assert one.info.model_digest == "old"


async def test_weights_in_memory_are_kept_as_long_as_an_engine_can_need_them() -> None:
    one = OrderedEngine()
    control, _ = cell(one)
    first, second, refused = (Checkpoint.of_memory([MemoryFile.create(8)]) for _ in range(3))
    await control.weights.update(first, None)
    assert first.paths[0].exists()
    one.fails = {PrepareWeights: RequestError("tensor a is wrong")}
    with pytest.raises(RequestError):
        await control.weights.update(refused, None)
    assert not refused.paths[0].exists() and first.paths[0].exists()
    one.fails = {}
    await control.weights.update(second, None)
    assert not first.paths[0].exists() and second.paths[0].exists()
    await control.close()
    assert not second.paths[0].exists()


async def test_parts_in_memory_are_kept_until_later_updates_have_all_their_tensors() -> None:
    """The bug: a trainer that sent a part of the model in each step filled the memory of the machine."""
    one = OrderedEngine()
    control, _ = cell(one)
    names = [("a", "b"), ("c",), ("b",), ("a",), ("c", "b", "a")]
    parts = [Checkpoint.of_memory([MemoryFile.create(8)]) for _ in names]
    one.parts = dict(zip([part.paths for part in parts], names, strict=True))
    kept = [[0], [0, 1], [0, 1, 2], [1, 2, 3], [4]]
    for number, places in enumerate(kept):
        await control.weights.update(parts[number], None)
        assert [place for place in range(number + 1) if parts[place].paths[0].exists()] == places
        again = OrderedEngine()
        again.parts = one.parts
        await control.sync(again)
        assert again.info.model_digest == one.info.model_digest, "although it has not read all updates"
    await control.close()


async def test_parts_in_memory_can_have_the_size_of_one_checkpoint() -> None:
    one = OrderedEngine()
    control, _ = cell(one)
    maximum = max_checkpoint_bytes(8)
    one.info = msgspec.structs.replace(one.info, num_weights=8)
    parts = [Checkpoint.of_memory([MemoryFile.create(size)]) for size in (maximum - 10, 11, 10, maximum)]
    one.parts = dict(zip([part.paths for part in parts], [("a",), ("b",), ("b",), ("b", "a")], strict=True))
    await control.weights.update(parts[0], None)
    with pytest.raises(RequestError, match=f"have {maximum + 1} bytes, and the maximum is {maximum}: send all tensors"):
        await control.weights.update(parts[1], None)
    assert not parts[1].paths[0].exists() and one.prepared is None and control.weights.version == "1"
    await control.weights.update(parts[2], None)
    await control.weights.update(parts[3], None)
    assert [part.paths[0].exists() for part in parts] == [False, False, False, True]
    await control.close()


async def test_a_version_can_be_renamed_and_engines_that_join_have_the_new_name() -> None:
    one = OrderedEngine()
    control, _ = cell(one)
    await control.weights.rename("base")
    again = OrderedEngine()
    await control.sync(again)
    assert (control.weights.version, versions(one, again)) == ("base", ["base", "base"])


async def test_engines_whose_weights_differ_have_no_checksums() -> None:
    one, two = OrderedEngine(), OrderedEngine()
    control, _ = cell(one, two)
    assert await control.weights.checksums() == {"a": "old"}
    two.info = msgspec.structs.replace(two.info, model_digest="damaged")
    with pytest.raises(EngineError, match="decode-1 has other weights than decode-0"):
        await control.weights.checksums()


async def test_an_engine_that_missed_one_of_several_updates_gets_the_rest() -> None:
    one = OrderedEngine()
    control, _ = cell(one)
    await control.weights.update(SOME, None)
    missed = OrderedEngine()
    await control.sync(missed)
    await control.weights.update(SOME, None)
    await control.sync(missed)
    assert missed.info.model_digest == one.info.model_digest == "old+some+some"
    strange = OrderedEngine()
    strange.info = msgspec.structs.replace(strange.info, model_digest="of another update", weight_version="7")
    await control.sync(strange)
    assert strange.info.model_digest == one.info.model_digest and strange.read[0] == OLD


async def test_an_engine_keeps_its_version_if_the_server_has_not_named_one() -> None:
    control, _ = cell()
    elsewhere = OrderedEngine()
    elsewhere.info = msgspec.structs.replace(elsewhere.info, weight_version="7")
    await control.sync(elsewhere)
    assert versions(elsewhere) == ["7"]


async def test_engines_drop_weights_that_they_may_have_prepared_after_a_lost_answer() -> None:
    """An engine whose answer got lost drops any weights that it has prepared."""
    one, two = OrderedEngine(), OrderedEngine(fails={PrepareWeights: EngineError("no answer")})
    control, _ = cell(one, two)
    with pytest.raises(EngineError, match="no answer"):
        await control.weights.update(NEW, None)
    assert (one.dropped, two.dropped) == (["new"], [""])
    two.fails.clear()
    await control.weights.prepare(OLD)
    await control.weights.drop("old")
    assert (one.dropped, two.dropped) == (["new", "old"], ["", "old"])

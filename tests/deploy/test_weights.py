"""New weights for the engines of a cell: all get them or none, whatever goes wrong with one of them."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from motet.deploy.weights import CellWeights
from motet.engine import PreparedWeights, Worker, WorkerState
from motet.errors import EngineDiedError, EngineError, MotetError, NoWorkerError, RequestError, StartupError
from motet.models.checkpoint import START, Checkpoint, MemoryFile
from motet.routing.router import Router
from motet.routing.workers.fleet import Fleet
from motet.testing.fake_engine import FakeEngine, fake_info
from motet.types import PauseMode

pytestmark = pytest.mark.anyio

OLD, NEW, SOME = (Checkpoint.of(Path(name)) for name in ("old", "new", "some"))
DIED = EngineDiedError("its process is gone")


class RenewableEngine(FakeEngine):
    """Its `model_digest` names the folders that it has read."""

    def __init__(self, *, fails: dict[str, MotetError] | None = None) -> None:
        super().__init__(lambda _, start: [], info=msgspec.structs.replace(fake_info(), model_digest="old"))
        self.fails = fails or {}
        """The error of each method that fails."""
        self.prepared: Checkpoint | None = None
        self.held = False
        self.unreadable: Checkpoint | None = None
        self.read: list[Checkpoint] = []
        """The folders that were read; `OLD` for the weights of the start."""
        self.has_kv = self.has_weights = True
        self.emptied: list[bool] = []
        """For each time that its prefix cache was emptied: True if groups had to compute their KV anew."""

    async def prepare_weights(self, checkpoint: Checkpoint) -> PreparedWeights:
        self._fail("prepare")
        if checkpoint == self.unreadable:
            raise RequestError(f"{checkpoint.name} has no weights")
        self.prepared = OLD if checkpoint == START else checkpoint
        self.read.append(self.prepared)
        return PreparedWeights(1, 0.5, whole=checkpoint != SOME, digest=checkpoint.name)

    async def apply_weights(self, version: str) -> None:
        self._fail("apply")
        assert self.prepared is not None
        digest = f"{self.info.model_digest}+some" if self.prepared == SOME else self.prepared.name
        self.info = msgspec.structs.replace(self.info, model_digest=digest, weight_version=version)
        self.prepared, self.has_weights = None, True

    async def name_weights(self, version: str) -> None:
        self.info = msgspec.structs.replace(self.info, weight_version=version)

    async def checksums(self) -> dict[str, str]:
        return {"a": self.info.model_digest}

    def drop_weights(self) -> None:
        self.prepared = None

    async def hold(self, held: bool) -> None:
        self._fail("hold")
        self.held = held
        assert held or (self.has_kv and self.has_weights)

    async def forget_prefixes(self, *, anew: bool) -> None:
        self._fail("forget")
        self.emptied.append(anew)

    async def sleep(self, *, weights: bool) -> None:
        self._fail("sleep")
        assert self.held
        self.has_kv, self.has_weights = False, self.has_weights and not weights

    async def wake(self) -> None:
        self._fail("wake")
        self.has_kv = True

    def _fail(self, what: str) -> None:
        if (error := self.fails.get(what)) is not None:
            raise error


def cell(*engines: RenewableEngine) -> tuple[CellWeights, Fleet]:
    router = Router(Fleet())
    fleet = router.fleet
    for number, engine in enumerate(engines):
        fleet.put(Worker(f"decode-{number}", engine, "-"))
    return CellWeights(router), fleet


def versions(*engines: RenewableEngine) -> list[str]:
    return [engine.info.weight_version for engine in engines]


async def test_all_engines_get_the_new_weights_and_their_version() -> None:
    one, two = RenewableEngine(), RenewableEngine()
    weights, fleet = cell(one, two)
    assert (await weights.update(NEW, None)).version == "1"
    assert (await weights.update(NEW, "step 2")).version == weights.version == "step 2"
    assert (await weights.update(NEW, None)).version == "3"
    assert versions(one, two) == ["3", "3"] and not one.held and not two.held
    assert fleet.present("old") == "new"


@pytest.mark.parametrize("error", [RequestError("tensor a is wrong"), DIED])
async def test_if_one_engine_cannot_prepare_them_none_gets_them(error: MotetError) -> None:
    one, two = RenewableEngine(), RenewableEngine(fails={"prepare": error})
    weights, fleet = cell(one, two)
    with pytest.raises(type(error), match=error.message):
        await weights.update(NEW, None)
    assert versions(one, two) == ["0", "0"] and one.prepared is None
    assert (weights.version, fleet.present("old")) == ("0", "old")


async def test_while_an_engine_is_not_there_nothing_is_updated() -> None:
    one, two = RenewableEngine(), RenewableEngine()
    weights, fleet = cell(one, two)
    fleet.mark("decode-1", WorkerState.DEAD)
    with pytest.raises(NoWorkerError, match="the worker decode-1 is dead"):
        await weights.update(NEW, None)
    assert versions(one, two) == ["0", "0"]


async def test_an_engine_that_dies_as_it_gets_them_has_them_when_it_is_back() -> None:
    one, two = RenewableEngine(), RenewableEngine(fails={"apply": DIED, "hold": DIED})
    weights, _ = cell(one, two)
    assert (await weights.update(NEW, None)).version == "1"
    again = RenewableEngine()
    await weights.bring(again)
    assert versions(one, again) == ["1", "1"] and again.info.model_digest == one.info.model_digest


async def test_if_all_die_the_version_stays_and_the_error_is_told() -> None:
    weights, _ = cell(RenewableEngine(fails={"apply": DIED}))
    with pytest.raises(EngineError, match=DIED.message):
        await weights.update(NEW, None)
    assert weights.version == "0"


async def test_updates_are_counted_with_their_time() -> None:
    router = Router(Fleet())
    one = RenewableEngine()
    router.fleet.put(Worker("engine-0", one, "-"))
    weights = CellWeights(router)
    await weights.update(NEW, None)
    await weights.update(NEW, None)
    one.fails["prepare"] = RequestError("tensor a is wrong")
    with pytest.raises(RequestError):
        await weights.update(NEW, None)
    figures = router.figures()
    assert figures.weight_updates == {"applied": 2, "failed": 1}
    assert sum(figures.weight_update_seconds) == 2 and figures.weight_update_seconds_sum > 0


async def test_an_engine_that_is_started_anew_reads_what_is_still_true() -> None:
    """The last folder with all tensors, and those with some that came after it."""
    one = RenewableEngine()
    weights, _ = cell(one)
    for folder in (SOME, OLD, NEW, SOME, SOME):
        await weights.update(folder, None)
    again = RenewableEngine()
    await weights.bring(again)
    assert again.info.model_digest == one.info.model_digest == "new+some+some"
    assert again.info.weight_version == "5"


async def test_an_engine_does_not_serve_if_a_folder_holds_other_weights_by_now() -> None:
    one = RenewableEngine()
    weights, _ = cell(one)
    await weights.update(SOME, None)
    other = RenewableEngine()
    other.info = msgspec.structs.replace(other.info, model_digest="another start")
    with pytest.raises(StartupError, match="some does not hold the weights of version 1 any more"):
        await weights.bring(other)


async def test_a_pause_holds_all_engines_and_new_ones_and_outlasts_an_update() -> None:
    one, two = RenewableEngine(), RenewableEngine(fails={"hold": DIED})
    weights, _ = cell(one, two)
    await weights.pause(PauseMode.KEEP)
    await weights.pause(PauseMode.KEEP)
    new = RenewableEngine()
    await weights.bring(new)
    await weights.update(NEW, None)
    assert (weights.paused, one.held, new.held) == (True, True, True)
    await weights.resume()
    assert (weights.paused, one.held) == (False, False)


async def test_an_update_ends_as_a_whole_if_its_caller_leaves() -> None:
    one = RenewableEngine()
    weights, _ = cell(one)
    async with weights.lock:
        leaving = asyncio.create_task(weights.update(NEW, None))
        await asyncio.sleep(0)
        leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await weights.pause(PauseMode.KEEP)  # comes after it
    assert versions(one) == ["1"]


async def test_an_engine_that_reads_other_weights_than_the_others_ends_the_update() -> None:
    class Elsewhere(RenewableEngine):
        async def prepare_weights(self, checkpoint: Checkpoint) -> PreparedWeights:
            return msgspec.structs.replace(await super().prepare_weights(checkpoint), digest="another folder")

    one, two = RenewableEngine(), Elsewhere()
    weights, _ = cell(one, two)
    with pytest.raises(EngineError, match="decode-1 has read other weights in new than decode-0"):
        await weights.update(NEW, None)
    assert versions(one, two) == ["0", "0"] and one.prepared is two.prepared is None


async def test_a_gateway_does_the_two_steps_one_by_one_and_may_change_its_mind() -> None:
    one = RenewableEngine()
    weights, _ = cell(one)
    assert (await weights.prepare_weights(NEW)).digest == "new"
    assert (await weights.prepare_weights(OLD)).digest == "old", "the first were not dropped"
    weights.drop_weights("new")  # it comes late
    assert one.prepared == OLD
    with pytest.raises(EngineError, match="these new weights are not prepared"):
        await weights.apply_weights("1", digest="new")
    weights.drop_weights("old")
    assert not one.prepared
    with pytest.raises(EngineError, match="these new weights are not prepared"):
        await weights.apply_weights("1")
    await weights.prepare_weights(NEW)
    await weights.apply_weights("7")
    assert (weights.version, versions(one), one.held) == ("7", ["7"], False)


async def test_what_a_gateway_has_prepared_is_forgotten_after_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motet.deploy.weights.PREPARED_S", 0.0)
    one = RenewableEngine()
    weights, _ = cell(one)
    await weights.prepare_weights(NEW)
    assert (await weights.update(OLD, None)).version == "1"  # waits for the lock that they hold
    assert one.info.model_digest == "old"


async def test_weights_in_memory_are_kept_as_long_as_an_engine_may_need_them() -> None:
    one = RenewableEngine()
    weights, _ = cell(one)
    first, second, refused = (Checkpoint.of_memory([MemoryFile.create(8)]) for _ in range(3))
    await weights.update(first, None)
    assert first.paths[0].exists()
    one.fails = {"prepare": RequestError("tensor a is wrong")}
    with pytest.raises(RequestError):
        await weights.update(refused, None)
    assert not refused.paths[0].exists() and first.paths[0].exists()
    one.fails = {}
    await weights.update(second, None)
    assert not first.paths[0].exists() and second.paths[0].exists()
    weights.close()
    assert not second.paths[0].exists()


async def test_a_version_can_get_another_name_which_engines_that_come_have_too() -> None:
    one = RenewableEngine()
    weights, _ = cell(one)
    await weights.rename("base")
    again = RenewableEngine()
    await weights.bring(again)
    assert (weights.version, versions(one, again)) == ("base", ["base", "base"])


async def test_engines_whose_weights_differ_have_no_checksums() -> None:
    one, two = RenewableEngine(), RenewableEngine()
    weights, _ = cell(one, two)
    assert await weights.checksums() == {"a": "old"}
    two.info = msgspec.structs.replace(two.info, model_digest="damaged")
    with pytest.raises(EngineError, match="decode-1 has other weights than decode-0"):
        await weights.checksums()


async def test_an_engine_that_missed_one_of_several_updates_gets_the_rest() -> None:
    one = RenewableEngine()
    weights, _ = cell(one)
    await weights.update(SOME, None)
    missed = RenewableEngine()
    await weights.bring(missed)
    await weights.update(SOME, None)
    await weights.bring(missed)
    assert missed.info.model_digest == one.info.model_digest == "old+some+some"
    strange = RenewableEngine()
    strange.info = msgspec.structs.replace(strange.info, model_digest="of another update", weight_version="7")
    await weights.bring(strange)
    assert strange.info.model_digest == one.info.model_digest and strange.read[0] == OLD


async def test_an_engine_keeps_its_version_if_nobody_has_named_one_here() -> None:
    weights, _ = cell()
    elsewhere = RenewableEngine()
    elsewhere.info = msgspec.structs.replace(elsewhere.info, weight_version="7")
    await weights.bring(elsewhere)
    assert versions(elsewhere) == ["7"]

"""Control of engines that only notes what the routes pass on."""

from collections.abc import Collection

from safetensors import safe_open

from motet.control.cell_sleep import CellSleep, SleepTag
from motet.control.controlled_engines import ControlledEngines
from motet.control.engine_control import EngineControl, NewRequests
from motet.control.weight_updates import WeightUpdate, WeightUpdates
from motet.engine import Worker
from motet.engine_orders import PreparedWeights
from motet.errors import NoWorkerError, RequestError
from motet.models.checkpoint import Checkpoint, checkpoint_files
from motet.routing.router import Router
from motet.routing.workers.fleet import Fleet
from motet.testing.fake_engine import FakeEngine, fake_info
from motet.types import PauseMode

BAD = "/bad"
GONE = "/gone"


class NotedUpdates(WeightUpdates):
    """Notes each call in `calls`."""

    calls: list[object]
    tensors: list[str]
    """The names of the tensors that came in memory with the last update."""
    prepared: Checkpoint | None

    async def update(self, checkpoint: Checkpoint, version: str | None) -> WeightUpdate:
        if checkpoint.name == BAD:
            raise RequestError("tensor a: it is wrong", code="invalid_weights")
        if checkpoint.name == GONE:
            raise NoWorkerError("the worker decode-0 is dead: the weights cannot be updated now")
        self._read(checkpoint)
        self.calls.append((checkpoint.name, version))
        await self.rename(version or "1")
        return WeightUpdate(self.version, "decode-0", 0.25)

    async def rename(self, version: str) -> None:
        self.history.name(version)

    async def checksums(self) -> dict[str, str]:
        return {"a": "01", "b": "02"}

    async def prepare(self, checkpoint: Checkpoint, *, base: str = "") -> PreparedWeights:
        self._read(checkpoint)
        self.prepared = checkpoint
        return PreparedWeights(2, 0.5, complete=True, digest=checkpoint.name)

    async def apply(self, version: str, *, digest: str = "") -> None:
        self.history.name(version)
        self.calls.append(digest)

    async def drop(self, digest: str = "") -> None:
        self.prepared = None
        self.calls.append(digest)

    def _read(self, checkpoint: Checkpoint) -> None:
        if checkpoint.memory:
            self.tensors = []
            for file in checkpoint_files(checkpoint.paths):
                with safe_open(file, framework="pt") as tensors:
                    self.tensors += tensors.keys()
            checkpoint.close()


class NotedSleep(CellSleep):
    """Notes each call in `calls`."""

    calls: list[object]

    async def sleep(self, level: int, mode: PauseMode) -> None:
        self.tags = {*SleepTag}
        self.calls.append((level, mode))

    async def wake(self, tags: Collection[SleepTag]) -> bool:
        self.calls.append(tuple(tags))
        if not tags:
            self.tags.clear()
        return not self.tags


class NotedControl(EngineControl):
    """Notes each call of a route. A pause and the end of a pause have an effect."""

    weights: NotedUpdates
    sleep: NotedSleep

    def __init__(self) -> None:
        router = Router(Fleet([Worker("decode-0", FakeEngine(lambda *_: [], info=fake_info()), "-")]))
        super().__init__(router)
        self.engines = ControlledEngines(router, on_other_servers=False, clock=lambda: self.now_s)
        self.now_s = 0.0
        self.weights = NotedUpdates(router, self.engines)
        self.sleep = NotedSleep(self.engines, self.weights, pause=self.pause)
        self.calls = self.weights.calls = self.sleep.calls = list[object]()
        self.weights.tensors = []
        self.weights.prepared = None

    async def pause(self, mode: PauseMode, new_requests: NewRequests = NewRequests.WAIT) -> None:
        self.calls.append(mode)
        await self.engines.halt()
        self.engines.refuses_new = new_requests is NewRequests.REFUSE

    async def resume(self) -> None:
        await self.engines.resume()

    async def abort(self, traces: Collection[str] | None) -> int:
        self.calls.append(traces)
        return 2

    async def forget_prefixes(self, *, recompute: bool) -> None:
        self.calls.append(recompute)

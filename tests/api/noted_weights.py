"""Weights of a server that are only noted."""

from collections.abc import Collection

from safetensors import safe_open

from motet.engine import PreparedWeights, WeightUpdate
from motet.errors import NoWorkerError, RequestError
from motet.models.checkpoint import Checkpoint, checkpoint_files
from motet.types import PauseMode

BAD = "/bad"
GONE = "/gone"


class NotedWeights:
    """Keeps what it is asked for."""

    def __init__(self) -> None:
        self.version = "0"
        self.paused = False
        self.asked: list[object] = []
        self.tensors: list[str] = []
        """The names of those that came in memory with the last update."""
        self.prepared: Checkpoint | None = None

    async def pause(self, mode: PauseMode) -> None:
        self.paused = True
        self.asked.append(mode)

    async def resume(self) -> None:
        self.paused = False

    async def abort(self, traces: Collection[str] | None) -> int:
        self.asked.append(traces)
        return 2

    async def update(self, checkpoint: Checkpoint, version: str | None) -> WeightUpdate:
        if checkpoint.name == BAD:
            raise RequestError("tensor a: it is wrong", code="invalid_weights")
        if checkpoint.name == GONE:
            raise NoWorkerError("the worker decode-0 is dead: no weights are updated now")
        self._note(checkpoint)
        self.asked.append((checkpoint.name, version))
        self.version = version or "1"
        return WeightUpdate(self.version, "decode-0", 0.25)

    async def forget_prefixes(self, *, anew: bool) -> None:
        self.asked.append(anew)

    async def rename(self, version: str) -> None:
        self.version = version

    async def checksums(self) -> dict[str, str]:
        return {"a": "01", "b": "02"}

    async def prepare_weights(self, checkpoint: Checkpoint) -> PreparedWeights:
        self._note(checkpoint)
        self.prepared = checkpoint
        return PreparedWeights(2, 0.5, whole=True, digest=checkpoint.name)

    async def apply_weights(self, version: str, *, digest: str = "") -> None:
        self.version = version
        self.asked.append(digest)

    def drop_weights(self, digest: str = "") -> None:
        self.prepared = None
        self.asked.append(digest)

    async def hold(self, held: bool) -> None:
        self.paused = held

    def _note(self, checkpoint: Checkpoint) -> None:
        if checkpoint.memory:
            self.tensors = []
            for file in checkpoint_files(checkpoint.paths):
                with safe_open(file, framework="pt") as tensors:
                    self.tensors += tensors.keys()
            checkpoint.close()

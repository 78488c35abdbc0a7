"""An engine without a model that takes orders, and notes what it has read."""

from pathlib import Path

import msgspec

from motet.engine_orders import (
    ApplyWeights,
    Checksums,
    Done,
    DropWeights,
    EngineFacts,
    EngineOrder,
    ForgetPrefixes,
    Hold,
    NameWeights,
    OrderAnswer,
    PreparedWeights,
    PrepareWeights,
    Sleep,
    SumWeights,
    Wake,
)
from motet.errors import EngineDiedError, MotetError, RequestError
from motet.models.checkpoint import Checkpoint, CheckpointKind
from motet.testing.fake_engine import FakeEngine, fake_info

OLD, NEW, SOME = (Checkpoint.of(Path(name)) for name in ("old", "new", "some"))
DIED = EngineDiedError("its process is gone")


class OrderedEngine(FakeEngine):
    """An engine whose `model_digest` names the folders that it has read."""

    def __init__(self, *, fails: dict[type[EngineOrder], MotetError] | None = None, device: str = "none") -> None:
        info = msgspec.structs.replace(fake_info(), model_digest=OLD.name, device=device)
        super().__init__(lambda _, start: [], info=info)
        self.fails = fails or {}
        """The error of each order that fails."""
        self.prepared: Checkpoint | None = None
        self.prepared_digest = ""
        self.parts: dict[tuple[Path, ...], tuple[str, ...]] = {SOME.paths: ()}
        """Checkpoints with a part of the tensors, by their paths, with the reported names of the tensors."""
        self.held = False
        self.unreadable: Checkpoint | None = None
        self.read: list[Checkpoint] = []
        """The folders that were read; `OLD` for the weights of the start."""
        self.has_kv = self.has_weights = True
        self.emptied: list[bool] = []
        """An entry for each time that its prefix cache was emptied: True if groups had to recompute their KV."""
        self.dropped: list[str] = []
        """The digest of each order to drop weights."""

    async def send(self, order: EngineOrder) -> OrderAnswer:  # noqa: C901  one case for each order
        if (error := self.fails.get(type(order))) is not None:
            raise error
        match order:
            case PrepareWeights():
                return self.prepare(order)
            case ApplyWeights(version):
                return self.apply(version)
            case NameWeights(version):
                self.info = msgspec.structs.replace(self.info, weight_version=version)
                return EngineFacts(self.info)
            case SumWeights():
                return Checksums({"a": self.info.model_digest})
            case DropWeights(digest):
                self.prepared = None
                self.dropped.append(digest)
            case Hold(held):
                self.held = held
                assert held or (self.has_kv and self.has_weights)
            case ForgetPrefixes(recompute):
                self.emptied.append(recompute)
            case Sleep(weights):
                assert self.held
                self.has_kv, self.has_weights = False, self.has_weights and not weights
            case Wake():
                self.has_kv = True
        return Done()

    def prepare(self, order: PrepareWeights) -> PreparedWeights:
        checkpoint = Checkpoint(order.kind, tuple(map(Path, order.paths)))
        if checkpoint == self.unreadable:
            raise RequestError(f"{checkpoint.name} has no weights")
        self.prepared = OLD if order.kind is CheckpointKind.START else checkpoint
        self.read.append(self.prepared)
        digest, names = checkpoint.name, self.parts.get(checkpoint.paths)
        if names is not None:
            digest = "+".join((order.base or self.info.model_digest, *(names or ["some"])))
        self.prepared_digest = OLD.name if order.kind is CheckpointKind.START else digest
        return PreparedWeights(1, 0.5, complete=names is None, digest=digest, names=names or ())

    def apply(self, version: str) -> EngineFacts:
        assert self.prepared is not None
        self.info = msgspec.structs.replace(self.info, model_digest=self.prepared_digest, weight_version=version)
        self.prepared, self.has_weights = None, True
        return EngineFacts(self.info)

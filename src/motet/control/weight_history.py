"""The updates that an engine which is started again must read, and the version of the weights that serve."""

from collections.abc import Sequence
from dataclasses import dataclass

from motet.engine import ControlledEngine
from motet.engine_orders import ApplyWeights, NameWeights, PreparedWeights, PrepareWeights
from motet.errors import EngineError, StartupError
from motet.models.checkpoint import START, Checkpoint
from motet.types import FIRST_VERSION


@dataclass(frozen=True)
class AppliedCheckpoint:
    """A checkpoint that the engines of a server have applied."""

    checkpoint: Checkpoint
    version: str
    digest: str
    """The `model_digest` of the engines that have it."""
    complete: bool
    """True if it has all tensors of the model."""


class WeightHistory:
    """The last checkpoint with all tensors, and those with some tensors that came after it. Owned by
    `WeightUpdates`. Checkpoints in memory are kept until an engine does not need them any more."""

    def __init__(self) -> None:
        self.version: str = FIRST_VERSION
        self._named = False
        """True once this server has named a version. Until then workers on other servers can have other versions."""
        self._applied: list[AppliedCheckpoint] = []

    @property
    def last(self) -> AppliedCheckpoint | None:
        """The last update; None if the weights of the start serve."""
        return self._applied[-1] if self._applied else None

    def name(self, version: str) -> None:
        """Notes that the weights that serve have another version."""
        self.version, self._named = version, True

    def add(self, applied: AppliedCheckpoint) -> None:
        if applied.complete:
            self.close()
        self._applied.append(applied)
        self.name(applied.version)

    def close(self) -> None:
        """Forgets all checkpoints."""
        for old in self._applied:
            old.checkpoint.close()
        self._applied.clear()

    async def bring(self, engine: ControlledEngine) -> None:
        """Gives an engine the weights of the others. Raises StartupError if their folders hold others by now, and
        RequestError if they cannot be read."""
        if self.last is not None and engine.info.model_digest != self.last.digest:
            digests = [one.digest for one in self._applied]
            known = engine.info.model_digest
            first = digests.index(known) + 1 if known in digests else 0
            if not (first or self._applied[0].complete) and engine.info.weight_version != FIRST_VERSION:
                await self._bring_start(engine)
            await self._bring_applied(engine, self._applied[first:])
        await self._bring_name(engine)

    async def bring_again(self, engine: ControlledEngine) -> None:
        """Gives an engine without weights the weights of the server. Raises what `bring` raises."""
        if not (self._applied and self._applied[0].complete):
            await self._bring_start(engine)
        await self._bring_applied(engine, self._applied)
        await self._bring_name(engine)

    async def _bring_start(self, engine: ControlledEngine) -> None:
        await engine.send(PrepareWeights.of(START))
        await engine.send(ApplyWeights(FIRST_VERSION))

    async def _bring_applied(self, engine: ControlledEngine, applied: Sequence[AppliedCheckpoint]) -> None:
        for one in applied:
            prepared = await engine.send(PrepareWeights.of(one.checkpoint))
            if not isinstance(prepared, PreparedWeights):
                raise EngineError(f"the engine answered {type(prepared).__name__} to PrepareWeights")
            await engine.send(ApplyWeights(self.version, prepared.digest))
            if engine.info.model_digest != one.digest:
                raise StartupError(f"{one.checkpoint.name} does not hold the weights of version {one.version} any more")

    async def _bring_name(self, engine: ControlledEngine) -> None:
        if self._named and engine.info.weight_version != self.version:
            await engine.send(NameWeights(self.version))

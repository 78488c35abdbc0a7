"""New weights for all engines of a server: they have the same weights, and an update reaches all of them or none.

    1. every engine prepares the checkpoint, while its weights serve. One that cannot, or is not there, ends the update
    2. the engines here are held between two steps. All apply what they have prepared, and continue

An engine that dies in 2 or later gets the new weights when it is restarted: it reads them again, and does not serve if
their folder holds others by then (`WeightHistory`). A gateway updates the engines of its workers. It gives a worker
the orders that a server gives to its engines, so 1 and 2 are methods of their own too.
"""

import asyncio
import logging
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from motet.control.controlled_engines import ControlledEngines, NamedEngine
from motet.engine import ControlledEngine
from motet.engine_orders import (
    ApplyWeights,
    Checksums,
    DropWeights,
    NameWeights,
    OrderAnswer,
    PreparedWeights,
    PrepareWeights,
    SumWeights,
)
from motet.engines.server_engine import ServerEngine
from motet.errors import EngineDiedError, EngineError, RequestError, StartupError
from motet.metrics.routing import UPDATE_S
from motet.models.checkpoint import START, Checkpoint
from motet.routing.router import Router
from motet.types import FIRST_VERSION

logger = logging.getLogger(__name__)

PREPARED_S = 600.0
"""Time in seconds for which prepared weights are kept. The gateway can be waiting for other servers, or have died."""


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
    """The checkpoints that a restarted engine must read: the last with all tensors, and later ones with some tensors.
    Owned by `WeightUpdates`. Checkpoints in memory are kept until an engine does not need them any more."""

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


@dataclass(frozen=True)
class WeightUpdate:
    """New weights that all engines of a server have."""

    version: str
    slowest: str
    """Id of the worker that prepared them last."""
    seconds: float
    """Time in seconds that this worker took."""


@dataclass(frozen=True)
class PreparedUpdate:
    """An update that all engines have prepared."""

    checkpoint: Checkpoint
    engines: Sequence[NamedEngine]
    prepared: PreparedWeights
    slowest: str
    seconds: float
    """Time in seconds that the slowest worker took."""
    started_s: float


class WeightUpdates:
    """The weights of a server's engines. Owned by `EngineControl`."""

    def __init__(self, router: Router, engines: ControlledEngines) -> None:
        self.history = WeightHistory()
        self.lost = False
        """True while the system has the memory of the weights: they must be read again, or come with an update."""
        self._engines = engines
        self._fleet = router.fleet
        self._figures = router.counts
        self._figures.weight_update_seconds = self._seconds = [0] * (len(UPDATE_S) + 1)
        self._count = 0
        """Number of updates so far."""
        self._ready: PreparedUpdate | None = None
        """The update that a gateway has let this server prepare. The lock is held for it."""
        self._expiry: asyncio.Task[None] | None = None

    @property
    def version(self) -> str:
        return self.history.version

    async def update(self, checkpoint: Checkpoint, version: str | None) -> WeightUpdate:
        """Gives all engines new weights, and owns the checkpoint from now on. Running groups continue with the new
        weights. `version`: by default the number of updates. Raises RequestError if the weights cannot be used, and
        EngineError if an engine is not there; then all keep their weights."""
        updating = asyncio.ensure_future(self._update(checkpoint, version))
        return await asyncio.shield(updating)  # an update is not left half done if its caller leaves

    async def _update(self, checkpoint: Checkpoint, version: str | None) -> WeightUpdate:
        async with self._engines.lock:
            return await self._apply(await self._prepare(checkpoint), version)

    async def rename(self, version: str) -> None:
        """Gives the weights that serve another version. Raises EngineError unless all engines are there."""
        async with self._engines.lock:
            await asyncio.gather(*(engine.send(NameWeights(version)) for _, engine in self._engines.all()))
            self.history.name(version)

    async def checksums(self) -> dict[str, str]:
        """Returns the SHA-256 of what the engines have in the place of each tensor of a checkpoint. Raises EngineError
        unless all engines are there, and have the same, and RequestError while the weights sleep."""
        async with self._engines.lock:
            if self.lost:
                raise asleep()
            engines = self._engines.all()
            answers = await asyncio.gather(*(engine.send(SumWeights()) for _, engine in engines))
            sums = [answer.sums for answer in answers if isinstance(answer, Checksums)]
            for (id, _), one in zip(engines, sums, strict=True):
                if one != sums[0]:
                    raise EngineError(f"{id} has other weights than {engines[0][0]}")
            return sums[0]

    async def prepare(self, checkpoint: Checkpoint) -> PreparedWeights:
        """Does the first step of an update, for a gateway. Raises what `update` raises."""
        try:
            await self.drop()
            await self._engines.lock.acquire()
        except BaseException:
            checkpoint.close()
            raise
        try:
            self._ready = await self._prepare(checkpoint)
        except BaseException:
            self._engines.lock.release()
            raise
        self._expiry = asyncio.create_task(self._expire())
        return self._ready.prepared

    async def apply(self, version: str, *, digest: str = "") -> None:
        """Does the second step. Raises EngineError if nothing is prepared, or weights with another digest."""
        if (ready := self._take_ready(digest)) is None:
            raise EngineError(f"these new weights are not prepared; they are kept for {PREPARED_S:g} s")
        try:
            await self._apply(ready, version)
        finally:
            self._engines.lock.release()

    async def drop(self, digest: str = "") -> None:
        """Forgets the prepared weights, unless they have another digest."""
        if (ready := self._take_ready(digest)) is not None:
            try:
                await drop(ready.checkpoint, [(engine, ready.prepared.digest) for _, engine in ready.engines])
            finally:
                self._engines.lock.release()

    async def close(self) -> None:
        """Forgets all checkpoints."""
        await self.drop()
        self.history.close()

    def _take_ready(self, digest: str) -> PreparedUpdate | None:
        if self._ready is not None and digest not in ("", self._ready.prepared.digest):
            return None
        ready, self._ready = self._ready, None
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        return ready

    async def _expire(self) -> None:
        await asyncio.sleep(PREPARED_S)
        self._expiry = None  # else dropping would cancel this task
        await self.drop()

    async def _prepare(self, checkpoint: Checkpoint) -> PreparedUpdate:
        """Lets all engines prepare the checkpoint. If one cannot, all drop it."""
        engines: Sequence[NamedEngine] = ()
        prepared: dict[str, PreparedWeights] = {}
        try:
            engines = self._engines.all()
            started_s = time.monotonic()
            ended_s: dict[str, float] = {}

            async def prepare(id: str, engine: ControlledEngine) -> OrderAnswer:
                answer = await engine.send(PrepareWeights.of(checkpoint))
                ended_s[id] = time.monotonic()
                return answer

            answers = await asyncio.gather(*(prepare(*one) for one in engines), return_exceptions=True)
            for (id, _), answer in zip(engines, answers, strict=True):
                if isinstance(answer, PreparedWeights):
                    prepared[id] = answer
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer  # not earlier: the other engines would read files that are closed
            (first, facts), *others = prepared.items()
            if other := next((id for id, one in others if one.digest != facts.digest), None):
                raise EngineError(f"{other} has read other weights in {checkpoint.name} than {first}")
        except BaseException:
            # An engine whose answer got lost may have prepared any weights.
            digests = {id: one.digest for id, one in prepared.items()}
            await self._fail(checkpoint, [(engine, digests.get(id, "")) for id, engine in engines])
            raise
        slowest = max(ended_s, key=ended_s.__getitem__)
        return PreparedUpdate(checkpoint, engines, facts, slowest, ended_s[slowest] - started_s, started_s)

    async def _apply(self, update: PreparedUpdate, version: str | None) -> WeightUpdate:
        """Raises EngineError if no engine has applied the weights."""
        before = {engine.info.model_digest for _, engine in update.engines}
        if self.history.last is not None:
            before.add(self.history.last.digest)  # engines that could not wake may have older weights
        name = str(self._count + 1) if version is None else version
        prepared = update.prepared
        try:
            digest = await self._apply_each(update.engines, ApplyWeights(name, prepared.digest))
        except BaseException:
            await self._fail(update.checkpoint, [(engine, prepared.digest) for _, engine in update.engines])
            raise
        if prepared.complete:
            self.lost = False
        self.history.add(AppliedCheckpoint(update.checkpoint, name, digest, prepared.complete))
        self._count += 1
        for old in before:
            self._fleet.record_replaced_weights(old, digest)
        self._disown_old(update.engines, digest)
        self._count_time(time.monotonic() - update.started_s)
        logger.info("new weights, version %s: %s read them last, in %.2f s", name, update.slowest, update.seconds)
        return WeightUpdate(name, update.slowest, update.seconds)

    async def _apply_each(self, engines: Sequence[NamedEngine], order: ApplyWeights) -> str:
        """Applies what all have prepared, and returns the `model_digest` from now on. An engine that dies gets the
        weights when it is restarted. Raises EngineError if all have died."""
        if not self._engines.paused:
            await self._engines.hold_steps(True, local_only=True)
        answers = await asyncio.gather(*(engine.send(order) for _, engine in engines), return_exceptions=True)
        if not self._engines.paused:
            await self._engines.hold_steps(False, local_only=True)
        for (_, engine), answer in zip(engines, answers, strict=True):
            if not isinstance(answer, BaseException):
                return engine.info.model_digest
        raise next(answer for answer in answers if isinstance(answer, BaseException))

    def _disown_old(self, engines: Sequence[NamedEngine], digest: str) -> None:
        """Lets each worker on another server that does not have the weights join again, with them."""
        for id, engine in engines:
            if isinstance(engine, ServerEngine) and engine.info.model_digest != digest:
                logger.warning("%s does not have the new weights: it joins again", id)
                engine.disown(EngineDiedError(f"{id} does not have the new weights"))

    def _count_time(self, seconds: float) -> None:
        self._figures.weight_updates["applied"] += 1
        self._figures.weight_update_seconds_sum += seconds
        self._seconds[bisect_left(UPDATE_S, seconds)] += 1

    async def _fail(self, checkpoint: Checkpoint, engines: Sequence[tuple[ControlledEngine, str]]) -> None:
        self._figures.weight_updates["failed"] += 1
        await drop(checkpoint, engines)


async def drop(checkpoint: Checkpoint, engines: Sequence[tuple[ControlledEngine, str]]) -> None:
    """Forgets a checkpoint, and what these engines have prepared of it, by their digests. Never raises."""
    try:
        orders = (engine.send(DropWeights(digest)) for engine, digest in engines)
        await asyncio.gather(*orders, return_exceptions=True)
    finally:
        checkpoint.close()


def asleep() -> RequestError:
    return RequestError("The engines of this server are asleep: POST /wake_up lets them continue.", code="asleep")

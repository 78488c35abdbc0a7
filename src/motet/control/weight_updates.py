"""New weights for all engines of a server: they have the same weights, and an update reaches all of them or none.

    1. every engine prepares the checkpoint, while its old weights serve. If an engine is not available or cannot
       prepare it, the update fails
    2. the local engines are stopped between two steps. All engines apply the prepared weights, and continue

An engine that dies in step 2 or later gets the new weights when it is restarted: it reads the checkpoint again, and
does not serve if the folder has changed since (`WeightHistory`). A gateway updates the engines of its workers with the
same orders that a server gives to its own engines, so steps 1 and 2 are also methods of their own."""

import asyncio
import logging
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from motet.control.controlled_engines import ControlledEngines, NamedEngine
from motet.engine import ControlledEngine
from motet.engine_info import FIRST_VERSION
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
from motet.engines.wire import INVALID_WEIGHTS
from motet.errors import EngineDiedError, EngineError, RequestError, StartupError
from motet.metrics.routing import UPDATE_S
from motet.models.checkpoint import START, Checkpoint, max_checkpoint_bytes
from motet.routing.router import Router

logger = logging.getLogger(__name__)

PREPARED_S = 600.0
"""Time in seconds for which prepared weights are kept for a gateway: it can wait for other servers, or have died."""


@dataclass(frozen=True, eq=False)
class AppliedCheckpoint:
    """A checkpoint that the engines of a server have applied."""

    checkpoint: Checkpoint
    version: str
    digest: str
    """The `model_digest` of engines that have applied it."""
    prepared: PreparedWeights
    base: str
    """If it has some of the model's tensors: digest of the weights before it; empty for the weights of the start."""

    @property
    def complete(self) -> bool:
        """True if it has all tensors of the model."""
        return self.prepared.complete


class WeightHistory:
    """The checkpoints that a restarted engine must read: the last one with all tensors, and later ones with some of the
    tensors. A checkpoint whose tensors are all in later checkpoints is left out. Owned by `WeightUpdates`. Checkpoints
    in memory are kept as long as a restarted engine needs them."""

    def __init__(self) -> None:
        self.version: str = FIRST_VERSION
        self._named = False
        """True once this server has named a version. Until then, workers on other servers can have other versions."""
        self._applied: list[AppliedCheckpoint] = []

    @property
    def last(self) -> AppliedCheckpoint | None:
        """The last update, or None while the server has the weights with which it started."""
        return self._applied[-1] if self._applied else None

    def name(self, version: str) -> None:
        """Records the version of the present weights."""
        self.version, self._named = version, True

    def add(self, applied: AppliedCheckpoint) -> None:
        needed = [] if applied.complete else self._needed_before(applied.prepared)
        for earlier in self._applied:
            if earlier not in needed:
                earlier.checkpoint.close()
        self._applied = [*needed, applied]
        self.name(applied.version)

    def check_memory(self, checkpoint: Checkpoint, prepared: PreparedWeights, *, num_weights: int) -> None:
        """Raises RequestError if the updates since the last complete one, with this checkpoint, would keep more memory
        than a complete checkpoint. `num_weights`: number of the model's weights; 0 if it is not known, then nothing is
        checked."""
        maximum = max_checkpoint_bytes(num_weights)
        if prepared.complete or not num_weights:
            return
        needed = [earlier.checkpoint for earlier in self._needed_before(prepared) if not earlier.complete]
        num_bytes = sum(file.num_bytes for one in (*needed, checkpoint) for file in one.memory)
        if num_bytes > maximum:
            why = f"the updates since the last complete one have {num_bytes} bytes, and the maximum is {maximum}"
            raise RequestError(f"{why}: send all tensors of the model", code=INVALID_WEIGHTS)

    def _needed_before(self, prepared: PreparedWeights) -> list[AppliedCheckpoint]:
        """Returns the checkpoints that a restarted engine must read before these weights. A checkpoint whose tensors
        are all replaced later is left out."""
        replaced, needed = set(prepared.names), list[AppliedCheckpoint]()
        for earlier in reversed(self._applied):
            names = earlier.prepared.names
            if earlier.complete or not names or not replaced.issuperset(names):
                needed.insert(0, earlier)
                replaced.update(names)
        return needed

    def close(self) -> None:
        for applied in self._applied:
            applied.checkpoint.close()
        self._applied.clear()

    async def sync(self, engine: ControlledEngine) -> None:
        """Gives an engine the weights of the other engines. Raises StartupError if the folders of the weights have
        changed, and RequestError if the weights cannot be read."""
        if self.last is not None and engine.info.model_digest != self.last.digest:
            digests = [applied.digest for applied in self._applied]
            known = engine.info.model_digest
            first = digests.index(known) + 1 if known in digests else 0
            if not (first or self._applied[0].complete) and engine.info.weight_version != FIRST_VERSION:
                await self._send_start(engine)
            await self._send_applied(engine, self._applied[first:])
        await self._send_version(engine)

    async def restore(self, engine: ControlledEngine) -> None:
        """Gives an engine without weights the weights of the server. Raises the errors of `sync`."""
        if not (self._applied and self._applied[0].complete):
            await self._send_start(engine)
        await self._send_applied(engine, self._applied)
        await self._send_version(engine)

    async def _send_start(self, engine: ControlledEngine) -> None:
        await engine.send(PrepareWeights.of(START))
        await engine.send(ApplyWeights(FIRST_VERSION))

    async def _send_applied(self, engine: ControlledEngine, checkpoints: Sequence[AppliedCheckpoint]) -> None:
        for applied in checkpoints:
            prepared = await engine.send(PrepareWeights.of(applied.checkpoint, base=applied.base))
            if not isinstance(prepared, PreparedWeights):
                raise EngineError(f"the engine answered {type(prepared).__name__} to PrepareWeights")
            await engine.send(ApplyWeights(self.version, prepared.digest))
            if engine.info.model_digest != applied.digest:
                raise StartupError(
                    f"{applied.checkpoint.name} does not contain the weights of version {applied.version} any more"
                )

    async def _send_version(self, engine: ControlledEngine) -> None:
        if self._named and engine.info.weight_version != self.version:
            await engine.send(NameWeights(self.version))


@dataclass(frozen=True)
class WeightUpdate:
    """An update that all engines of a server have applied."""

    version: str
    slowest: str
    """Id of the worker that prepared the weights last."""
    seconds: float
    """Time in seconds that this worker took."""


@dataclass(frozen=True)
class PreparedUpdate:
    """An update that all engines have prepared."""

    checkpoint: Checkpoint
    engines: Sequence[NamedEngine]
    prepared: PreparedWeights
    base: str
    """See `AppliedCheckpoint`."""
    slowest: str
    seconds: float
    """Time in seconds that the slowest worker took."""
    started_s: float


class WeightUpdates:
    """The weights of a server's engines. Owned by `EngineControl`."""

    def __init__(self, router: Router, engines: ControlledEngines) -> None:
        self.history = WeightHistory()
        self.lost = False
        """True while the memory of the weights is released: they must be read again, or replaced by an update."""
        self._engines = engines
        self._fleet = router.fleet
        self._figures = router.counts
        self._figures.weight_update_seconds = self._seconds = [0] * (len(UPDATE_S) + 1)
        self._count = 0
        """Number of updates so far."""
        self._ready: PreparedUpdate | None = None
        """The update that this server has prepared for a gateway. The lock is held until it is applied or dropped."""
        self._expiry: asyncio.Task[None] | None = None

    @property
    def version(self) -> str:
        return self.history.version

    async def update(self, checkpoint: Checkpoint, version: str | None) -> WeightUpdate:
        """Gives all engines new weights, with which running groups continue, and owns the checkpoint from now on.
        `version`: by default the number of updates. Raises RequestError if the weights cannot be used, and EngineError
        if an engine is not available; then all engines keep their old weights."""
        return await asyncio.shield(self._update(checkpoint, version))  # completed even if its caller disconnects

    async def _update(self, checkpoint: Checkpoint, version: str | None) -> WeightUpdate:
        async with self._engines.lock:
            return await self._apply(await self._prepare(checkpoint), version)

    async def rename(self, version: str) -> None:
        """Gives the present weights another version. Raises EngineError unless all engines are available."""
        async with self._engines.lock:
            await asyncio.gather(*(engine.send(NameWeights(version)) for _, engine in self._engines.all()))
            self.history.name(version)

    async def checksums(self) -> dict[str, str]:
        """Returns the SHA-256 of the engines' weights by tensor name in a checkpoint. Raises EngineError unless all
        engines are available and have equal weights, and RequestError while the weights are released. Does not wait for
        an update that reads files."""
        async with self._engines.weights_lock:
            if self.lost:
                raise asleep()
            engines = self._engines.all()
            answers = await asyncio.gather(*(engine.send(SumWeights()) for _, engine in engines))
            sums = [answer.sums for answer in answers if isinstance(answer, Checksums)]
            for (id, _), engine_sums in zip(engines, sums, strict=True):
                if engine_sums != sums[0]:
                    raise EngineError(f"{id} has other weights than {engines[0][0]}")
            return sums[0]

    async def prepare(self, checkpoint: Checkpoint, *, base: str = "") -> PreparedWeights:
        """Does step 1 of an update, for a gateway. `base`: see `PrepareWeights`. Raises the errors of `update`."""
        try:
            await self.drop()
            await self._engines.lock.acquire()
        except BaseException:
            checkpoint.close()
            raise
        try:
            self._ready = await self._prepare(checkpoint, base)
        except BaseException:
            self._engines.lock.release()
            raise
        self._expiry = asyncio.create_task(self._expire())
        return self._ready.prepared

    async def apply(self, version: str, *, digest: str = "") -> None:
        """Does step 2 of an update. Raises EngineError if no weights with this digest are prepared."""
        if (ready := self._take_ready(digest)) is None:
            raise EngineError(f"these weights are not prepared; prepared weights are kept for {PREPARED_S:g} s")
        try:
            await self._apply(ready, version)
        finally:
            self._engines.lock.release()

    async def drop(self, digest: str = "") -> None:
        """Drops the prepared weights, unless they have another digest."""
        if (ready := self._take_ready(digest)) is not None:
            try:
                await drop(ready.checkpoint, [(engine, ready.prepared.digest) for _, engine in ready.engines])
            finally:
                self._engines.lock.release()

    async def close(self) -> None:
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
        self._expiry = None  # otherwise `drop` would cancel this task
        await self.drop()

    async def _prepare(self, checkpoint: Checkpoint, base: str = "") -> PreparedUpdate:
        """Makes all engines prepare the checkpoint. If an engine cannot, all engines drop it."""
        engines: Sequence[NamedEngine] = ()
        prepared: dict[str, PreparedWeights] = {}
        try:
            engines = self._engines.all()
            started_s = time.monotonic()
            ended_s: dict[str, float] = {}

            async def prepare(id: str, engine: ControlledEngine) -> OrderAnswer:
                answer = await engine.send(PrepareWeights.of(checkpoint, base=base))
                ended_s[id] = time.monotonic()
                return answer

            answers = await asyncio.gather(*(prepare(*named) for named in engines), return_exceptions=True)
            for (id, _), answer in zip(engines, answers, strict=True):
                if isinstance(answer, PreparedWeights):
                    prepared[id] = answer
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer  # after all have answered, since the other engines still read the files
            (first, facts), *others = prepared.items()
            if other := next((id for id, weights in others if weights.digest != facts.digest), None):
                raise EngineError(f"{other} has read other weights in {checkpoint.name} than {first}")
            num_weights = max(engine.info.num_weights for _, engine in engines)
            self.history.check_memory(checkpoint, facts, num_weights=num_weights)
        except BaseException:
            # An engine whose answer was lost can have prepared any weights.
            digests = {id: weights.digest for id, weights in prepared.items()}
            await self._fail(checkpoint, [(engine, digests.get(id, "")) for id, engine in engines])
            raise
        slowest = max(ended_s, key=ended_s.__getitem__)
        if not base and self.history.last is not None:
            base = self.history.last.prepared.digest
        return PreparedUpdate(checkpoint, engines, facts, base, slowest, ended_s[slowest] - started_s, started_s)

    async def _apply(self, update: PreparedUpdate, version: str | None) -> WeightUpdate:
        """Raises EngineError if no engine has applied the weights."""
        before = {engine.info.model_digest for _, engine in update.engines}
        if self.history.last is not None:
            before.add(self.history.last.digest)  # engines that could not wake can have older weights
        name = str(self._count + 1) if version is None else version
        prepared = update.prepared
        try:
            digest = await self._apply_each(update.engines, ApplyWeights(name, prepared.digest))
        except BaseException:
            await self._fail(update.checkpoint, [(engine, prepared.digest) for _, engine in update.engines])
            raise
        if prepared.complete:
            self.lost = False
        update.checkpoint.settle()
        self.history.add(AppliedCheckpoint(update.checkpoint, name, digest, prepared, update.base))
        self._count += 1
        for old in before:
            self._fleet.successors.replace_weights(old, digest, infos=[engine.info for _, engine in update.engines])
        self._fleet.refresh_facts()
        self._force_rejoin_of_old(update.engines, digest)
        took_s = time.monotonic() - update.started_s
        self._figures.weight_updates["applied"] += 1
        self._figures.weight_update_seconds_sum += took_s
        self._seconds[bisect_left(UPDATE_S, took_s)] += 1
        logger.info("new weights, version %s: %s read them last, in %.2f s", name, update.slowest, update.seconds)
        return WeightUpdate(name, update.slowest, update.seconds)

    async def _apply_each(self, engines: Sequence[NamedEngine], order: ApplyWeights) -> str:
        """Applies the prepared weights on all engines, and returns their new `model_digest`. An engine that dies gets
        the weights when it is restarted. Raises EngineError if all engines have died."""
        async with self._engines.weights_lock, self._engines.step_lock:
            if not self._engines.paused:
                await self._engines.hold_steps(True, local_only=True)
            answers = await asyncio.gather(*(engine.send(order) for _, engine in engines), return_exceptions=True)
            if not self._engines.paused:
                await self._engines.hold_steps(False, local_only=True)
        for (_, engine), answer in zip(engines, answers, strict=True):
            if not isinstance(answer, BaseException):
                return engine.info.model_digest
        raise next(answer for answer in answers if isinstance(answer, BaseException))

    def _force_rejoin_of_old(self, engines: Sequence[NamedEngine], digest: str) -> None:
        """Makes each worker on another server without the new weights join again, which gives it the weights."""
        for id, engine in engines:
            if isinstance(engine, ServerEngine) and engine.info.model_digest != digest:
                logger.warning("%s does not have the new weights: it joins again", id)
                engine.force_rejoin(EngineDiedError(f"{id} does not have the new weights"))

    async def _fail(self, checkpoint: Checkpoint, engines: Sequence[tuple[ControlledEngine, str]]) -> None:
        self._figures.weight_updates["failed"] += 1
        await drop(checkpoint, engines)


async def drop(checkpoint: Checkpoint, engines: Sequence[tuple[ControlledEngine, str]]) -> None:
    """Closes a checkpoint, and makes each engine drop its prepared weights that have this digest. Never raises."""
    try:
        orders = (engine.send(DropWeights(digest)) for engine, digest in engines)
        await asyncio.gather(*orders, return_exceptions=True)
    finally:
        checkpoint.close()


def asleep() -> RequestError:
    return RequestError("The engines of this server are asleep: POST /wake_up lets them continue.", code="asleep")

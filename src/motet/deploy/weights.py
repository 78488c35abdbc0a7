"""The weights of all engines of a server: they are the same, and new ones come to all together or to none.

    1. every engine reads the new weights, while the old ones serve. One that cannot, or is not there, ends the update
    2. the engines here are held between two steps; all get the new weights, and go on

An engine that dies in 2 gets the new weights when it is started again, as does any that dies later: it reads them
again, and does not serve if their folder holds something else by then. A gateway's engines are those of its workers: to
their own servers it is what a server is to its engines, so a server has steps 1 and 2 as calls of their own too.
"""

import asyncio
import logging
import time
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from motet.engine import Engine, PreparedWeights, Renewable, Sleeping, SleepTag, WeightUpdate, Worker, WorkerState
from motet.engines.far import FarEngine
from motet.errors import (
    EngineClosedError,
    EngineDiedError,
    EngineError,
    MotetError,
    NoWorkerError,
    RequestError,
    StartupError,
)
from motet.metrics.routing import UPDATE_S
from motet.models.checkpoint import START, Checkpoint
from motet.routing.router import Router
from motet.types import FIRST_VERSION, PauseMode

logger = logging.getLogger(__name__)

PREPARED_S = 600.0
"""Seconds for which a server keeps weights that a gateway has let it prepare: the gateway may wait as long for other
servers, or have died."""


@dataclass(frozen=True)
class Update:
    """New weights that the engines have got."""

    checkpoint: Checkpoint
    version: str
    digest: str
    """The `model_digest` of the engines that have them."""
    whole: bool
    """True if they are all tensors of the model."""


@dataclass
class Asleep:
    """The memory that the engines of a cell have given back (`deploy.sleep`)."""

    tags: set[SleepTag] = field(default_factory=set)
    """What has not been woken yet; empty while they are awake."""
    weights_lost: bool = False
    """True while their weights must be read again."""

    def check_awake(self) -> None:
        """Raises RequestError while anything sleeps."""
        if self.tags:
            raise RequestError("The engines of this server are asleep: POST /wake_up lets them go on.", code="asleep")


@dataclass(frozen=True)
class Ready:
    """New weights that all engines have prepared."""

    checkpoint: Checkpoint
    engines: Sequence[tuple[Worker, Renewable]]
    facts: PreparedWeights
    slowest: str
    """The id of the worker that was the last to have read them."""
    seconds: float
    """How long that one took."""
    begun_s: float


class CellWeights:
    """Owned by the cell or the gateway. `lock`: no engine joins the fleet during an update."""

    def __init__(self, router: Router, *, everywhere: bool = False) -> None:
        """`everywhere`: engines on other servers get new weights too."""
        self.lock = asyncio.Lock()
        self.paused = False
        self.version: str = FIRST_VERSION
        self._named = False
        """True once the version is known here: servers elsewhere may have others before."""
        self._has_paused = False
        self.asleep = Asleep()
        self._router = router
        self._fleet = router.fleet
        self._everywhere = everywhere
        self._count = 0
        router.counts.weight_update_seconds = self._update_seconds = [0] * (len(UPDATE_S) + 1)
        self._updates: list[Update] = []
        """What an engine must read that is started anew, in order."""
        self._ready: Ready | None = None
        """What a gateway has let this server prepare; the lock is held for it."""
        self._expiry: asyncio.TimerHandle | None = None

    async def bring(self, engine: Engine) -> None:
        """Gives a new engine the weights of the others, and lets it sleep as they do. Raises StartupError if their
        folders hold other ones by now, and RequestError if they cannot be read."""
        sleeper = engine if isinstance(engine, Sleeping) else None
        if not isinstance(engine, Renewable):
            if self._updates or self.asleep.tags:
                raise StartupError("it cannot get the weights of the others")
            return
        if self._updates and engine.info.model_digest != self._updates[-1].digest:
            await self._bring_updates(engine)
        if self._named and engine.info.weight_version != self.version:
            await engine.name_weights(self.version)
        if self.paused or (self._has_paused and isinstance(engine, FarEngine)):
            await engine.hold(self.paused)  # a server elsewhere may have missed the end of a pause
        if self.asleep.tags and sleeper is not None:
            await sleeper.sleep(weights=self.asleep.weights_lost)
            if SleepTag.KV_CACHE not in self.asleep.tags:
                await sleeper.wake()

    async def bring_again(self, engine: Renewable) -> None:
        """Gives an engine that has lost its weights those of the cell. Raises what `bring` raises."""
        if not (self._updates and self._updates[0].whole):
            await self._bring_first(engine)
        await self._bring(self._updates, to=engine)
        if self._named and engine.info.weight_version != self.version:
            await engine.name_weights(self.version)

    async def _bring_first(self, engine: Renewable) -> None:
        await engine.prepare_weights(START)
        await engine.apply_weights(FIRST_VERSION)

    async def _bring_updates(self, engine: Renewable) -> None:
        """Gives an engine what it lacks of the updates, from that on whose weights it has."""
        digests = [update.digest for update in self._updates]
        has = engine.info.model_digest
        first = digests.index(has) + 1 if has in digests else 0
        if self._updates and not (first or self._updates[0].whole) and engine.info.weight_version != FIRST_VERSION:
            await self._bring_first(engine)
        await self._bring(self._updates[first:], to=engine)

    async def _bring(self, updates: Sequence[Update], *, to: Renewable) -> None:
        for update in updates:
            await to.prepare_weights(update.checkpoint)
            await to.apply_weights(self.version)
            if to.info.model_digest != update.digest:
                raise StartupError(
                    f"{update.checkpoint.name} does not hold the weights of version {update.version} any more"
                )

    async def pause(self, mode: PauseMode) -> None:
        """Returns once nothing is computed; new groups wait in the queue. May be called twice."""
        self._router.waiting.shut(True)
        if mode is PauseMode.WAIT:
            await self._rest()
        elif mode is PauseMode.ABORT:
            await self._router.cut()
        async with self.lock:
            await self.halt()

    async def halt(self) -> None:
        """Holds all engines and shuts the queue. The caller has `lock`."""
        self._router.waiting.shut(True)
        self.paused = self._has_paused = True
        await self._hold(True)

    async def _rest(self) -> None:
        """Waits for the groups under way. If the caller leaves meanwhile, there is no pause."""
        try:
            await self._router.rest()
        except asyncio.CancelledError:
            self._router.waiting.shut(self.paused)
            raise

    async def forget_prefixes(self, *, anew: bool) -> None:
        """Empties the prefix caches of all engines. Groups under way keep their KV, or compute it `anew`. Raises
        EngineError if a server elsewhere cannot be asked; an engine here that dies comes back without any."""
        async with self.lock:
            engines = self._there()
            asked = (engine.forget_prefixes(anew=anew) for engine in engines)
            for engine, answer in zip(engines, await asyncio.gather(*asked, return_exceptions=True), strict=True):
                died = isinstance(answer, EngineDiedError | EngineClosedError) and not isinstance(engine, FarEngine)
                if isinstance(answer, BaseException) and not died:
                    raise answer

    async def rename(self, version: str) -> None:
        """Calls the weights by another version. Raises EngineError unless all engines are there."""
        async with self.lock:
            await asyncio.gather(*(engine.name_weights(version) for _, engine in self._all()))
            self.version, self._named = version, True

    async def checksums(self) -> dict[str, str]:
        """Returns the SHA-256 of what the engines have in place of each tensor of a checkpoint. Raises EngineError
        unless all are there, and have the same."""
        async with self.lock:
            if self.asleep.weights_lost:
                self.asleep.check_awake()
            engines = self._all()
            sums = await asyncio.gather(*(engine.checksums() for _, engine in engines))
            for (worker, _), one in zip(engines, sums, strict=True):
                if one != sums[0]:
                    raise EngineError(f"{worker.id} has other weights than {engines[0][0].id}")
            return sums[0]

    async def abort(self, traces: Collection[str] | None) -> int:
        """Ends groups where they are, all or those of these requests; returns their number."""
        return await self._router.cut(traces)

    async def resume(self) -> None:
        """Lets all groups go on. May be called twice. Raises RequestError while the engines sleep."""
        async with self.lock:
            self.asleep.check_awake()
            await self.go_on()

    async def go_on(self) -> None:
        """Undoes `halt`. The caller has `lock`, and the engines are awake."""
        self.paused = False
        await self._hold(False)
        self._router.waiting.shut(False)

    async def update(self, checkpoint: Checkpoint, version: str | None) -> WeightUpdate:
        """Gives all engines new weights, and owns the checkpoint from now on. `version`: by default the number of
        updates. Groups under way go on with them. Raises RequestError if the weights cannot be used, and EngineError if
        an engine is not there; then all have the old ones."""
        updating = asyncio.ensure_future(self._update(checkpoint, version))
        return await asyncio.shield(updating)  # it is not left half done if nobody waits for it any more

    async def _update(self, checkpoint: Checkpoint, version: str | None) -> WeightUpdate:
        async with self.lock:
            return await self._apply(await self._read(checkpoint), version)

    async def prepare_weights(self, checkpoint: Checkpoint) -> PreparedWeights:
        """Does the first step of an update, for a gateway. Raises what `update` raises."""
        self.drop_weights()
        await self.lock.acquire()
        try:
            self._ready = await self._read(checkpoint)
        except BaseException:
            self.lock.release()
            raise
        self._expiry = asyncio.get_running_loop().call_later(PREPARED_S, self.drop_weights)
        return self._ready.facts

    async def apply_weights(self, version: str, *, digest: str = "") -> None:
        """Does the second step. Raises EngineError if nothing is prepared, or other weights than those of `digest`."""
        if (ready := self._take_ready(digest)) is None:
            raise EngineError(f"these new weights are not prepared; they are kept for {PREPARED_S:g} s")
        try:
            await self._apply(ready, version)
        finally:
            self.lock.release()

    def drop_weights(self, digest: str = "") -> None:
        """Forgets what is prepared, unless it is something else than the weights of `digest`."""
        if (ready := self._take_ready(digest)) is not None:
            self._forget(ready.checkpoint, ready.engines)
            self.lock.release()

    async def hold(self, held: bool) -> None:
        """Does for a gateway what a pause does to the engines."""
        self.drop_weights()  # a gateway that pauses is in no update any more
        async with self.lock:
            if not held:
                self.asleep.check_awake()
            self.paused = held
            await self._hold(held)

    def close(self) -> None:
        """Forgets weights in memory."""
        self.drop_weights()
        for update in self._updates:
            update.checkpoint.close()

    def _take_ready(self, digest: str) -> Ready | None:
        if self._ready is not None and digest not in ("", self._ready.facts.digest):
            return None
        ready, self._ready = self._ready, None
        if self._expiry is not None:
            self._expiry.cancel()
        return ready

    async def _read(self, checkpoint: Checkpoint) -> Ready:
        """Lets all engines read the checkpoint, and closes it if one cannot."""
        engines: Sequence[tuple[Worker, Renewable]] = ()
        try:
            engines = self._all()
            begun_s = time.monotonic()
            ended_s: dict[str, float] = {}

            async def prepare(worker: Worker, engine: Renewable) -> PreparedWeights:
                facts = await engine.prepare_weights(checkpoint)
                ended_s[worker.id] = time.monotonic()
                return facts

            answers = await asyncio.gather(*(prepare(*one) for one in engines), return_exceptions=True)
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer  # when all have ended: they would read files that are closed
            facts = [answer for answer in answers if isinstance(answer, PreparedWeights)]
            for (worker, _), other in zip(engines, facts, strict=True):
                if other.digest != facts[0].digest:
                    first = engines[0][0].id
                    raise EngineError(f"{worker.id} has read other weights in {checkpoint.name} than {first}")
        except BaseException:
            self._failed(checkpoint, engines)
            raise
        slowest = max(ended_s, key=ended_s.__getitem__)
        return Ready(checkpoint, engines, facts[0], slowest, ended_s[slowest] - begun_s, begun_s)

    def _failed(self, checkpoint: Checkpoint, engines: Sequence[tuple[Worker, Renewable]]) -> None:
        self._router.counts.weight_updates["failed"] += 1
        self._forget(checkpoint, engines)

    def _forget(self, checkpoint: Checkpoint, engines: Sequence[tuple[Worker, Renewable]]) -> None:
        for _, engine in engines:
            engine.drop_weights()
        checkpoint.close()

    async def _apply(self, ready: Ready, version: str | None) -> WeightUpdate:
        """Raises EngineError if no engine has got the weights."""
        before = {worker.engine.info.model_digest for worker, _ in ready.engines}
        before.update(one.digest for one in self._updates[-1:])  # engines that could not wake may have older ones
        name = str(self._count + 1) if version is None else version
        try:
            renewed = await self._apply_each(ready.engines, name)
        except BaseException:
            self._failed(ready.checkpoint, ready.engines)
            raise
        update = Update(ready.checkpoint, name, renewed.engine.info.model_digest, ready.facts.whole)
        if update.whole:
            for old in self._updates:
                old.checkpoint.close()
            self._updates.clear()
            self.asleep.weights_lost = False
        self._updates.append(update)
        self.version, self._named = name, True
        self._count += 1
        for digest in before:
            self._fleet.renewed(digest, update.digest)
        self._give_up_old(ready.engines, update.digest)
        self._count_time(time.monotonic() - ready.begun_s)
        logger.info("new weights, version %s: %s read them last, in %.2f s", name, ready.slowest, ready.seconds)
        return WeightUpdate(name, ready.slowest, ready.seconds)

    def _count_time(self, seconds: float) -> None:
        figures = self._router.counts
        figures.weight_updates["applied"] += 1
        figures.weight_update_seconds_sum += seconds
        self._update_seconds[bisect_left(UPDATE_S, seconds)] += 1

    async def _apply_each(self, engines: Sequence[tuple[Worker, Renewable]], version: str) -> Worker:
        """Applies what all have prepared, and returns a worker that has it. Those that died meanwhile get it when they
        are started again. Raises EngineError if all have died."""
        if not self.paused:
            await self._hold(True, here=True)
        answers = await asyncio.gather(
            *(engine.apply_weights(version) for _, engine in engines), return_exceptions=True
        )
        if not self.paused:
            await self._hold(False, here=True)
        there = [worker for (worker, _), answer in zip(engines, answers, strict=True) if answer is None]
        if not there:
            raise next(answer for answer in answers if answer is not None)
        return there[0]

    def _give_up_old(self, engines: Sequence[tuple[Worker, Renewable]], digest: str) -> None:
        """Lets each server elsewhere that has not got the weights join anew, with them."""
        for worker, engine in engines:
            if isinstance(engine, FarEngine) and engine.info.model_digest != digest:
                logger.warning("%s has not got the new weights: it joins anew", worker.id)
                engine.disown(EngineDiedError(f"{worker.id} has not got the new weights"))

    def _all(self) -> list[tuple[Worker, Renewable]]:
        """Returns the engines that get new weights. Raises EngineError unless all are there, and can."""
        members = [one for one in self._fleet.members if self._everywhere or one.worker is None or one.worker.local]
        if not members:
            raise NoWorkerError("there is no worker: no weights are updated now")
        found: list[tuple[Worker, Renewable]] = []
        for member in members:
            if member.state is not WorkerState.READY:
                raise NoWorkerError(f"the worker {member.id} is {member.state}: no weights are updated now")
            worker = member.worker
            if worker is None or not isinstance(worker.engine, Renewable):
                raise EngineError(f"the worker {member.id} is no engine of ours, and cannot get new weights")
            found.append((worker, worker.engine))
        if len(models := {worker.engine.info.model for worker, _ in found}) > 1:
            raise EngineError(f"the workers have several models ({', '.join(sorted(models))}): ask their own servers")
        return found

    async def _hold(self, held: bool, *, here: bool = False) -> None:
        """Holds all engines that are there, or only those `here`, or lets them go on. One that dies meanwhile is held
        when it is back; a server elsewhere that was not told joins anew."""
        engines = self._there(here=here)
        answers = await asyncio.gather(*(engine.hold(held) for engine in engines), return_exceptions=True)
        for engine, answer in zip(engines, answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, MotetError):
                raise answer
            if isinstance(answer, MotetError) and isinstance(engine, FarEngine):
                engine.disown(EngineDiedError(f"a pause, or its end, was not heard: {answer.message}"))

    def _there(self, *, here: bool = False) -> list[Renewable]:
        """Returns the engines that are there now, or only those of this machine."""
        workers = [member.worker for member in self._fleet.members if member.worker is not None]
        wanted = [one.engine for one in workers if one.local or (self._everywhere and not here)]
        return [engine for engine in wanted if isinstance(engine, Renewable)]

    def there(self) -> list[Sleeping]:
        """Returns the engines of this machine that are there now."""
        return [engine for engine in self._there(here=True) if isinstance(engine, Sleeping)]

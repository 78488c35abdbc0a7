"""The weights of a cell: all its engines have the same ones, and get new ones together or not at all.

    1. every engine reads the new weights, while the old ones serve. One that cannot, or is not there, ends the update
    2. all engines are held between two steps, get the new weights, and go on

An engine that dies in 2 gets the new weights when it is started again, as does any that dies later: it reads the
folders again, and does not serve if they hold something else by then.
"""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from motet.engines.base import Engine, SleepTag, Worker, WorkerState
from motet.engines.native.protocol import WeightsPrepared
from motet.errors import EngineError, NoWorkerError, RequestError, StartupError
from motet.metrics.routing import UPDATE_S
from motet.routing.router import Router
from motet.types import FIRST_VERSION, EngineInfo, PauseMode


@runtime_checkable
class Renewable(Protocol):
    """An engine that can get new weights while it lives (`NativeEngine`)."""

    @property
    def info(self) -> EngineInfo: ...

    async def prepare_weights(self, folder: Path | None) -> WeightsPrepared:
        """Reads new weights while the old ones serve; None: those of the start. Raises RequestError if they cannot be
        used."""
        ...

    async def apply_weights(self, version: str) -> None:
        """Puts the prepared weights in the place of the old ones."""
        ...

    def drop_weights(self) -> None:
        """Forgets prepared weights."""
        ...

    async def hold(self, held: bool) -> None:
        """Stops all groups between two steps, or lets them go on."""
        ...

    async def forget_prefixes(self, *, anew: bool) -> None:
        """Empties the prefix cache. Groups under way keep their KV, or compute it `anew`."""
        ...

    async def sleep(self, *, weights: bool) -> None:
        """Gives the memory of the KV cache back, and with `weights` theirs. It must be held."""
        ...

    async def wake(self) -> None:
        """Takes the memory of the KV cache again."""
        ...


@dataclass(frozen=True)
class Update:
    """New weights that the cell has got."""

    folder: Path
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


class CellWeights:
    """Owned by the cell. `lock`: no engine joins the fleet during an update."""

    def __init__(self, router: Router) -> None:
        self.lock = asyncio.Lock()
        self.paused = False
        self.asleep = Asleep()
        self._router = router
        self._fleet = router.fleet
        self._count = 0
        router.counts.weight_update_seconds = self._update_seconds = [0] * (len(UPDATE_S) + 1)
        self._updates: list[Update] = []
        """What an engine must read that is started anew, in order."""

    @property
    def version(self) -> str:
        return self._updates[-1].version if self._updates else FIRST_VERSION

    async def bring(self, engine: Engine) -> None:
        """Gives a new engine the weights of the cell. Raises StartupError if their folders hold other ones by now, and
        RequestError if they cannot be read."""
        if (self._updates or self.asleep.tags) and not isinstance(engine, Renewable):
            raise StartupError("it cannot get the weights of the others")
        if not isinstance(engine, Renewable):
            return
        await self._bring_updates(engine)
        if self.paused:
            await engine.hold(True)
        if self.asleep.tags:
            await engine.sleep(weights=self.asleep.weights_lost)
            if SleepTag.KV_CACHE not in self.asleep.tags:
                await engine.wake()

    async def bring_again(self, engine: Renewable) -> None:
        """Gives an engine that has lost its weights those of the cell. Raises what `bring` raises."""
        if not (self._updates and self._updates[0].whole):
            await engine.prepare_weights(None)
            await engine.apply_weights(FIRST_VERSION)
        await self._bring_updates(engine)

    async def _bring_updates(self, engine: Renewable) -> None:
        for update in self._updates:
            await engine.prepare_weights(update.folder)
            await engine.apply_weights(update.version)
            if engine.info.model_digest != update.digest:
                raise StartupError(f"{update.folder} does not hold the weights of version {update.version} any more")

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
        self.paused = True
        await self._hold(True)

    async def _rest(self) -> None:
        """Waits for the groups under way. If the caller leaves meanwhile, there is no pause."""
        try:
            await self._router.rest()
        except asyncio.CancelledError:
            self._router.waiting.shut(self.paused)
            raise

    async def abort(self, traces: Collection[str] | None) -> int:
        """Ends groups where they are, all or those of these requests; returns their number."""
        return await self._router.cut(traces)

    async def resume(self) -> None:
        """Lets all groups go on. May be called twice. Raises RequestError while the engines sleep."""
        async with self.lock:
            if self.asleep.tags:
                raise RequestError(
                    "The engines of this server are asleep: POST /wake_up lets them go on.", code="asleep"
                )
            await self.go_on()

    async def go_on(self) -> None:
        """Undoes `halt`. The caller has `lock`, and the engines are awake."""
        self.paused = False
        await self._hold(False)
        self._router.waiting.shut(False)

    async def update(self, folder: Path, version: str | None) -> str:
        """Gives all engines the weights in a folder, and returns the name of that version: by default the number of
        updates. Groups under way go on with them. Raises RequestError if the weights cannot be used, and EngineError if
        an engine is not there; then all have the old ones."""
        updating = asyncio.ensure_future(self._counted(folder, version))
        return await asyncio.shield(updating)  # it is not left half done if nobody waits for it any more

    async def _counted(self, folder: Path, version: str | None) -> str:
        begun_s, figures = time.monotonic(), self._router.counts
        try:
            name = await self._update(folder, version)
        except BaseException:
            figures.weight_updates["failed"] += 1
            raise
        figures.weight_updates["applied"] += 1
        figures.weight_update_seconds_sum += (seconds := time.monotonic() - begun_s)
        self._update_seconds[bisect_left(UPDATE_S, seconds)] += 1
        return name

    async def _update(self, folder: Path, version: str | None) -> str:
        async with self.lock:
            engines = self._all()
            try:
                prepared = await asyncio.gather(*(engine.prepare_weights(folder) for _, engine in engines))
            except BaseException:
                for _, engine in engines:
                    engine.drop_weights()
                raise
            before = {worker.engine.info.model_digest for worker, _ in engines}
            before.update(one.digest for one in self._updates[-1:])  # engines that could not wake may have older ones
            name = str(self._count + 1) if version is None else version
            renewed = await self._apply(engines, name)
            digest = renewed.engine.info.model_digest
            update = Update(folder, name, digest, prepared[0].whole)
            self._updates = [update] if update.whole else [*self._updates, update]
            self.asleep.weights_lost &= not update.whole
            self._count += 1
            for old in before:
                self._fleet.renewed(old, digest)
            return name

    async def _apply(self, engines: Sequence[tuple[Worker, Renewable]], version: str) -> Worker:
        """Applies what all have prepared, and returns a worker that has it. Those that died meanwhile get it when they
        are started again. Raises EngineError if all have died."""
        if not self.paused:
            await self._hold(True)
        answers = await asyncio.gather(
            *(engine.apply_weights(version) for _, engine in engines), return_exceptions=True
        )
        if not self.paused:
            await self._hold(False)
        there = [worker for (worker, _), answer in zip(engines, answers, strict=True) if answer is None]
        if not there:
            raise next(answer for answer in answers if answer is not None)
        return there[0]

    def _all(self) -> list[tuple[Worker, Renewable]]:
        """Returns all engines of this machine. Raises EngineError unless all are there."""
        members = [member for member in self._fleet.members if member.worker is None or member.worker.local]
        for member in members:
            if member.state is not WorkerState.READY:
                raise NoWorkerError(f"the worker {member.id} is {member.state}: no weights are updated now")
        workers = [member.worker for member in members if member.worker is not None]
        return [(worker, worker.engine) for worker in workers if isinstance(worker.engine, Renewable)]

    async def _hold(self, held: bool) -> None:
        """Holds all engines that are there, or lets them go on. One that dies meanwhile is held when it is back."""
        for answer in await asyncio.gather(*(engine.hold(held) for engine in self.there()), return_exceptions=True):
            if isinstance(answer, BaseException) and not isinstance(answer, EngineError):
                raise answer

    def there(self) -> list[Renewable]:
        """Returns the engines of this machine that are there now."""
        workers = [member.worker for member in self._fleet.members if member.worker is not None]
        return [worker.engine for worker in workers if worker.local and isinstance(worker.engine, Renewable)]

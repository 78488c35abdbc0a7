"""The engines of a server that take orders, and the pause that stops them between two steps."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

from motet.engine import ControlledEngine, Engine, WorkerState
from motet.engine_orders import Hold
from motet.engines.server_engine import ServerEngine
from motet.errors import EngineClosedError, EngineDiedError, EngineError, MotetError, NoWorkerError
from motet.routing.router import Router

NamedEngine = tuple[str, ControlledEngine]
"""An engine with the id of its worker."""


class ControlledEngines:
    """The engines of a router's workers. Owned by `EngineControl`."""

    def __init__(self, router: Router, *, on_other_servers: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """`on_other_servers`: True if engines on other servers take the orders too."""
        self.lock = asyncio.Lock()
        """Held while weights or their memory change, and while an engine joins, so that none joins in the middle of an
        order. It can be held for a long time, because files are read."""
        self.step_lock = asyncio.Lock()
        """Held while engines are paused, continue, or apply weights that they have read. It is never held while a file
        is read, so a trainer can always end a pause. Acquired after the other locks, if several are needed."""
        self.weights_lock = asyncio.Lock()
        """Held while the weights that serve are replaced, released, or read for checksums. It is never held while a
        file is read. Acquired after `lock`."""
        self.paused = False
        self.refuses_new = False
        """True in a pause in which new requests are refused instead of waiting, until its end."""
        self._router = router
        self._on_other_servers = on_other_servers
        self._has_paused = False
        """True after the first pause, whose end a worker on another server can have missed."""
        self._joining: Engine | None = None
        self._clock = clock
        self._pause_start_s: float | None = None

    @property
    def pause_s(self) -> float | None:
        """Duration of the present pause, in which new groups wait; None without a pause."""
        return None if self._pause_start_s is None else self._clock() - self._pause_start_s

    def all(self) -> list[NamedEngine]:
        """Returns all engines. Raises EngineError unless each is ready and takes orders, and all have one model."""
        everywhere = self._on_other_servers
        members = [one for one in self._router.fleet.members if everywhere or one.worker is None or one.worker.local]
        if not members:
            raise NoWorkerError("there is no worker: the weights cannot be updated now")
        engines: list[NamedEngine] = []
        for member in members:
            if member.state is not WorkerState.READY:
                raise NoWorkerError(f"the worker {member.id} is {member.state}: the weights cannot be updated now")
            if member.worker is None or not isinstance(member.worker.engine, ControlledEngine):
                raise EngineError(f"the worker {member.id} is not a Motet engine, and cannot get new weights")
            engines.append((member.id, member.worker.engine))
        if len(models := {engine.info.model for _, engine in engines}) > 1:
            names = ", ".join(sorted(models))
            raise EngineError(f"the workers have several models ({names}): send weights to their own servers")
        return engines

    def connected(self, *, local_only: bool = False) -> list[ControlledEngine]:
        """Returns the engines of all workers that have been reached, in any state, and the engine that joins."""
        workers = [member.worker for member in self._router.fleet.members if member.worker is not None]
        engines: list[Engine] = [
            worker.engine for worker in workers if worker.local or (self._on_other_servers and not local_only)
        ]
        joining = self._joining
        if joining is not None and joining not in engines and not (local_only and isinstance(joining, ServerEngine)):
            engines.append(joining)
        return [engine for engine in engines if isinstance(engine, ControlledEngine)]

    @contextlib.contextmanager
    def joining(self, engine: Engine) -> Iterator[None]:
        """Includes an engine that is not in the fleet yet in pauses and their ends. The caller holds `lock`."""
        self._joining = engine
        try:
            yield
        finally:
            self._joining = None

    async def give(
        self, order: Callable[[ControlledEngine], Awaitable[object]], *, to: Sequence[ControlledEngine]
    ) -> None:
        """Gives an order to several engines at the same time. Ignores a local engine that dies: it gets the order when
        it is restarted. Raises the first other error once all engines have answered."""
        answers = await asyncio.gather(*map(order, to), return_exceptions=True)
        for engine, answer in zip(to, answers, strict=True):
            died = isinstance(answer, EngineDiedError | EngineClosedError) and not isinstance(engine, ServerEngine)
            if isinstance(answer, BaseException) and not died:
                raise answer

    async def halt(self) -> None:
        """Pauses all engines and the queue. The caller holds `step_lock`."""
        self.hold_new_groups(True)
        await self.hold(True)

    async def resume(self) -> None:
        """Undoes `halt`. The caller holds `step_lock`, and the engines are awake."""
        await self.hold(False)
        self.hold_new_groups(False)

    def hold_new_groups(self, held: bool) -> None:
        """Makes new groups wait in the queue, or admits them again."""
        self._router.waiting.pause(held)
        self.refuses_new &= held
        self._note_pause()

    async def hold(self, held: bool) -> None:
        """Pauses all engines, or ends the pause. The caller holds `step_lock`."""
        self.paused = held
        self._has_paused |= held
        self._note_pause()
        await self.hold_steps(held)

    def _note_pause(self) -> None:
        if not (self.paused or self._router.waiting.paused):
            self._pause_start_s = None
        elif self._pause_start_s is None:
            self._pause_start_s = self._clock()

    async def hold_steps(self, held: bool, *, local_only: bool = False) -> None:
        """Stops the engines between two steps, or lets them continue. A local engine that dies gets the order when it
        is restarted. A worker on another server that does not get the order must join again."""
        engines = self.connected(local_only=local_only)
        answers = await asyncio.gather(*(engine.send(Hold(held)) for engine in engines), return_exceptions=True)
        for engine, answer in zip(engines, answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, MotetError):
                raise answer
            if isinstance(answer, MotetError) and isinstance(engine, ServerEngine):
                which = "a pause" if held else "the end of a pause"
                engine.force_rejoin(EngineDiedError(f"the worker did not get {which}: {answer.message}"))

    async def sync_pause(self, engine: ControlledEngine) -> None:
        """Pauses an engine that joins during a pause. Ends the pause of a worker on another server that can have missed
        the end."""
        async with self.step_lock:
            if self.paused or (self._has_paused and isinstance(engine, ServerEngine)):
                await engine.send(Hold(self.paused))

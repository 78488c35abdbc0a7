"""Control of all engines of a server, or of all workers of a gateway: pauses, weights, adapters and
sleep.

routes of trainers, /engine/order ──► EngineControl ──► `send` of each engine
                                        ├── weights   `weight_updates`
                                        ├── sleep     `cell_sleep`; None for a gateway
                                        ├── adapters  `adapters`
                                        ├── engines   `controlled_engines`
                                        └── upload    `checkpoint_upload`; None unless a trainer has started one
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Sequence
from enum import StrEnum
from pathlib import Path

from motet.control.adapters import AdapterControl, AdapterSource
from motet.control.cell_sleep import CellSleep
from motet.control.checkpoint_upload import CheckpointUpload
from motet.control.controlled_engines import ControlledEngines
from motet.control.weight_updates import WeightUpdates, asleep
from motet.engine import ControlledEngine, Engine
from motet.engine_info import ModelCard
from motet.engine_orders import (
    ApplyWeights,
    Checksums,
    ControlOrder,
    Done,
    DropWeights,
    EngineFacts,
    ForgetPrefixes,
    Hold,
    LoadAdapter,
    NameWeights,
    OrderAnswer,
    PrepareWeights,
    SumWeights,
    UnloadAdapter,
)
from motet.errors import RequestError, StartupError
from motet.models.checkpoint import Checkpoint
from motet.routing.router import Router
from motet.types import PauseMode


class NewRequests(StrEnum):
    """The treatment of requests that arrive in a pause."""

    REFUSE = "refuse"
    """They get 503 at once."""
    WAIT = "wait"
    """They wait in the queue for the end of the pause."""


class EngineControl:
    """Carries out the orders of trainers and gateways on all engines. Owned by the cell or the gateway."""

    def __init__(self, router: Router, *, on_other_servers: bool = False) -> None:
        """`on_other_servers`: True for a gateway: engines on other servers take the orders too."""
        self.engines = ControlledEngines(router, on_other_servers=on_other_servers)
        self.weights = WeightUpdates(router, self.engines)
        self.upload: CheckpointUpload | None = None
        """The upload that a trainer has started; None if none is open."""
        self.adapters = AdapterControl(router, self.engines, on_other_servers=on_other_servers)
        self.sleep = None if on_other_servers else CellSleep(self.engines, self.weights, pause=self.pause)
        self._router = router

    @contextlib.asynccontextmanager
    async def joining(self, engine: Engine, *, listed: Sequence[ModelCard] = ()) -> AsyncIterator[None]:
        """Prepares an engine that the caller puts in the fleet. Holds the lock. `listed`: the models that a worker on
        another server lists in addition to the facts of its engine. Raises the errors of `sync`."""
        async with self.engines.lock:
            with self.engines.joining(engine):
                await self.sync(engine)
                await self.adapters.sync(engine, listed)
                yield

    async def sync(self, engine: Engine) -> None:
        """Gives an engine that joins the weights of the others, and makes it pause and sleep if they do. Raises
        StartupError if the folders have changed, and RequestError if they cannot be read."""
        if not isinstance(engine, ControlledEngine):
            if self.weights.history.last is not None or (self.sleep is not None and self.sleep.tags):
                raise StartupError("it cannot get the weights of the other engines")
            return
        await self.weights.history.sync(engine)
        await self.engines.sync_pause(engine)
        if self.sleep is not None:
            await self.sleep.sync(engine)

    async def pause(self, mode: PauseMode, new_requests: NewRequests = NewRequests.WAIT) -> None:
        """Returns as soon as nothing is computed; new groups wait in the queue, or are refused. Can be called twice."""
        self.engines.hold_new_groups(True)
        self.engines.refuses_new = new_requests is NewRequests.REFUSE
        try:
            if mode is PauseMode.WAIT:
                await self._router.wait_idle()
            elif mode is PauseMode.ABORT:
                await self._router.abort()
            async with self.engines.step_lock:
                await self.engines.halt()
        except asyncio.CancelledError:  # the caller disconnected while it waited: the server does not pause
            self.engines.hold_new_groups(self.engines.paused)
            raise

    async def resume(self) -> None:
        """Lets all groups continue, also while weights are read. Can be called twice. Raises RequestError while the
        engines sleep."""
        async with self.engines.step_lock:
            self._check_awake()
            await self.engines.resume()

    async def forget_prefixes(self, *, recompute: bool) -> None:
        """Empties the prefix caches of all engines. `recompute`: True if running groups must recompute their KV;
        otherwise they keep it. Raises EngineError if a worker on another server fails."""
        order = ForgetPrefixes(recompute)
        async with self.engines.step_lock:
            await self.engines.give(lambda engine: engine.send(order), to=self.engines.connected())

    async def abort(self, traces: Collection[str] | None) -> int:
        """Ends groups early: all, or only the groups of requests with these `x-request-id`. Returns their number."""
        return await self._router.abort(traces)

    async def obey(self, order: ControlOrder, *, uploaded: Checkpoint | None = None) -> OrderAnswer:
        """Carries out a gateway's order on all engines. `uploaded`: checkpoint to prepare, if its files were sent."""
        match order:
            case PrepareWeights(kind, paths, base):
                return await self.weights.prepare(uploaded or Checkpoint(kind, tuple(map(Path, paths))), base=base)
            case ApplyWeights(version, digest):
                await self.weights.apply(version, digest=digest)
                return EngineFacts(self._router.info)
            case DropWeights(digest):
                await self.weights.drop(digest)
            case NameWeights(version):
                await self.weights.rename(version)
                return EngineFacts(self._router.info)
            case SumWeights():
                return Checksums(await self.weights.checksums())
            case Hold(held):
                await self._hold(held)
            case ForgetPrefixes(recompute):
                await self.forget_prefixes(recompute=recompute)
            case LoadAdapter():
                await self._load_adapter(order, uploaded)
                return EngineFacts(self._router.info)
            case UnloadAdapter(name):
                await self.adapters.unload(name)
                return EngineFacts(self._router.info)
        return Done()

    async def _load_adapter(self, order: LoadAdapter, uploaded: Checkpoint | None) -> None:
        memory = None if uploaded is None else uploaded.memory[0]
        source = AdapterSource(Path(order.path) if memory is None else memory.path, memory, order.config)
        await self.adapters.load(order.name, source, in_place=order.in_place, version=order.version)

    async def _hold(self, held: bool) -> None:
        """Starts or ends a pause that a gateway controls. The gateway's own queue holds new groups."""
        async with self.engines.step_lock:
            if not held:
                self._check_awake()
            await self.engines.hold(held)

    def _check_awake(self) -> None:
        if self.sleep is not None and self.sleep.tags:
            raise asleep()

    def opened_upload(self) -> CheckpointUpload:
        """Returns the upload that a trainer has started. Raises RequestError if none is open."""
        if self.upload is None:
            raise RequestError("No weight update is open: POST /start_weight_update first.", code="no_weight_update")
        return self.upload

    def drop_upload(self) -> None:
        """Discards the upload that a trainer has started, if an upload is open."""
        if self.upload is not None:
            self.upload.drop()
            self.upload = None

    async def close(self) -> None:
        """Closes all checkpoints. Called when the engines have been closed."""
        self.drop_upload()
        await self.weights.close()
        self.adapters.close()

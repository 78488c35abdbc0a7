"""Adds workers on other servers to the fleet of a gateway, each time such a worker has started.

1. its model and the facts in its report must fit the other workers (`CompatibilityCheck`), and everything that the
   model needs here is fetched, such as its tokenizer
2. the object for this start is made, and gets the weights that the other engines have
3. it is connected to the workers with which it exchanges KV, and put in the fleet
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial

from motet.control.engine_control import EngineControl
from motet.deploy.discover import CompatibilityCheck, FoundServer
from motet.deploy.kv_connections import connect_to_fleet
from motet.deploy.remote_keeper import KeptEngine, WorkerCalls
from motet.engine import Worker
from motet.engines.upstream.text_upstream import TextUpstream
from motet.engines.wire import EngineReport
from motet.errors import WorkerLeavingError
from motet.routing.text_router import TextRouter
from motet.routing.workers.fleet import Fleet
from motet.types import EngineKind, Role

PROBE_TIMEOUT_S = 2.0
"""Time limit of the probe of a text upstream, after which it is used without: with one request for each choice."""

PrepareModel = Callable[[EngineReport, FoundServer], Awaitable[None]]
"""Fetches everything that is needed before a worker can be used. Raises EngineError if it is not available."""


class FleetEntry:
    """The way of workers into the fleet of one gateway."""

    def __init__(
        self, fleet: Fleet, control: EngineControl, *, prepare: PrepareModel, texts: TextRouter, connects_workers: bool
    ) -> None:
        """`texts`: routes requests for models that only text upstreams have; `connects_workers`: True if workers that
        exchange KV are connected before they get a group, False if they connect to each other without the gateway."""
        self._fleet = fleet
        self._control = control
        self._prepare = prepare
        self._texts = texts
        self._connects_workers = connects_workers
        self._compatibility = CompatibilityCheck()
        self._connecting = asyncio.Lock()

    def calls(self, id: str, server: FoundServer, *, role: Role | None) -> WorkerCalls:
        """Returns the calls with which a keeper watches the worker `id`. `role`: the role that the operator named."""
        return WorkerCalls(
            report=server.report,
            problem=partial(self._compatibility.problem, id, role=role),
            join=partial(self._join, id, server=server),
            left=partial(self._compatibility.forget, id),
        )

    def remove(self, id: str) -> None:
        """Removes a worker that has left."""
        self._fleet.remove(id)
        self._texts.remove(id)

    async def _join(self, id: str, report: EngineReport, *, server: FoundServer) -> KeptEngine:
        await self._prepare(report, server)
        engine = server.probe.make_engine(report)
        try:
            if isinstance(engine, TextUpstream):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PROBE_TIMEOUT_S):
                        await engine.learn_abilities()
                self._texts.put(id, engine.generate)
                self._fleet.put_text(id, report.models)
            else:
                self._fleet.set_models(id, report.models)
                async with self._control.engines.lock:
                    await self._control.sync(engine)
                    await self._put(Worker(id, engine, server.url, local=False), report.info.kind)
        except BaseException:  # its keeper does not know it at this point, but it can have groups already
            engine.lost(WorkerLeavingError(f"{id} has left"))
            await engine.close()
            raise
        return engine

    async def _put(self, worker: Worker, kind: EngineKind) -> None:
        """Puts an engine in the fleet. Motet's engines are connected before, one at a time: two that come at the same
        time would not find each other. Other engines connect by a first transfer, for which they must be in the fleet;
        no request waits for that."""
        if kind is EngineKind.MOTET and self._connects_workers:
            async with self._connecting:
                await connect_to_fleet(worker, self._fleet)
                self._fleet.put(worker)
            return
        self._fleet.put(worker)
        if kind is not EngineKind.MOTET:
            await connect_to_fleet(worker, self._fleet)

"""The workers of a gateway: servers of any kind on any machine, which join, leave, die and return at any time.

    --worker URL          workers from the start
    --workers-file FILE   a worker joins when it is added to the file, and leaves when it is removed from it; the same
                          for any other `WorkerList`
    POST /workers         operators do the same over HTTP (`Membership`)

1. each worker has a keeper (`remote_keeper`), which requests its report every second and updates the fleet
2. a worker that has started, or started again, is put in the fleet by `FleetEntry`
3. a worker that leaves gets no new groups. When its groups have ended, or have moved to other workers at the end of
   their time, its keeper ends and the worker is removed. The server itself continues to run
4. a gateway without workers is not dead: it answers 503 until a worker joins or returns
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from urllib.parse import urlsplit

from motet.control.engine_control import EngineControl
from motet.deploy.discover import CompatibilityCheck, FoundServer, ProbeSettings
from motet.deploy.kv_connections import connect_to_fleet
from motet.deploy.remote_keeper import ENDS, HEARTBEAT_S, KeeperLimits, KeptEngine, RemoteKeeper, WorkerCalls
from motet.deploy.shutdown import first_of
from motet.deploy.worker_list import WorkerList, WorkersFromList
from motet.engine import Worker
from motet.engine_info import EngineKind
from motet.engines.upstream.text_upstream import TextUpstream
from motet.engines.wire import EngineReport
from motet.errors import DrainingError, NotFoundError, RequestError, WorkerLeavingError
from motet.kv_events.follower import SharedContext, follow_blocks
from motet.routing.router import Router
from motet.routing.text_router import TextRouter
from motet.routing.workers.fleet import Fleet
from motet.settings.named_worker import NamedWorker, named_workers, roles_by_url
from motet.types import Role

logger = logging.getLogger(__name__)

PORTS = {"http": 80, "https": 443}
PROBE_TIMEOUT_S = 2.0
"""Maximum time to detect the abilities of a text upstream; without them, it gets one request for each choice."""

PrepareModel = Callable[[EngineReport, FoundServer], Awaitable[None]]
"""Fetches everything that is needed before a worker can be used. Raises EngineError if it is not available."""


class FleetEntry:
    """Puts the workers of one gateway in its fleet, each time a worker has started.

    1. its model and the facts in its report must fit the other workers (`CompatibilityCheck`), and everything that the
       model needs here is fetched, such as its tokenizer
    2. an engine object is made for the worker's server, and the worker gets the weights that the other engines have
    3. it is connected to the workers with which it exchanges KV, and put in the fleet
    """

    def __init__(
        self, fleet: Fleet, control: EngineControl, *, prepare: PrepareModel, texts: TextRouter, connects_workers: bool
    ) -> None:
        """`texts`: routes requests for models that only text upstreams have; `connects_workers`: True if the gateway
        connects workers that exchange KV, False if they connect to each other without it."""
        self._fleet = fleet
        self._control = control
        self._prepare = prepare
        self._texts = texts
        self._connects_workers = connects_workers
        self._compatibility = CompatibilityCheck()

    def calls(self, id: str, server: FoundServer, *, role: Role | None) -> WorkerCalls:
        """Returns the calls for the keeper of the worker `id`. `role`: the role that the operator named."""
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
                await first_of(engine.learn_abilities(), timeout_s=PROBE_TIMEOUT_S)
                self._texts.put(id, engine.generate)
                self._fleet.put_text(id, report.models)
            else:
                self._fleet.set_models(id, report.models)
                worker, is_motet = Worker(id, engine, server.url, local=False), report.info.kind is EngineKind.MOTET
                # One engine at a time: two that join at the same time would not find each other.
                async with self._control.joining(engine, listed=report.models):
                    if is_motet and self._connects_workers:
                        await connect_to_fleet(worker, self._fleet)
                    self._fleet.put(worker)
                    if not is_motet:  # connects by a first transfer, for which it must be in the fleet
                        await connect_to_fleet(worker, self._fleet)
        except BaseException:  # the keeper does not own the engine yet, and the engine can already have groups
            engine.lost(WorkerLeavingError(f"{id} has left"))
            await engine.close()
            raise
        return engine


@dataclass
class _KeptWorker:
    """One worker of the gateway."""

    keeper: RemoteKeeper
    task: asyncio.Task[None] | None = None
    """Task of the keeper; None unless the gateway is watched."""
    drain_s: float | None = None
    """Time that its groups have to end; None unless the worker is leaving."""


class Gateway:
    """Workers on other servers that serve together. `join`, `leave` and `drain` are the functions of a `Membership`."""

    def __init__(
        self,
        router: Router,
        prepare: PrepareModel,
        *,
        probes: ProbeSettings,
        drain_s: float,
        heartbeat_s: float = HEARTBEAT_S,
        connects_workers: bool = True,
        texts: TextRouter | None = None,
        listed: WorkerList | None = None,
    ) -> None:
        """Starts with the workers of the config. Workers of `listed` join and leave with the list, and their groups
        have `drain_s` to end. `heartbeat_s`: time between two requests for a worker's report; `connects_workers` and
        `texts`: as in `FleetEntry`. Raises ConfigError."""
        self.router = router
        self.control = EngineControl(router, on_other_servers=True)
        self._fleet = fleet = router.fleet
        texts = texts or TextRouter(fleet)
        self._entry = FleetEntry(fleet, self.control, prepare=prepare, texts=texts, connects_workers=connects_workers)
        self._probes = probes
        self._drain_s = drain_s
        self._limits = KeeperLimits(
            silence_s=probes.config.worker_timeout_s, stall_s=probes.config.upstream_timeout_s, heartbeat_s=heartbeat_s
        )
        self._follow_blocks = partial(follow_blocks, shared=SharedContext())
        self._workers: dict[str, _KeptWorker] = {}
        self._tasks: asyncio.TaskGroup | None = None
        """Tasks of keepers and of leaving workers; None unless the gateway is watched."""
        for named in named_workers(probes.config.workers):
            self.add(named)
        self._listed = listed
        self._from_list = WorkersFromList()
        if listed is not None:
            self._apply_list(listed.named)

    @property
    def dead(self) -> bool:
        return False

    async def death(self) -> None:
        await asyncio.Event().wait()

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[asyncio.Task[None]]:
        """Runs `watch` in a task. Yields the task when a report of every present worker has been requested."""
        watching = asyncio.create_task(self.watch())
        try:
            checked = [worker.keeper.checked.wait() for worker in self._workers.values()]
            await first_of(asyncio.gather(*checked), asyncio.wait([watching]))
            if watching.done():
                watching.result()
            yield watching
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    async def watch(self) -> None:
        """Watches the workers until it is cancelled. Called again, it also continues with workers that were leaving."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for id, worker in self._workers.items():
                worker.task = tasks.create_task(worker.keeper.keep())
                if worker.drain_s is not None:
                    tasks.create_task(self._finish_leaving(id, worker))
            if self._listed is not None:
                tasks.create_task(self._follow(self._listed))
            try:
                await asyncio.Event().wait()
            finally:
                self._tasks = None

    async def close(self) -> None:
        """Ends all groups of its workers, and all calls to them; their servers continue to run."""
        await self.router.close()
        await asyncio.gather(*(worker.keeper.close() for worker in self._workers.values()))
        await self.control.close()

    def add(self, named: NamedWorker, id: str | None = None) -> str:
        """Returns the id of the new worker. Raises RequestError if its URL or id is taken."""
        named = replace(named, role=named.role or roles_by_url(self._probes.config.role_of).get(named.url))
        if (known := self._ids.get(named.url)) is not None:
            raise RequestError(f"{named.url} is already a worker: {known}.", param="url", code="worker_exists")
        if id in self._workers:
            raise RequestError(f"There is already a worker {id}.", param="id", code="worker_exists")
        id = id or _free_id(named.url, self._workers)
        keeper = RemoteKeeper(
            id,
            named.url,
            calls=self._entry.calls(id, self._probes.server(named, id), role=named.role),
            fleet=self._fleet,
            limits=self._limits,
            follow=self._follow_blocks,
        )
        worker = self._workers[id] = _KeptWorker(keeper)
        logger.info("%s is the worker at %s", id, named.url)
        self._fleet.expect(id, named.url, role=named.role, takes_texts=named.kind is EngineKind.OPENAI)
        if self._tasks is not None:
            worker.task = self._tasks.create_task(keeper.keep())
        return id

    async def join(self, named: NamedWorker, id: str | None) -> str:
        self._open_tasks()  # raises DrainingError when the server is closing
        return self.add(named, id)

    async def leave(self, id: str, drain_s: float) -> None:
        self._known(id)
        self._start_leaving(id, drain_s)

    async def drain(self, id: str) -> None:
        self._known(id).keeper.take_out()

    @property
    def _ids(self) -> dict[str, str]:
        """Ids of all workers, by URL."""
        return {worker.keeper.url: id for id, worker in self._workers.items()}

    def _known(self, id: str) -> _KeptWorker:
        if id not in self._workers:
            raise NotFoundError(f"There is no worker {id}.", code="worker_not_found")
        return self._workers[id]

    def _open_tasks(self) -> asyncio.TaskGroup:
        if self._tasks is None:
            raise DrainingError("The server is closing: workers cannot join or leave any more.")
        return self._tasks

    def _start_leaving(self, id: str, drain_s: float) -> None:
        tasks, worker = self._open_tasks(), self._workers[id]
        if worker.drain_s is None:
            worker.drain_s = drain_s
            self._from_list.forget(worker.keeper.url)
            worker.keeper.take_out()
            tasks.create_task(self._finish_leaving(id, worker))

    async def _finish_leaving(self, id: str, worker: _KeptWorker) -> None:
        try:
            await first_of(self._idle(id), timeout_s=worker.drain_s)
            if worker.task is not None:
                worker.task.cancel()
                await asyncio.wait([worker.task])
            await self._fleet.evict(id, WorkerLeavingError(f"{id} has left"))
            await worker.keeper.close()
        except ENDS:
            raise
        except BaseException:  # else it would end the tasks of all workers
            logger.exception("%s: it could not leave in order", id)
        self._entry.remove(id)
        del self._workers[id]

    async def _idle(self, id: str) -> None:
        """Returns when the worker has no work of this gateway. Polls, because the end of a prefill is not reported."""
        while (member := self._fleet.get(id)) is not None:
            if not member.groups and member.load.idle:
                return
            await first_of(self._fleet.changes.wait(), timeout_s=self._limits.heartbeat_s)

    async def _follow(self, listed: WorkerList) -> None:
        while True:
            try:
                self._apply_list(await listed.next())
            except ENDS:
                raise
            except BaseException:  # else it would end the tasks of all workers
                logger.exception("the list of workers could not be followed; it is read again")
                await asyncio.sleep(self._limits.heartbeat_s)

    def _apply_list(self, named: Iterable[NamedWorker]) -> None:
        named = list(named)
        for id in self._from_list.removed(named):
            self._start_leaving(id, self._drain_s)
        leaving = [id for id, worker in self._workers.items() if worker.drain_s is not None]
        for new in self._from_list.added(named, self._ids, leaving=leaving):
            self._from_list.note(new.url, self.add(new))


def _free_id(url: str, taken: Collection[str]) -> str:
    """Returns an id such as `10.0.0.1:8000`."""
    parts = urlsplit(url)
    id = f"{parts.hostname}:{parts.port or PORTS[parts.scheme]}"
    return next(free for free in chain([id], (f"{id}-{number}" for number in count(2))) if free not in taken)

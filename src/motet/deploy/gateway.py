"""The workers of a gateway: servers of any kind on other machines or ports, which join, leave, die and return at any
time.

    --worker URL          workers from the start
    --workers-file FILE   workers that are added there or removed join or leave; the same for any other `WorkerList`
    POST /workers         operators do the same over HTTP (`Membership`)

1. each worker has a keeper (`remote_keeper`), which requests its report every second and updates the fleet
2. a worker that leaves gets no new groups. When its groups have ended, or have moved to other workers because their
   time is over, its keeper ends and the worker is removed. The server itself continues to run
3. a gateway without workers is not dead: it answers 503 until a worker joins or returns
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from urllib.parse import urlsplit

from motet.control.engine_control import EngineControl
from motet.deploy.discover import ProbeSettings
from motet.deploy.fleet_entry import FleetEntry, PrepareModel
from motet.deploy.remote_keeper import ENDS, HEARTBEAT_S, KeeperLimits, RemoteKeeper
from motet.deploy.shutdown import first_of
from motet.deploy.worker_list import WorkerList, WorkersFromList
from motet.errors import DrainingError, NotFoundError, RequestError, WorkerLeavingError
from motet.kv_events.follower import SharedContext, follow_blocks
from motet.routing.router import Router
from motet.routing.text_router import TextRouter
from motet.settings.named_worker import NamedWorker, named_workers

logger = logging.getLogger(__name__)

PORTS = {"http": 80, "https": 443}


@dataclass
class _KeptWorker:
    """One worker of the gateway, owned by it."""

    keeper: RemoteKeeper
    task: asyncio.Task[None] | None = None
    """Runs the keeper; None unless the gateway is watched."""
    drain_s: float | None = None
    """Time in seconds that its groups have to end; None unless it is leaving."""


class Gateway:
    """Workers on other servers that serve together; has the functions of a `Membership`."""

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
        """Starts with the workers of the config. Workers of `listed` come and go with the list, and their groups have
        `drain_s` to end. `heartbeat_s`: time between two requests to a worker; `connects_workers` and `texts`: as in
        `FleetEntry`. Raises ConfigError."""
        self.router = router
        self.control = EngineControl(router, on_other_servers=True)
        self._fleet = router.fleet
        texts = texts or TextRouter(router.fleet)
        self._entry = FleetEntry(
            router.fleet, self.control, prepare=prepare, texts=texts, connects_workers=connects_workers
        )
        self._probes = probes
        self._drain_s = drain_s
        self._limits = KeeperLimits(
            silence_s=probes.config.worker_timeout_s, stall_s=probes.config.upstream_timeout_s, heartbeat_s=heartbeat_s
        )
        self._follow_blocks = partial(follow_blocks, shared=SharedContext())
        self._workers: dict[str, _KeptWorker] = {}
        """Workers by id."""
        self._tasks: asyncio.TaskGroup | None = None
        """Runs the tasks of keepers and of leaving workers; None unless the gateway is watched."""
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
        """Watches the workers in a task, which it yields when a report of every present worker has been requested."""
        watching = asyncio.create_task(self.watch())
        try:
            checked = [worker.keeper.checked.wait() for worker in self._workers.values()]
            await first_of(asyncio.gather(*checked), asyncio.shield(watching))
            yield watching
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    async def watch(self) -> None:
        """Watches the workers until it is cancelled. When it is called again, workers that were leaving continue to
        leave."""
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
        """Ends all groups and calls on its workers; their servers continue to run."""
        await self.router.close()
        await asyncio.gather(*(worker.keeper.close() for worker in self._workers.values()))
        await self.control.close()

    def add(self, named: NamedWorker, id: str | None = None) -> str:
        """Returns the id of the new worker. Raises RequestError if its URL or id is taken."""
        named = replace(named, role=named.role or self._probes.role_of(named.url))
        known = self._ids.get(named.url)
        if known is not None:
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
        self._fleet.expect(id, named.url, role=named.role)
        if self._tasks is not None:
            worker.task = self._tasks.create_task(keeper.keep())
        return id

    async def join(self, named: NamedWorker, id: str | None) -> str:
        self._open_tasks()
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
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(worker.drain_s):
                    await self._idle(id)
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
        """Returns when the worker has no groups and no waiting work of this gateway. Checks regularly, because the end
        of a prefill is not reported."""
        while (member := self._fleet.get(id)) is not None:
            if not member.groups and member.load.idle:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.heartbeat_s):
                    await self._fleet.changes.wait()

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

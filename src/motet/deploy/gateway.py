"""The workers of a gateway: servers elsewhere, of any kind, that join, leave, die and return while it runs.

    --worker URL          there from the start
    --workers-file FILE   workers that are added there or removed join or leave; also for any other `WorkerList`
    POST /workers         operators do the same over HTTP (`Membership`)

1. each worker has a keeper (`deploy.remote_keeper`), which asks it every second and lets the fleet know
2. a worker that leaves gets no new groups; when its groups have ended, or its time is up and they go on elsewhere, its
   keeper ends, and the worker is forgotten. The server itself runs on.
3. a gateway without workers is not dead: it answers 503 until somebody joins or returns
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from motet.control.engine_control import EngineControl
from motet.deploy.discover import CompatibilityCheck, FoundServer, ProbeSettings
from motet.deploy.meet import meet_fleet
from motet.deploy.remote_keeper import ENDS, HEARTBEAT_S, KeptEngine, RemoteKeeper
from motet.deploy.shutdown import first_of
from motet.engine import Worker
from motet.engines.upstream.text_upstream import TextUpstream
from motet.engines.wire import EngineReport
from motet.errors import ConfigError, DrainingError, NotFoundError, RequestError, WorkerLeavingError
from motet.kv_events.follower import SharedContext, follow_blocks
from motet.routing.router import Router
from motet.routing.text_router import TextRouter
from motet.settings.named_worker import NamedWorker, named_workers, roles_by_url
from motet.types import EngineKind

logger = logging.getLogger(__name__)

LEARN_S = 2.0
"""Seconds for the probe of a text upstream before it is used anyway, with one request for each choice."""
PORTS = {"http": 80, "https": 443}

Learn = Callable[[EngineReport, FoundServer], Awaitable[None]]
"""Fetches all that is needed before a worker can be used. Raises EngineError if it is not available."""


class WorkerList(Protocol):
    """A list of workers that may change (`WorkersFile`, `ListedWorkers`)."""

    @property
    def named(self) -> Sequence[NamedWorker]:
        """The workers of the last list."""
        ...

    async def next(self) -> Sequence[NamedWorker]:
        """Waits for the next list of workers, which may be the same again. May be cancelled."""
        ...


class WorkersFile:
    """A file that names workers, `URL` or `URL,role` in each line, with comments after `#`.

    A broken line is logged and skipped; a file that cannot be read any more counts as unchanged."""

    def __init__(self, path: Path, *, period_s: float = 1.0) -> None:
        """`period_s`: time between two checks of the file. Raises ConfigError if it cannot be read."""
        self.named: tuple[NamedWorker, ...] = ()
        self._path = path
        self._period_s = period_s
        self._stamp: tuple[int, int, int] | None = None
        self._missing = False
        if problem := self._read():
            raise ConfigError(f"--workers-file {path}: cannot be read: {problem}")

    async def next(self) -> tuple[NamedWorker, ...]:
        await asyncio.sleep(self._period_s)
        return await asyncio.to_thread(self.look)

    def look(self) -> tuple[NamedWorker, ...]:
        """Returns the workers that the file names now."""
        problem = self._read()
        if problem and not self._missing:
            logger.error("%s: cannot be read, the workers stay as they are: %s", self._path, problem)
        self._missing = problem is not None
        return self.named

    def _read(self) -> Exception | None:
        """Reads the file if it has changed; returns why it cannot be read."""
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp != self._stamp:
                self.named = tuple(self._workers_in(self._path.read_text(encoding="utf-8")))
                self._stamp = stamp
        except (OSError, UnicodeDecodeError) as error:
            self._stamp = None  # when it is back it is read, also if it looks as before
            return error
        return None

    def _workers_in(self, text: str) -> list[NamedWorker]:
        by_url: dict[str, NamedWorker] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                for worker in named_workers(filter(None, [line.partition("#")[0].strip()])):
                    by_url.setdefault(worker.url, worker)
            except ConfigError as error:
                logger.error("%s, line %d: %s; the line is skipped", self._path, number, error.message)
        return list(by_url.values())


class Gateway:
    """Servers elsewhere that serve together, and their `Membership`."""

    def __init__(
        self,
        router: Router,
        learn: Learn,
        *,
        asking: ProbeSettings,
        drain_s: float,
        heartbeat_s: float = HEARTBEAT_S,
        introduces: bool = True,
        texts: TextRouter | None = None,
        listed: WorkerList | None = None,
    ) -> None:
        """Begins with the workers of the config. Workers of `listed` come and go with the list, and their groups have
        `drain_s` to end. `heartbeat_s`: time between two questions to a worker; `introduces`: True if the gateway lets
        workers that exchange KV meet before they get a group, False if they do it themselves; `texts`: routes requests
        for models that only text upstreams have. Raises ConfigError."""
        self.router = router
        self.control = EngineControl(router, on_other_servers=True)
        self._likeness = CompatibilityCheck()
        self._fleet = router.fleet
        self._learn = learn
        self._texts = texts or TextRouter(router.fleet)
        self._asking = asking
        self._roles = roles_by_url(asking.config.role_of)
        self._drain_s = drain_s
        self._heartbeat_s = heartbeat_s
        self._introduces = introduces
        self._follow_blocks = partial(follow_blocks, shared=SharedContext())
        self._keepers: dict[str, RemoteKeeper] = {}
        self._keeping: dict[str, asyncio.Task[None]] = {}
        """The task of each keeper, while the gateway is watched."""
        self._leaving: dict[str, float] = {}
        """Seconds that the groups of each leaving worker have."""
        self._from_list: dict[str, str] = {}
        """URL -> id of the workers that came from the list and stay."""
        self._in_list: set[str] = set()
        """URLs of the list that have been processed."""
        self._joining = asyncio.Lock()
        self._tasks: asyncio.TaskGroup | None = None
        """Runs the tasks of keepers and of leaving workers; None unless the gateway is watched."""
        for named in named_workers(asking.config.workers):
            self.add(named)
        self._listed = listed
        if listed is not None:
            self._take_listed(listed.named)

    @property
    def dead(self) -> bool:
        return False

    async def death(self) -> None:
        await asyncio.Event().wait()

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[asyncio.Task[None]]:
        """Watches the workers in a task, which it yields once every worker named so far has been asked."""
        watching = asyncio.create_task(self.watch())
        try:
            looks = [keeper.looked.wait() for keeper in self._keepers.values()]
            await first_of(asyncio.gather(*looks), asyncio.shield(watching))
            yield watching
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    async def watch(self) -> None:
        """Watches the workers until it is cancelled; called again, it goes on with departures that were under way."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for keeper in self._keepers.values():
                self._keeping[keeper.id] = tasks.create_task(keeper.keep())
            for id in self._leaving:
                tasks.create_task(self._let_go(id))
            if self._listed is not None:
                tasks.create_task(self._follow(self._listed))
            try:
                await asyncio.Event().wait()
            finally:
                self._tasks = None

    async def close(self) -> None:
        """Ends all groups and questions of its workers; their servers run on."""
        await self.router.close()
        await asyncio.gather(*(keeper.close() for keeper in self._keepers.values()))
        await self.control.close()

    def add(self, named: NamedWorker, id: str | None = None) -> str:
        """Returns the id of the new worker. Raises RequestError if its URL or id is taken."""
        named = replace(named, role=named.role or self._roles.get(named.url))
        known = next((keeper.id for keeper in self._keepers.values() if keeper.url == named.url), None)
        if known is not None:
            raise RequestError(f"{named.url} is already a worker: {known}.", param="url", code="worker_exists")
        if id in self._keepers:
            raise RequestError(f"There is already a worker {id}.", param="id", code="worker_exists")
        id = id or _free_id(named.url, self._keepers)
        server = self._asking.server(named, id)
        keeper = self._keepers[id] = RemoteKeeper(
            id,
            named.url,
            report=server.report,
            join=partial(self._join, id, server=server),
            problem=partial(self._likeness.problem, id, role=named.role),
            gone=partial(self._likeness.forget, id),
            fleet=self._fleet,
            silence_s=self._asking.config.worker_timeout_s,
            quiet_s=self._asking.config.upstream_timeout_s,
            heartbeat_s=self._heartbeat_s,
            follow=self._follow_blocks,
        )
        logger.info("%s is the worker at %s", id, named.url)
        self._fleet.expect(id, named.url, role=named.role)
        if self._tasks is not None:
            self._keeping[id] = self._tasks.create_task(keeper.keep())
        return id

    async def join(self, named: NamedWorker, id: str | None) -> str:
        self._open_tasks()
        return self.add(named, id)

    async def leave(self, id: str, drain_s: float) -> None:
        self._known(id)
        self._start_leaving(id, drain_s)

    async def drain(self, id: str) -> None:
        self._known(id).take_out()

    def _known(self, id: str) -> RemoteKeeper:
        if id not in self._keepers:
            raise NotFoundError(f"There is no worker {id}.", code="worker_not_found")
        return self._keepers[id]

    def _open_tasks(self) -> asyncio.TaskGroup:
        if self._tasks is None:
            raise DrainingError("The server is closing: workers neither join nor leave any more.")
        return self._tasks

    def _start_leaving(self, id: str, drain_s: float) -> None:
        tasks = self._open_tasks()
        if id not in self._leaving:
            self._leaving[id] = drain_s
            self._from_list.pop(self._keepers[id].url, None)
            self._keepers[id].take_out()
            tasks.create_task(self._let_go(id))

    async def _let_go(self, id: str) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._leaving[id]):
                    await self._idle(id)
            keeping = self._keeping.pop(id)
            keeping.cancel()
            await asyncio.wait([keeping])
            await self._fleet.evict(id, WorkerLeavingError(f"{id} has left"))
            await self._keepers[id].close()
        except ENDS:
            raise
        except BaseException:  # raised, it would end the tasks of all workers
            logger.exception("%s: it could not be left in order", id)
        self._fleet.remove(id)
        self._texts.remove(id)
        del self._keepers[id], self._leaving[id]

    async def _idle(self, id: str) -> None:
        """Returns once the worker has nothing of ours. Checks regularly, since the end of a prefill wakes nobody."""
        while (member := self._fleet.get(id)) is not None:
            if not member.groups and member.load.idle:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_s):
                    await self._fleet.changes.wait()

    async def _follow(self, listed: WorkerList) -> None:
        while True:
            try:
                self._take_listed(await listed.next())
            except ENDS:
                raise
            except BaseException:  # raised, it would end the tasks of all workers
                logger.exception("the list of workers could not be followed; it is read again")
                await asyncio.sleep(self._heartbeat_s)

    def _take_listed(self, named: Iterable[NamedWorker]) -> None:
        """Processes each URL of the list once: if an operator removes that worker, it stays away. The list cannot
        remove workers that operators added."""
        wanted = {worker.url: worker for worker in named}
        for url in self._from_list.keys() - wanted.keys():
            self._start_leaving(self._from_list[url], self._drain_s)
        self._in_list &= wanted.keys()
        there = {keeper.url: keeper.id for keeper in self._keepers.values()}
        for url in [url for url in wanted if url not in self._in_list]:
            if url not in there:
                self._from_list[url] = self.add(wanted[url])
            elif there[url] in self._leaving:
                continue  # until it has left
            self._in_list.add(url)

    async def _join(self, id: str, report: EngineReport, *, server: FoundServer) -> KeptEngine:
        """Adds a start of a worker to the fleet."""
        await self._learn(report, server)
        kept = server.way.kept(report)
        try:
            if isinstance(kept, TextUpstream):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LEARN_S):
                        await kept.learn()
                self._texts.put(id, kept.generate)
                self._fleet.put_text(id, report.models)
            else:
                self._fleet.offer(id, report.models)
                async with self.control.lock:
                    await self.control.bring(kept)
                    await self._join_engine(Worker(id, kept, server.url, local=False), report.info.kind)
        except BaseException:  # its keeper does not have it yet, but it may have groups already
            kept.lost(WorkerLeavingError(f"{id} has left"))
            await kept.close()
            raise
        return kept

    async def _join_engine(self, newcomer: Worker, kind: EngineKind) -> None:
        """Lets engines of ours meet before they get a group, one at a time: two that come at once would not see each
        other. Others meet by a transfer, for which they must be workers already; nobody waits for that."""
        if kind is EngineKind.MOTET and self._introduces:
            async with self._joining:
                await meet_fleet(newcomer, self._fleet)
                self._fleet.put(newcomer)
            return
        self._fleet.put(newcomer)
        if kind is not EngineKind.MOTET:
            await meet_fleet(newcomer, self._fleet)


def _free_id(url: str, taken: Collection[str]) -> str:
    """Returns an id such as `10.0.0.1:8000`."""
    parts = urlsplit(url)
    id = f"{parts.hostname}:{parts.port or PORTS[parts.scheme]}"
    return next(free for free in chain([id], (f"{id}-{number}" for number in count(2))) if free not in taken)

"""The workers of a gateway: servers elsewhere, of any kind, that join, leave, die and return while it runs.

    --worker URL          there from the start
    --workers-file FILE   what is added or removed in it joins or leaves; so with any other `WorkerList`
    POST /workers         operators do the same over HTTP (`Membership`)

1. each worker has a keeper (`deploy.remote_keeper`), which asks it every second and lets the fleet know
2. a worker that leaves gets no new groups; when its groups have ended, or its time is up and they go on elsewhere, its
   keeper ends, and nobody knows it any more. The server itself runs on.
3. a gateway without workers is no dead one: it answers 503 until somebody joins or returns
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from itertools import chain, count
from urllib.parse import urlsplit

from motet.config import GatewayConfig
from motet.deploy.compose import Router
from motet.deploy.discover import FoundServer
from motet.deploy.gateway_parts import GatewayRules, LearnedModels, WorkerList
from motet.deploy.likeness import Likeness
from motet.deploy.meet import meet_all
from motet.deploy.remote_keeper import KeeperRules, Kept, KeptServer, RemoteKeeper
from motet.engines.base import ANSWERING, Worker, WorkerState
from motet.engines.upstream.upstream import TextUpstream
from motet.engines.wire import EngineReport
from motet.errors import DrainingError, NotFoundError, RequestError, WorkerLeavingError
from motet.kv_events.follower import follow_blocks
from motet.kv_events.shared_context import SharedContext
from motet.routing.fleet import Member
from motet.settings.named_worker import NamedWorker, named_workers, roles_by_url
from motet.types import EngineKind

LEARN_S = 2.0
"""How long it may take to find out what a text upstream can before it is used; it is asked one by one meanwhile."""
PORTS = {"http": 80, "https": 443}


class Gateway:
    """Servers elsewhere that serve together, and their `Membership`."""

    def __init__(
        self,
        router: Router,
        models: LearnedModels,
        config: GatewayConfig,
        *,
        server_at: Callable[[NamedWorker], FoundServer],
        rules: GatewayRules,
        listed: WorkerList | None = None,
    ) -> None:
        """With the workers that `config` names; those that are `listed` come and go with the list. Raises
        ConfigError."""
        self.router = router
        self.models = models
        self.likeness = Likeness()
        self._fleet = router.fleet
        self._server_at = server_at
        self._roles = roles_by_url(config.role_of)
        self._silence_s = config.worker_timeout_s
        self._rules = rules
        self._follow_blocks = partial(follow_blocks, shared=SharedContext())
        self._keepers: dict[str, RemoteKeeper] = {}
        self._from_list: dict[str, str] = {}
        """URL -> id of those that the list brought and that are to stay."""
        self._in_list: set[str] = set()
        """URLs in the list that have been heeded."""
        self._leaving: dict[str, float] = {}
        """How long their groups have."""
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._joining = asyncio.Lock()
        self._tasks: asyncio.TaskGroup | None = None
        """While it is watched."""
        for named in named_workers(config.workers):
            self.add(named)
        self._listed = listed
        if listed is not None:
            self._take_listed(listed.named)

    @property
    def workers(self) -> list[Worker]:
        """Those that take groups now."""
        members = [member for member in self._fleet.members if member.state is WorkerState.READY]
        return [member.worker for member in members if member.worker is not None]

    @property
    def dead(self) -> bool:
        return False

    async def death(self) -> None:
        await asyncio.Event().wait()

    async def looked(self) -> None:
        """Returns once every worker named so far has been asked; while it is watched."""
        await asyncio.gather(*(keeper.looked.wait() for keeper in list(self._keepers.values())))

    async def watch(self) -> None:
        """Until it is cancelled; what it was doing then is taken up when it is called again."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for keeper in self._keepers.values():
                self._keep(keeper, tasks)
            for id in self._leaving:
                tasks.create_task(self._let_go(id))
            if self._listed is not None:
                tasks.create_task(self._follow(self._listed))
            try:
                await asyncio.Event().wait()
            finally:
                self._tasks = None

    async def close(self) -> None:
        """The servers run on."""
        await self.router.engine.close()
        await asyncio.gather(*(keeper.close() for keeper in self._keepers.values()))

    def add(self, named: NamedWorker, id: str | None = None) -> str:
        """Returns its id. Raises RequestError if its URL or id is taken."""
        named = replace(named, role=named.role or self._roles.get(named.url))
        known = next((keeper.id for keeper in self._keepers.values() if keeper.url == named.url), None)
        if known is not None:
            raise RequestError(f"{named.url} is a worker already: {known}.", param="url", code="worker_exists")
        if id in self._keepers:
            raise RequestError(f"There is a worker {id} already.", param="id", code="worker_exists")
        id = id or _free_id(named.url, self._keepers)
        server = self._server_at(named)
        keeper = RemoteKeeper(
            id,
            KeptServer(named.url, server.report, partial(self._join, id, server)),
            fleet=self._fleet,
            rules=KeeperRules(
                problem=lambda report: self.likeness.problem(report, named.role),
                silence_s=self._silence_s,
                heartbeat_s=self._rules.heartbeat_s,
                follow=self._follow_blocks,
            ),
        )
        self._keepers[id] = keeper
        self._fleet.expect(id, named.url, named.role)
        if self._tasks is not None:
            self._keep(keeper, self._tasks)
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

    def _keep(self, keeper: RemoteKeeper, tasks: asyncio.TaskGroup) -> None:
        self._keeping[keeper.id] = tasks.create_task(keeper.keep())

    def _start_leaving(self, id: str, drain_s: float) -> None:
        tasks = self._open_tasks()
        if id not in self._leaving:
            self._leaving[id] = drain_s
            self._from_list.pop(self._keepers[id].url, None)
            self._keepers[id].take_out()
            tasks.create_task(self._let_go(id))

    async def _let_go(self, id: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._leaving[id]):
                await self._idle(id)
        keeping = self._keeping.pop(id)
        keeping.cancel()
        await asyncio.wait([keeping])
        await self._fleet.evict(id, WorkerLeavingError(f"{id} has left"))
        await self._keepers[id].close()
        self._fleet.remove(id)
        self.models.texts.remove(id)
        del self._keepers[id], self._leaving[id]

    async def _idle(self, id: str) -> None:
        """Returns once it has nothing of ours. Nobody tells that a prompt has been prefilled, so that is looked for."""
        while (member := self._fleet.get(id)) is not None and _busy(member):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._rules.heartbeat_s):
                    await self._fleet.changed()

    async def _follow(self, listed: WorkerList) -> None:
        while True:
            self._take_listed(await listed.next())

    def _take_listed(self, named: Iterable[NamedWorker]) -> None:
        """Heeds a name once: whom an operator removes stays away; whom one has joined is not the list's to remove."""
        wanted = {worker.url: worker for worker in named}
        for url in self._from_list.keys() - wanted.keys():
            self._start_leaving(self._from_list[url], self._rules.drain_s)
        self._in_list &= wanted.keys()
        there = {keeper.url: keeper.id for keeper in self._keepers.values()}
        for url in [url for url in wanted if url not in self._in_list]:
            if url not in there:
                self._from_list[url] = self.add(wanted[url])
            elif there[url] in self._leaving:
                continue  # until it has left
            self._in_list.add(url)

    async def _join(self, id: str, server: FoundServer, report: EngineReport) -> Kept:
        await self.models.learn(report, server)
        kept = server.kept(report)
        try:
            if isinstance(kept, TextUpstream):
                await self._join_texts(id, kept, report)
            else:
                await self._join_engine(id, Worker(id, kept, server.url, local=False), report)
        except BaseException:  # its keeper does not have it yet, but it may have been given groups
            kept.lost(WorkerLeavingError(f"{id} has left"))
            await kept.close()
            raise
        return kept

    async def _join_texts(self, id: str, upstream: TextUpstream, report: EngineReport) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEARN_S):
                await upstream.learn()
        self.models.texts.put(id, upstream)
        self._fleet.put_text(id, report.models)

    async def _join_engine(self, id: str, newcomer: Worker, report: EngineReport) -> None:
        """Ours meet before they get a group, one at a time: two that come at once would both not see the other. Others
        meet by a transfer, for which they must be workers already; nobody waits for theirs."""
        self._fleet.offer(id, report.models)
        if report.info.kind is not EngineKind.MOTET:
            self._fleet.put(newcomer)
            await meet_all(newcomer, self._present)
            return
        if not self._rules.introduces:
            self._fleet.put(newcomer)
            return
        async with self._joining:
            await meet_all(newcomer, self._present)
            self._fleet.put(newcomer)

    @property
    def _present(self) -> list[Worker]:
        members = [member for member in self._fleet.members if member.state in ANSWERING]
        return [member.worker for member in members if member.worker is not None]


def _busy(member: Member) -> bool:
    return bool(member.groups or member.books.waiting_tokens or member.books.open_choices)


def _free_id(url: str, taken: Collection[str]) -> str:
    """Such as `10.0.0.1:8000`."""
    parts = urlsplit(url)
    id = f"{parts.hostname}:{parts.port or PORTS[parts.scheme]}"
    return next(free for free in chain([id], (f"{id}-{number}" for number in count(2))) if free not in taken)

"""The workers there are, as they join, leave, die and return: what routing chooses from and `/status` tells.

Who changes what: a keeper (`deploy`) says when a worker is there and what state it is in; `Routed` says that one died
when it finds out first. A worker that returns, with its process started again or its connection mended, keeps its id
and begins new books: groups of its former life still close the old ones.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from motet.engines.base import ANSWERING, Worker, WorkerReport, WorkerState
from motet.errors import MotetError
from motet.routing.affinity import SESSION_TTL_S, Affinity
from motet.routing.candidate import Work
from motet.routing.load import WorkerLoad
from motet.routing.prefix_index import PrefixIndex
from motet.types import Role

logger = logging.getLogger(__name__)

REFUSAL_S = 0.5
"""A worker that took no more is passed over for so long."""


class Evictable(Protocol):
    """A group that can be told to go elsewhere."""

    async def evict(self, error: MotetError) -> None: ...


class Member:
    """One worker of a fleet, from when it was first heard of."""

    def __init__(self, id: str, address: str, role: Role | None, *, clock: Callable[[], float]) -> None:
        self.id = id
        self.address = address
        self.role = role
        self.state = WorkerState.STARTING
        self.worker: Worker | None = None
        self.books = WorkerLoad(clock=clock)
        self.foreign_choices = 0
        """Open choices that others gave it, as it told last; 0 for a worker that is ours alone."""
        self.groups: set[Evictable] = set()
        """Those it is writing."""
        self.last_decision: str | None = None
        self.note = ""
        """Why it is in its state."""
        self.given_up = False
        """Whether nobody expects it back."""
        self._clock = clock
        self._refused_until_s = clock()

    @property
    def open_choices(self) -> int:
        """Being written there or to be written, whoever wants them."""
        return self.books.open_choices + self.foreign_choices

    def reported(self, choices: int) -> None:
        """It says that so many are open there."""
        self.foreign_choices = max(0, choices - self.books.open_choices)

    @property
    def refused(self) -> bool:
        """Whether it took no more a moment ago."""
        return self._clock() < self._refused_until_s

    def refuse(self) -> None:
        self._refused_until_s = self._clock() + REFUSAL_S

    def returned(self, worker: Worker) -> None:
        """It is there, for the first time or again."""
        self.books = WorkerLoad(clock=self._clock)
        self.groups = set()
        self.given_up = False
        self.foreign_choices = 0
        self.worker = worker
        self.role = worker.engine.info.role
        self.address = worker.address
        self._refused_until_s = self._clock()

    def report(self) -> WorkerReport:
        return WorkerReport(
            id=self.id,
            address=self.address,
            state=self.state,
            role=self.role,
            worker=self.worker,
            last_decision=self.last_decision,
            note=self.note or None,
        )


class Waiters:
    """Those who wait for something to happen next."""

    def __init__(self) -> None:
        self._futures: list[asyncio.Future[None]] = []

    @property
    def count(self) -> int:
        return sum(not future.done() for future in self._futures)

    def wait(self) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures = [other for other in self._futures if not other.done()]
        self._futures.append(future)
        return future

    def wake(self) -> None:
        futures, self._futures = self._futures, []
        for future in futures:
            if not future.done():
                future.set_result(None)


class Fleet:
    """Members by id, in the order in which they joined."""

    def __init__(
        self,
        workers: Iterable[Worker] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        session_expiry_s: float = SESSION_TTL_S,
    ) -> None:
        self.index = PrefixIndex()
        """Prompt blocks of the members, as far as they are told of."""
        self.sessions = Affinity(clock=clock, ttl_s=session_expiry_s)
        self._clock = clock
        self._members: dict[str, Member] = {}
        self._waiters = Waiters()
        self._room_waiters = Waiters()
        for worker in workers:
            self.put(worker)

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(self._members.values())

    def reports(self) -> list[WorkerReport]:
        return [member.report() for member in self._members.values()]

    def get(self, id: str) -> Member | None:
        return self._members.get(id)

    def ready(self, work: Work) -> list[Member]:
        """Those that may get such work now. Prefill workers generate only where there is nobody else who could."""
        members = [member for member in self._members.values() if member.state is WorkerState.READY]
        if work is Work.PREFILL:
            return [member for member in members if member.role is Role.PREFILL]
        if self.has_decode:
            return [member for member in members if member.role is not Role.PREFILL]
        return members

    @property
    def has_decode(self) -> bool:
        """Whether a worker that decodes has been heard of, up or not."""
        return any(member.role in (Role.DECODE, Role.BOTH) for member in self._members.values())

    @property
    def has_prefill(self) -> bool:
        """Whether prefill and decode are apart: workers of both kinds have been heard of, up or not."""
        return self.has_decode and any(member.role is Role.PREFILL for member in self._members.values())

    @property
    def hopeful(self) -> bool:
        """Whether a worker that could generate is there or may come back."""
        everybody = not self.has_decode
        return any(
            not member.given_up for member in self._members.values() if everybody or member.role is not Role.PREFILL
        )

    def give_up(self, id: str) -> None:
        """It will not come back."""
        if member := self._members.get(id):
            member.given_up = True
            self.notify()

    def expect(self, id: str, address: str, role: Role | None = None) -> Member:
        """Names a worker that is yet to come."""
        if id not in self._members:
            self._members[id] = Member(id, address, role, clock=self._clock)
        return self._members[id]

    def put(self, worker: Worker) -> Member:
        """A worker is ready: a new one, or one that has come back with another engine."""
        member = self.expect(worker.id, worker.address)
        self._forget(worker.id)
        member.returned(worker)
        self.mark(worker.id, WorkerState.READY)
        self.notify()  # also of one that was ready, and nobody had noticed that it was gone
        return member

    def mark(self, id: str, state: WorkerState, why: str = "") -> None:
        """Unknown ids are ignored: the worker has been removed meanwhile."""
        member = self._members.get(id)
        if member is None or (member.state, member.note) == (state, why):
            return
        because = f": {why}" if why else ""
        if member.state is state:
            logger.info("%s is still %s%s", id, state, because)
        else:
            level = logging.INFO if state in (*ANSWERING, WorkerState.STARTING) else logging.ERROR
            logger.log(level, "%s is %s, was %s%s", id, state, member.state, because)
        member.state, member.note = state, why
        self.notify()

    def remove(self, id: str) -> None:
        """It is not known any more; its groups, if any, are to be evicted before."""
        if self._members.pop(id, None) is not None:
            self._forget(id)
            logger.info("%s has left", id)
            self.notify()

    async def evict(self, id: str, error: MotetError) -> None:
        """Its groups end with `error`, which says whether they may go on elsewhere."""
        if member := self._members.get(id):
            await asyncio.gather(*(group.evict(error) for group in list(member.groups)))

    def _forget(self, id: str) -> None:
        """What it had cached is gone, or tells of itself anew."""
        self.index.cleared(id)
        self.sessions.forget_worker(id)

    def notify(self) -> None:
        """Something changed: a member, or one group less is on one."""
        self._waiters.wake()
        self.notify_room()

    def notify_room(self) -> None:
        """There may be a place for whoever waits for one: a choice has ended, say."""
        self._room_waiters.wake()

    def changed(self) -> asyncio.Future[None]:
        """Done at the next change after this call; to be cancelled by who does not wait for it."""
        return self._waiters.wait()

    def room(self) -> asyncio.Future[None]:
        """The same, and done too when a place may have come free."""
        return self._room_waiters.wait()

    def check(self) -> None:
        """Raises unless every group has ended and the books are empty."""
        for member in self._members.values():
            member.books.check()
            if member.groups:
                raise AssertionError(f"{member.id}: {len(member.groups)} groups left")
        if waiting := self._waiters.count + self._room_waiters.count:
            raise AssertionError(f"{waiting} wait for the fleet to change")

"""The workers there are, as they join, leave, die and return: what routing chooses from and `/status` tells.

Who changes what: a keeper (`deploy`) says when a worker is there and what state it is in; `Routed` says that one died
when it finds out first. A worker that returns, with its process started again or its connection mended, keeps its id
and begins new books: groups of its former life still close the old ones.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from motet.engines.base import ANSWERING, Worker, WorkerReport, WorkerState
from motet.errors import MotetError
from motet.ids import ModelName
from motet.routing.affinity import SESSION_TTL_S, Affinity
from motet.routing.candidate import Work
from motet.routing.catalog import Catalog
from motet.routing.member import Member
from motet.routing.prefix_index import PrefixIndex
from motet.routing.serving import Serving
from motet.routing.waiters import Waiters
from motet.types import ModelCard, Role

__all__ = ["Fleet", "Member"]

logger = logging.getLogger(__name__)


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
        self._catalog = Catalog(self._members)
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

    def serving(self, model: str = "") -> Serving:
        """Who serves the model now; without a name, any."""
        return self._catalog.serving(model)

    def ready(self, work: Work, model: str = "") -> tuple[Member, ...]:
        """Those that may get such work now. Prefill workers generate only where there is nobody else who could."""
        return self.serving(model).ready(work)

    def has_prefill(self, model: str = "") -> bool:
        """Whether prefill and decode are apart: workers of both kinds have been heard of, up or not."""
        return self.serving(model).has_prefill

    def hopeful(self, model: str = "") -> bool:
        """Whether a worker that could generate is there or may come back."""
        return self.serving(model).hopeful

    def texts(self, model: str) -> list[Member]:
        """Those that take texts and may get one for this model now."""
        ready = (member for member in self._members.values() if member.state is WorkerState.READY)
        return [member for member in ready if member.text and member.has(model)]

    def models(self) -> Mapping[ModelName, ModelCard]:
        """What its members serve, or served when they were last there, in order of arrival; the same object until a
        member changes."""
        return self._catalog.models

    def only_text(self, model: str) -> bool:
        """Whether none but members that take texts serve it."""
        having = [member for member in self._members.values() if model and member.has(model)]
        return bool(having) and all(member.text for member in having)

    def base_of(self, model: str) -> ModelName | None:
        """The own model of the engine that serves it, under its own or another name, or as an adapter; None: none has
        been met."""
        for member in self._members.values():
            if member.worker is not None and model and member.has(model):
                return member.worker.engine.info.model
        return None

    def adapter(self, model: ModelName) -> str:
        """Under which name blocks of this model's KV are known beside those of its base model; empty if it has none."""
        card = self._catalog.models.get(model) if model else None
        return model if card is not None and card.parent is not None else ""

    def maker(self, engine_id: str) -> Member | None:
        """Of tickets that name this start of an engine; None: it is no member, or not any more."""
        return self._catalog.makers.get(engine_id)

    def give_up(self, id: str) -> None:
        """It will not come back."""
        if member := self._members.get(id):
            member.given_up = True
            self._catalog.changed()
            self.notify()

    def expect(self, id: str, address: str, role: Role | None = None, *, text: bool = False) -> Member:
        """Names a worker that is yet to come. `text`: it takes texts, not tokens."""
        if id not in self._members:
            self._members[id] = Member(id, address, role, text=text, clock=self._clock)
            self._catalog.changed()
        return self._members[id]

    def put(self, worker: Worker) -> Member:
        """A worker is ready: a new one, or one that has come back with another engine."""
        return self._returned(self.expect(worker.id, worker.address), worker)

    def put_text(self, id: str, cards: Sequence[ModelCard]) -> Member | None:
        """One that takes texts, and was expected, is ready, for the first time or again, and serves these models.
        None: it has been removed meanwhile."""
        member = self._members.get(id)
        if member is None:
            return None
        member.offers(cards)
        return self._returned(member, None)

    def offer(self, id: str, cards: Sequence[ModelCard]) -> None:
        """What it serves beside its engine's own model, from now on; told before it is put, it is ready with it.
        Unknown ids are ignored."""
        member = self._members.get(id)
        if member is not None and member.models != tuple(cards):
            member.offers(cards)
            self._catalog.changed()
            self.notify()

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
        self._catalog.changed()
        self.notify()

    def remove(self, id: str) -> None:
        """It is not known any more; its groups, if any, are to be evicted before."""
        if self._members.pop(id, None) is not None:
            self._forget(id)
            self._catalog.changed()
            logger.info("%s has left", id)
            self.notify()

    async def evict(self, id: str, error: MotetError) -> None:
        """Its groups end with `error`, which says whether they may go on elsewhere."""
        if member := self._members.get(id):
            await asyncio.gather(*(group.evict(error) for group in list(member.groups)))

    def _returned(self, member: Member, worker: Worker | None) -> Member:
        self._forget(member.id)
        member.returned(worker)
        self._catalog.changed()
        self.mark(member.id, WorkerState.READY)
        self.notify()  # also of one that was ready, and nobody had noticed that it was gone
        return member

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

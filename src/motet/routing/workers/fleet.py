"""The workers of a router, as they join, leave, die and return: routing chooses from them, and `/status` shows them.

Who changes what: a keeper (`deploy`) reports when a worker is there and in what state; the `Dispatcher` reports a death
if it notices first. A worker that returns, with a new process or a new connection, keeps its id and begins new books;
groups of its former life still close the old ones.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from motet.block_names import BlockName, LastPrompt
from motet.engine import ANSWERING, Worker, WorkerReport, WorkerState
from motet.errors import EngineSilentError, MotetError
from motet.ids import ModelName
from motet.routing.choosing.cost import WorkKind
from motet.routing.workers.affinity import SESSION_TTL_S, Affinity
from motet.routing.workers.member import Member, WorkerLoad
from motet.routing.workers.prefix_index import PrefixIndex
from motet.routing.workers.serving import ModelServing, serving
from motet.types import ModelCard, Role

logger = logging.getLogger(__name__)


MOST_RENEWALS = 1000
"""Number of weights, given up one after the other, that a group may have begun with."""


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
        """The prompt blocks that the members have cached, as far as they publish it."""
        self.open_blocks = PrefixIndex()
        """The prompt blocks of open groups, from the moment when the first group is given to a member: long before they
        are computed and published."""
        self.last_prompt = LastPrompt()
        self.sessions = {work: Affinity(clock=clock, ttl_s=session_expiry_s) for work in WorkKind}
        """The worker that last did each kind of work for a session."""
        self._renewed: dict[str, str] = {}
        """For each `model_digest` of weights that all members gave up: that of the next ones."""
        self._clock = clock
        self._members: dict[str, Member] = {}
        self._serving: dict[str, ModelServing] = {}
        """By model; like `_makers` and `_models` it is kept until a member changes."""
        self._makers: dict[str, Member] | None = None
        self._models: dict[ModelName, ModelCard] = {}
        self._models_true = True
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

    def serving(self, model: str = "") -> ModelServing:
        """Returns the workers that serve the model now; without a name, those of all models."""
        found = self._serving.get(model)
        if found is None:
            found = serving(self._members.values(), model)
            if not model or model in self.models():  # names that clients invent are not kept
                self._serving[model] = found
        return found

    def ready(self, work: WorkKind, model: str = "") -> tuple[Member, ...]:
        """Returns the workers that may get such work now. Prefill workers decode only if nobody else can."""
        return self.serving(model).ready(work)

    def texts(self, model: str) -> list[Member]:
        """Returns the members that take texts and may get a request for this model now."""
        members = self._members.values()
        return [one for one in members if one.text and one.state is WorkerState.READY and one.has(model)]

    def models(self) -> Mapping[ModelName, ModelCard]:
        """Returns the models that its members serve, or served when they were last there, in order of arrival, each
        with the first member's card. It is the same object until a member changes."""
        if not self._models_true:
            served: dict[ModelName, ModelCard] = {}
            for member in self._members.values():
                for card in member.cards:
                    served.setdefault(card.name, card)
            arrived = [name for name in self._models if name in served]
            self._models = {name: served[name] for name in dict.fromkeys((*arrived, *served))}
            self._models_true = True
        return self._models

    def only_text(self, model: str) -> bool:
        """Returns True if only members that take texts serve the model."""
        having = [member for member in self._members.values() if model and member.has(model)]
        return bool(having) and all(member.text for member in having)

    def base_of(self, model: str) -> ModelName | None:
        """Returns the base model of the engine that serves this model under another name, or as an adapter."""
        for member in self._members.values():
            if member.worker is not None and model and member.has(model):
                return member.worker.engine.info.model
        return None

    def adapter(self, model: ModelName) -> str:
        """Returns the name that tells KV blocks of this model from those of its base model; empty if it has none."""
        card = self.models().get(model) if model else None
        return model if card is not None and card.parent is not None else ""

    def maker(self, engine_id: str) -> Member | None:
        """Returns the maker of tickets that name this start of an engine; None if it is no member (any more)."""
        if self._makers is None:
            made = ((member.engine_id, member) for member in self._members.values())
            self._makers = {id: member for id, member in made if id is not None}
        return self._makers.get(engine_id)

    def give_up(self, id: str) -> None:
        """Notes that the worker is not expected to come back."""
        if member := self._members.get(id):
            member.given_up = True
            self._note_change()

    def renewed(self, old: str, new: str) -> None:
        """Notes that all members that had the old weights have new ones: groups that began with those go on with these.
        `old`, `new`: their `model_digest`."""
        if old != new:
            self._renewed.pop(new, None)
            self._renewed = {digest: new if last == old else last for digest, last in self._renewed.items()}
            self._renewed[old] = new
            while len(self._renewed) > MOST_RENEWALS:
                self._renewed.pop(next(iter(self._renewed)))
        for member in self._members.values():
            if member.worker is not None:
                member.note_facts(member.worker.engine.info)
        self._note_change()

    def note_weights(self, id: str) -> None:
        """Notes that one worker elsewhere has new weights: its groups go on with these, and only there or at workers
        that have the same ones."""
        member = self._members.get(id)
        if member is None or member.worker is None:
            return
        member.note_facts(info := member.worker.engine.info)
        for group in member.groups:
            group.renewed(info.model_digest)
        logger.warning("%s has new weights, version %s", id, info.weight_version)
        self._note_change()

    def hold(self, member: Member, trunk: Sequence[BlockName]) -> None:
        """Books the blocks of the prompt of a group that the member gets."""
        self.open_blocks.stored(member.id, member.books.hold(trunk))

    def let_go(self, member: Member, trunk: Sequence[BlockName], *, books: WorkerLoad) -> None:
        """Undoes `hold`. `books`: those of the member in which the group stands; it may have begun new ones since."""
        gone = books.let_go(trunk)
        if books is member.books and self._members.get(member.id) is member:
            self.open_blocks.removed(member.id, gone)

    def present(self, digest: str) -> str:
        """Returns the `model_digest` of the weights with which a group goes on that began with these."""
        return self._renewed.get(digest, digest)

    def expect(self, id: str, address: str, *, role: Role | None = None, text: bool = False) -> Member:
        """Adds a worker that has not come yet. `text`: it takes texts, not tokens."""
        if id not in self._members:
            self._members[id] = Member(id, address, role=role, text=text, clock=self._clock)
            self._note_change()
        return self._members[id]

    def put(self, worker: Worker) -> Member:
        """Adds a worker that is ready: a new one, or one that has come back with another engine."""
        return self._returned(self.expect(worker.id, worker.address), worker)

    def put_text(self, id: str, cards: Sequence[ModelCard]) -> Member | None:
        """Notes that an expected worker that takes texts is ready, and serves these models. Returns None if it has been
        removed meanwhile."""
        member = self._members.get(id)
        if member is None:
            return None
        member.offers(cards)
        return self._returned(member, None)

    def offer(self, id: str, cards: Sequence[ModelCard]) -> None:
        """Notes the models that the worker serves from now on, beside its engine's own. Unknown ids are ignored."""
        member = self._members.get(id)
        if member is not None and member.models != tuple(cards):
            member.offers(cards)
            self._note_change()

    def mark(self, id: str, state: WorkerState, *, why: str = "") -> None:
        """Notes the state of a worker. Unknown ids are ignored: the worker has been removed meanwhile."""
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
        member.deaths += state is WorkerState.DEAD
        self._note_change()

    def distrust(self, id: str, *, why: str) -> None:
        """Leaves a worker alone for a while, since what it sent cannot be right. Unknown ids are ignored."""
        if (member := self._members.get(id)) is not None and not member.distrusted:
            member.distrust()
            self.mark(id, WorkerState.DEAD, why=why)

    def remove(self, id: str) -> None:
        """Forgets a worker; its groups, if any, must be evicted before."""
        if self._members.pop(id, None) is not None:
            self._forget(id)
            logger.info("%s has left", id)
            self._note_change()

    async def evict(self, id: str, error: MotetError) -> None:
        """Ends the groups of a worker with `error`, which says whether they may go on elsewhere."""
        if member := self._members.get(id):
            await asyncio.gather(*(group.evict(error) for group in list(member.groups)))

    async def end_silences(self, id: str, error: EngineSilentError, *, looks: int) -> None:
        """Called at each look at a worker. Ends the groups of which it has sent nothing for `looks` looks in a row, and
        leaves it alone for a while if it sends nothing of any other either."""
        if (member := self._members.get(id)) is None:
            return
        silent = {group: group.look() for group in member.groups}
        late = [group for group, count in silent.items() if count >= looks]
        if late and all(silent.values()):
            self.distrust(id, why=error.message)
        await asyncio.gather(*(group.evict(error) for group in late))

    def _returned(self, member: Member, worker: Worker | None) -> Member:
        self._forget(member.id)
        member.returned(worker)
        self.mark(member.id, WorkerState.READY)
        self._note_change()  # also if it was ready, since nobody had noticed that it was gone
        return member

    def _forget(self, id: str) -> None:
        """Forgets what the worker had cached: it is gone, or the worker publishes it again."""
        self.index.cleared(id)
        self.open_blocks.cleared(id)
        for sessions in self.sessions.values():
            sessions.forget_worker(id)

    def _note_change(self) -> None:
        """A member has come, gone or changed: who serves what is worked out again."""
        self._serving.clear()
        self._makers = None
        self._models_true = False
        self.notify()

    def notify(self) -> None:
        """Wakes all waiting tasks: a member has changed, or a group has left one."""
        self._waiters.wake()
        self.notify_room()

    def notify_room(self) -> None:
        """Wakes the tasks that wait for room: a choice has ended, for instance."""
        self._room_waiters.wake()

    def changed(self) -> asyncio.Future[None]:
        """Returns a future that is done at the next change. A caller that stops waiting cancels it."""
        return self._waiters.wait()

    def room(self) -> asyncio.Future[None]:
        """Returns a future that is done at the next change, or when there may be room."""
        return self._room_waiters.wait()

    def check(self) -> None:
        """Raises AssertionError unless every group has ended and the books are empty."""
        for member in self._members.values():
            member.books.check()
            if member.groups:
                raise AssertionError(f"{member.id}: {len(member.groups)} groups left")
        if waiting := self._waiters.count + self._room_waiters.count:
            raise AssertionError(f"{waiting} wait for the fleet to change")


class Waiters:
    """The futures of tasks that wait for the same thing; all are done at once."""

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

"""The workers of a router as they join, leave, die and return: routing chooses from them, and `/status` shows them.

The keeper of a worker (in `deploy`) reports the worker's state. If a group finds a worker dead before the keeper does,
`WorkerChooser` reports it. A worker that returns, with a new process or a new connection, keeps its id and gets an
empty load; the groups of its last start are removed from the load of that start."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from motet.block_names import LastPrompt
from motet.engine import ANSWERING, Worker, WorkerReport, WorkerState
from motet.engine_info import AdapterInfo, EngineInfo, EngineKind, ModelCard, adapted
from motet.errors import EngineSilentError, MotetError
from motet.routing.workers.affinity import SESSION_TTL_S, Affinity
from motet.routing.workers.client_holdings import ClientTotal
from motet.routing.workers.member import Member, WorkerFaults
from motet.routing.workers.open_groups import OpenGroups, Waiters
from motet.routing.workers.prefix_index import PrefixIndex
from motet.routing.workers.serving import Catalog, WorkKind
from motet.routing.workers.worker_facts import WorkerFacts
from motet.routing.workers.worker_load import WorkerLoad
from motet.types import Role

logger = logging.getLogger(__name__)

MAX_REPLACED = 1000
"""Maximum number of replaced weights that are recorded. Groups with older weights cannot continue."""


class Fleet:
    """Members by id, in the order in which they joined."""

    def __init__(
        self,
        workers: Iterable[Worker] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        session_expiry_s: float = SESSION_TTL_S,
    ) -> None:
        self._members: dict[str, Member] = {}
        self.catalog = Catalog(self._members)
        self.cached_blocks = PrefixIndex()
        """The prompt blocks that members have cached, according to the events that they publish."""
        self.open_blocks = PrefixIndex()
        """The prompt blocks of open groups: known as soon as a member gets a group, long before an event."""
        self.last_prompt = LastPrompt()
        self.sessions = {work: Affinity(clock=clock, ttl_s=session_expiry_s) for work in WorkKind}
        """The worker that last did each kind of work for a session."""
        self.successors = WeightSuccessors()
        self.client_totals: dict[str, ClientTotal] = {}
        """What each client with open groups holds on all members."""
        self.waiting_weights: Mapping[str, Mapping[str, float]] = {}
        """The weights of the clients whose groups wait for capacity, by model and client. Set by the router's queue."""
        self.capacity = Waiters()
        """Tasks that wait for capacity. They are also woken at each change."""
        self.changes = Waiters(also=self.capacity)
        """Tasks that wait for a change of a member or of its open groups."""
        self._clock = clock
        for worker in workers:
            self.put(worker)

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(self._members.values())

    def reports(self) -> list[WorkerReport]:
        return [member.report() for member in self._members.values()]

    def get(self, id: str) -> Member | None:
        return self._members.get(id)

    def expect(self, id: str, address: str, *, role: Role | None = None, takes_texts: bool = False) -> Member:
        """Adds a worker that has not been reached yet. `takes_texts`: True if it takes texts instead of tokens."""
        if id not in self._members:
            self._members[id] = Member(
                id,
                address,
                facts=WorkerFacts(role=role, kind=EngineKind.OPENAI if takes_texts else None),
                load=WorkerLoad(id, self.open_blocks, client_totals=self.client_totals, clock=self._clock),
                groups=OpenGroups(changes=self.changes, capacity=self.capacity),
                faults=WorkerFaults(clock=self._clock),
            )
            self._record_change()
        return self._members[id]

    def put(self, worker: Worker) -> Member:
        """Adds a worker that is ready: a new worker, or one that has returned with another engine."""
        return self._returned(self.expect(worker.id, worker.address), worker)

    def put_text(self, id: str, cards: Sequence[ModelCard]) -> Member | None:
        """Records that an expected worker that takes texts is ready with these models; None if it was removed."""
        if (member := self._members.get(id)) is None:
            return None
        member.set_models(cards)
        return self._returned(member, None)

    def set_models(self, id: str, cards: Sequence[ModelCard]) -> None:
        """Records the models that the worker serves in addition to its engine's own model. Ignores unknown ids."""
        member = self._members.get(id)
        if member is not None and member.models.additional != tuple(cards):
            member.set_models(cards)
            self._record_change()

    def mark(self, id: str, state: WorkerState, *, why: str = "", expected: bool = False) -> None:
        """Records the state of a worker. Ignores unknown ids, whose workers have been removed. `expected`: this server
        ended the worker, so the end is not logged as an error. The end of a draining worker is not an error either."""
        member = self._members.get(id)
        if member is None or (member.state, member.note) == (state, why):
            return
        because = f": {why}" if why else ""
        if member.state is state:
            logger.info("%s is still %s%s", id, state, because)
        else:
            is_loss = state not in (*ANSWERING, WorkerState.STARTING) and member.state is not WorkerState.DRAINING
            level = logging.ERROR if is_loss and not expected else logging.INFO
            logger.log(level, "%s is %s, was %s%s", id, state, member.state, because)
        member.state, member.note = state, why
        member.faults.deaths += state is WorkerState.DEAD
        self._record_change()

    def distrust(self, id: str, *, why: str) -> None:
        """Gives a worker that sent invalid data no groups for some time. Ignores unknown ids."""
        if (member := self._members.get(id)) is not None and not member.faults.distrusted:
            member.faults.distrust()
            self.mark(id, WorkerState.DEAD, why=why)

    def give_up(self, id: str) -> None:
        """Records that the worker is not expected to return. Ignores unknown ids."""
        if member := self._members.get(id):
            member.given_up = True
            self._record_change()

    def remove(self, id: str) -> None:
        """Removes a worker, whose groups have been evicted."""
        if (member := self._members.pop(id, None)) is not None:
            member.load.retire()
            self._forget_cache(id)
            logger.info("%s has left", id)
            self._record_change()

    def refresh_facts(self) -> None:
        """Reads the facts about all engines again, after engines of this server have new weights or adapters."""
        for member in self._members.values():
            if member.worker is not None:
                member.refresh_facts()
        self._record_change()

    def record_worker_weights(self, id: str) -> None:
        """Records new weights or adapters of a worker on another server. Its groups continue with them, there or
        elsewhere."""
        member = self._members.get(id)
        if member is None or member.worker is None:
            return
        info, known = member.worker.engine.info, member.facts.pair_key
        member.refresh_facts()
        for group in member.groups:
            group.use_weights(info)
        if known != member.facts.pair_key:
            logger.warning("%s has new weights, version %s", id, info.weight_version)
        self._record_change()

    async def evict(self, id: str, error: MotetError) -> None:
        """Ends the groups of a worker with `error`, which determines if they can continue on another worker."""
        if member := self._members.get(id):
            await asyncio.gather(*(group.evict(error) for group in list(member.groups)))

    async def end_silences(self, id: str, error: EngineSilentError, *, polls: int) -> None:
        """Called at each poll of a worker. Ends the groups whose readers have received nothing from it for this number
        of polls in a row. If no other group received anything either, the worker gets no groups for some time."""
        if member := self._members.get(id):
            silent = {group: group.poll() for group in member.groups}
            late = [group for group, count in silent.items() if count >= polls]
            if late and all(silent.values()):
                self.distrust(id, why=error.message)
            await asyncio.gather(*(group.evict(error) for group in late))

    def check(self) -> None:
        """Raises AssertionError unless every group has ended and no task waits."""
        for member in self._members.values():
            member.load.check()
            if member.groups:
                raise AssertionError(f"{member.id}: {len(member.groups)} groups left")
        if self.client_totals:
            raise AssertionError(f"clients are left: {self.client_totals}")
        if waiting := self.changes.count + self.capacity.count:
            raise AssertionError(f"{waiting} tasks still wait for a change of the fleet")

    def _returned(self, member: Member, worker: Worker | None) -> Member:
        self._forget_cache(member.id)
        member.returned(worker)
        self.mark(member.id, WorkerState.READY)
        self._record_change()  # even if it was ready, because its absence was not noticed
        return member

    def _forget_cache(self, id: str) -> None:
        """Forgets the worker's cached blocks, which are gone or will be published again, and its sessions."""
        self.cached_blocks.cleared(id)
        for sessions in self.sessions.values():
            sessions.forget_worker(id)

    def _record_change(self) -> None:
        self.catalog.invalidate()
        self.changes.wake()


class WeightSuccessors:
    """Digests of weights (`weights_of`) that no worker has any more, with the weights that replaced them."""

    def __init__(self) -> None:
        self._present: dict[str, str] = {}
        """Digest of the current weights, by the digest of the weights that they replaced."""

    def replace_weights(self, old: str, new: str, *, infos: Iterable[EngineInfo]) -> None:
        """Records that all workers with the old weights have the new weights now, so that groups which started with the
        old weights continue with the new ones. `old`, `new`: `EngineInfo.model_digest`. `infos`: the engines."""
        self.replace(old, new)
        for adapter in {adapter for info in infos for adapter in info.adapters}:
            self.replace(adapted(old, adapter), adapted(new, adapter))

    def replace_adapter(self, old: AdapterInfo, new: AdapterInfo, *, infos: Iterable[EngineInfo]) -> None:
        """Records that all workers with the adapter `old` have `new` under the same name now, with which its groups
        continue. `infos`: the engines."""
        for digest in {info.model_digest for info in infos}:
            self.replace(adapted(digest, old), adapted(digest, new))

    def replace(self, old: str, new: str) -> None:
        if old == new:
            return
        self._present.pop(new, None)
        self._present = {digest: new if last == old else last for digest, last in self._present.items()}
        self._present[old] = new
        while len(self._present) > MAX_REPLACED:
            self._present.pop(next(iter(self._present)))

    def present(self, digest: str) -> str:
        """Returns the digest of the weights with which a group of the weights `digest` continues."""
        return self._present.get(digest, digest)

"""The simulation of routing: groups arrive, the product's own code chooses a worker, and fake workers do the work."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from statistics import fmean, pstdev

from bench.router.simulated_worker import BLOCK_SIZE, Cache, Engine, FakeWorker, Group
from motet.routing.choosing.choose import choose
from motet.routing.choosing.cost import WEIGHTS, Candidate, CostWeights, GroupNeeds, WorkKind, has_room
from motet.routing.choosing.survey import shortlist
from motet.routing.queue.fair_queue import FairQueue
from motet.routing.workers.affinity import Affinity
from motet.routing.workers.prefix_index import PrefixIndex
from motet.types import Policy

LOOKS = 100
"""How often the workers' loads are compared in a run."""
WARM_UP = 0.25
"""Share of the groups, the first ones, that figures leave out."""


@dataclass(frozen=True)
class Rules:
    """The rules of a run."""

    policy: Policy = Policy.KV
    weights: CostWeights = WEIGHTS
    group_is_one: bool = False
    """True if a group counts as one choice, like in a gateway whose unit is the request."""
    short: bool = True
    """True if in a large fleet only a shortlist is compared."""
    sessions: bool = True
    queue: FairQueue[Group] | None = None
    """The queue of groups that have no room anywhere; None if they wait in the engine of the chosen worker."""


@dataclass(slots=True)
class _Books:
    """What the router knows of a worker from the groups that it gave to it and their progress."""

    groups: int = 0
    choices: int = 0
    queued_tokens: int = 0
    trunk_blocks: int = 0


@dataclass(frozen=True)
class Outcome:
    """The groups after the warm-up, with their times."""

    groups: Sequence[Group]
    unlike: float
    """Standard deviation of workers' open choices over their mean, averaged over time."""
    seconds: float
    """Time from the first arrival of these groups to the last end."""


class Run:
    """One simulation, from the first arrival until everything has ended."""

    def __init__(self, groups: Sequence[Group], *, workers: int, engine: Engine, rules: Rules) -> None:
        self._groups = groups
        self._rules = rules
        self._engine = engine
        self._index = PrefixIndex()
        self._now_s = 0.0
        self._affinity = Affinity(clock=lambda: self._now_s)
        self._workers = {f"w{number}": self._worker(f"w{number}") for number in range(workers)}
        self._ids = list(self._workers)
        self._books = {id: _Books() for id in self._ids}
        self._changes: list[tuple[float, int, FakeWorker]] = []
        self._turn = 0
        self._unlike: list[float] = []

    def run(self) -> Outcome:
        warm = int(len(self._groups) * WARM_UP)
        look_every = max(1, (len(self._groups) - warm) // LOOKS)
        for number, group in enumerate(self._groups):
            self._work_until(group.arrival_s)
            self._now_s = group.arrival_s
            self._take(group)
            if number >= warm and number % look_every == 0:
                self._look()
        self._work_until(float("inf"))
        counted = self._groups[warm:]
        return Outcome(counted, fmean(self._unlike), self._now_s - counted[0].arrival_s)

    def _worker(self, id: str) -> FakeWorker:
        stored, removed = partial(self._index.stored, id), partial(self._index.removed, id)
        cache = Cache(self._engine.num_blocks, stored=stored, removed=removed)
        return FakeWorker(id, self._engine, cache, self._changed)

    def _work_until(self, end_s: float) -> None:
        while self._changes and self._changes[0][0] <= end_s:
            at_s, version, worker = heappop(self._changes)
            if version == worker.version:
                self._now_s = at_s
                worker.change(at_s)
                self._schedule(worker)
                self._serve_queue()

    def _schedule(self, worker: FakeWorker) -> None:
        at_s = worker.next_change_s()
        if at_s is not None:
            heappush(self._changes, (at_s, worker.version, worker))

    def _take(self, group: Group) -> None:
        if self._rules.queue is None:
            self._route(group)
        else:
            self._rules.queue.push(group, choices=group.choices, priority=0, now_s=self._now_s)
            self._serve_queue()

    def _serve_queue(self) -> None:
        queue = self._rules.queue
        while queue and (group := queue.pop(self._fits, self._now_s)) is not None:
            self._route(group)

    def _fits(self, group: Group) -> bool:
        wanted = self._wanted(group)
        return any(has_room(self._candidate(id, 0, False), wanted) for id in self._ids)

    def _route(self, group: Group) -> None:
        overlap = self._index.overlap(group.names)
        session = group.session if self._rules.sessions else None
        home = self._affinity.worker_of(session) if session else None
        ids: Sequence[str] = self._ids
        if self._rules.short:
            ids = shortlist(ids, [overlap], session=home, able=self._books, turn=self._turn)
        candidates = [self._candidate(id, overlap.get(id, 0), id == home) for id in ids]
        decision = choose(
            candidates, self._wanted(group), policy=self._rules.policy, turn=self._turn, weights=self._rules.weights
        )
        if decision is None:
            raise AssertionError("there are always workers")
        self._turn += 1
        self._give(group, ids[decision.place], candidates[decision.place].cached_tokens)

    def _give(self, group: Group, id: str, cached_tokens: int) -> None:
        books = self._books[id]
        group.thought_uncached = max(0, group.prompt_tokens - cached_tokens)
        books.groups += 1
        books.choices += group.choices
        books.queued_tokens += group.thought_uncached
        books.trunk_blocks += group.prompt_blocks
        if group.session:
            self._affinity.keep(group.session, id)
        worker = self._workers[id]
        worker.submit(group, self._now_s)
        self._schedule(worker)

    def _changed(self, worker: FakeWorker, group: Group) -> None:
        """Updates the worker's books: the group's prompt has been computed, or one of its choices has ended."""
        books = self._books[worker.id]
        if group.thought_uncached:
            books.queued_tokens -= group.thought_uncached
            group.thought_uncached = 0
        if group.open < group.choices:
            books.choices -= 1
        if not group.open:
            books.groups -= 1
            books.trunk_blocks -= group.prompt_blocks

    def _candidate(self, id: str, cached_blocks: int, has_session: bool) -> Candidate:
        books, tails = self._books[id], int(self._workers[id].tail_blocks)
        choices = books.choices
        if self._rules.group_is_one:
            tails = tails * books.groups // max(1, choices)
            choices = books.groups
        return Candidate(
            id=id,
            cached_tokens=cached_blocks * BLOCK_SIZE,
            queued_tokens=books.queued_tokens,
            open_choices=choices,
            trunk_blocks=books.trunk_blocks,
            tail_blocks=tails,
            max_choices=self._engine.max_choices,
            num_blocks=self._engine.num_blocks,
            block_size=BLOCK_SIZE,
            has_session=has_session,
        )

    def _wanted(self, group: Group) -> GroupNeeds:
        return GroupNeeds(
            work=WorkKind.GENERATE,
            choices=1 if self._rules.group_is_one else group.choices,
            prompt_tokens=group.prompt_tokens,
            needs_prompt=True,
        )

    def _look(self) -> None:
        choices = [books.choices for books in self._books.values()]
        if any(choices):
            self._unlike.append(pstdev(choices) / fmean(choices))

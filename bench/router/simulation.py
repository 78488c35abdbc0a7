"""The simulation of routing: groups arrive, Motet's own code chooses a worker, and simulated workers do the work."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from statistics import fmean, pstdev

from bench.router.simulated_worker import BLOCK_SIZE, EngineTimes, SimulatedCache, SimulatedGroup, SimulatedWorker
from motet.routing.choosing.choose import choose
from motet.routing.choosing.cost import (
    WEIGHTS,
    Candidate,
    CostWeights,
    GroupNeeds,
    has_capacity,
    has_partial_capacity,
)
from motet.routing.choosing.survey import shortlist
from motet.routing.queue.fair_queue import ONE_CLIENT, ClientRules, FairQueue
from motet.routing.workers.affinity import Affinity
from motet.routing.workers.prefix_index import PrefixIndex
from motet.routing.workers.serving import WorkKind
from motet.routing.workers.worker_share import WorkerShare
from motet.settings.server_config import Policy

COMPARISONS = 100
"""Number of comparisons of the workers' loads in a run."""
WARM_UP = 0.25
"""Share of the groups, the first ones, that the figures leave out."""


@dataclass(frozen=True)
class RoutingRules:
    """The rules of a run."""

    policy: Policy = Policy.KV
    weights: CostWeights = WEIGHTS
    group_is_one: bool = False
    """True if a group counts as one choice, as in a gateway whose unit is the request."""
    short: bool = True
    """True if only a shortlist is compared in a large fleet."""
    sessions: bool = True
    queue: FairQueue[SimulatedGroup] | None = None
    """Queue of the groups that fit on no worker. None if groups wait in the engine of the chosen worker."""


@dataclass(slots=True)
class _WorkerLoad:
    """The load of a worker as the router knows it from the groups that it assigned and their progress."""

    groups: int = 0
    choices: int = 0
    queued_tokens: int = 0
    trunk_blocks: int = 0


@dataclass(frozen=True)
class SimulationOutcome:
    """The groups after the warm-up, with their times."""

    groups: Sequence[SimulatedGroup]
    unlike: float
    """Standard deviation of the workers' open choices divided by their mean, averaged over time."""
    seconds: float
    """Time from the arrival of the first of these groups to the last end."""


class RoutingSimulation:
    """One simulation, from the first arrival until everything has ended."""

    def __init__(
        self, groups: Sequence[SimulatedGroup], *, workers: int, engine: EngineTimes, rules: RoutingRules
    ) -> None:
        self._groups = groups
        self._rules = rules
        self._engine = engine
        self._index = PrefixIndex()
        self._now_s = 0.0
        self._affinity = Affinity(clock=lambda: self._now_s)
        self._workers = {f"w{number}": self._worker(f"w{number}") for number in range(workers)}
        self._ids = list(self._workers)
        self._loads = {id: _WorkerLoad() for id in self._ids}
        self._changes: list[tuple[float, int, SimulatedWorker]] = []
        self._turn = 0
        self._unlike: list[float] = []

    def run(self) -> SimulationOutcome:
        warm = int(len(self._groups) * WARM_UP)
        compare_every = max(1, (len(self._groups) - warm) // COMPARISONS)
        for number, group in enumerate(self._groups):
            self._work_until(group.arrival_s)
            self._now_s = group.arrival_s
            self._accept(group)
            if number >= warm and number % compare_every == 0:
                self._compare_loads()
        self._work_until(float("inf"))
        counted = self._groups[warm:]
        return SimulationOutcome(counted, fmean(self._unlike), self._now_s - counted[0].arrival_s)

    def _worker(self, id: str) -> SimulatedWorker:
        stored, removed = partial(self._index.stored, id), partial(self._index.removed, id)
        cache = SimulatedCache(self._engine.num_blocks, stored=stored, removed=removed)
        return SimulatedWorker(id, self._engine, cache, self._changed)

    def _work_until(self, end_s: float) -> None:
        while self._changes and self._changes[0][0] <= end_s:
            at_s, version, worker = heappop(self._changes)
            if version == worker.version:
                self._now_s = at_s
                worker.change(at_s)
                self._schedule(worker)
                self._serve_queue()

    def _schedule(self, worker: SimulatedWorker) -> None:
        at_s = worker.next_change_s()
        if at_s is not None:
            heappush(self._changes, (at_s, worker.version, worker))

    def _accept(self, group: SimulatedGroup) -> None:
        if self._rules.queue is None:
            self._route(group)
        else:
            self._rules.queue.push(group, choices=group.choices, priority=0, now_s=self._now_s)
            self._serve_queue()

    def _serve_queue(self) -> None:
        queue = self._rules.queue
        clients = ClientRules(fits_partially=self._fits_partially) if self._engine.starts_partially else ONE_CLIENT
        while queue and (group := queue.pop(self._fits, self._now_s, clients=clients)) is not None:
            self._route(group)

    def _fits(self, group: SimulatedGroup) -> bool:
        needs = self._needs(group)
        return any(has_capacity(self._candidate(id, 0, False), needs) for id in self._ids)

    def _fits_partially(self, group: SimulatedGroup) -> bool:
        needs = self._needs(group)
        return any(has_partial_capacity(self._candidate(id, 0, False), needs) for id in self._ids)

    def _route(self, group: SimulatedGroup) -> None:
        overlap = self._index.overlap(group.names)
        session = group.session if self._rules.sessions else None
        home = self._affinity.worker_of(session) if session else None
        ids: Sequence[str] = self._ids
        if self._rules.short:
            ids = shortlist(ids, [overlap], session=home, able=self._loads, turn=self._turn)
        candidates = [self._candidate(id, overlap.get(id, 0), id == home) for id in ids]
        decision = choose(
            candidates, self._needs(group), policy=self._rules.policy, turn=self._turn, weights=self._rules.weights
        )
        if decision is None:
            raise AssertionError("no worker was chosen, although there are always workers")
        self._turn += 1
        self._assign(group, ids[decision.index], candidates[decision.index].cached_tokens)

    def _assign(self, group: SimulatedGroup, id: str, cached_tokens: int) -> None:
        load = self._loads[id]
        group.expected_uncached = max(0, group.prompt_tokens - cached_tokens)
        load.groups += 1
        load.choices += group.choices
        load.queued_tokens += group.expected_uncached
        load.trunk_blocks += group.prompt_blocks
        if group.session:
            self._affinity.record(group.session, id)
        worker = self._workers[id]
        worker.submit(group, self._now_s)
        self._schedule(worker)

    def _changed(self, worker: SimulatedWorker, group: SimulatedGroup) -> None:
        """Updates the worker's load: the group's prompt has been computed, or one of its choices has ended."""
        load = self._loads[worker.id]
        if group.expected_uncached:
            load.queued_tokens -= group.expected_uncached
            group.expected_uncached = 0
        if group.open < group.choices:
            load.choices -= 1
        if not group.open:
            load.groups -= 1
            load.trunk_blocks -= group.prompt_blocks

    def _candidate(self, id: str, cached_blocks: int, has_session: bool) -> Candidate:
        load, tails = self._loads[id], int(self._workers[id].tail_blocks)
        choices = load.choices
        if self._rules.group_is_one:
            tails = tails * load.groups // max(1, choices)
            choices = load.groups
        return Candidate(
            id=id,
            cached_tokens=cached_blocks * BLOCK_SIZE,
            queued_tokens=load.queued_tokens,
            open_choices=choices,
            trunk_blocks=load.trunk_blocks,
            tail_blocks=tails,
            max_choices=self._engine.max_choices,
            num_blocks=self._engine.num_blocks,
            block_size=BLOCK_SIZE,
            share=WorkerShare(choices, 0, 1.0, fair=True) if self._engine.starts_partially else None,
            has_session=has_session,
        )

    def _needs(self, group: SimulatedGroup) -> GroupNeeds:
        return GroupNeeds(
            work=WorkKind.GENERATE,
            choices=1 if self._rules.group_is_one else group.choices,
            prompt_tokens=group.prompt_tokens,
            needs_prompt=True,
        )

    def _compare_loads(self) -> None:
        choices = [load.choices for load in self._loads.values()]
        if any(choices):
            self._unlike.append(pstdev(choices) / fmean(choices))

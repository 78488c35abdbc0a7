"""The queue of groups for which no worker has free capacity: for their choices, their trunk, and one tail block of each
choice. They start in a fair order (`fair_queue`), as soon as a worker has the capacity or their client stays within its
share of a worker.

A group waits for workers that have its model, and blocks only groups that need one of the same workers. Workers have
queues too, but a group in a worker's queue waits for that worker only. A group that moves does not wait here.
"""

import asyncio
import logging
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Protocol

from motet.errors import EngineError, OverloadedError
from motet.ids import ModelName
from motet.metrics.routing import QUEUE_S, RoutingFigures
from motet.routing.groups.journey import Journey
from motet.routing.groups.prefiller import Prefiller
from motet.routing.queue.capacity import CapacityCache, ClientCapacity, have_capacity
from motet.routing.queue.fair_queue import ClientRules, FairQueue
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.worker_share import WaitingWeights
from motet.settings.server_config import RoutingConfig
from motet.types import GenerateRequest

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Time in seconds after which the queue is checked again even if no capacity was reported."""
RETRY_AFTER_S = 5


class WaitingGroups:
    """The groups of one router that wait for capacity. A task admits them while any group waits."""

    def __init__(
        self,
        fleet: Fleet,
        figures: RoutingFigures,
        *,
        routing: RoutingConfig,
        prefiller: Prefiller,
        clock: Callable[[], float],
    ) -> None:
        """`prefiller`: knows the admitted groups that are not in any worker's load yet."""
        self._fleet = fleet
        self._figures = figures
        self._routing = routing
        self._prefiller = prefiller
        self._clock = clock
        self._queue: FairQueue[Journey] = FairQueue(max_wait_s=routing.queue_timeout_s)
        fleet.waiting_weights = self._queue.weights
        self._rounds = 0
        self._admitting: asyncio.Task[None] | None = None
        self.paused = False
        """True while no group is admitted."""
        figures.queue_seconds = self._histogram = [0] * (len(QUEUE_S) + 1)

    def __len__(self) -> int:
        return len(self._queue)

    def can_pass(self, request: GenerateRequest) -> bool:
        """Returns True if the group need not wait: there is capacity, and no other group waits for that capacity. A
        group for which no worker is ready passes too, so that it is refused at once."""
        model = request.model
        if not self._fleet.catalog.ready(model):
            return True
        if self.paused or any(lane == model or self._share_workers(lane, model) for lane in self._queue.lanes):
            return False
        return self._has_capacity(len(request.choices), len(request.prompt), model=model)

    def pause(self, paused: bool) -> None:
        """Admits no groups from now on, or admits them again. Groups that arrive during this time wait."""
        self.paused = paused
        self._fleet.capacity.wake()

    def count_admitted(self, wait_s: float) -> None:
        self._histogram[bisect_left(QUEUE_S, wait_s)] += 1
        self._figures.queue_seconds_sum += wait_s

    def push(self, group: Journey) -> None:
        """Puts `group` into the queue, until it has started, failed or been removed."""
        request = group.request
        self._queue.push(
            group,
            choices=len(request.choices),
            priority=request.priority,
            now_s=self._clock(),
            lane=request.model,
            client=request.client,
            weight=request.client_weight,
        )
        if self._admitting is None:
            self._admitting = asyncio.create_task(self._run())
        self._fleet.capacity.wake()  # this group can fit even if the groups before it do not

    def remove(self, group: Journey) -> None:
        self._queue.remove(group)

    async def close(self) -> None:
        if self._admitting is not None:
            self._admitting.cancel()
            await asyncio.wait((self._admitting,))
            self._admitting = None

    def check(self) -> None:
        """Raises AssertionError if a group waits."""
        if self._queue:
            raise AssertionError(f"{len(self._queue)} groups left in the queue")

    async def _run(self) -> None:
        while self._queue:
            try:
                self._admit()
            # A defect, or a worker that reports impossible figures, must not stop the queue forever.
            except Exception as error:
                logger.error("the check for capacity failed", exc_info=error)
                for group in self._queue.expired(float("inf")):
                    group.fail(EngineError("The server could not check its workers for capacity; its log says why."))
            if self._queue:
                await self._fleet.capacity.wait_at_most(POLL_S)
        self._admitting = None

    def _admit(self) -> None:
        """Starts every group that may start now, and fails the groups that have waited too long."""
        now_s = self._clock()
        for late in self._queue.expired(now_s):
            why = f"No worker had capacity for the request within {self._routing.queue_timeout_s:g} s. Try again later."
            late.fail(OverloadedError(why, retry_after_s=RETRY_AFTER_S))
        if self.paused:
            return
        current = AdmissionRound(self._fleet, self._prefiller, has_capacity=self._has_capacity, number=self._rounds)
        self._rounds += 1
        pop = partial(self._queue.pop, current.fits, now_s, clients=current.rules, share_capacity=self._share_workers)
        while (group := pop()) is not None:
            if group.ending:
                continue
            wait_s = now_s - group.arrival_s
            self.count_admitted(wait_s)
            try:
                group.start(queue_s=wait_s)
            except Exception as error:  # only the group's own reader gets the error
                group.fail(error)
            current.record_start()

    def _share_workers(self, model: str, other_model: str) -> bool:
        members = set(self._fleet.catalog.ready(model))
        return not members.isdisjoint(self._fleet.catalog.ready(other_model))

    def _has_capacity(self, choices: int, prompt_tokens: int, *, model: ModelName) -> bool:
        """Returns True if a worker has capacity, or if no worker is expected: then the group starts and is refused."""
        return not self._fleet.catalog.serving(model).worker_expected or have_capacity(
            self._fleet.catalog.ready(model),
            choices=choices,
            largest_part=min(choices, self._routing.spread_choices or choices),
            prompt_tokens=prompt_tokens,
            choices_prefilling=self._prefiller.choices_in_progress(model),
        )


class HasCapacity(Protocol):
    def __call__(self, choices: int, prompt_tokens: int, *, model: ModelName) -> bool: ...


class AdmissionRound:
    """Decides which waiting groups can start in one iteration of the event loop, in which capacity only decreases."""

    def __init__(self, fleet: Fleet, prefiller: Prefiller, *, has_capacity: HasCapacity, number: int) -> None:
        """`has_capacity`: returns True if a worker has free capacity. `number`: number of earlier rounds."""
        self.rules = ClientRules(held=self._held, in_share=self._in_share, fits_partially=self._fits_partially)
        self._fleet = fleet
        self._prefiller = prefiller
        self._has_capacity = has_capacity
        self._number = number
        self._weights = WaitingWeights(fleet.waiting_weights)
        self._free = defaultdict[ModelName, CapacityCache](CapacityCache)
        self._for_clients: dict[ModelName, ClientCapacity] = {}
        infos = [member.worker.engine.info for member in fleet.catalog.ready() if member.worker is not None]
        self._max_choices = sum(info.max_num_seqs for info in infos)
        self._num_blocks = sum(info.num_blocks for info in infos)
        self._prefilling = prefiller.choices_by_client()

    def fits(self, group: Journey) -> bool:
        model = group.request.model
        has_capacity = partial(self._has_capacity, model=model)
        return self._free[model].fits(group.num_choices, len(group.request.prompt), has_capacity=has_capacity)

    def record_start(self) -> None:
        """Called after a group has started."""
        self._prefilling = self._prefiller.choices_by_client()

    def _held(self, client: str, weight: float) -> float:
        """Returns the larger of two fractions, divided by the weight: the client's part of all choices that the workers
        can run at once, and its part of all KV blocks."""
        choices, blocks = self._prefilling[client], 0
        if total := self._fleet.client_totals.get(client):
            choices, blocks = choices + total.choices, total.blocks
        return max(choices / max(1, self._max_choices), blocks / max(1, self._num_blocks)) / weight

    def _in_share(self, group: Journey) -> bool:
        prefilling = self._prefilling[group.request.client]
        return self._capacity(group).in_share(group.request, group.num_choices, prefilling=prefilling)

    def _fits_partially(self, group: Journey) -> bool:
        return self._capacity(group).fits_partially(group.request, group.num_choices)

    def _capacity(self, group: Journey) -> ClientCapacity:
        model = group.request.model
        if (found := self._for_clients.get(model)) is None:
            members = self._fleet.catalog.ready(model)
            found = self._for_clients[model] = ClientCapacity(members, self._weights, round_number=self._number)
        return found

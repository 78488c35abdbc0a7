"""The queue of groups for which no worker has the capacity. They start in a fair order, each on the first worker that
has the capacity.

A group waits for workers that have its model, and blocks only groups that need one of the same workers. Workers have
queues too, but a group in a worker's queue waits for that worker only. A group that moves to another worker does not
wait in this queue.
"""

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from motet.errors import EngineError, OverloadedError
from motet.ids import ModelName
from motet.metrics.routing import QUEUE_S, RoutingFigures
from motet.routing.groups.journey import Journey
from motet.routing.queue.capacity import CapacityCache, have_capacity
from motet.routing.queue.fair_queue import FairQueue
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.serving import WorkKind
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
        choices_prefilling: Callable[[ModelName], int],
        clock: Callable[[], float],
    ) -> None:
        """`choices_prefilling`: returns the number of admitted choices for a model that are not in the load of any
        worker yet."""
        self._fleet = fleet
        self._figures = figures
        self._routing = routing
        self._choices_prefilling = choices_prefilling
        self._clock = clock
        self._queue: FairQueue[Journey] = FairQueue(max_wait_s=routing.queue_timeout_s)
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
        if not self._fleet.catalog.ready(WorkKind.GENERATE, model):
            return True
        if self.paused:
            return False
        if any(lane == model or self._share_workers(lane, model) for lane in self._queue.lanes):
            return False
        return self._has_capacity(len(request.choices), len(request.prompt), model=model)

    def pause(self, paused: bool) -> None:
        """Admits no groups from now on, or admits them again. Groups that arrive during this time wait."""
        self.paused = paused
        self._fleet.capacity.wake()

    def count_admitted(self, wait_s: float) -> None:
        """Counts a group that was admitted after `wait_s`."""
        self._histogram[bisect_left(QUEUE_S, wait_s)] += 1
        self._figures.queue_seconds_sum += wait_s

    def push(self, group: Journey) -> None:
        """Puts `group` into the queue, until it has started, failed or been removed."""
        request = group.request
        self._queue.push(
            group, choices=len(request.choices), priority=request.priority, now_s=self._clock(), lane=request.model
        )
        if self._admitting is None:
            self._admitting = asyncio.create_task(self._run())
        self._fleet.capacity.wake()  # this group can fit even if the groups before it do not

    def remove(self, group: Journey) -> None:
        """Removes a group that has ended, if it is in the queue."""
        self._queue.remove(group)

    async def close(self) -> None:
        """Stops admitting groups."""
        if self._admitting is not None:
            self._admitting.cancel()
            await asyncio.wait((self._admitting,))
            self._admitting = None

    def check(self) -> None:
        """Raises AssertionError if a group waits."""
        if self._queue:
            raise AssertionError(f"{len(self._queue)} groups left in the queue")

    async def _run(self) -> None:
        """Admits groups while one waits."""
        while self._queue:
            try:
                self._admit()
            # A defect, or a worker that reports impossible figures, must not stop the queue forever.
            except Exception as error:
                logger.error("the check for capacity failed", exc_info=error)
                for group in self._queue.expired(float("inf")):
                    group.fail(EngineError("The server could not check its workers for capacity; its log says why."))
            if self._queue:
                # Not wait_for, which before Python 3.12 swallows a cancellation that comes together with capacity.
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._fleet.capacity.wait()
        self._admitting = None

    def _admit(self) -> None:
        """Starts every group that may start now, and fails the groups that have waited too long."""
        now_s = self._clock()
        for late in self._queue.expired(now_s):
            why = f"No worker had capacity for the request within {self._routing.queue_timeout_s:g} s. Try again later."
            late.fail(OverloadedError(why, retry_after_s=RETRY_AFTER_S))
        if self.paused:
            return
        caches = {lane: CapacityCache(partial(self._has_capacity, model=ModelName(lane))) for lane in self._queue.lanes}

        def fits(group: Journey) -> bool:
            return caches[group.request.model].fits(group.num_choices, len(group.request.prompt))

        while (group := self._queue.pop(fits, now_s, share_capacity=self._share_workers)) is not None:
            if group.ending:
                continue
            self.count_admitted(now_s - group.arrival_s)
            try:
                group.start()
            except Exception as error:  # only the group's own reader gets the error
                group.fail(error)

    def _share_workers(self, model: str, other_model: str) -> bool:
        """Returns True if a worker has both models."""
        members = set(self._fleet.catalog.ready(WorkKind.GENERATE, model))
        return not members.isdisjoint(self._fleet.catalog.ready(WorkKind.GENERATE, other_model))

    def _has_capacity(self, choices: int, prompt_tokens: int, *, model: ModelName) -> bool:
        """Returns True if a worker has capacity, or if no worker is expected: then the group starts and is refused."""
        return not self._fleet.catalog.serving(model).worker_expected or have_capacity(
            self._fleet.catalog.ready(WorkKind.GENERATE, model),
            choices=choices,
            largest_part=min(choices, self._routing.spread_choices or choices),
            prompt_tokens=prompt_tokens,
            choices_prefilling=self._choices_prefilling(model),
        )

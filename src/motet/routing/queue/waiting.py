"""The queue of groups for which no worker has the capacity: for their choices, their trunk, and one tail block of each
choice. They start in a fair order, each on the first worker that has the capacity.

A group waits for workers that have its model, and blocks only groups that need one of the same workers. Workers have
queues too, but a group in a worker's queue waits for that worker only. A group that moves does not wait here."""

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import partial

from motet.errors import EngineError, OverloadedError
from motet.ids import ModelName
from motet.metrics.routing import QUEUE_S, RoutingFigures
from motet.routing.choosing.cost import can_start
from motet.routing.groups.journey import Journey
from motet.routing.queue.fair_queue import FairQueue
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.member import Member
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
        """`choices_prefilling`: returns the admitted choices for a model that are not in any worker's load yet."""
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
        size, now_s = len(request.choices), self._clock()
        self._queue.push(group, choices=size, priority=request.priority, now_s=now_s, lane=request.model)
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
        members = set(self._fleet.catalog.ready(model))
        return not members.isdisjoint(self._fleet.catalog.ready(other_model))

    def _has_capacity(self, choices: int, prompt_tokens: int, *, model: ModelName) -> bool:
        """Returns True if a worker has capacity, or if no worker is expected: then the group starts and is refused."""
        return not self._fleet.catalog.serving(model).worker_expected or have_capacity(
            self._fleet.catalog.ready(model),
            choices=choices,
            largest_part=min(choices, self._routing.spread_choices or choices),
            prompt_tokens=prompt_tokens,
            choices_prefilling=self._choices_prefilling(model),
        )


def have_capacity(
    members: Iterable[Member], *, choices: int, largest_part: int, prompt_tokens: int, choices_prefilling: int
) -> bool:
    """Returns True if the workers could start the group at once. Pure: reads only the workers' loads.

    `members`: the workers that may get it. `largest_part`: maximum number of choices that one worker must take.
    `choices_prefilling`: number of admitted choices that are not in the load of any worker yet.

    A worker that has just refused a group has no capacity. An idle worker takes a group of any size. For any other
    worker `can_start` decides. A group in parts also needs capacity for all its choices together."""
    fits, busy, free_choices = False, choices_prefilling > 0, -choices_prefilling
    one_part = largest_part >= choices
    for member in members:
        if member.worker is None or member.faults.refused:
            continue
        info, load = member.worker.engine.info, member.load
        open_choices = load.open_choices
        fits = (
            fits
            or not open_choices
            or can_start(
                open_choices=open_choices,
                max_choices=info.max_num_seqs,
                held_blocks=load.trunk_blocks + load.tail_blocks,
                num_blocks=info.num_blocks,
                choices=largest_part,
                prompt_blocks=-(-prompt_tokens // info.block_size),
            )
        )
        busy = busy or open_choices > 0
        free_choices += max(0, info.max_num_seqs - open_choices)
        if fits and (free_choices >= choices or (one_part and not choices_prefilling)):
            return True
    return fits and not busy


class CapacityCache:
    """Checks the capacity for many groups in one turn of the event loop, in which capacity only decreases. If a group
    did not fit, a group with at least as many choices and prompt tokens does not fit either. So the time for a long
    queue grows with the number of different group sizes in it."""

    def __init__(self, has_capacity: Callable[[int, int], bool]) -> None:
        """`has_capacity`: takes a number of choices and a number of prompt tokens."""
        self._has_capacity = has_capacity
        self._too_large: list[tuple[int, int]] = []
        """The smallest sizes that did not fit. None of them is at least as large as another in both numbers."""

    def fits(self, choices: int, prompt_tokens: int) -> bool:
        if any(choices >= size[0] and prompt_tokens >= size[1] for size in self._too_large):
            return False
        if self._has_capacity(choices, prompt_tokens):
            return True
        larger = [size for size in self._too_large if size[0] >= choices and size[1] >= prompt_tokens]
        self._too_large = [*(size for size in self._too_large if size not in larger), (choices, prompt_tokens)]
        return False

"""Groups wait here while no worker has room for them, so that they go where room comes first, in a fair order.

A group waits for workers that have its model, and holds up only those that want one of the same workers. Workers
have queues too, but a group in one waits for that worker only. A group that moves to another worker never waits here.
"""

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

from motet.errors import EngineError, OverloadedError
from motet.ids import ModelName
from motet.metrics.routing import QUEUE_S, RoutingFigures
from motet.routing.choosing.cost import WorkKind, begins_at_once
from motet.routing.groups.journey import Journey
from motet.routing.queue.fair_queue import FairQueue
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.member import Member
from motet.settings.server_config import RoutingConfig
from motet.types import GenerateRequest

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.5
"""Seconds after which the queue is checked again even if nobody has reported room."""
RETRY_AFTER_S = 5


def has_room(
    members: Iterable[Member], *, choices: int, largest_part: int, prompt_tokens: int, on_the_way: int
) -> bool:
    """Returns True if a worker could begin the group at once. Pure: reads only the workers' books.

    `members`: the workers that may get it. `largest_part`: the most choices that one worker must take.
    `on_the_way`: number of choices that were let through and are in no books yet.

    A worker that refused a group a moment ago has no room; an empty one takes a group of any size; for any other
    `begins_at_once` decides. A group in parts also needs room for all its choices together. Reads `members` only as far
    as needed."""
    fits, busy, free_choices = False, on_the_way > 0, -on_the_way
    whole = largest_part >= choices
    for member in members:
        if member.worker is None or member.refused:
            continue
        info, books = member.worker.engine.info, member.books
        fits = (
            fits
            or not member.open_choices
            or begins_at_once(
                open_choices=member.open_choices,
                max_choices=info.max_num_seqs,
                held_blocks=books.trunk_blocks + books.tail_blocks,
                num_blocks=info.num_blocks,
                choices=largest_part,
                prompt_blocks=-(-prompt_tokens // info.block_size),
            )
        )
        busy = busy or member.open_choices > 0
        free_choices += max(0, info.max_num_seqs - member.open_choices)
        if fits and (free_choices >= choices or (whole and not on_the_way)):
            return True
    return fits and not busy


class CapacityCache:
    """Checks room for many groups in one turn, in which room only shrinks: if a group had none, one with at least as
    many choices and prompt tokens has none either. So a long queue costs little more than its different sizes."""

    def __init__(self, has_room: Callable[[int, int], bool]) -> None:
        """`has_room`: takes a number of choices and of prompt tokens."""
        self._has_room = has_room
        self._too_large: list[tuple[int, int]] = []
        """Sizes without room; none of them includes another."""

    def fits(self, choices: int, prompt_tokens: int) -> bool:
        if any(choices >= other and prompt_tokens >= tokens for other, tokens in self._too_large):
            return False
        if self._has_room(choices, prompt_tokens):
            return True
        larger = [one for one in self._too_large if one[0] >= choices and one[1] >= prompt_tokens]
        self._too_large = [*(one for one in self._too_large if one not in larger), (choices, prompt_tokens)]
        return False


class WaitingGroups:
    """The groups of one router that wait. A task lets them in as long as there are any."""

    def __init__(
        self,
        fleet: Fleet,
        figures: RoutingFigures,
        *,
        routing: RoutingConfig,
        on_the_way: Callable[[ModelName], int],
        clock: Callable[[], float],
    ) -> None:
        """`on_the_way`: returns the number of choices for a model that were let through and are in no books yet."""
        self._fleet = fleet
        self._figures = figures
        self._routing = routing
        self._on_the_way = on_the_way
        self._clock = clock
        self._queue: FairQueue[Journey] = FairQueue(max_wait_s=routing.queue_timeout_s)
        self._admitting: asyncio.Task[None] | None = None
        self.is_shut = False
        """True while no group is let in."""
        figures.queue_seconds = self._waits = [0] * (len(QUEUE_S) + 1)

    def __len__(self) -> int:
        return len(self._queue)

    def may_pass(self, request: GenerateRequest) -> bool:
        """Returns True if the group need not wait: there is room, and nobody waits for it. A group that no worker can
        take passes too, so that it is refused at once."""
        model = request.model
        if not self._fleet.ready(WorkKind.GENERATE, model):
            return True
        if self.is_shut:
            return False
        if any(lane == model or self._same_room(lane, model) for lane in self._queue.lanes):
            return False
        return self._has_room(len(request.choices), len(request.prompt), model=model)

    def shut(self, shut: bool) -> None:
        """Lets no group in from now on, or goes on; groups that come meanwhile wait for as long as others do."""
        self.is_shut = shut
        self._fleet.notify_room()

    def passed(self, wait_s: float) -> None:
        """Counts a group that was let in after `wait_s`."""
        self._waits[bisect_left(QUEUE_S, wait_s)] += 1
        self._figures.queue_seconds_sum += wait_s

    def push(self, group: Journey) -> None:
        """Puts `group` into the queue, until it has begun, failed or been removed."""
        request = group.request
        self._queue.push(
            group, choices=len(request.choices), priority=request.priority, now_s=self._clock(), lane=request.model
        )
        if self._admitting is None:
            self._admitting = asyncio.create_task(self._admit())
        self._fleet.notify_room()  # it may fit where the groups before it do not

    def remove(self, group: Journey) -> None:
        """Takes a group that has ended out of the queue, if it is there."""
        self._queue.remove(group)

    async def close(self) -> None:
        """Stops letting groups in."""
        if self._admitting is not None:
            self._admitting.cancel()
            await asyncio.wait((self._admitting,))
            self._admitting = None

    def check(self) -> None:
        """Raises if a group waits."""
        if self._queue:
            raise AssertionError(f"{len(self._queue)} groups left in the queue")

    async def _admit(self) -> None:
        """Lets groups in. Runs as long as one waits."""
        while self._queue:
            try:
                self._let_in()
            # A bug, or a worker whose figures make no sense: it must not stop all groups for ever.
            except Exception as error:
                logger.error("looking for room failed", exc_info=error)
                for group in self._queue.expired(float("inf")):
                    group.fail(EngineError("The server could not look for room on its workers; its log says why."))
            if self._queue:
                # Not wait_for, which before Python 3.12 swallows being cancelled as room comes.
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_AGAIN_S):
                        await self._fleet.room()
        self._admitting = None

    def _let_in(self) -> None:
        """Begins every group that may go now, and fails those that have waited too long."""
        now_s = self._clock()
        for late in self._queue.expired(now_s):
            why = f"No worker had room for the request within {self._routing.queue_timeout_s:g} s. Try again later."
            late.fail(OverloadedError(why, retry_after_s=RETRY_AFTER_S))
        if self.is_shut:
            return
        looks = {lane: CapacityCache(partial(self._has_room, model=ModelName(lane))) for lane in self._queue.lanes}

        def fits(group: Journey) -> bool:
            return looks[group.request.model].fits(group.num_choices, len(group.request.prompt))

        while (group := self._queue.pop(fits, now_s, same_room=self._same_room)) is not None:
            if group.ending:
                continue
            self.passed(now_s - group.since_s)
            try:
                group.begin()
            except Exception as error:  # only its own reader gets it
                group.fail(error)

    def _same_room(self, one: str, other: str) -> bool:
        """Returns True if a worker has both models."""
        having = set(self._fleet.ready(WorkKind.GENERATE, one))
        return not having.isdisjoint(self._fleet.ready(WorkKind.GENERATE, other))

    def _has_room(self, choices: int, prompt_tokens: int, *, model: ModelName) -> bool:
        """Also returns True if no worker will ever have room: the group goes and is refused."""
        return not self._fleet.serving(model).hopeful or has_room(
            self._fleet.ready(WorkKind.GENERATE, model),
            choices=choices,
            largest_part=min(choices, self._routing.spread_choices or choices),
            prompt_tokens=prompt_tokens,
            on_the_way=self._on_the_way(model),
        )

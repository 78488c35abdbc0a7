"""Groups wait here while no worker has room for them, so that they go where room comes first, in a fair order.

A group waits for workers that have its model, and holds up only those that want one of the same workers.

A worker that is given more than it can hold queues it too, but what waits there waits for that worker. A group that
finds room goes straight through. One that is resumed never waits: it stands below this.
"""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from motet.engines.base import Engine, GroupStream
from motet.errors import EngineClosedError, OverloadedError
from motet.ids import ModelName, RequestId
from motet.metrics.routing import QUEUE_S
from motet.routing.around import Around
from motet.routing.candidate import Work
from motet.routing.fair_queue import FairQueue
from motet.routing.fleet import Fleet
from motet.routing.queued_group import QueuedGroup
from motet.routing.room import Look, has_room
from motet.types import GenerateRequest

LOOK_AGAIN_S = 0.5
"""Room may come without anybody telling, and groups may have waited too long."""
RETRY_AFTER_S = 5


class Queued(Around[QueuedGroup]):
    """An `Engine` in front of one that gives groups to the fleet."""

    def __init__(  # sizes: what it stands before, what it looks at, and how long it waits
        self,
        engine: Engine,
        fleet: Fleet,
        *,
        timeout_s: float,
        largest_part: int = 0,
        on_the_way: Callable[[ModelName], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`largest_part`: of a larger group so many choices may have to go to one worker; 0: all. `on_the_way`:
        choices for a model that were let through and that no worker's books know yet."""
        super().__init__(engine)
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._largest_part = largest_part
        self._on_the_way = on_the_way
        self._clock = clock
        self._queue: FairQueue[QueuedGroup] = FairQueue(max_wait_s=timeout_s)
        self._usher: asyncio.Task[None] | None = None
        self._closed = False
        self._waits = [0] * (len(QUEUE_S) + 1)
        self._waits_sum_s = 0.0

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def waits(self) -> tuple[int, ...]:
        """How many groups waited so long: a count for each bound of `QUEUE_S`, and one for longer ones."""
        return tuple(self._waits)

    @property
    def waits_sum_s(self) -> float:
        return self._waits_sum_s

    def generate(self, request: GenerateRequest) -> GroupStream:
        if self._goes(request):
            stream = self._engine.generate(request)
            self._waited(0.0)
            return stream
        group = self._keep(QueuedGroup(request, self._engine, now_s=self._clock(), ended=self._ended))
        self._queue.push(
            group,
            choices=len(request.choices),
            priority=request.priority,
            now_s=self._clock(),
            lane=request.model,
        )
        if self._usher is None:
            self._usher = asyncio.create_task(self._let_in())
        self._fleet.notify_room()  # it may fit where those before it do not
        return group

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        may_fit_now = request_id in self._groups
        await super().stop_choice(request_id, index)
        if may_fit_now:
            self._fleet.notify_room()

    async def close(self) -> None:
        """Groups that wait get `EngineClosedError`."""
        self._closed = True
        if self._usher is not None:
            self._usher.cancel()
            await asyncio.gather(self._usher, return_exceptions=True)
            self._usher = None
        closed = EngineClosedError("the engine was closed")
        for group in list(self._groups.values()):
            group.fail(closed)
        await self._engine.close()

    def check(self) -> None:
        """Raises unless every group has ended."""
        super().check()
        if self._queue:
            raise AssertionError(f"{len(self._queue)} groups left in the queue")

    async def _let_in(self) -> None:
        """Runs as long as a group waits."""
        while self._queue:
            now_s = self._clock()
            for late in self._queue.expired(now_s):
                late.fail(self._no_room())
            looks = {lane: Look(partial(self._fits, ModelName(lane))) for lane in self._queue.lanes}
            fits = partial(QueuedGroup.fits, looks=looks)
            while (group := self._queue.pop(fits, now_s, same_room=self._same_room)) is not None:
                self._waited(now_s - group.since_s)
                group.start()
            if self._queue:
                # Not wait_for, which before Python 3.12 swallows being cancelled as room comes.
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_AGAIN_S):
                        await self._fleet.room()
        self._usher = None

    def _goes(self, request: GenerateRequest) -> bool:
        """Without any worker, and when all is closed, the group goes too: it is told so."""
        model = request.model
        if self._closed or not self._fleet.ready(Work.GENERATE, model):
            return True
        if any(lane == model or self._same_room(lane, model) for lane in self._queue.lanes):
            return False
        return self._has_room(model, len(request.choices), len(request.prompt))

    def _same_room(self, one: str, other: str) -> bool:
        """Whether a worker has both models."""
        having = set(self._fleet.ready(Work.GENERATE, one))
        return not having.isdisjoint(self._fleet.ready(Work.GENERATE, other))

    def _fits(self, model: ModelName, choices: int, prompt_tokens: int) -> bool:
        """Where no worker will ever have room a group goes too: it is told so."""
        return self._has_room(model, choices, prompt_tokens) or not self._fleet.hopeful(model)

    def _has_room(self, model: ModelName, choices: int, prompt_tokens: int) -> bool:
        return has_room(
            self._fleet.ready(Work.GENERATE, model),
            choices=choices,
            largest_part=min(choices, self._largest_part or choices),
            prompt_tokens=prompt_tokens,
            on_the_way=self._on_the_way(model),
        )

    def _no_room(self) -> OverloadedError:
        return OverloadedError(
            f"No worker had room for the request within {self._timeout_s:g} s. Try again later.",
            retry_after_s=RETRY_AFTER_S,
        )

    def _waited(self, wait_s: float) -> None:
        self._waits[bisect_left(QUEUE_S, wait_s)] += 1
        self._waits_sum_s += wait_s

    def _ended(self, group: QueuedGroup) -> None:
        self._queue.remove(group)
        super()._ended(group)

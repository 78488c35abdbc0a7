"""The open groups on a worker, each with its share of the worker's load, and the tasks that wait for them to end."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress

from motet.block_names import BlockName
from motet.engine_info import EngineInfo
from motet.errors import MotetError
from motet.routing.workers.worker_load import UnfinishedPrompt, WorkerLoad


class Waiters:
    """The futures of the tasks that wait; `wake` completes all of them at once. A future exists from the call of
    `wait`, so a wake between that call and the await is not missed."""

    def __init__(self, *, also: "Waiters | None" = None) -> None:
        """`also`: other waiters, which each `wake` of this object wakes too."""
        self._futures: list[asyncio.Future[None]] = []
        self._also = also

    @property
    def count(self) -> int:
        return sum(not future.done() for future in self._futures)

    def wait(self) -> asyncio.Future[None]:
        """Returns a future that is done at the next `wake`. A caller that stops waiting cancels it."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures = [other for other in self._futures if not other.done()]
        self._futures.append(future)
        return future

    async def wait_at_most(self, timeout_s: float) -> None:
        """Returns at the next `wake`, or after the timeout."""
        # Not wait_for, which before Python 3.12 swallows a cancellation that comes together with the wake.
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.wait()

    def wake(self) -> None:
        futures, self._futures = self._futures, []
        for future in futures:
            if not future.done():
                future.set_result(None)
        if self._also is not None:
            self._also.wake()


class OpenGroups:
    """The open groups, or parts of groups, on one worker."""

    def __init__(self, *, changes: Waiters, capacity: Waiters) -> None:
        """`changes`: woken when a group has left the worker. `capacity`: woken when a choice has ended."""
        self.changes = changes
        self.capacity = capacity
        self.received = False
        """True if the worker has sent anything of a group since its keeper set this to False."""
        self._groups: set[OpenGroup] = set()

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: "OpenGroup") -> None:
        self._groups.add(group)

    def __iter__(self) -> "Iterator[OpenGroup]":
        return iter(self._groups)

    def remove(self, group: "OpenGroup") -> None:
        self._groups.discard(group)
        self.changes.wake()

    def next_start(self) -> "OpenGroups":
        """Returns an empty `OpenGroups` for the worker's next start."""
        return OpenGroups(changes=self.changes, capacity=self.capacity)


class OpenGroup:
    """A group, or a part of a group, on one worker, until it ends or moves. Owns its share of the worker's load."""

    def __init__(
        self,
        load: WorkerLoad,
        groups: OpenGroups,
        *,
        choices: int,
        end: Callable[[MotetError], Awaitable[None]],
        use_weights: Callable[[EngineInfo], None] | None = None,
        client: str = "",
        weight: float = 1.0,
        trunk: Sequence[BlockName] = (),
        prompt_tokens: int | None = None,
    ) -> None:
        """`end`: ends the group on this worker with an error. `use_weights`: called with the facts about new weights
        with which the group continues. `client`, `weight`: `client` and `client_weight` of the request.
        `prompt_tokens`: prompt tokens that the worker must compute; None if unknown."""
        self.evicted: MotetError | None = None
        """The error with which the worker's keeper has ended the group."""
        self.waits = False
        """True while the group's reader waits for the next delta. Set only for workers on other servers."""
        self._silent_polls = 0
        """Number of polls of the worker in a row at which the reader waited and had received nothing since the last."""
        self._load = load
        self._groups = groups
        self._end: Callable[[MotetError], Awaitable[None]] | None = end
        """None after `close`. Otherwise an ended group would be kept until a full garbage collection."""
        self._use_weights = use_weights
        self._choices = 0
        self._tail_blocks = 0
        self._trunk = trunk
        self._client = load.enter(client, weight=weight)
        self._prompt: UnfinishedPrompt | None = None if prompt_tokens is None else load.prompts.add(prompt_tokens)
        self._client.add_trunk(trunk)
        load.add_trunk(trunk)
        self.add_choices(choices)
        groups.add(self)

    @property
    def is_open(self) -> bool:
        return self._end is not None

    def finish_prompt(self, *, computed_tokens: int) -> None:
        """Records that the worker has computed or fetched the prompt."""
        if self._prompt is not None:
            self._load.prompts.finish(self._prompt, computed_tokens=computed_tokens)
            self._prompt = None

    def record_delta(self) -> None:
        """Records that the reader has received the delta for which it waited."""
        self._silent_polls = 0

    def add_choices(self, choices: int) -> None:
        self._choices += choices
        self._client.add_choices(choices)
        self._load.given_choices += choices

    def add_tail_blocks(self, blocks: int) -> None:
        if self.is_open:
            self._tail_blocks += blocks
            self._client.add_blocks(blocks)
            self._load.tail_blocks += blocks

    def remove_choices(self, choices: int, *, tail_blocks: int = 0) -> None:
        """Removes choices that have ended, with the blocks of their output tokens."""
        if self.is_open:
            self.add_choices(-choices)
            self.add_tail_blocks(-tail_blocks)
            self._groups.capacity.wake()

    def close(self) -> None:
        """Removes the group: the worker sends nothing more of it. A second call changes nothing."""
        if not self.is_open:
            return
        self.add_choices(-self._choices)
        self.add_tail_blocks(-self._tail_blocks)
        self._end = None
        self._load.remove_trunk(self._trunk)
        self._client.remove_trunk(self._trunk)
        self._load.leave(self._client)
        if self._prompt is not None:
            self._load.prompts.remove(self._prompt)
            self._prompt = None
        self._groups.remove(self)

    async def evict(self, error: MotetError) -> None:
        """Ends the group on this worker with `error`, once."""
        if self._end is not None and self.evicted is None:
            self.evicted = error
            await self._end(error)

    def poll(self) -> int:
        """Called at each poll of the worker. Returns the number of polls in a row without a delta."""
        self._silent_polls += self.waits
        return self._silent_polls

    def use_weights(self, info: EngineInfo) -> None:
        if self._use_weights is not None:
            self._use_weights(info)

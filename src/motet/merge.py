"""Several streams read as one: the items of all sources in the order in which they arrive.

    source ──► a task each ──► put ──► queue ──► read, or `async for`
                               waits while       one reader
                               the queue is full

A source is a coroutine function that delivers its items through the `put` that it is called with, in order. The merge
owns the task of each source from `add` until the task is done.

- End: when every source has returned and the reader has every item. Sources can be added after that, too.
- Error: the first error of a source ends the merge. The reader gets all items that arrived before it, then the error.
- Back-pressure: a source that delivers to a full queue waits, so a slow reader slows the sources down. There are never
  more items in memory than the capacity and one delivery of each source.
- Close: `aclose` cancels the sources and waits for them. A reader that waits for an item gets the end.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import TypeVar

import msgspec

from motet.types import PromptReport

T = TypeVar("T")

Take = Callable[[Sequence[T]], Awaitable[None] | None]
"""Takes the next items of a stream, at least one. What it returns is awaited before it is called again."""
Source = Callable[[Take[T]], Coroutine[None, None, None]]
"""Delivers the items of a stream to a `Take`, and returns when the stream has ended."""

BATCH = 16
"""Number of items processed before other tasks of the event loop get their turn. Takes about 2 ms for groups."""


async def in_batches(items: Iterable[T]) -> AsyncIterator[T]:
    """Yields all items, with an iteration of the event loop after each `BATCH`: a request can have thousands."""
    for number, item in enumerate(items, start=1):
        yield item
        if number % BATCH == 0:
            await asyncio.sleep(0)


async def deliver(stream: AsyncIterable[T], take: Take[T]) -> None:
    """A source: delivers the items of an iterable one by one."""
    async for item in stream:
        if (taking := take((item,))) is not None:
            await taking


class Merge(AsyncIterator[T]):
    """The merge of several streams. Read it to its end, or call `aclose`."""

    def __init__(self, capacity: int, *, on_end: Callable[[], Awaitable[None]] | None = None) -> None:
        """`capacity`: number of unread items above which sources wait. `on_end`: awaited before end and error."""
        self._capacity = capacity
        self._on_end = on_end
        self._items: deque[T] = deque()
        self._sources: set[asyncio.Task[None]] = set()
        self._error: Exception | None = None
        self.over = False
        """True when no item is accepted any more: after `aclose` and after an error."""
        self._changed = asyncio.Event()
        """Set when an item has arrived, when a source has ended, and when the merge has ended."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        """A future for each source that waits, in the order in which they have to continue."""
        self._items_left = False
        """True if the last `read` left items in the queue."""

    def add(self, source: Source[T]) -> asyncio.Task[None]:
        """Starts to read a source. Returns its task: cancelling it ends this source alone, without an error."""
        task = asyncio.create_task(source(self.put))
        self._sources.add(task)
        task.add_done_callback(self._source_ended)
        return task

    def put(self, items: Sequence[T]) -> Awaitable[None] | None:
        """The `Take` of the sources. Returns None if the source can continue at once."""
        self.put_nowait(items)
        if len(self._items) <= self._capacity and not self.over:
            return None
        waiting = asyncio.get_running_loop().create_future()  # after the end: until the source is cancelled
        self._waiting.append(waiting)
        return waiting

    def put_nowait(self, items: Sequence[T]) -> None:
        """Delivers items whatever the capacity. They are dropped if the merge has ended."""
        if not self.over:
            self._items.extend(items)
            self._changed.set()

    async def read(self, limit: int | None = None) -> list[T]:
        """Returns the items that have arrived, at least one and at most `limit`; an empty list at the end. Raises the
        first error of a source. After a call that left items in the queue, other tasks run first."""
        if self._items_left:
            await asyncio.sleep(0)
        await self._until_items()
        items = self._items
        if limit is None or len(items) <= limit:
            taken = [*items]
            items.clear()
        else:
            taken = [items.popleft() for _ in range(limit)]
        self._items_left = bool(items)
        if self._waiting:
            self._let_continue()
        return taken

    async def __anext__(self) -> T:
        if not self._items:
            await self._until_items()
            if not self._items:
                raise StopAsyncIteration
        item = self._items.popleft()
        if self._waiting:
            self._let_continue()
        return item

    def fail(self, error: Exception) -> None:
        """Ends the merge with an error, which the reader gets at once: unread items are dropped, and the sources are
        cancelled. If the merge has failed before, the earlier error stays."""
        self._error = self._error or error
        self._end()
        for task in self._sources:
            task.cancel()

    async def aclose(self) -> None:
        """Ends the merge. Can be called at any time, and twice."""
        self._end()
        async for task in in_batches([*self._sources]):
            task.cancel()
        if self._sources:
            await asyncio.wait(self._sources)

    async def _until_items(self) -> None:
        """Returns when there are items to read, or at the end. Raises the error that ended the merge."""
        while not self._items:
            if self.over or not self._sources:
                if self._on_end is not None:
                    await self._on_end()
                if self._error is not None:
                    raise self._error
                return
            self._changed.clear()
            await self._changed.wait()

    def _let_continue(self) -> None:
        """Lets sources continue until no more of them wait than there are unread items above the capacity."""
        while len(self._waiting) > max(0, len(self._items) - self._capacity) and not self.over:
            waiting = self._waiting.popleft()
            if not waiting.done():  # its source can have been cancelled
                waiting.set_result(None)

    def _end(self) -> None:
        self.over = True
        self._items.clear()
        self._changed.set()

    def _source_ended(self, task: asyncio.Task[None]) -> None:
        self._sources.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and not self.over:
            self._error, self.over = error, True
        self._changed.set()


class PromptOnce:
    """Passes on the first report on a group's prompt. Each worker that generates choices of the group sends one."""

    def __init__(self) -> None:
        self.reported = False
        """True once a report has been passed on."""
        self.prefill_worker = ""
        """Id of the worker that prefilled the prompt; added to the report."""
        self.queue_s = 0.0
        """Time for which the group waited for capacity; added to the report."""

    def first(self, report: PromptReport | None) -> PromptReport | None:
        """Returns the report if it is the group's first one."""
        if report is None or self.reported:
            return None
        self.reported = True
        if not (self.prefill_worker or self.queue_s):
            return report
        return msgspec.structs.replace(
            report,
            prefill_worker=self.prefill_worker or report.prefill_worker,
            queue_s=self.queue_s + report.queue_s,
        )

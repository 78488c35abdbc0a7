"""Many prompts at a time: a bounded number of tasks, results in the order of the prompts, and an early stop."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, Generic, TypeVar

from motet.llm.limit import MAX_REQUESTS

Item = TypeVar("Item")
Result = TypeVar("Result")

AHEAD: Final = 32
"""Number of prompts, in addition to the requests in progress, that are tokenised in advance."""


class PromptRun(Generic[Item, Result]):
    """Runs one task for each item, at most `MAX_REQUESTS + AHEAD` at a time, and collects the results.

    Belongs to one event loop."""

    def __init__(
        self,
        items: Sequence[Item],
        run: Callable[[Item], Awaitable[Result]],
        *,
        order: Sequence[int] | None = None,
        on_done: Callable[[Result], None] | None = None,
    ) -> None:
        """`order`: the numbers of the items in the order in which they start. `on_done`: called with each result."""
        self.results: list[Result | None] = [None] * len(items)
        """The results so far, in the order of the items."""
        self._items = items
        self._run = run
        self._order = range(len(items)) if order is None else order
        self._on_done = on_done
        self._workers: list[asyncio.Task[None]] = []

    async def finish(self) -> list[Result | None]:
        """Runs all items. Returns None in place of the results of items that `stop` has ended. If an item fails, all
        others end, and its exception is raised with a note that names it."""
        rest = iter(self._order)
        num_workers = min(len(self._items), MAX_REQUESTS + AHEAD)
        self._workers = [asyncio.create_task(self._work(rest)) for _ in range(num_workers)]
        try:
            if self._workers:
                await asyncio.wait(self._workers, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self.stop()
            ends = await asyncio.gather(*self._workers, return_exceptions=True)
        failures = [end for end in ends if isinstance(end, Exception)]
        if failures:
            raise failures[0]
        return self.results

    def stop(self) -> None:
        """Cancels all items that are not done. The server ends their choices at once."""
        for worker in self._workers:
            worker.cancel()

    async def _work(self, rest: Iterator[int]) -> None:
        for number in rest:
            try:
                result = await self._run(self._items[number])
            except Exception as error:
                if len(self._items) > 1:
                    error.add_note(f"This was prompt {number} of {len(self._items)}, counted from 0.")
                raise
            self.results[number] = result
            if self._on_done is not None:
                self._on_done(result)

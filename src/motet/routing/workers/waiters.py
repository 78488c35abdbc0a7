"""Tasks that wait for the same thing to happen."""

import asyncio


class Waiters:
    """The futures of the tasks that wait. `wake` completes all of them at once.

    A future exists from the call of `wait`, so a wake between that call and the await is not missed."""

    def __init__(self, *, also: "Waiters | None" = None) -> None:
        """`also`: other waiters that each `wake` of these wakes too."""
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

    def wake(self) -> None:
        futures, self._futures = self._futures, []
        for future in futures:
            if not future.done():
                future.set_result(None)
        if self._also is not None:
            self._also.wake()

"""Those who wait for something to happen next."""

import asyncio


class Waiters:
    """Each has a future; all are done at once."""

    def __init__(self) -> None:
        self._futures: list[asyncio.Future[None]] = []

    @property
    def count(self) -> int:
        return sum(not future.done() for future in self._futures)

    def wait(self) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures = [other for other in self._futures if not other.done()]
        self._futures.append(future)
        return future

    def wake(self) -> None:
        futures, self._futures = self._futures, []
        for future in futures:
            if not future.done():
                future.set_result(None)

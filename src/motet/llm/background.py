"""An event loop in a thread, for programs that block or that have an event loop of their own."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


async def in_daemon_thread(work: Callable[[], Result]) -> Result:
    """Runs a function in a thread that does not delay the end of the process, and waits for its result."""
    future: Future[Result] = Future()

    def run() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)


class LoopThread:
    """An event loop that runs in a daemon thread until `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._last: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._thread = threading.Thread(target=self._run, name="motet-llm", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Result]) -> "Future[Result]":
        """Starts a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Callable[[], object]) -> None:
        """Schedules a function in the loop."""
        self._loop.call_soon_threadsafe(work)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancels all coroutines, runs `last`, ends the loop and waits for the thread. Does nothing if it has ended."""
        if self._thread.is_alive():
            self._last = last
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            if self._last is not None:
                self._loop.run_until_complete(self._last())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

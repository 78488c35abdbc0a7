"""Runs a function in a daemon thread: unlike a thread of a `ThreadPoolExecutor`, it does not delay the exit of the
process."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_daemon_thread(work: Callable[[], T], *, name: str) -> Future[T]:
    """Starts `work` in a daemon thread. Returns the future of its result."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future

"""How a user ends a server: the first SIGTERM or SIGINT asks it to drain, the second to stop at once."""

import asyncio
import os
import signal
from collections.abc import Awaitable
from types import TracebackType
from typing import TextIO

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Turns signals into two events, while it is entered."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.at_once = asyncio.Event()

    def ask(self) -> None:
        if self.drain.is_set():
            self.at_once.set()
        self.drain.set()

    def watch_stdin(self, stdin: TextIO) -> None:
        """Stops at once when the program at the other end of standard input has ended, however it did."""

        def read() -> None:
            if not os.read(stdin.fileno(), 4096):
                loop.remove_reader(stdin)
                self.drain.set()
                self.at_once.set()

        loop = asyncio.get_running_loop()
        loop.add_reader(stdin, read)

    def __enter__(self) -> "StopSignals":
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def first_of(*waits: Awaitable[object], timeout_s: float | None = None) -> None:
    """Returns as soon as one is done (raising what it raised) or the time is up; the others are cancelled."""
    futures = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            future.result()
    finally:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)

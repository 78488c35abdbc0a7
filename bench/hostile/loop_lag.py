"""Measures how late the event loop of a server in a child process wakes its tasks.

child    `print_lags` runs the server. A task sleeps for a millisecond, over and over, and prints how late it woke
parent   `lag_server` starts the child, and a thread collects the lags from the child's standard output
"""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

MAX_LAG_MS = 50.0
"""Limit of the lag that the benchmarks check."""
SLEEP_S = 0.001
LAGS_PER_LINE = 100
AFTER_S = 0.05
"""A lag counts for an interval if the task woke at most this long after the end of the interval."""

Lag = tuple[float, float]
"""Monotonic time at which the task woke, and how late it was, both in seconds."""


async def print_lags(serving: Coroutine[None, None, None]) -> None:
    """Runs a server, and prints its lags.

    A lag counts only up to the CPU time of the process in that interval, because other programs on the machine delay
    the task too.
    """

    async def measure() -> None:
        lags: list[Lag] = []
        while True:
            start, worked = time.monotonic(), time.process_time()
            await asyncio.sleep(SLEEP_S)
            woke = time.monotonic()
            lags.append((woke, min(woke - start - SLEEP_S, time.process_time() - worked)))
            if len(lags) == LAGS_PER_LINE:
                print(json.dumps(lags), flush=True)
                lags.clear()

    measuring = asyncio.create_task(measure())
    await serving
    measuring.cancel()


@dataclass(frozen=True)
class LagServer:
    """A server in a child process."""

    url: str
    pid: int
    lags: list[Lag]
    """Lags so far. Another thread appends to the list."""

    def lags_ms(self, start: float, ended: float) -> Sequence[float]:
        """Returns the lags in an interval of monotonic time, ascending, in milliseconds."""
        return sorted(1000 * late for woke, late in list(self.lags) if start < woke <= ended)

    def max_lag_ms(self, start: float, ended: float) -> float:
        """Waits until the child has reported the interval, and returns the maximum lag in milliseconds."""
        while not self.lags or self.lags[-1][0] < ended:
            time.sleep(0.01)
        return self.lags_ms(start, ended + AFTER_S)[-1]


@contextmanager
def lag_server(module: str, *arguments: str, kill: bool = False) -> Iterator[LagServer]:
    """Starts a module that calls `print_lags`, and ends it at the end of the context.

    `kill`: True to end it at once, even if it is still busy with requests whose clients have disconnected.
    """
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None  # both are pipes
        lines = iter(process.stdout)
        url = next(line.strip() for line in lines if line.startswith("http"))
        lags: list[Lag] = []
        collecting = threading.Thread(target=collect_lags, args=(lines, lags))
        collecting.start()
        try:
            yield LagServer(url, process.pid, lags)
        finally:
            if kill:
                process.kill()
            process.stdin.close()  # the server ends when its standard input does
            collecting.join()


def collect_lags(lines: Iterable[str], lags: list[Lag]) -> None:
    for line in lines:
        if line.startswith("["):
            lags += json.loads(line)

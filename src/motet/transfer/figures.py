"""Measures the duration and size of pulls: a histogram for the metrics, and a log line while there are pulls.

Imports nothing heavy: the metrics layer reads the bounds from here.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from statistics import fmean

from motet.transfer.orders import PullLanded

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the histogram of pull seconds; longer ones are counted after the last."""

LINE_EVERY_S = 10.0


class TransferFigures:
    """Collects the figures of pulls."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        """Number of pulls that took at most as long as each bound, and longer than the one before; then the rest."""
        self.seconds_sum = 0.0
        self.line_due_s: float | None = None
        """Time of the clock at which `take_line` returns a line; None if there was no pull since the last line."""
        self._clock = clock
        self._unlogged: list[PullLanded] = []

    def add(self, pull: PullLanded) -> None:
        self.counts[bisect_left(SECONDS, pull.seconds)] += 1
        self.seconds_sum += pull.seconds
        self._unlogged.append(pull)
        if self.line_due_s is None:
            self.line_due_s = self._clock() + LINE_EVERY_S

    def take_line(self) -> str | None:
        """Returns a log line about the pulls since the last line, if the first of them was ten seconds ago."""
        if self.line_due_s is None or self._clock() < self.line_due_s:
            return None
        pulls, self._unlogged, self.line_due_s = self._unlogged, [], None
        return line_of(pulls)


def line_of(pulls: Sequence[PullLanded]) -> str:
    """Makes the log line about one or more pulls. MB is 2^20 bytes, as in vLLM's line."""
    transfer_ms = sorted(1000 * pull.seconds for pull in pulls)
    post_ms = sorted(1000 * pull.post_seconds for pull in pulls)
    megabytes, seconds = sum(pull.num_bytes for pull in pulls) / 2**20, sum(pull.seconds for pull in pulls)
    p90 = -(-9 * len(pulls) // 10) - 1  # index of the least value that nine in ten do not exceed
    return (
        f"KV transfers: number={len(pulls)}"
        f" transfer_ms_avg={fmean(transfer_ms):.1f} transfer_ms_p90={transfer_ms[p90]:.1f}"
        f" post_ms_avg={fmean(post_ms):.1f} post_ms_p90={post_ms[p90]:.1f}"
        f" mb_avg={megabytes / len(pulls):.1f} mb_per_s={megabytes / seconds if seconds else 0.0:.1f}"
        f" descriptors_avg={fmean(pull.num_descriptors for pull in pulls):.1f}"
    )

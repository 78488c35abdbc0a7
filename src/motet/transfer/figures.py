"""Measures the duration and size of pulls, for a histogram in the metrics and for a periodic log line.

1. The engine adds each pull that has landed.
2. The pull is counted in the histogram at once.
3. `LOG_EVERY_S` seconds after the first pull that is not in a log line yet, `take_log_line` returns a line.

Imports nothing heavy: the metrics layer reads the bounds from here."""

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from statistics import fmean

from motet.transfer.orders import PullLanded

BUCKET_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the histogram's buckets, in seconds. One more bucket counts the pulls that took longer."""

LOG_EVERY_S = 10.0


class TransferFigures:
    """Collects the figures of all pulls of an engine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts = [0] * (len(BUCKET_BOUNDS_S) + 1)
        """Number of pulls in each bucket: longer than the previous bound, and at most as long as the bucket's own."""
        self.seconds_sum = 0.0
        self.log_due_s: float | None = None
        """Time at which `take_log_line` returns a line; None if there was no pull since the last line."""
        self._clock = clock
        self._unlogged: list[PullLanded] = []

    def add(self, pull: PullLanded) -> None:
        self.counts[bisect_left(BUCKET_BOUNDS_S, pull.seconds)] += 1
        self.seconds_sum += pull.seconds
        self._unlogged.append(pull)
        if self.log_due_s is None:
            self.log_due_s = self._clock() + LOG_EVERY_S

    def take_log_line(self) -> str | None:
        """Returns a log line about the pulls since the last line, if the first of them landed `LOG_EVERY_S` ago."""
        if self.log_due_s is None or self._clock() < self.log_due_s:
            return None
        pulls, self._unlogged, self.log_due_s = self._unlogged, [], None
        return log_line(pulls)


def log_line(pulls: Sequence[PullLanded]) -> str:
    """Formats the log line about one or more pulls. MB is 2^20 bytes, as in vLLM's line."""
    transfer_ms = sorted(1000 * pull.seconds for pull in pulls)
    post_ms = sorted(1000 * pull.post_seconds for pull in pulls)
    megabytes, seconds = sum(pull.num_bytes for pull in pulls) / 2**20, sum(pull.seconds for pull in pulls)
    p90 = -(-9 * len(pulls) // 10) - 1  # index of the smallest value that nine in ten pulls do not exceed
    return (
        f"KV transfers: number={len(pulls)}"
        f" transfer_ms_avg={fmean(transfer_ms):.1f} transfer_ms_p90={transfer_ms[p90]:.1f}"
        f" post_ms_avg={fmean(post_ms):.1f} post_ms_p90={post_ms[p90]:.1f}"
        f" mb_avg={megabytes / len(pulls):.1f} mb_per_s={megabytes / seconds if seconds else 0.0:.1f}"
        f" descriptors_avg={fmean(pull.num_descriptors for pull in pulls):.1f}"
    )

"""How long pulls take and what they bring: a histogram for the metrics, and a line of log while there are any.

Imports nothing heavy: the metrics layer reads the bounds from here.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the histogram of pull seconds; longer ones are counted after the last."""

LINE_EVERY_S = 10.0


class PullFigures(Protocol):
    """Of one pull that brought what its ticket said (`transfer.base.Landed`)."""

    @property
    def seconds(self) -> float: ...

    @property
    def post_seconds(self) -> float: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def num_descriptors(self) -> int: ...


class TransferFigures:
    """Collects what pulls brought."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds_sum = 0.0
        self._clock = clock
        self._counts = [0] * (len(SECONDS) + 1)
        self._unsaid: list[PullFigures] = []
        self._line_due_s: float | None = None

    @property
    def counts(self) -> tuple[int, ...]:
        """One for each bound, of pulls that took as long as it at most and longer than the bound before; one for the
        rest."""
        return tuple(self._counts)

    @property
    def line_due_s(self) -> float | None:
        """When `take_line` has something to say, by the clock; None while there is nothing to tell."""
        return self._line_due_s

    def add(self, pull: PullFigures) -> None:
        self._counts[bisect_left(SECONDS, pull.seconds)] += 1
        self.seconds_sum += pull.seconds
        self._unsaid.append(pull)
        if self._line_due_s is None:
            self._line_due_s = self._clock() + LINE_EVERY_S

    def take_line(self) -> str | None:
        """The line of log about the pulls since the last one, ten seconds after the first of them."""
        if self._line_due_s is None or self._clock() < self._line_due_s:
            return None
        pulls, self._unsaid, self._line_due_s = self._unsaid, [], None
        return line_of(pulls)


def line_of(pulls: Sequence[PullFigures]) -> str:
    """Of one pull at least. MB is 2^20 bytes, as in vLLM's line."""
    transfer_ms = [1000 * pull.seconds for pull in pulls]
    post_ms = [1000 * pull.post_seconds for pull in pulls]
    megabytes = sum(pull.num_bytes for pull in pulls) / 2**20
    seconds = sum(pull.seconds for pull in pulls)
    return (
        f"KV transfers: number={len(pulls)}"
        f" transfer_ms_avg={_mean(transfer_ms):.1f} transfer_ms_p90={_p90(transfer_ms):.1f}"
        f" post_ms_avg={_mean(post_ms):.1f} post_ms_p90={_p90(post_ms):.1f}"
        f" mb_avg={megabytes / len(pulls):.1f} mb_per_s={megabytes / seconds if seconds else 0.0:.1f}"
        f" descriptors_avg={_mean([pull.num_descriptors for pull in pulls]):.1f}"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _p90(values: Sequence[float]) -> float:
    """The least value that nine in ten do not exceed."""
    nine_in_ten = -(-9 * len(values) // 10)
    return sorted(values)[nine_in_ten - 1]

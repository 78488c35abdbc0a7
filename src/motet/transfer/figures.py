"""How long pulls take and what they bring: a histogram for the metrics, and a line of log while there are any.

Imports nothing heavy: the metrics layer reads the bounds from here.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the histogram of pull seconds; longer ones are counted after the last."""

LINE_EVERY_S = 10.0


@dataclass(frozen=True)
class PullFigures:
    """Of one pull that brought what its ticket said."""

    seconds: float
    """From the order to the verified data."""
    post_seconds: float
    """Of them, those spent posting reads."""
    num_bytes: int
    num_descriptors: int


class SecondsHistogram:
    """Counts of pulls by how long they took."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self.sum_s = 0.0

    @property
    def counts(self) -> tuple[int, ...]:
        """One for each bound, of pulls that took as long as it at most and longer than the bound before; one for the
        rest."""
        return tuple(self._counts)

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(SECONDS, seconds)] += 1
        self.sum_s += seconds


class TransferLine:
    """One line of log for the pulls of ten seconds, with the figures of vLLM's."""

    def __init__(self) -> None:
        self._pulls: list[PullFigures] = []
        self._due_s: float | None = None

    @property
    def due_s(self) -> float | None:
        """When `take` has a line; None while there is nothing to tell."""
        return self._due_s

    def add(self, pull: PullFigures, now_s: float) -> None:
        self._pulls.append(pull)
        if self._due_s is None:
            self._due_s = now_s + LINE_EVERY_S

    def take(self, now_s: float) -> str | None:
        """The line once it is due, and begins the next one."""
        if self._due_s is None or now_s < self._due_s:
            return None
        pulls, self._pulls, self._due_s = self._pulls, [], None
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
    return sorted(values)[-(-9 * len(values) // 10) - 1]

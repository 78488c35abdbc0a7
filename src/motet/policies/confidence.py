"""How sure a model was while it wrote a choice, and which choices are not worth going on with.

This is DeepConf (arXiv 2508.15260), online. The confidence of a token is minus the mean of the k highest
log-probabilities at its position: where one token is almost certain, the others have very low ones. The confidence of
a choice is the lowest mean over any `window` consecutive tokens so far. A choice is lost when that falls below
a threshold, which is given, or comes from the first choices, the warm-up: DeepConf's "top 10 percent" is their
90th percentile.

Means are compared exactly. Each token's confidence is rounded once to a multiple of 2^-32, and sums are sums of whole
numbers. So a running sum cannot drift, a token costs the same in a long window as in a short one, and it makes no
difference how tokens were bundled: sums of floats depend on their order, and would differ by the last bits.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

from motet.types import TokenLogprob

SCALE: Final = 2**32
"""Confidences are kept as whole numbers, this many for 1.0; log-probabilities have about 24 significant bits."""

LOWEST_LOGPROB: Final = -1000.0
"""Lower log-probabilities count as this one. A token that a filter or a grammar excludes has minus infinity."""


@dataclass(frozen=True)
class ConfidenceRule:
    """Which choices are lost: those below a threshold that is fixed, or that the choices of the warm-up set."""

    window: int
    """Number of consecutive tokens in a mean. A choice with fewer tokens has no mean yet."""
    top: int
    """Most log-probabilities in the confidence of a token."""
    below: float | None = None
    """The fixed threshold; None: it comes from the warm-up."""
    warm_up: int = 0
    """The choices [0, warm_up) set the threshold when all of them have ended, and are never lost themselves."""
    percentile: float = 0.0
    """The percentile of their lowest means, by the nearest rank, above 0 and up to 100."""


@dataclass(slots=True)
class _Choice:
    """One choice. `total` is the sum of `recent`, the last tokens, at most a window of them."""

    recent: deque[int]
    total: int = 0
    lowest_total: int | None = None
    """The lowest sum of a full window so far."""
    ended: bool = False


@dataclass
class Confidences:
    """The confidences of one group's choices."""

    rule: ConfidenceRule
    threshold: float | None = field(init=False)
    """Choices whose lowest mean is lower are lost. None: the warm-up goes on, or no choice of it had a full window."""
    _choices: dict[int, _Choice] = field(init=False, default_factory=dict)
    _fallen: set[int] = field(init=False, default_factory=set)
    """Unfinished choices below the threshold that `lost` has not told yet."""
    _told: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.threshold = self.rule.below

    def add(self, index: int, logprobs: Sequence[TokenLogprob]) -> None:
        """Takes in the next tokens of a choice; those that come after its end are not counted."""
        choice = self._choice(index)
        if choice.ended:
            return
        window, top = self.rule.window, self.rule.top
        for logprob in logprobs:
            confidence = scaled_confidence(logprob, top)
            if len(choice.recent) == window:
                choice.total -= choice.recent.popleft()
            choice.recent.append(confidence)
            choice.total += confidence
            if len(choice.recent) == window and (choice.lowest_total is None or choice.total < choice.lowest_total):
                choice.lowest_total = choice.total
        self._compare(index)

    def ended(self, index: int) -> None:
        """The choice has ended, by itself or not. When all of the warm-up have, the threshold is known."""
        choice = self._choice(index)
        if choice.ended:
            return
        choice.ended = True
        choice.recent.clear()
        self._fallen.discard(index)
        if self.threshold is None and index < self.rule.warm_up:
            self._end_warm_up()

    def lost(self) -> tuple[int, ...]:
        """Returns the unfinished choices below the threshold that were not returned before, in the order of index."""
        lost = tuple(sorted(self._fallen))
        self._told.update(lost)
        self._fallen.clear()
        return lost

    def lowest(self, index: int) -> float | None:
        """Returns the lowest mean of a choice so far; None if it has fewer tokens than a window."""
        choice = self._choices.get(index)
        if choice is None or choice.lowest_total is None:
            return None
        return choice.lowest_total / (self.rule.window * SCALE)

    def _choice(self, index: int) -> _Choice:
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _Choice(deque())
        return choice

    def _compare(self, index: int) -> None:
        lowest = self.lowest(index)
        if self.threshold is None or lowest is None or lowest >= self.threshold:
            return
        if not (index < self.rule.warm_up or index in self._told or self._choices[index].ended):
            self._fallen.add(index)

    def _end_warm_up(self) -> None:
        warm_up = range(self.rule.warm_up)
        if not all(index in self._choices and self._choices[index].ended for index in warm_up):
            return
        lowest = [mean for index in warm_up if (mean := self.lowest(index)) is not None]
        if lowest:
            self.threshold = nearest_rank(lowest, self.rule.percentile)
            for index in self._choices:
                self._compare(index)


def scaled_confidence(logprob: TokenLogprob, top: int) -> int:
    """Returns the confidence of a token, times `SCALE`. Without log-probabilities of other tokens, its own counts."""
    logprobs = [value for _, value in logprob.top[:top]] or [logprob.logprob]
    total = sum(logprobs)
    if not LOWEST_LOGPROB <= total <= 0:  # True also for a NaN; else none of them is below the lowest
        total = sum(min(0.0, max(LOWEST_LOGPROB, value)) for value in logprobs)
    return round(-SCALE * (total / len(logprobs)))


def nearest_rank(values: Sequence[float], percentile: float) -> float:
    """Returns the smallest value such that at least `percentile` percent of them are not greater."""
    # The decimal that the client wrote: 7 percent of 100 are 7, and in binary floats a little more.
    rank = math.ceil(Fraction(str(percentile)) * len(values) / 100)
    return sorted(values)[max(rank, 1) - 1]

"""The confidence of a model in its choices, and the choices that are lost because their confidence is too low.

This is the online form of DeepConf (arXiv 2508.15260). The confidence of a token is minus the mean of the `top` highest
log-probabilities at its position: if the model is almost certain of one token, all other tokens have very low ones. The
confidence of a choice is the lowest mean over any `window` consecutive tokens so far. A choice is lost when its
confidence is below a threshold. The threshold is given, or computed from the first choices, the warm-up: DeepConf's
"top 10 percent" is the 90th percentile of their confidences.

Means are compared exactly. Each token's confidence is rounded once to a multiple of 2^-32, and sums are sums of
integers. So a running sum cannot drift, a token costs the same in a long window as in a short one, and it makes no
difference how the engine bundles tokens. Sums of floats depend on their order, and would differ in the last bits.
"""

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

from motet.types import TokenLogprob

SCALE: Final = 2**32
"""Integer that represents a confidence of 1.0. Log-probabilities have about 24 significant bits."""
LOWEST_LOGPROB: Final = -1000.0
"""Lower log-probabilities are raised to this one. A token that a filter or a grammar excludes has minus infinity."""


@dataclass(frozen=True)
class ConfidenceRule:
    """The threshold below which choices are lost: a fixed threshold, or a threshold computed from the warm-up."""

    window: int
    """Number of consecutive tokens in a mean. A choice with fewer tokens has no mean yet."""
    top: int
    """Maximum number of log-probabilities in the confidence of a token."""
    below: float | None = None
    """Fixed threshold; None if the warm-up sets it."""
    warm_up: int = 0
    """Number of choices, from 0, that set the threshold when all of them have ended. They are never lost themselves."""
    percentile: float = 0.0
    """Percentile of the warm-up's lowest means that is the threshold, by the nearest rank, above 0 and up to 100."""


@dataclass(slots=True)
class _Choice:
    """The confidences of one choice, all times `SCALE`."""

    recent: deque[int] = field(default_factory=deque)
    """Confidences of the last tokens, at most a window."""
    total: int = 0
    """Sum of `recent`."""
    lowest_total: int | None = None
    """Lowest sum of a full window so far."""
    ended: bool = False


@dataclass
class Confidences:
    """The confidences of the choices of one group."""

    rule: ConfidenceRule
    threshold: float | None = field(init=False)
    """Mean below which a choice is lost; None during the warm-up, and if none of its choices had a full window."""
    _choices: defaultdict[int, _Choice] = field(init=False, default_factory=lambda: defaultdict(_Choice))
    _lost: set[int] = field(init=False, default_factory=set)
    """Unfinished choices below the threshold that `lost` has not returned yet."""
    _returned: set[int] = field(init=False, default_factory=set)
    """Choices that `lost` has returned."""

    def __post_init__(self) -> None:
        self.threshold = self.rule.below

    def add(self, index: int, logprobs: Sequence[TokenLogprob]) -> None:
        """Adds the next tokens of a choice. Tokens after its end are not counted."""
        if (choice := self._choices[index]).ended:
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
        """Records the end of a choice, for any reason. The end of the last choice of the warm-up sets the threshold."""
        if (choice := self._choices[index]).ended:
            return
        choice.ended = True
        choice.recent.clear()
        self._lost.discard(index)
        if self.threshold is None and index < self.rule.warm_up:
            self._end_warm_up()

    def lost(self) -> tuple[int, ...]:
        """Returns the unfinished choices below the threshold that were not returned before, ascending."""
        lost = tuple(sorted(self._lost))
        self._returned.update(lost)
        self._lost.clear()
        return lost

    def lowest(self, index: int) -> float | None:
        """Returns the lowest mean of a choice so far; None if it has fewer tokens than a window."""
        total = self._choices[index].lowest_total
        return None if total is None else total / (self.rule.window * SCALE)

    def _compare(self, index: int) -> None:
        lowest = self.lowest(index)
        if self.threshold is None or lowest is None or lowest >= self.threshold:
            return
        if not (index < self.rule.warm_up or index in self._returned or self._choices[index].ended):
            self._lost.add(index)

    def _end_warm_up(self) -> None:
        warm_up = range(self.rule.warm_up)
        if not all(self._choices[index].ended for index in warm_up):
            return
        lowest = [mean for index in warm_up if (mean := self.lowest(index)) is not None]
        if lowest:
            self.threshold = nearest_rank(lowest, self.rule.percentile)
            for index in self._choices:
                self._compare(index)


def scaled_confidence(logprob: TokenLogprob, top: int) -> int:
    """Returns the confidence of a token, times `SCALE`. Uses the token's own log-probability if no others are given."""
    logprobs = [value for _, value in logprob.top[:top]] or [logprob.logprob]
    total = sum(logprobs)
    if not LOWEST_LOGPROB <= total <= 0:  # also True for NaN; if it is False, no value is below the lowest
        total = sum(min(0.0, max(LOWEST_LOGPROB, value)) for value in logprobs)
    return round(-SCALE * (total / len(logprobs)))


def nearest_rank(values: Sequence[float], percentile: float) -> float:
    """Returns the smallest value such that at least `percentile` percent of the values are not greater."""
    # Computed with the decimal that the client sent: 7 percent of 100 are 7, and in binary floats a little more.
    rank = math.ceil(Fraction(str(percentile)) * len(values) / 100)
    return sorted(values)[max(rank, 1) - 1]

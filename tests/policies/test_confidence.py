"""The confidence of a choice: lowest means over windows of tokens, and the choices that fall below the threshold."""

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.policies.confidence import ConfidenceRule, Confidences, nearest_rank
from motet.types import TokenLogprob


def token(*logprobs: float, drawn: float = -0.5) -> TokenLogprob:
    return TokenLogprob(7, drawn, 1, tuple(enumerate(logprobs)))


def tokens(*confidences: float) -> list[TokenLogprob]:
    return [token(-confidence) for confidence in confidences]


def fixed(window: int, *, below: float, top: int = 1) -> Confidences:
    return Confidences(ConfidenceRule(window=window, top=top, below=below))


def warmed_up(window: int, *, warm_up: int, percentile: float) -> Confidences:
    return Confidences(ConfidenceRule(window=window, top=1, warm_up=warm_up, percentile=percentile))


@pytest.mark.parametrize(
    ("top", "logprob", "confidence"),
    [
        (2, token(-1.0, -2.0, -9.0), 1.5),
        (20, token(-1.0, -2.0, -9.0), 4.0),
        (2, token(-0.0, -math.inf), 500.0),
        (2, token(-0.25, -2_000.0), 500.125),
        (3, token(math.nan, math.inf, -3.0), 1_003 / 3),
        (2, token(drawn=-0.75), 0.75),
    ],
)
def test_the_confidence_of_a_token_is_minus_the_mean_of_the_highest(
    top: int, logprob: TokenLogprob, confidence: float
) -> None:
    confidences = fixed(1, below=0.0, top=top)
    confidences.add(0, [logprob])
    assert confidences.lowest(0) == pytest.approx(confidence, abs=2**-32)


def test_a_choice_has_the_lowest_mean_of_any_full_window() -> None:
    confidences = fixed(3, below=0.0)
    confidences.add(4, tokens(1.0, 2.0))
    assert confidences.lowest(4) is None  # no window is full
    confidences.add(4, tokens(6.0))
    assert confidences.lowest(4) == 3.0
    confidences.add(4, tokens(7.0))
    assert confidences.lowest(4) == 3.0
    confidences.add(4, tokens(0.0, 0.5))
    assert confidences.lowest(4) == 2.5
    assert confidences.lowest(5) is None


def test_a_choice_below_the_threshold_is_reported_once() -> None:
    confidences = fixed(2, below=1.0)
    confidences.add(3, tokens(1.0, 1.0))
    assert confidences.lost() == ()  # at the threshold is not below it
    confidences.add(3, tokens(0.5))
    confidences.add(1, tokens(0.0, 0.0))
    assert confidences.lost() == (1, 3)
    confidences.add(3, tokens(0.0))  # it was on its way already
    assert confidences.lost() == ()
    assert confidences.lowest(3) == 0.25


def test_a_choice_that_has_ended_is_not_lost_and_takes_no_more_tokens() -> None:
    confidences = fixed(2, below=1.0)
    confidences.add(0, tokens(0.0, 0.5))
    confidences.ended(0)
    confidences.add(0, tokens(0.0, 0.0))
    confidences.ended(0)
    assert (confidences.lost(), confidences.lowest(0)) == ((), 0.25)


def test_the_warm_up_sets_the_threshold_when_all_of_it_has_ended() -> None:
    confidences = warmed_up(1, warm_up=3, percentile=50)
    for index, lowest in enumerate([3.0, 1.0, 2.0, 1.5, 2.5, 1.5]):
        confidences.add(index, tokens(lowest, 9.0))
    confidences.ended(5)
    confidences.ended(2)
    confidences.ended(0)
    assert (confidences.threshold, confidences.lost()) == (None, ())
    confidences.ended(1)
    assert confidences.threshold == 2.0
    assert confidences.lost() == (3,)  # its low point was before; 5 has ended
    confidences.add(4, tokens(1.75))
    assert confidences.lost() == (4,)


def test_choices_of_the_warm_up_are_never_lost() -> None:
    confidences = warmed_up(1, warm_up=2, percentile=100)
    confidences.add(0, tokens(1.0))
    confidences.add(1, tokens(2.0))
    confidences.ended(0)
    confidences.ended(1)
    assert (confidences.threshold, confidences.lost()) == (2.0, ())


def test_choices_of_the_warm_up_that_are_shorter_than_a_window_do_not_count() -> None:
    confidences = warmed_up(2, warm_up=3, percentile=1)
    confidences.add(0, tokens(1.0))
    confidences.add(1, tokens(4.0, 4.0))
    for index in range(3):  # 2 has no tokens
        confidences.ended(index)
    assert confidences.threshold == 4.0


def test_a_warm_up_with_only_short_choices_sets_no_threshold() -> None:
    confidences = warmed_up(2, warm_up=1, percentile=90)
    confidences.add(0, tokens(5.0))
    confidences.ended(0)
    confidences.add(1, tokens(0.0, 0.0))
    assert (confidences.threshold, confidences.lost()) == (None, ())


@pytest.mark.parametrize(
    ("count", "percentile", "rank"),
    [
        (10, 90, 9),
        (10, 91, 10),
        (10, 100, 10),
        (10, 0.1, 1),
        (1, 50, 1),
        (100, 7, 7),
        (100, 29, 29),
        (1_000, 99.9, 999),
    ],
)
def test_a_percentile_is_the_nearest_rank(count: int, percentile: float, rank: int) -> None:
    assert nearest_rank([float(value) for value in range(count, 0, -1)], percentile) == rank


LOGPROBS = st.floats(-50, 0)
TOKENS = st.lists(st.lists(LOGPROBS, min_size=1, max_size=4).map(lambda values: token(*values)), max_size=40)


@pytest.mark.slow
@given(TOKENS, st.lists(st.integers(0, 40)), st.integers(1, 8), st.integers(1, 4))
def test_tokens_in_any_bundles_have_the_same_lowest_mean(
    logprobs: list[TokenLogprob], cuts: list[int], window: int, top: int
) -> None:
    joint, cut = fixed(window, below=0.0, top=top), fixed(window, below=0.0, top=top)
    joint.add(0, logprobs)
    edges = [0, *sorted(cuts), len(logprobs)]
    for start, end in pairwise(edges):
        cut.add(0, logprobs[start:end])
    assert joint.lowest(0) == cut.lowest(0)  # bit for bit

    each = [-math.fsum(values) / len(values) for t in logprobs if (values := [value for _, value in t.top[:top]])]
    means = [math.fsum(each[i : i + window]) / window for i in range(len(each) - window + 1)]
    lowest = joint.lowest(0)
    assert (lowest is None) == (not means)
    assert lowest is None or lowest == pytest.approx(min(means), abs=1e-9)


def test_running_sums_do_not_drift() -> None:
    confidences = fixed(10, below=0.0)
    confidences.add(0, tokens(*(9 + 1 / (3 + i) for i in range(5_000)), *[0.125] * 10))
    assert confidences.lowest(0) == 0.125


EIGHTHS = st.integers(0, 24).map(lambda eighths: eighths / 8)
"""Confidences whose sums are exact in floats too, so that the model below is exact."""


def lowest_mean(confidences: Sequence[float], window: int) -> float | None:
    means = [sum(confidences[i : i + window]) / window for i in range(len(confidences) - window + 1)]
    return min(means, default=None)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.lists(EIGHTHS, max_size=4) | st.none()), max_size=30),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from([1.0, 50.0, 90.0, 100.0]),
)
def test_the_choices_that_are_lost_are_those_of_plain_recomputation(
    steps: list[tuple[int, list[float] | None]], window: int, warm_up: int, percentile: float
) -> None:
    below = None if warm_up else 1.5
    confidences = Confidences(ConfidenceRule(window, 1, below=below, warm_up=warm_up, percentile=percentile))
    added: dict[int, list[float]] = {index: [] for index in range(5)}
    ended: set[int] = set()
    returned: set[int] = set()
    for index, bundle in steps:  # without a bundle, the choice ends
        if bundle is None:
            confidences.ended(index)
            ended.add(index)
        else:
            confidences.add(index, tokens(*bundle))
            added[index] += bundle if index not in ended else []
        lowest = {i: lowest_mean(values, window) for i, values in added.items()}
        threshold = below
        if below is None and ended.issuperset(range(warm_up)):
            means = sorted(mean for i in range(warm_up) if (mean := lowest[i]) is not None)
            threshold = means[math.ceil(percentile * len(means) / 100) - 1] if means else None
        fallen = {
            i
            for i, mean in lowest.items()
            if threshold is not None and mean is not None and mean < threshold and i not in ended and i >= warm_up
        }
        assert confidences.lost() == tuple(sorted(fallen - returned))
        returned |= fallen
        assert confidences.threshold == threshold
        assert {i: confidences.lowest(i) for i in added} == lowest

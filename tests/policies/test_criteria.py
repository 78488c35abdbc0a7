"""When a group has enough answers: conditions on the answers, against plain counting."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.policies.criteria import Agree, Answers, AnyOf, Condition, Finished, Posterior, Window, posterior

Ends = dict[int, str | None]
"""Values by index, in the order in which the choices finished."""


def answers_of(ends: Ends, *, n: int = 12, lost: tuple[int, ...] = ()) -> Answers:
    answers = Answers(n)
    for index in lost:
        answers.lose(index)
    for index, value in ends.items():
        answers.finish(index, value)
    return answers


def in_order(letters: str) -> Ends:
    """Returns the values of choices 0, 1, ...; a dot is an answer without a value."""
    return {index: None if letter == "." else letter for index, letter in enumerate(letters)}


@pytest.mark.parametrize(
    ("condition", "letters", "met"),
    [
        (Finished(3), "ab", None),
        (Finished(3), "a..", "finished"),
        (Agree(2), "ab..", None),
        (Agree(2), "ab.b", "agree"),
        (Agree(2), "aaa", "agree"),
        (Posterior(0.95), "", None),
        (Posterior(0.1), "..", None),
        (Posterior(31 / 32), "aaaa", "posterior"),
        (Posterior(31 / 32 + 1e-9), "aaaa", None),
        (Posterior(0.9), "aaab", None),  # 1 - (1 + 5) / 32 = 0.8125
        (Posterior(0.8125), "aaab", "posterior"),
        (Posterior(0.5), "ab", "posterior"),
        (Window(3), "aabaaa", "window"),
        (Window(3), "baaab", None),
        (Window(3), "...aa.", None),
        (Window(1), ".a", "window"),
        (Window(5), "bbbbbbbbbbaa", "window"),
        (Window(5), "abbbbabbbbaa", None),
        (Window(13), "aaaaaaaaaaaa", None),
        (AnyOf((Agree(3), Finished(3))), "ab", None),
        (AnyOf((Agree(3), Finished(3))), "aba", "finished"),
        (AnyOf((Agree(3), Finished(3))), "aaa", "agree"),
        (AnyOf((AnyOf((Window(2),)), Agree(2))), "aa", "window"),
        (AnyOf(()), "aa", None),
    ],
)
def test_a_condition_returns_its_name_when_it_is_met(condition: Condition, letters: str, met: str | None) -> None:
    assert condition.met(answers_of(in_order(letters))) == met


def test_choices_left_over_at_the_end_are_in_no_window() -> None:
    assert Window(5).met(answers_of({10: "a", 11: "a"})) is None
    assert Window(2).met(answers_of({10: "a", 11: "a"})) == "window"


def test_a_lost_choice_breaks_its_window_and_counts_nowhere() -> None:
    answers = answers_of({0: "a", 1: "a", 3: "a"}, n=6, lost=(2,))
    assert Window(3).met(answers) is None
    assert Finished(4).met(answers) is None
    assert answers.lost == {2}
    answers.finish(4, "a")
    answers.finish(5, "a")
    assert Window(3).met(answers) == "window"


def test_only_conditions_on_values_need_them() -> None:
    assert not Finished(1).needs_values
    assert Agree(1).needs_values and Posterior(0.9).needs_values and Window(1).needs_values
    assert not AnyOf((Finished(1), AnyOf((Finished(2),)))).needs_values
    assert AnyOf((Finished(1), AnyOf((Agree(2),)))).needs_values


def test_the_majority_is_the_value_that_first_had_its_count() -> None:
    answers = answers_of({5: "b", 0: "a"})
    assert (answers.leader, answers.leading()) == (("b", 1), (1, 1))
    answers.finish(3, "a")
    assert (answers.leader, answers.leading()) == (("a", 2), (2, 1))
    answers.finish(1, "b")
    assert (answers.leader, answers.leading()) == (("a", 2), (2, 2))
    assert answers.counts == {"b": 2, "a": 2}


def test_without_a_value_there_is_no_majority() -> None:
    answers = answers_of({0: None, 1: None})
    assert (answers.leader, answers.leading(), answers.counts) == (None, (0, 0), {})


@pytest.mark.parametrize("index", [0, 1, -1, 12])
def test_a_choice_ends_once_and_is_in_the_group(index: int) -> None:
    answers = answers_of({0: "a"}, lost=(1,))
    with pytest.raises(ValueError, match=f"choice {index} "):
        answers.finish(index, "a")
    with pytest.raises(ValueError, match=f"choice {index} "):
        answers.lose(index)
    assert (answers.values, answers.counts, answers.lost) == ({0: "a"}, {"a": 1}, {1})


@st.composite
def ends(draw: st.DrawFn) -> tuple[int, Ends, set[int]]:
    """Generates n, the values in the order in which choices finished, and the lost choices."""
    n = draw(st.integers(1, 12))
    order = draw(st.permutations(range(n)))
    finished = draw(st.integers(0, n))
    values = [draw(st.sampled_from(["a", "a", "b", "c", None])) for _ in range(finished)]
    lost = draw(st.sets(st.sampled_from(order[finished:]))) if finished < n else set()
    return n, dict(zip(order, values, strict=False)), lost


@given(ends(), st.integers(1, 6))
def test_conditions_agree_with_counting(drawn: tuple[int, Ends, set[int]], k: int) -> None:
    n, values, lost = drawn
    answers = answers_of(values, n=n, lost=tuple(lost))
    found = [value for value in values.values() if value is not None]
    highest = sorted(Counter(found).values(), reverse=True)
    assert answers.leading() == tuple([*highest, 0, 0][:2])
    assert answers.counts == Counter(found)
    leader = None
    for many in range(1, len(found) + 1):
        value, count = found[many - 1], found[:many].count(found[many - 1])
        if leader is None or count > found[: many - 1].count(leader):
            leader = value
    assert answers.leader == (None if leader is None else (leader, found.count(leader)))

    assert Finished(k).met(answers) == ("finished" if len(values) >= k else None)
    assert Agree(k).met(answers) == ("agree" if any(found.count(value) >= k for value in found) else None)
    windows = [{values.get(i) for i in range(start, start + k)} for start in range(0, n, k) if start + k <= n]
    assert Window(k).met(answers) == ("window" if any({value} in windows for value in "abc") else None)


def integral(first: int, second: int, *, low: float) -> float:
    """Returns the integral of x^first (1-x)^second from `low` to 1, by Simpson's rule."""
    steps = 2_000
    width = (1 - low) / steps
    points = [low + i * width for i in range(steps + 1)]
    heights = [x**first * (1 - x) ** second for x in points]
    return (heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2])) * width / 3


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (4, 0), (3, 1), (5, 5), (12, 7), (20, 9), (2, 6)])
def test_the_posterior_is_the_share_of_the_beta_distribution_above_one_half(first: int, second: int) -> None:
    share = integral(first, second, low=0.5) / integral(first, second, low=0.0)
    assert float(posterior(first, second)) == pytest.approx(share, abs=1e-9)


def test_the_posterior_is_exact() -> None:
    assert posterior(4, 0) == Fraction(31, 32)
    assert posterior(3, 1) == Fraction(26, 32)
    assert posterior(7, 7) == Fraction(1, 2)
    assert posterior(300, 0) == 1 - Fraction(1, 2**301)


@given(st.integers(0, 300), st.integers(0, 300))
def test_either_of_two_values_is_the_more_frequent(first: int, second: int) -> None:
    assert posterior(first, second) + posterior(second, first) == 1
    assert posterior(first + 1, second) > posterior(first, second)

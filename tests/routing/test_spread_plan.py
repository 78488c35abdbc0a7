"""The plan for a large group: how many parts it is split into, and how large they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.routing.choosing.prefill_plan import PART_MS, SplitFacts, filled, plan_parts, time_ms

LEVELS = st.lists(st.integers(0, 200), min_size=1, max_size=12).map(sorted)


def large(choices: int = 32, *, prompt_tokens: int = 1000, max_tokens: int = 256, ticket: bool = True) -> SplitFacts:
    return SplitFacts(choices, prompt_tokens, max_tokens, ticket)


@pytest.mark.parametrize(
    ("choices", "levels", "expected"),
    [
        (6, [0], [6]),
        (6, [0, 0], [3, 3]),
        (7, [0, 0, 0], [3, 2, 2]),
        (6, [0, 4], [5, 1]),
        (4, [0, 4], [4, 0]),
        (3, [0, 4], [3, 0]),
        (5, [0, 4], [5, 0]),
        (10, [0, 1, 5], [6, 4, 0]),
        (3, [7, 7, 7], [1, 1, 1]),
        (1000, [0, 0, 1000], [500, 500, 0]),
        (0, [0, 1], [0, 0]),
    ],
)
def test_choices_fill_the_lowest_levels_until_all_are_equal(
    choices: int, levels: list[int], expected: list[int]
) -> None:
    assert filled(choices, levels) == expected


@given(choices=st.integers(0, 500), levels=LEVELS)
def test_every_choice_is_placed_and_no_other_placement_is_more_even(choices: int, levels: list[int]) -> None:
    plan = filled(choices, levels)
    assert len(plan) == len(levels)
    assert sum(plan) == choices
    assert min(plan) >= 0
    filled_up = [level + got for level, got in zip(levels, plan, strict=True)]
    highest_used = max((up for up, got in zip(filled_up, plan, strict=True) if got), default=0)
    # If one choice moved from the fullest worker to another one, that worker would become fuller than the fullest was.
    assert all(up + 1 >= highest_used for up in filled_up)


@given(
    choices=st.integers(1, 300),
    prompt_tokens=st.integers(1, 100_000),
    max_tokens=st.integers(1, 4096),
    ticket=st.booleans(),
    open_choices=st.lists(st.integers(0, 200), max_size=12),
    spread_choices=st.integers(0, 64),
)
def test_a_plan_has_every_choice_once_and_no_part_that_is_too_small(
    choices: int, prompt_tokens: int, max_tokens: int, ticket: bool, open_choices: list[int], spread_choices: int
) -> None:
    group = SplitFacts(choices, prompt_tokens, max_tokens, ticket)
    plan = plan_parts(group, open_choices, spread_choices=spread_choices)
    assert sum(plan) == choices
    assert 1 <= len(plan) <= max(1, len(open_choices))
    if len(plan) > 1:
        assert spread_choices
        assert choices > spread_choices
        assert min(plan) >= max(1, spread_choices // 2)
        levels = sorted(open_choices)
        assert time_ms(group, plan, levels=levels) < time_ms(group, [choices], levels=levels)


@pytest.mark.parametrize("choices", [1, 7, 8])
def test_a_group_up_to_the_limit_is_not_split(choices: int) -> None:
    assert plan_parts(large(choices), [0, 0, 0, 0], spread_choices=8) == [choices]


def test_a_group_just_above_the_limit_is_split_into_halves() -> None:
    assert plan_parts(large(9), [0, 0, 0, 0], spread_choices=8) == [5, 4]


def test_no_group_is_split_if_splitting_is_off() -> None:
    assert plan_parts(large(512), [0, 0], spread_choices=0) == [512]


@pytest.mark.parametrize("open_choices", [[], [3]])
def test_with_at_most_one_worker_there_is_one_part(open_choices: list[int]) -> None:
    assert plan_parts(large(64), open_choices, spread_choices=8) == [64]


def test_equal_workers_get_equal_parts() -> None:
    assert plan_parts(large(64), [5, 5, 5, 5], spread_choices=16) == [16, 16, 16, 16]


def test_a_worker_that_is_much_busier_gets_nothing() -> None:
    assert plan_parts(large(32), [200, 0, 0], spread_choices=8) == [16, 16]


def test_a_busier_worker_gets_fewer() -> None:
    assert plan_parts(large(32), [8, 0], spread_choices=8) == [20, 12]


def test_no_part_is_made_for_a_few_choices() -> None:
    assert plan_parts(large(20), [17, 0], spread_choices=8) == [20]
    assert plan_parts(large(20), [12, 0], spread_choices=8) == [16, 4]


def test_a_group_whose_long_prompt_would_be_computed_twice_is_not_split() -> None:
    short, long = {"prompt_tokens": 100}, {"prompt_tokens": 20_000}
    assert plan_parts(large(32, **long, ticket=False), [0, 0], spread_choices=8) == [32]
    assert plan_parts(large(32, **short, ticket=False), [0, 0], spread_choices=8) == [16, 16]
    assert plan_parts(large(32, **long, ticket=True), [0, 0], spread_choices=8) == [16, 16]


def test_the_longer_the_answers_the_more_parts() -> None:
    parts = [
        len(plan_parts(large(64, max_tokens=tokens, ticket=False), [0] * 8, spread_choices=8))
        for tokens in (8, 32, 128, 256)
    ]
    assert parts == sorted(parts)
    assert parts[0] == 1
    assert parts[-1] > 2


def test_an_answer_of_unknown_length_does_not_count_as_endless() -> None:
    plans = [
        plan_parts(large(64, max_tokens=tokens, ticket=False), [0] * 8, spread_choices=8) for tokens in (256, 8192)
    ]
    assert plans[0] == plans[1]


def test_of_equally_fast_plans_the_one_with_fewer_parts_wins() -> None:
    """Each choice has one token, so splitting saves as much time as a part costs."""
    group = SplitFacts(choices=8, prompt_tokens=0, max_tokens=1, ticket=True)
    assert time_ms(group, [8], levels=[0, 0]) == time_ms(group, [4, 4], levels=[0, 0]) == PART_MS + 4.0
    assert plan_parts(group, [0, 0], spread_choices=4) == [8]

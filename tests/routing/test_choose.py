"""Which worker gets the next group."""

import pytest

from motet.routing.choose import Candidate, Work, choose


def candidate(
    waiting_tokens: int = 0, open_choices: int = 0, *, up: bool = True, may_be_tried: bool = True
) -> Candidate:
    return Candidate(up=up, may_be_tried=may_be_tried, waiting_tokens=waiting_tokens, open_choices=open_choices)


def test_prefill_goes_where_the_fewest_prompt_tokens_wait_whatever_is_being_written() -> None:
    assert choose([candidate(50, 0), candidate(40, 9), candidate(60, 0)], Work.PREFILL) == 1


def test_generating_goes_where_the_fewest_choices_are_open_whatever_waits() -> None:
    assert choose([candidate(0, 5), candidate(0, 4), candidate(99, 3)], Work.GENERATE) == 2


@pytest.mark.parametrize("work", Work)
def test_of_equals_the_first_is_chosen(work: Work) -> None:
    assert choose([candidate(7, 7), candidate(3, 3), candidate(3, 3)], work) == 1


@pytest.mark.parametrize("work", Work)
def test_one_that_has_just_died_is_chosen_for_nothing(work: Work) -> None:
    dead = candidate(0, 0, up=False, may_be_tried=False)
    assert choose([dead, candidate(9, 9)], work) == 1
    assert choose([dead], work) is None


def test_one_that_died_a_while_ago_is_tried_for_prefill_and_not_for_a_group_that_cannot_be_begun_again() -> None:
    suspect = candidate(0, 0, up=False)
    assert choose([suspect, candidate(9, 9)], Work.PREFILL) == 0
    assert choose([suspect, candidate(9, 9)], Work.GENERATE) == 1


@pytest.mark.parametrize("work", Work)
def test_of_none_none_is_chosen(work: Work) -> None:
    assert choose([], work) is None

"""A record adds up the steps of a group."""

from motet.metrics.prometheus import Metrics
from motet.types import FinishReason
from tests.metrics.shown import ShownChoice, TimedGroup


def a_group(num_choices: int, *, started_s: float = 0.0) -> TimedGroup:
    return TimedGroup(Metrics().of("m"), num_choices, started_s=started_s)


def test_times_count_from_the_start_and_wait_for_every_choice() -> None:
    group = a_group(3, started_s=10.0)
    record = group.record
    group.step([ShownChoice(1, None)], 11.0)
    assert (record.first_token_s, record.last_choice_first_token_s) == (1.0, None)
    group.step([ShownChoice(0, None), ShownChoice(1, None), ShownChoice(2, FinishReason.STOP)], 12.5)
    assert (record.first_token_s, record.last_choice_first_token_s) == (1.0, 2.5)
    assert (record.finish_spread_s(complete=False), record.age_s) == (None, 2.5)


def test_spread_is_from_the_first_end_to_the_last() -> None:
    group = a_group(2)
    group.step([ShownChoice(0, FinishReason.STOP), ShownChoice(1, None)], 1.0)
    group.step([ShownChoice(1, FinishReason.LENGTH)], 4.0)
    assert len(group.record.finished_s) == group.record.num_choices
    assert group.record.finish_spread_s(complete=False) == 3.0
    assert (group.record.decode_s(0), group.record.decode_s(1)) == (0.0, 3.0)


def test_a_step_without_choices_starts_a_group_and_is_not_a_first_token() -> None:
    group = a_group(1)
    assert group.num_first_steps == 0
    group.step([], 1.0)
    assert group.num_first_steps == 1
    assert group.record.first_token_s is None

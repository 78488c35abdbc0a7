"""What a group's steps add up to."""

from motet.metrics.record import GroupRecord
from motet.types import FinishReason
from tests.metrics.shown import ShownChoice


def test_times_count_from_the_start_and_wait_for_every_choice() -> None:
    record = GroupRecord(num_choices=3, started_s=10.0)
    record.step([ShownChoice(1, None)], 11.0)
    assert (record.first_token_s, record.last_choice_first_token_s) == (1.0, None)
    record.step([ShownChoice(0, None), ShownChoice(1, None), ShownChoice(2, FinishReason.STOP)], 12.5)
    assert (record.first_token_s, record.last_choice_first_token_s) == (1.0, 2.5)
    assert record.finish_spread_s is None


def test_spread_is_from_the_first_end_to_the_last() -> None:
    record = GroupRecord(num_choices=2, started_s=0.0)
    record.step([ShownChoice(0, FinishReason.STOP), ShownChoice(1, None)], 1.0)
    record.step([ShownChoice(1, FinishReason.LENGTH)], 4.0)
    assert record.all_finished
    assert record.finish_spread_s == 3.0
    assert (record.decode_s(0), record.decode_s(1)) == (0.0, 3.0)


def test_step_tells_the_time_since_the_step_before() -> None:
    record = GroupRecord(num_choices=1, started_s=0.0)
    assert record.step([], 1.0) is None
    assert record.step([ShownChoice(0, None)], 1.25) == 0.25


def test_step_without_choices_is_no_first_token() -> None:
    record = GroupRecord(num_choices=1, started_s=0.0)
    record.step([], 1.0)
    assert record.first_token_s is None

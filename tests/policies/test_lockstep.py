"""The steps do not depend on the bundles in which the engine sends its tokens: each has one token of each choice."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.ids import RequestId
from motet.policies.lockstep import WAITING_LOGPROB_BYTES, WAITING_TOKEN_BYTES, Lockstep
from motet.types import ChoiceDelta, Finish, FinishReason, GroupDelta, PromptReport, TokenLogprob

GROUP = RequestId("r")
STOP = Finish(FinishReason.STOP)


def delta(*choices: ChoiceDelta, prompt: PromptReport | None = None, worker: str = "") -> GroupDelta:
    return GroupDelta(GROUP, choices, prompt, worker)


def steps_of(lockstep: Lockstep) -> list[GroupDelta]:
    steps = []
    while (step := lockstep.next()) is not None:
        steps.append(step)
    return steps


def started(*indices: int) -> Lockstep:
    lockstep = Lockstep(GROUP)
    lockstep.start(indices)
    return lockstep


def test_a_step_waits_for_the_slowest_choice() -> None:
    lockstep = started(0, 1)
    lockstep.feed(delta(ChoiceDelta(0, (10,)), ChoiceDelta(1, (20,))))
    lockstep.feed(delta(ChoiceDelta(0, (11,))))
    lockstep.feed(delta(ChoiceDelta(0, (12,), None, STOP)))
    assert steps_of(lockstep) == [delta(ChoiceDelta(0, (10,)), ChoiceDelta(1, (20,)))]
    lockstep.feed(delta(ChoiceDelta(1, (21, 22, 23))))
    assert steps_of(lockstep) == [
        delta(ChoiceDelta(0, (11,)), ChoiceDelta(1, (21,))),
        delta(ChoiceDelta(0, (12,), None, STOP), ChoiceDelta(1, (22,))),
        delta(ChoiceDelta(1, (23,))),
    ]


def test_several_tokens_of_a_step_are_several_steps_each_with_its_log_probability() -> None:
    lockstep = started(3)
    scores = tuple(TokenLogprob(token, -1.0, 1) for token in (5, 6))
    lockstep.feed(delta(ChoiceDelta(3, (5, 6), scores, STOP)))
    assert lockstep.waiting_bytes == 2 * (WAITING_TOKEN_BYTES + WAITING_LOGPROB_BYTES)
    assert steps_of(lockstep) == [
        delta(ChoiceDelta(3, (5,), scores[:1])),
        delta(ChoiceDelta(3, (6,), scores[1:], STOP)),
    ]


def test_a_choice_that_has_been_ended_delays_no_other_and_gets_no_more_tokens() -> None:
    lockstep = started(0, 1, 2)
    lockstep.feed(delta(ChoiceDelta(0, (10, 11))))
    assert lockstep.next() is None
    lockstep.feed(delta(ChoiceDelta(2, (30,))))
    assert lockstep.waiting_bytes == 3 * WAITING_TOKEN_BYTES
    lockstep.end(2)
    assert lockstep.waiting_bytes == 2 * WAITING_TOKEN_BYTES
    lockstep.end(1)
    lockstep.feed(delta(ChoiceDelta(1, (20,))))
    assert steps_of(lockstep) == [delta(ChoiceDelta(0, (10,))), delta(ChoiceDelta(0, (11,)))]


def test_a_choice_that_starts_later_joins_at_the_present_step() -> None:
    lockstep = started(0)
    lockstep.feed(delta(ChoiceDelta(0, (10, 11))))
    assert lockstep.next() == delta(ChoiceDelta(0, (10,)))
    lockstep.start([1])
    assert lockstep.next() is None
    lockstep.feed(delta(ChoiceDelta(1, (20,))))
    assert lockstep.next() == delta(ChoiceDelta(0, (11,)), ChoiceDelta(1, (20,)))


def test_an_end_without_a_token_is_a_step_of_its_choice() -> None:
    lockstep = started(0, 1)
    abort = Finish(FinishReason.ABORT)
    lockstep.feed(delta(ChoiceDelta(0, (), None, abort), ChoiceDelta(1, (), None, abort)))
    assert steps_of(lockstep) == [delta(ChoiceDelta(0, (), None, abort), ChoiceDelta(1, (), None, abort))]


def test_the_reports_about_prompt_and_worker_are_in_the_next_step() -> None:
    lockstep = started(0, 1)
    lockstep.feed(delta(ChoiceDelta(0, (10,)), prompt=PromptReport(3), worker="decode-0"))
    lockstep.feed(delta(ChoiceDelta(1, (20, 21))))
    assert lockstep.next() == delta(
        ChoiceDelta(0, (10,)), ChoiceDelta(1, (20,)), prompt=PromptReport(3), worker="decode-0"
    )
    lockstep.feed(delta(ChoiceDelta(0, (11,))))
    assert lockstep.next() == delta(ChoiceDelta(0, (11,)), ChoiceDelta(1, (21,)))


@pytest.mark.slow
@given(st.data(), st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_the_steps_do_not_depend_on_the_bundles(data: st.DataObject, lengths: Sequence[int]) -> None:
    tokens = [[100 * index + place for place in range(length)] for index, length in enumerate(lengths)]
    lockstep = started(*range(len(lengths)))
    steps: list[GroupDelta] = []
    while any(tokens):
        index = data.draw(st.sampled_from([index for index, left in enumerate(tokens) if left]))
        size = data.draw(st.integers(1, len(tokens[index])))
        taken, tokens[index] = tokens[index][:size], tokens[index][size:]
        lockstep.feed(delta(ChoiceDelta(index, tuple(taken), None, None if tokens[index] else STOP)))
        if data.draw(st.booleans()):
            steps += steps_of(lockstep)
    steps += steps_of(lockstep)
    assert lockstep.waiting_bytes == 0
    assert [[(one.index, *one.token_ids) for one in step.choices] for step in steps] == [
        [(index, 100 * index + place) for index, length in enumerate(lengths) if place < length]
        for place in range(max(lengths))
    ]

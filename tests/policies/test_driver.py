"""The driver of a policy: after each step, it returns which choices end, which start, and which never start."""

import asyncio
import tracemalloc
from collections import Counter
from collections.abc import Sequence

import pytest

from motet.loop_budget import BUDGET, LoopBudget
from motet.policies.confidence import ConfidenceRule
from motet.policies.criteria import Agree, Finished
from motet.policies.driver import ChoiceOutput, PolicyDriver
from motet.policies.extract import Extract, ExtractKind
from motet.policies.steering import AnswerValues, GroupPolicy
from motet.types import FinishReason, TokenLogprob
from tests.clock import Clock, TurnCounter

pytestmark = pytest.mark.anyio

LAST_LINE = Extract(ExtractKind.LAST_LINE)
AGREE = GroupPolicy(stop_when=Agree(2), extract=LAST_LINE, start=2)


def finished(index: int, text: str = "") -> ChoiceOutput:
    return ChoiceOutput(index, text, FinishReason.STOP)


def scored(index: int, *logprobs: float, num_tokens: int) -> ChoiceOutput:
    return ChoiceOutput(index, logprobs=[TokenLogprob(0, logprob, 1) for logprob in logprobs], num_tokens=num_tokens)


async def test_without_a_policy_only_the_ends_by_the_client_are_decided() -> None:
    driver = PolicyDriver(None, range(3))
    assert driver.cancel(2)
    decision = await driver.step([finished(0)])
    assert (decision.abort, decision.start, decision.drop) == ((2,), (), ())
    assert driver.unfinished == {1}
    driver.finished([1])
    assert driver.unfinished == set()
    assert driver.report("g") is None


async def test_without_a_policy_choices_can_have_any_indices() -> None:
    """Choices that were requested later (`/v1/groups/{id}/more`) continue the indices of their group."""
    driver = PolicyDriver(None, [4, 5])
    assert driver.cancel(5)
    decision = await driver.step([finished(4)])
    assert (decision.abort, driver.unfinished) == ((5,), set())


async def test_choices_start_as_others_finish_until_the_condition_is_met() -> None:
    driver = PolicyDriver(AGREE, range(5))
    assert driver.waiting == {2, 3, 4}
    assert (await driver.step([ChoiceOutput(0, "a"), ChoiceOutput(1, "b")])).start == ()
    assert (await driver.step([finished(0, "bc"), ChoiceOutput(1, "\n")])).start == (2,)
    assert (await driver.step([finished(1, "d")])).start == (3,)
    decision = await driver.step([finished(2, "x\nabc"), ChoiceOutput(3, "y")])
    assert (decision.abort, decision.start, decision.drop) == ((3,), (), (4,))
    assert driver.unfinished == set()
    report = driver.report("g")
    assert report is not None
    assert (report.started, report.finished, report.aborted, report.stopped_by) == (4, 3, 1, "agree")


async def test_a_choice_that_the_client_ends_takes_part_in_the_next_decision() -> None:
    driver = PolicyDriver(GroupPolicy(start=1), range(3))
    assert driver.cancel(0)
    assert not driver.cancel(0)
    assert driver.cancelled == {0}
    assert driver.unfinished == {0, 1, 2}
    decision = await driver.step([])
    assert (decision.abort, decision.start) == ((0,), (1,))
    assert driver.cancelled == set()
    assert driver.unfinished == {1, 2}


async def test_a_choice_that_finishes_in_the_step_in_which_it_is_cancelled_has_finished() -> None:
    driver = PolicyDriver(GroupPolicy(stop_when=Finished(2)), range(2))
    driver.cancel(0)
    assert (await driver.step([finished(0)])).abort == ()
    report = driver.report("g")
    assert report is not None and report.finished == 1


async def test_waiting_choices_can_be_withdrawn() -> None:
    driver = PolicyDriver(GroupPolicy(start=1), range(4))
    assert not driver.withdraw(0)
    assert driver.withdraw(1)
    assert not driver.withdraw(1)
    assert driver.unfinished == {0, 2, 3}
    driver.withdraw_all()
    assert driver.unfinished == {0}
    assert (await driver.step([finished(0)])).start == ()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
async def test_the_order_of_the_deltas_of_a_step_does_not_matter(order: Sequence[int]) -> None:
    driver = PolicyDriver(GroupPolicy(extract=LAST_LINE, vote=True), range(3))
    await driver.step([finished(index, text) for index, text in ((index, "abb"[index]) for index in order)])
    report = driver.report("g")
    assert report is not None and report.vote is not None
    assert report.vote.values == {0: "a", 1: "b", 2: "b"}
    assert (report.vote.majority, report.vote.count) == ("b", 2)


async def test_log_probabilities_after_the_end_of_a_choice_do_not_count() -> None:
    rule = ConfidenceRule(window=2, top=1, below=2.0)
    driver = PolicyDriver(GroupPolicy(confidence=rule), range(2))
    assert driver.reads_logprobs and not driver.reads_answers
    assert (await driver.step([scored(0, -3.0, -3.0, -1.0, num_tokens=2)])).abort == ()
    await driver.step([finished(1)])
    assert (await driver.step([scored(1, -1.0, -1.0, num_tokens=2)])).abort == ()
    assert (await driver.step([scored(0, -1.0, -1.0, num_tokens=4)])).abort == (0,)


class SlowRule:
    """Rule whose values take a time to find, on a clock of the test."""

    def __init__(self, turns: TurnCounter, *, value_s: float) -> None:
        self.turns = turns
        self.value_s = value_s
        self.found = Counter[int]()
        """Number of values found in each turn of the event loop."""
        extract = Extract(ExtractKind.LAST_LINE)
        object.__setattr__(extract, "_find", self.find)
        self.policy = GroupPolicy(extract=extract, vote=True)
        self._clock = Clock()
        BUDGET.set(LoopBudget(self._clock))

    def find(self, text: str) -> str:
        self._clock.now_s += self.value_s
        self.found[self.turns.turns] += 1
        return text


async def test_all_groups_together_have_one_limit_of_time_for_values_in_a_turn_of_the_event_loop() -> None:
    """One request can have hundreds of prompts whose answers end in the same step."""
    with TurnCounter() as turns:
        rule = SlowRule(turns, value_s=0.0015)
        drivers = [PolicyDriver(rule.policy, range(2)) for _ in range(40)]
        await asyncio.gather(
            *(driver.step([finished(0, "a"), finished(1, str(i))]) for i, driver in enumerate(drivers))
        )
    assert rule.found.total() == 80
    assert max(rule.found.values()) * rule.value_s < 0.01
    votes = [report.vote for driver in drivers if (report := driver.report("g")) is not None]
    assert [vote.values for vote in votes if vote is not None] == [{0: "a", 1: str(i)} for i in range(40)]


async def test_a_choice_can_be_ended_while_values_are_found() -> None:
    with TurnCounter() as turns:
        driver = PolicyDriver(SlowRule(turns, value_s=1.0).policy, range(3))
        stepping = asyncio.create_task(driver.step([finished(0, "a"), finished(1, "b")]))
        await asyncio.sleep(0)
        assert driver.cancel(2)
        assert (await stepping).abort == (2,)


def test_the_texts_of_answers_are_kept_without_an_object_for_each_token() -> None:
    """The bug: 256 answers of 8,000 tokens took 150 MB until their values were found, also if they were streamed."""
    values, token = AnswerValues(LAST_LINE), "abcd"
    tracemalloc.start()
    try:
        for number in range(8000):
            values.add_text(0, f"{token}{number % 10}")
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 2 * 8000 * 5
    values.add_text(0, "\n42")
    values.find(0)
    assert values.take(0) == "42"
    assert values.take(1) is None

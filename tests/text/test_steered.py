"""A group under a policy: which choices end early and start later, and that their texts are those without a policy."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from motet.errors import MotetError, NoWorkerError, OverloadedError
from motet.ids import RequestId
from motet.policies.confidence import ConfidenceRule
from motet.policies.criteria import Agree, Finished, Window
from motet.policies.extract import Extract, ExtractKind
from motet.policies.steering import GroupPolicy, GroupReport, Refill
from motet.testing.fake_engine import FakeEngine, FakeGroup, Script
from motet.text.choice import TextRules
from motet.text.text_group import GroupStep, TextGroup
from motet.text.tokenizer import Tokenizer
from motet.types import ChoiceDelta, FinishReason, GenerateRequest, GroupDelta, TokenLogprob
from tests.text.feeding import ids_of, request, stopping
from tests.tiny_tokenizer import fake_answer

pytestmark = pytest.mark.anyio

ABORT, STOP = FinishReason.ABORT, FinishReason.STOP
LAST_LINE = Extract(ExtractKind.LAST_LINE)


def script(*answers: str) -> Script:
    return lambda _request, start: fake_answer(answers[start.index])


async def steps_of(
    engine: FakeEngine, sent: GenerateRequest, policy: GroupPolicy | None, *, tokenizer: Tokenizer
) -> list[GroupStep]:
    group = TextGroup(engine, sent, tokenizer=tokenizer, rules=TextRules(), policy=policy)
    steps: list[GroupStep] = []
    await group.run(steps.extend)
    await group.aclose()
    engine.check()
    return steps


def texts(steps: Sequence[GroupStep]) -> dict[int, str]:
    joined: dict[int, str] = {}
    for step in steps:
        for event in step.events:
            joined[event.index] = joined.get(event.index, "") + event.text
    return joined


def ends(steps: Sequence[GroupStep]) -> dict[int, FinishReason]:
    return {event.index: event.finish for step in steps for event in step.events if event.finish}


def report(steps: Sequence[GroupStep]) -> GroupReport:
    (last,) = [step.report for step in steps if step.report is not None]
    assert steps[-1].report is last
    return last


async def test_a_group_ends_when_enough_choices_have_finished(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(script("abcdefgh", "ab", "abc", "abcdefg"))
    policy = GroupPolicy(stop_when=Finished(2))
    steps = await steps_of(engine, request(4), policy, tokenizer=tokenizer)
    assert ends(steps) == {0: ABORT, 1: STOP, 2: STOP, 3: ABORT}
    assert texts(steps) == {0: "abcd", 1: "ab", 2: "abc", 3: "abcd"}  # the third ends with its fourth token
    result = report(steps)
    assert (result.started, result.finished, result.aborted, result.stopped_by) == (4, 2, 2, "finished")
    assert engine.record.generated_tokens == 4 + 3 + 4 + 4


async def test_choices_that_finish_in_the_step_that_decides_all_count(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(script("ab", "ab", "ab", "abcd"))
    steps = await steps_of(engine, request(4), GroupPolicy(stop_when=Finished(2)), tokenizer=tokenizer)
    assert ends(steps) == {0: STOP, 1: STOP, 2: STOP, 3: ABORT}


async def test_values_are_compared_and_the_majority_is_reported(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(script("x\nab", "xy\ncd", "xyz\nab", "xyzzyx\nab"))
    policy = GroupPolicy(stop_when=Agree(2), extract=LAST_LINE, vote=True)
    steps = await steps_of(engine, request(4), policy, tokenizer=tokenizer)
    assert ends(steps) == {0: STOP, 1: STOP, 2: STOP, 3: ABORT}
    result = report(steps)
    assert result.stopped_by == "agree" and result.vote is not None
    assert result.vote.values == {0: "ab", 1: "cd", 2: "ab"}
    assert (result.vote.majority, result.vote.count) == ("ab", 2)


async def test_a_group_whose_condition_is_never_met_runs_to_its_end(tokenizer: Tokenizer) -> None:
    answers = ["one", "two three", "four five six"]
    plain = await steps_of(FakeEngine(script(*answers)), request(), None, tokenizer=tokenizer)
    policy = GroupPolicy(stop_when=Agree(2), extract=LAST_LINE)
    steered = await steps_of(FakeEngine(script(*answers)), request(), policy, tokenizer=tokenizer)
    assert report(steered).stopped_by is None
    assert [step.events for step in steered] == [step.events for step in plain]


async def test_waiting_choices_start_as_others_end_with_their_own_seeds(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(script("a", "abcd", "abc", "ab"))
    steps = await steps_of(engine, request(4), GroupPolicy(start=2), tokenizer=tokenizer)
    assert texts(steps) == {0: "a", 1: "abcd", 2: "abc", 3: "ab"}
    started = [[(start.index, start.seed) for start in sent.choices] for sent in engine.requests]
    seeds = [start.seed for start in request(4).choices]
    assert started == [[(0, seeds[0]), (1, seeds[1])], [(2, seeds[2])], [(3, seeds[3])]]
    assert [sent.request_id for sent in engine.requests] == ["r", "r+1", "r+2"]
    assert [step.started for step in steps if step.started] == [(2,), (3,)]
    assert sum(step.prompt is not None for step in steps) == 1


async def test_waiting_choices_start_together_if_the_policy_says_so(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(script("a", "abcd", "abc", "ab"))
    policy = GroupPolicy(start=2, refill=Refill.ALL)
    await steps_of(engine, request(4), policy, tokenizer=tokenizer)
    assert [[start.index for start in sent.choices] for sent in engine.requests] == [[0, 1], [2, 3]]


async def test_choices_that_are_not_needed_never_start(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(script("ab", "ab", "no", "no", "no", "no"))
    policy = GroupPolicy(stop_when=Window(2), extract=LAST_LINE, start=2, refill=Refill.ALL)
    steps = await steps_of(engine, request(6), policy, tokenizer=tokenizer)
    assert texts(steps) == {0: "ab", 1: "ab"}
    result = report(steps)
    assert (result.n, result.started, result.finished, result.aborted, result.stopped_by) == (6, 2, 2, 0, "window")


@pytest.mark.parametrize(("session", "expected"), [("", "r"), ("mine", "mine")])
async def test_choices_that_start_later_have_the_session_of_the_first(
    tokenizer: Tokenizer, session: str, expected: str
) -> None:
    engine = FakeEngine(script("a", "ab", "abc"))
    sent = msgspec.structs.replace(request(3), session_id=session)
    await steps_of(engine, sent, GroupPolicy(start=1), tokenizer=tokenizer)
    assert [one.session_id for one in engine.requests] == [expected] * 3


async def test_a_choice_of_low_confidence_ends(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(script("abcd", "abcd"))  # each token scores -0.5, -1.5, ...
    sent = request(2)
    sent = msgspec.structs.replace(sent, sampling=msgspec.structs.replace(sent.sampling, logprobs=2))
    rule = ConfidenceRule(window=3, top=2, below=1.5, warm_up=0, percentile=0)
    steps = await steps_of(engine, sent, GroupPolicy(confidence=rule), tokenizer=tokenizer)
    assert ends(steps) == {0: ABORT, 1: ABORT}
    assert texts(steps) == {0: "abc", 1: "abc"}
    result = report(steps).confidence
    assert result is not None and result.threshold == 1.5 and result.lowest == {0: 1.0, 1: 1.0}


async def after_two_steps(group: TextGroup) -> tuple[list[GroupStep], asyncio.Task[None]]:
    """Returns the steps, to which later steps are added, and the task that reads the group."""
    steps: list[GroupStep] = []
    taken = asyncio.Semaphore(0)

    def take(more: Sequence[GroupStep]) -> None:
        steps.extend(more)
        taken.release()

    running = asyncio.create_task(group.run(take))
    await taken.acquire()
    await taken.acquire()
    return steps, running


async def test_a_choice_that_the_client_ends_keeps_its_output(tokenizer: Tokenizer) -> None:
    gate = asyncio.Semaphore(2)
    engine = FakeEngine(script("abcd", "efgh"), gate=gate)
    group = TextGroup(engine, request(2), tokenizer=tokenizer, rules=TextRules())
    steps, running = await after_two_steps(group)
    assert await group.end_choice(1)
    assert not await group.end_choice(1)
    assert not await group.end_choice(7)
    assert set(engine.open[RequestId("r")].unfinished) == {0}
    for _ in range(9):
        gate.release()
    await running
    assert texts(steps) == {0: "abcd", 1: "ef"}
    assert ends(steps) == {0: STOP, 1: ABORT}
    engine.check()


@pytest.mark.parametrize("policy", [None, GroupPolicy(start=1), GroupPolicy(deterministic=True)])
async def test_all_choices_are_ended_by_the_client(tokenizer: Tokenizer, policy: GroupPolicy | None) -> None:
    gate = asyncio.Semaphore(2)
    engine = FakeEngine(script("abcd", "efgh"), gate=gate)
    group = TextGroup(engine, request(2), tokenizer=tokenizer, rules=TextRules(), policy=policy)
    steps, running = await after_two_steps(group)
    await group.end_all()
    await running
    started = [0] if policy and policy.start else [0, 1]
    assert ends(steps) == dict.fromkeys(started, ABORT)
    assert texts(steps) == {index: "abcdefgh"[4 * index :][:2] for index in started}
    assert group.unfinished == set()
    await group.aclose()
    engine.check()


async def test_all_choices_are_ended_by_the_client_before_the_group_is_read(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(script("abcd", "efgh"))
    group = TextGroup(engine, request(2), tokenizer=tokenizer, rules=TextRules())
    await group.end_all()
    steps: list[GroupStep] = []
    await group.run(steps.extend)
    assert ends(steps) == {0: ABORT, 1: ABORT}
    engine.check()


async def test_choices_are_ended_by_the_client_before_their_first_token(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(script("abcd", "efgh"), gate=asyncio.Semaphore(0))
    group = TextGroup(engine, request(2), tokenizer=tokenizer, rules=TextRules())
    steps: list[GroupStep] = []
    running = asyncio.create_task(group.run(steps.extend))
    await asyncio.sleep(0)
    assert await group.end_choice(0)
    assert await group.end_choice(1)
    await running
    assert ends(steps) == {0: ABORT, 1: ABORT}
    assert texts(steps) == {0: "", 1: ""}
    engine.check()


async def test_a_waiting_choice_starts_when_the_only_running_one_is_ended(tokenizer: Tokenizer) -> None:
    gate = asyncio.Semaphore(2)
    engine = FakeEngine(script("abcd", "efgh", "ijkl"), gate=gate)
    group = TextGroup(engine, request(3), tokenizer=tokenizer, rules=TextRules(), policy=GroupPolicy(start=1))
    steps, running = await after_two_steps(group)
    assert await group.end_choice(2)
    assert await group.end_choice(0)
    for _ in range(20):
        gate.release()
    await running
    assert (texts(steps), ends(steps)) == ({0: "ab", 1: "efgh"}, {0: ABORT, 1: STOP})
    assert [step.started for step in steps if step.started] == [(1,)]
    engine.check()


async def test_a_reader_that_is_cancelled_at_any_moment_leaves_nothing(tokenizer: Tokenizer) -> None:
    policy = GroupPolicy(stop_when=Finished(1), deterministic=True)
    for turns in range(1, 40):
        engine = FakeEngine(script("a", "efghefgh", "ijkl"))
        group = TextGroup(engine, request(3), tokenizer=tokenizer, rules=TextRules(), policy=policy)
        running = asyncio.create_task(group.run(lambda _: None))
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        await group.aclose()
        engine.check()


class Refusing(FakeEngine):
    """Refuses groups that start later with these errors, one each time."""

    def __init__(self, script: Script, refusals: Sequence[MotetError]) -> None:
        super().__init__(script)
        self.refusals = list(refusals)

    def generate(self, request: GenerateRequest) -> FakeGroup:
        if "+" in request.request_id and self.refusals:
            raise self.refusals.pop(0)
        return super().generate(request)


async def test_choices_that_are_refused_when_they_start_are_submitted_again(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motet.text.steered.RETRY_S", 0.0)
    engine = Refusing(script("a", "ab"), [NoWorkerError("none"), OverloadedError("full"), NoWorkerError("none")])
    steps = await steps_of(engine, request(2), GroupPolicy(start=1), tokenizer=tokenizer)
    assert texts(steps) == {0: "a", 1: "ab"}
    assert engine.refusals == []
    monkeypatch.setattr("motet.text.steered.NO_WORKER_S", 0.0)
    engine = Refusing(script("a", "ab"), [NoWorkerError("none")] * 9)
    group = TextGroup(engine, request(2), tokenizer=tokenizer, rules=TextRules(), policy=GroupPolicy(start=1))
    with pytest.raises(NoWorkerError):
        await group.run(lambda _: None)
    await group.aclose()
    engine.check()


async def test_a_choice_that_is_refused_when_it_starts_can_be_ended(tokenizer: Tokenizer) -> None:
    engine = Refusing(script("a", "ab"), [OverloadedError("full")] * 1000)
    group = TextGroup(engine, request(2), tokenizer=tokenizer, rules=TextRules(), policy=GroupPolicy(start=1))
    steps: list[GroupStep] = []
    started = asyncio.Event()

    def take(more: Sequence[GroupStep]) -> None:
        steps.extend(more)
        if more[-1].started:
            started.set()

    running = asyncio.create_task(group.run(take))
    await started.wait()
    assert await group.end_choice(1)
    await running
    assert ends(steps) == {0: STOP, 1: ABORT}
    engine.check()


class Bundling(FakeEngine):
    """Sends the answer of a choice with log-probabilities, in one delta or in one for each token."""

    def __init__(self, ids: tuple[int, ...], *, at_once: bool) -> None:
        super().__init__(lambda *_: ids)
        scores = (-3.0, -3.0, -3.0, -1.0, -1.0)
        logprobs = tuple(TokenLogprob(id, -0.1, 1, ((id, score),)) for id, score in zip(ids, scores, strict=True))
        one = [ChoiceDelta(0, (id,), (logprob,)) for id, logprob in zip(ids, logprobs, strict=True)]
        self.deltas = [ChoiceDelta(0, ids, logprobs)] if at_once else one

    def generate(self, request: GenerateRequest) -> FakeGroup:
        return BundledGroup(self, request)


class BundledGroup(FakeGroup):
    def __init__(self, engine: Bundling, request: GenerateRequest) -> None:
        super().__init__(engine, request)
        self.left = list(engine.deltas)

    async def __anext__(self) -> GroupDelta:
        return GroupDelta(RequestId("r"), (self.left.pop(0),))


@pytest.mark.parametrize("at_once", [True, False])
async def test_tokens_after_a_stop_string_do_not_count_for_the_confidence(tokenizer: Tokenizer, at_once: bool) -> None:
    engine = Bundling(ids_of("ab!cd"), at_once=at_once)
    policy = GroupPolicy(confidence=ConfidenceRule(window=2, top=1, warm_up=1, percentile=90))
    group = TextGroup(engine, request(1), tokenizer=tokenizer, rules=stopping("!"), policy=policy)
    steps: list[GroupStep] = []
    await group.run(steps.extend)
    result = report(steps).confidence
    assert result is not None and result.threshold == 3.0


async def test_a_warm_up_choice_that_never_starts_does_not_delay_the_threshold(tokenizer: Tokenizer) -> None:
    gate = asyncio.Semaphore(2)
    engine = FakeEngine(script("abcd", "efgh", "ijklmn"), gate=gate)
    sent = request(3)
    sent = msgspec.structs.replace(sent, sampling=msgspec.structs.replace(sent.sampling, logprobs=2))
    policy = GroupPolicy(start=1, confidence=ConfidenceRule(window=2, top=2, warm_up=2, percentile=90))
    group = TextGroup(engine, sent, tokenizer=tokenizer, rules=TextRules(), policy=policy)
    steps, running = await after_two_steps(group)
    assert await group.end_choice(1)
    for _ in range(30):
        gate.release()
    await running
    result = report(steps).confidence
    assert result is not None and result.threshold == 1.0

"""A group turns the engine's deltas into the events of all its choices."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from motet.errors import EngineDiedError, EngineError
from motet.ids import RequestId
from motet.testing.fake_engine import FakeEngine, FakeGroup, Script
from motet.text.choice import ChoiceEvent, TextRules, WeightSpan
from motet.text.text_group import GroupStep, TextGroup
from motet.text.tokenizer import Tokenizer
from motet.types import (
    ChoiceDelta,
    ChoiceStart,
    FinishReason,
    GenerateRequest,
    GroupDelta,
    PromptReport,
    Usage,
)
from tests.text.feeding import first_of, request, stopping
from tests.tiny_tokenizer import EOS_ID, fake_answer

pytestmark = pytest.mark.anyio

ANSWERS = ["one", "two END three", "four five six"]


def script(*answers: str) -> Script:
    return lambda _request, start: fake_answer(answers[start.index])


async def rest_of(group: TextGroup) -> list[GroupStep]:
    steps: list[GroupStep] = []
    await group.run(steps.extend)
    return steps


def text_of(index: int, steps: list[GroupStep]) -> str:
    return "".join(event.text for step in steps for event in step.events if event.index == index)


async def test_choices_of_a_group_stream_at_the_same_time(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(script(*ANSWERS))
    steps = await rest_of(TextGroup(engine, request(), tokenizer=tokenizer, rules=TextRules()))
    assert [text_of(index, steps) for index in range(3)] == ANSWERS
    assert [event.index for event in steps[0].events] == [0, 1, 2]
    engine.check()


class ReportingEngine(FakeEngine):
    """Reports a worker in each step of a group, with deltas of some of the choices."""

    def __init__(self, *steps: tuple[str, Sequence[int]]) -> None:
        super().__init__(script(*ANSWERS))
        self.steps = steps

    def generate(self, request: GenerateRequest) -> FakeGroup:
        return ReportingGroup(self, request)


class ReportingGroup(FakeGroup):
    def __init__(self, engine: ReportingEngine, request: GenerateRequest) -> None:
        super().__init__(engine, request)
        self._steps = iter(engine.steps)

    async def __anext__(self) -> GroupDelta:
        worker, indices = next(self._steps)
        choices = tuple(ChoiceDelta(index, tuple(fake_answer("a")[:1])) for index in indices)
        return GroupDelta(RequestId("r"), choices, worker=worker)


async def test_a_group_knows_the_worker_that_generated_each_choice_last(tokenizer: Tokenizer) -> None:
    engine = ReportingEngine(("a", [0, 1]), ("", [0, 1]), ("b", [1]), ("b", [2]))
    group = TextGroup(engine, request(), tokenizer=tokenizer, rules=TextRules())
    reported = []
    for _ in engine.steps:
        await first_of(group)
        reported.append(dict(group.workers.of_choice))
    first, moved = {0: "a", 1: "a", 2: "a"}, {0: "a", 1: "b", 2: "a"}
    assert reported == [first, first, moved, moved | {2: "b"}]
    await group.aclose()


async def test_a_group_is_submitted_before_it_is_iterated(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(script(*ANSWERS))
    group = TextGroup(engine, request(), tokenizer=tokenizer, rules=TextRules())
    assert [r.request_id for r in engine.requests] == ["r"]
    await group.aclose()
    await group.aclose()
    engine.check()


async def test_a_stop_string_ends_its_choice_in_the_engine_too(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(script(*ANSWERS))
    group = TextGroup(engine, request(), tokenizer=tokenizer, rules=stopping("END"))
    steps: list[GroupStep] = []

    def take(read: Sequence[GroupStep]) -> None:
        steps.extend(read)
        ended = {event.index for s in steps for event in s.events if event.finish}
        if r := engine.open.get(RequestId("r")):
            assert set(r.unfinished) == {0, 1, 2} - ended

    await group.run(take)
    assert [text_of(index, steps) for index in range(3)] == ["one", "two ", "four five six"]
    finishes = {e.index: (e.finish, e.stop_reason) for s in steps for e in s.events if e.finish}
    stop = FinishReason.STOP
    assert finishes == {0: (stop, None), 1: (stop, "END"), 2: (stop, None)}
    assert group.num_tokens[1] == len(fake_answer("two END", eos=False))
    engine.check()


async def test_the_group_ends_when_stop_strings_have_ended_all_its_choices(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(script("a" * 9, "aab" + "a" * 9))
    group = TextGroup(engine, request(2), tokenizer=tokenizer, rules=stopping("aaa", "b"))
    steps = await rest_of(group)
    assert len(steps) == 2  # the first has the prompt report; "aa" is held back until the end
    assert (text_of(0, steps), text_of(1, steps)) == ("", "aa")
    engine.check()


async def test_steps_with_nothing_to_show_are_skipped(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(script("日"))
    steps = await rest_of(TextGroup(engine, request(1), tokenizer=tokenizer, rules=TextRules()))
    assert steps == [
        GroupStep([], PromptReport(cached_tokens=0)),
        GroupStep([ChoiceEvent(0, "日", tuple(fake_answer("日", eos=False)))]),
        GroupStep([ChoiceEvent(0, "", (EOS_ID,), finish=FinishReason.STOP, weight_versions=(WeightSpan("0", 0, 4),))]),
    ]


async def test_the_prompt_is_counted_once_and_answers_are_summed(tokenizer: Tokenizer) -> None:
    group = TextGroup(FakeEngine(script("a", "abc", "ab")), request(), tokenizer=tokenizer, rules=TextRules())
    assert group.usage == Usage(prompt_tokens=3, completion_tokens=0)
    await first_of(group)
    assert group.usage == Usage(prompt_tokens=3, completion_tokens=3)
    await rest_of(group)
    assert group.usage == Usage(prompt_tokens=3, completion_tokens=2 + 4 + 3)
    assert group.usage.total_tokens == 12
    assert group.num_tokens == {0: 2, 1: 4, 2: 3}


async def test_usage_of_several_groups_adds_up() -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=3)
    assert usage + usage == Usage(prompt_tokens=2, completion_tokens=4, cached_tokens=6)


async def test_the_engines_error_reaches_the_reader(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(script("abc"), fail_after={1: EngineDiedError("gone")})
    group = TextGroup(engine, request(1), tokenizer=tokenizer, rules=TextRules())
    await first_of(group)
    with pytest.raises(EngineDiedError):
        await rest_of(group)
    engine.check()


@pytest.mark.parametrize("steps", [0, 1])
async def test_a_reader_that_was_cancelled_can_still_close_the_group(tokenizer: Tokenizer, steps: int) -> None:
    engine = FakeEngine(script("abc"), gate=asyncio.Semaphore(steps))
    group = TextGroup(engine, request(1), tokenizer=tokenizer, rules=TextRules())
    for _ in range(steps):
        await first_of(group)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(rest_of(group), timeout=0)
    await group.aclose()
    engine.check()


async def test_a_stream_that_ends_early_is_an_error_and_not_a_short_answer(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(script("abc"))
    group = TextGroup(engine, request(1), tokenizer=tokenizer, rules=TextRules())
    await first_of(group)
    await engine.stop_choice(RequestId("r"), 0)  # the group has not requested this
    with pytest.raises(EngineError, match=r"before its choices \[0\] had ended"):
        await rest_of(group)


class ClosingEngine(FakeEngine):
    """An engine that records the streams that the reader has closed."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.closed_groups: list[RequestId] = []

    def generate(self, request: GenerateRequest) -> "ClosingGroup":
        self.requests.append(request)
        group = ClosingGroup(self, request)
        self.open[request.request_id] = group
        return group


class ClosingGroup(FakeGroup):
    def __init__(self, engine: ClosingEngine, request: GenerateRequest) -> None:
        super().__init__(engine, request)
        self._engine_of_group, self._id = engine, request.request_id

    async def aclose(self) -> None:
        self._engine_of_group.closed_groups.append(self._id)
        await super().aclose()


@pytest.mark.parametrize("stop", [(), ("c",)])
async def test_the_engines_stream_is_closed_before_the_last_event(tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    engine = ClosingEngine(script("abcd"))
    group = TextGroup(engine, request(1), tokenizer=tokenizer, rules=stopping(*stop))
    steps: list[GroupStep] = []
    while not any(event.finish for step in steps for event in step.events):
        assert engine.closed_groups == []
        steps = await first_of(group)
    assert "r" in engine.closed_groups
    assert await rest_of(group) == []


async def test_a_resumed_choice_that_had_ended_is_stopped_and_has_no_events(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(script("abc", "xyz"))
    output = tuple(fake_answer("ab", eos=False))
    starts = (ChoiceStart(0, 1, output), ChoiceStart(1, 2, tuple(fake_answer("x", eos=False))))
    group = TextGroup(
        engine,
        msgspec.structs.replace(request(), choices=starts),
        tokenizer=tokenizer,
        rules=stopping("b"),
    )
    first = await first_of(group)
    assert set(engine.open[RequestId("r")].unfinished) == {1}
    steps = [*first, *await rest_of(group)]
    assert (text_of(0, steps), text_of(1, steps)) == ("", "yz")
    assert group.usage.completion_tokens == 2 + 4
    engine.check()

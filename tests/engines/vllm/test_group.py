"""A group without a ticket: its requests are sent at once, and their answers become one stream."""

import asyncio

import msgspec
import pytest

from motet.engines.vllm.vllm_server import ScoredReply
from motet.engines.vllm.vllm_wire import VLLMPiece, VLLMUsage
from motet.errors import EngineDiedError, EngineError, RequestError, WorkerFaultError
from motet.types import ChoiceDelta, ChoiceStart, GenerateRequest, GroupDelta, PromptReport, TokenLogprob
from tests.clock import settle
from tests.engines.vllm.scripted_vllm import GREEDY, LENGTH, SAMPLING, group, piece, scene_with_group, vllm_scene

pytestmark = pytest.mark.anyio


def delta(*choices: ChoiceDelta, prompt: PromptReport | None = None) -> GroupDelta:
    return GroupDelta(group().request_id, choices, prompt)


async def test_requests_are_sent_before_they_are_read_with_trace_and_session() -> None:
    async with scene_with_group(group(), leaves=True) as (there, _):
        (call,) = there.calls
        assert (call.request.n, call.request.model, call.request.trace, call.request.session_id) == (
            3,
            "m",
            "trace-g",
            "session-1",
        )


async def test_everything_that_is_ready_is_one_delta_and_the_first_has_the_prompt_report() -> None:
    async with scene_with_group(group(stops=True), leaves=True) as (there, stream):
        for number, call in enumerate(there.calls):
            call.say(piece(0, 10 + number), piece(0, 20 + number))
        await settle()
        assert await anext(stream) == delta(
            ChoiceDelta(0, (10, 20)),
            ChoiceDelta(1, (11, 21)),
            ChoiceDelta(2, (12, 22)),
            prompt=PromptReport(cached_tokens=0),
        )
        there.calls[1].say(piece(0, 31, finish=LENGTH))
        assert await anext(stream) == delta(ChoiceDelta(1, (31,), None, LENGTH))


async def test_children_are_choices_and_the_stream_ends_with_the_last() -> None:
    async with scene_with_group(group(choices=(ChoiceStart(4, 7), ChoiceStart(2, 8)))) as (there, stream):
        (call,) = there.calls
        call.say(piece(0, 10), piece(1, 11, finish=LENGTH))
        assert (await anext(stream)).choices == (ChoiceDelta(2, (11,), None, LENGTH), ChoiceDelta(4, (10,)))
        call.say(piece(0, finish=LENGTH), VLLMUsage())
        call.end()
        assert (await anext(stream)).choices == (ChoiceDelta(4, (), None, LENGTH),)
        for _ in range(2):
            with pytest.raises(StopAsyncIteration):
                await anext(stream)


async def test_logprobs_stay_with_their_tokens() -> None:
    async with scene_with_group(group(n=1)) as (there, stream):
        logprobs = tuple(TokenLogprob(token_id, -0.5, 1) for token_id in (10, 11))
        there.calls[0].say(VLLMPiece(0, (10,), logprobs[:1]), VLLMPiece(0, (11,), logprobs[1:], LENGTH))
        assert (await anext(stream)).choices == (ChoiceDelta(0, (10, 11), logprobs, LENGTH),)


async def test_cached_tokens_are_known_if_the_complete_answer_has_arrived() -> None:
    async with scene_with_group(group(n=1)) as (there, stream):
        there.calls[0].say(piece(0, 10, finish=LENGTH), VLLMUsage(3))
        assert (await anext(stream)).prompt == PromptReport(cached_tokens=3)


@pytest.mark.parametrize("lie", [piece(3, 10), piece(-1, 10), piece(0, 11)], ids=["unknown", "negative", "ended"])
async def test_tokens_of_a_choice_that_is_not_open_end_the_group(lie: VLLMPiece) -> None:
    async with scene_with_group(group()) as (there, stream):
        there.calls[0].say(piece(0, 10, finish=LENGTH), lie)
        with pytest.raises(WorkerFaultError, match=f"choice {lie.index}, which is not open"):
            await anext(stream)


async def test_greedy_choices_are_copies_and_stopping_one_leaves_the_others() -> None:
    async with scene_with_group(group(sampling=GREEDY)) as (there, stream):
        (call,) = there.calls
        call.say(piece(0, 10))
        assert [choice.index for choice in (await anext(stream)).choices] == [0, 1, 2]
        await there.engine.stop_choice(group().request_id, 1)
        call.say(piece(0, 11, finish=LENGTH))
        assert (await anext(stream)).choices == (
            ChoiceDelta(0, (11,), None, LENGTH),
            ChoiceDelta(2, (11,), None, LENGTH),
        )


async def test_tokens_that_are_ready_for_a_stopped_choice_are_dropped() -> None:
    async with scene_with_group(group(), leaves=True) as (there, stream):
        there.calls[0].say(piece(0, 10), piece(1, 11), piece(2, 12))
        await settle()
        await there.engine.stop_choice(group().request_id, 1)
        assert [choice.index for choice in (await anext(stream)).choices] == [0, 2]


async def test_a_request_of_several_choices_is_closed_when_all_of_them_are_stopped() -> None:
    async with scene_with_group(group()) as (there, stream):
        (call,) = there.calls
        call.say(piece(2, 12, finish=LENGTH))
        await anext(stream)
        await there.engine.stop_choice(group().request_id, 0)
        call.say(piece(0, 10), piece(1, 11))
        assert (await anext(stream)).choices == (ChoiceDelta(1, (11,)),)
        assert there.open == [0]
        await there.engine.stop_choice(group().request_id, 1)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await settle()
        assert call.closed


async def test_a_request_is_closed_when_only_stopped_choices_are_left() -> None:
    async with scene_with_group(
        group(choices=(ChoiceStart(0, 1), ChoiceStart(1, 2), ChoiceStart(2, 9, (5,)))), leaves=True
    ) as (
        there,
        stream,
    ):
        await there.engine.stop_choice(group().request_id, 0)
        there.calls[0].say(piece(1, 11, finish=LENGTH))
        await anext(stream)
        await settle()
        assert there.open == [1]


async def test_the_rest_of_an_answer_is_read_so_that_its_connection_can_be_used_again() -> None:
    async with scene_with_group(group(stops=True), leaves=True) as (there, stream):
        first = there.calls[0]
        first.say(piece(0, 10, finish=LENGTH))
        await anext(stream)
        first.say(VLLMUsage())
        await settle()
        assert (first.reads, first.closed) == (2, False)
        first.end()


async def test_an_answer_may_break_after_the_end_of_its_choices() -> None:
    async with scene_with_group(group(n=2, stops=True)) as (there, stream):
        there.calls[0].say(piece(0, 10, finish=LENGTH))
        await anext(stream)
        there.calls[0].end(EngineDiedError("broke off"))
        await settle()
        there.calls[1].say(piece(0, 11, finish=LENGTH))
        assert (await anext(stream)).choices == (ChoiceDelta(1, (11,), None, LENGTH),)


async def test_no_connection_is_read_while_the_reader_is_slow() -> None:
    async with scene_with_group(group(n=1), leaves=True) as (there, stream):
        (call,) = there.calls
        for token_id in range(10, 14):
            call.say(piece(0, token_id))
            await settle()
        assert call.reads == 1
        assert (await anext(stream)).choices == (ChoiceDelta(0, (10,)),)
        assert (await anext(stream)).choices == (ChoiceDelta(0, (11, 12, 13)),)


@pytest.mark.parametrize("error", [RequestError("too long"), EngineDiedError("gone"), EngineError("broken")])
async def test_an_error_of_one_request_ends_the_group_after_the_deltas_before_it(error: EngineError) -> None:
    async with scene_with_group(group(stops=True)) as (there, stream):
        there.calls[0].say(piece(0, 10))
        there.calls[1].end(error)
        await settle()
        assert (await anext(stream)).choices == (ChoiceDelta(0, (10,)),)
        for _ in range(2):
            with pytest.raises(type(error), match=error.message):
                await anext(stream)
        assert there.open == []


async def test_a_refusal_ends_the_group_and_its_other_requests() -> None:
    async with scene_with_group(group(stops=True), accepting=False) as (there, stream):
        there.calls[2].refuse(RequestError("too long"))
        with pytest.raises(RequestError, match="too long"):
            await anext(stream)
        await settle()
        assert there.open == []


async def test_an_answer_that_breaks_off_means_a_dead_server() -> None:
    async with scene_with_group(group()) as (there, stream):
        there.calls[0].say(piece(1, 10, finish=LENGTH))
        there.calls[0].end()
        assert (await anext(stream)).choices == (ChoiceDelta(1, (10,), None, LENGTH),)
        with pytest.raises(EngineDiedError, match=r"broke off before choices \[0, 2\] ended"):
            await anext(stream)


async def test_an_unexpected_exception_reaches_the_reader() -> None:
    async with scene_with_group(group(), accepting=False) as (there, stream):
        there.calls[0].opening.set_exception(ZeroDivisionError("a defect"))
        with pytest.raises(ZeroDivisionError):
            await anext(stream)


@pytest.mark.parametrize("accepting", [True, False])
async def test_closing_ends_every_request_even_if_the_server_has_not_taken_it(accepting: bool) -> None:
    async with vllm_scene(accepting=accepting) as there:
        stream = there.engine.generate(group(stops=True))
        waiting = asyncio.ensure_future(anext(stream))
        await settle()
        await stream.aclose()
        await stream.aclose()
        assert there.open == []
        with pytest.raises(StopAsyncIteration):
            await waiting


async def test_closing_before_anything_was_sent_sends_nothing() -> None:
    async with vllm_scene() as there:
        await there.engine.generate(group()).aclose()
        assert there.calls == []


async def test_a_reader_that_was_cancelled_can_continue_to_read() -> None:
    async with vllm_scene() as there:
        stream = there.engine.generate(group(n=1))
        waiting = asyncio.ensure_future(anext(stream))
        await settle()
        waiting.cancel()
        await settle()
        there.calls[0].say(piece(0, 10, finish=LENGTH))
        assert (await anext(stream)).choices == (ChoiceDelta(0, (10,), None, LENGTH),)


def scored_group(n: int = 1, max_tokens: int = 9) -> GenerateRequest:
    return group(n=n, sampling=msgspec.structs.replace(SAMPLING, prompt_logprobs=1, max_tokens=max_tokens))


def scored_report(request: GenerateRequest, cached_tokens: int = 0) -> PromptReport:
    logprobs = (None, *(TokenLogprob(token_id, -0.5, 1) for token_id in request.prompt[1:]))
    return PromptReport.scored(cached_tokens, logprobs)


async def test_choices_are_requested_when_the_prompt_has_been_scored() -> None:
    """The bug: both requests were sent at once, and each computed the prompt."""
    request = msgspec.structs.replace(scored_group(n=2), seeded=True, stops=True)
    async with scene_with_group(request) as (there, stream):
        await settle()
        assert there.server.scored_answer is not None and not there.calls
        await there.engine.stop_choice(request.request_id, 0)
        report = scored_report(request)
        there.server.scored_answer.set_result(ScoredReply(report.parts or (), [VLLMUsage(0), piece(0, 5)]))
        await settle()
        assert [call.request.choices for call in there.calls] == [((1,),)]
        there.calls[0].say(piece(0, 10, finish=LENGTH), VLLMUsage(4))
        assert await anext(stream) == delta(ChoiceDelta(1, (10,), None, LENGTH), prompt=report)


async def test_a_choice_of_one_token_comes_with_the_scores_of_its_prompt() -> None:
    async with scene_with_group(request := scored_group(max_tokens=1)) as (there, stream):
        await settle()
        assert there.server.scored_answer is not None
        report = scored_report(request, cached_tokens=2)
        items: list[VLLMPiece | VLLMUsage] = [VLLMUsage(2), piece(0, 10, finish=LENGTH)]
        there.server.scored_answer.set_result(ScoredReply(report.parts or (), items))
        assert await anext(stream) == delta(ChoiceDelta(0, (10,), None, LENGTH), prompt=report)
        assert not there.calls


@pytest.mark.parametrize("items", [[], [piece(0, 10)], [piece(1, 10, finish=LENGTH)], [piece(-1, 10, finish=LENGTH)]])
async def test_a_choice_that_is_missing_next_to_scores_is_a_fault(items: list[VLLMPiece | VLLMUsage]) -> None:
    async with scene_with_group(request := scored_group(max_tokens=1)) as (there, stream):
        await settle()
        assert there.server.scored_answer is not None
        there.server.scored_answer.set_result(ScoredReply(scored_report(request).parts or (), items))
        with pytest.raises(WorkerFaultError, match="no end of choices"):
            await anext(stream)


async def test_a_group_fails_if_the_logprobs_of_its_prompt_fail() -> None:
    async with scene_with_group(scored_group()) as (there, stream):
        await settle()
        assert there.server.scored_answer is not None
        there.server.scored_answer.set_exception(EngineError("broken"))
        with pytest.raises(EngineError, match="broken"):
            await anext(stream)

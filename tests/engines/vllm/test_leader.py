"""A group with a ticket: its leader is sent first, with the ticket; the other requests follow, or all are sent
without a ticket."""

import logging

import msgspec
import pytest

from motet.engines.vllm.vllm_wire import VLLMPiece
from motet.errors import EngineDiedError, EngineError, MotetError, OverloadedError, RequestError
from motet.log import fields_of
from motet.types import ChoiceDelta, ChoiceStart, PromptReport
from tests.clock import settle
from tests.engines.vllm.scripted_vllm import GREEDY, LENGTH, PARAMS, VLLMScene, group, piece, scene_with_group, ticket

pytestmark = pytest.mark.anyio

NAME = group().request_id
TOKEN = piece(0, 10)
LAST = piece(0, 10, finish=LENGTH)


def requests(there: VLLMScene) -> list[tuple[str, int, object]]:
    """Returns name, n and ticket of each request."""
    return [(call.request.request_id, call.request.n, call.request.kv_params) for call in there.calls]


@pytest.mark.parametrize("first", [TOKEN, LAST])
async def test_the_other_requests_wait_for_the_leaders_first_token_and_have_no_ticket(first: VLLMPiece) -> None:
    async with scene_with_group(group(ticket=ticket())) as (there, stream):
        assert requests(there) == [("g:leader", 1, PARAMS)]
        there.calls[0].say(first)
        await settle()
        assert requests(there) == [("g:leader", 1, PARAMS), ("g:0", 2, None)]
        there.calls[1].say(piece(0, 11), piece(1, 12))
        await settle()
        assert (await anext(stream)).choices == (
            ChoiceDelta(0, (10,), None, first.finish),
            ChoiceDelta(1, (11,)),
            ChoiceDelta(2, (12,)),
        )
        await stream.aclose()
        assert (there.figures.tickets_unused, there.server.rejected) == ({"released": 0, "left": 0}, [])


async def test_the_prompt_report_has_the_cached_tokens_of_the_ticket() -> None:
    async with scene_with_group(group(ticket=msgspec.structs.replace(ticket(), cached_tokens=2)), leaves=True) as (
        there,
        stream,
    ):
        there.calls[0].say(TOKEN)
        assert (await anext(stream)).prompt == PromptReport(cached_tokens=2)


async def test_a_late_leader_is_closed_and_all_choices_are_sent_again_without_a_ticket(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with scene_with_group(group(ticket=ticket())) as (there, stream):
        with caplog.at_level(logging.WARNING, "motet"):
            there.leader_wait.time_out()
            await settle()
        assert (requests(there)[1:], there.open) == ([("g:again:0", 3, None)], [1])
        assert there.figures.pull_fallbacks == {"late": 1, "failed": 0}
        (line,) = caplog.records
        assert (fields_of(line)["request_id"], fields_of(line)["reason"]) == ("trace-g", "late")
        there.calls[1].say(*(piece(child, 10, finish=LENGTH) for child in range(3)))
        assert len((await anext(stream)).choices) == 3
        assert there.figures.tickets_unused == {"released": 1, "left": 0}


async def test_if_the_leader_fails_before_its_first_token_all_choices_are_sent_again() -> None:
    async with scene_with_group(group(ticket=ticket())) as (there, stream):
        there.calls[0].end(EngineError("KV load failure"))
        await settle()
        assert (requests(there)[1:], there.figures.pull_fallbacks) == (
            [("g:again:0", 3, None)],
            {"late": 0, "failed": 1},
        )
        # A decode server whose fetch failed does not notify the prefill server.
        assert (there.server.rejected, there.figures.tickets_unused) == ([PARAMS], {"released": 1, "left": 0})
        there.leader_wait.time_out()
        there.calls[1].end(EngineError("sick"))
        with pytest.raises(EngineError, match="sick"):
            await anext(stream)
        assert (len(there.calls), there.figures.pull_fallbacks["failed"]) == (2, 1)


async def test_if_the_leader_fails_with_a_500_its_ticket_is_released_and_all_are_resent() -> None:
    async with scene_with_group(group(ticket=ticket()), accepting=False) as (there, stream):
        there.calls[0].refuse(EngineError("500"))
        await settle()
        assert (there.server.rejected, there.figures.tickets_unused) == ([PARAMS], {"released": 1, "left": 0})
        assert [call.request.n for call in there.calls] == [1, 3]
        await stream.aclose()
        assert len(there.server.rejected) == 1


@pytest.mark.parametrize("error", [RequestError("too long"), EngineDiedError("gone"), OverloadedError("full")])
@pytest.mark.parametrize("taken", [True, False])
async def test_an_error_that_another_try_on_this_server_would_not_fix_ends_the_group(
    error: MotetError, taken: bool
) -> None:
    async with scene_with_group(group(ticket=ticket()), accepting=taken) as (there, stream):
        if taken:
            there.calls[0].end(error)
        else:
            there.calls[0].refuse(error)
        with pytest.raises(type(error)):
            await anext(stream)
        await settle()
        assert (len(there.calls), sum(there.figures.pull_fallbacks.values())) == (1, 0)
        given_back = not taken and not isinstance(error, EngineDiedError)
        assert there.server.rejected == [PARAMS] * given_back


async def test_a_leader_that_ends_without_a_token_means_a_dead_server() -> None:
    async with scene_with_group(group(ticket=ticket())) as (there, stream):
        there.calls[0].end()
        with pytest.raises(EngineDiedError, match=r"broke off before choices \[0\] ended"):
            await anext(stream)


async def test_after_its_first_token_a_leader_is_neither_late_nor_sent_again() -> None:
    async with scene_with_group(group(ticket=ticket())) as (there, stream):
        there.calls[0].say(TOKEN)
        await settle()
        there.leader_wait.time_out()
        await anext(stream)
        there.calls[0].end(EngineError("sick"))
        with pytest.raises(EngineError, match="sick"):
            await anext(stream)
        await settle()
        assert (len(there.calls), sum(there.figures.pull_fallbacks.values()), there.open) == (2, 0, [])


async def test_a_stopped_leader_still_fetches_for_the_others_and_is_then_closed() -> None:
    async with scene_with_group(group(ticket=ticket())) as (there, stream):
        await there.engine.stop_choice(NAME, 0)
        await settle()
        assert there.open == [0]
        there.calls[0].say(TOKEN)
        await settle()
        assert (there.open, there.calls[1].request.n) == ([1], 2)
        there.calls[1].say(piece(0, 11, finish=LENGTH), piece(1, 12, finish=LENGTH))
        assert [choice.index for choice in (await anext(stream)).choices] == [1, 2]


async def test_a_leader_that_is_stopped_and_late_is_not_sent_again() -> None:
    async with scene_with_group(group(ticket=ticket(), seeded=True), leaves=True) as (there, _):
        await there.engine.stop_choice(NAME, 0)
        there.leader_wait.time_out()
        await settle()
        assert [(call.request.n, call.request.seed) for call in there.calls] == [(1, 7), (2, 8)]


async def test_choices_that_are_stopped_while_they_wait_are_never_sent() -> None:
    async with scene_with_group(group(n=4, ticket=ticket(), seeded=True), leaves=True) as (there, _):
        await there.engine.stop_choice(NAME, 2)
        there.calls[0].say(TOKEN)
        await settle()
        assert [(call.request.n, call.request.seed) for call in there.calls] == [(1, 7), (1, 8), (1, 10)]


async def test_if_all_choices_are_stopped_nothing_is_left_open_and_nothing_follows() -> None:
    async with scene_with_group(group(ticket=ticket())) as (there, stream):
        for index in range(3):
            await there.engine.stop_choice(NAME, index)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await settle()
        assert (there.open, len(there.calls), there.server.rejected) == ([], 1, [])


async def test_the_token_of_a_scout_belongs_to_no_choice() -> None:
    choices = (ChoiceStart(0, 7, (20,)), ChoiceStart(1, 8, (21,)))
    async with scene_with_group(group(choices=choices, ticket=ticket())) as (there, stream):
        assert requests(there) == [("g:leader", 1, PARAMS)]
        there.calls[0].say(LAST)
        await settle()
        assert [call.request.prompt[4:] for call in there.calls] == [(), (20,), (21,)]
        for call in there.calls[1:]:
            call.say(piece(0, 30, finish=LENGTH))
        assert (await anext(stream)).choices == (
            ChoiceDelta(0, (30,), None, LENGTH),
            ChoiceDelta(1, (30,), None, LENGTH),
        )


async def test_a_scout_that_ends_without_a_token_means_a_dead_server() -> None:
    async with scene_with_group(group(choices=(ChoiceStart(0, 7, (20,)),), ticket=ticket())) as (there, stream):
        there.calls[0].end()
        with pytest.raises(EngineDiedError, match="broke off before the first token"):
            await anext(stream)


async def test_a_piece_without_a_token_does_not_let_the_others_follow() -> None:
    async with scene_with_group(group(ticket=ticket()), leaves=True) as (there, _):
        there.calls[0].say(piece(0))
        await settle()
        assert len(there.calls) == 1
        there.calls[0].end(EngineError("KV load failure"))
        await settle()
        assert there.figures.pull_fallbacks["failed"] == 1


async def test_a_greedy_group_has_only_a_leader_and_falls_back_like_others() -> None:
    async with scene_with_group(group(sampling=GREEDY, ticket=ticket())) as (there, stream):
        there.calls[0].end(EngineError("KV load failure"))
        await settle()
        assert requests(there) == [("g:leader", 1, PARAMS), ("g:again:0", 1, None)]
        there.calls[1].say(LAST)
        assert len((await anext(stream)).choices) == 3

"""A group with a ticket: one request goes ahead with it, and the others follow or do without."""

import logging

import msgspec
import pytest

from motet.engines.vllm.wire import VLLMPiece
from motet.errors import EngineDiedError, EngineError, MotetError, OverloadedError, RequestError
from motet.log import fields_of
from motet.types import ChoiceDelta, ChoiceStart, PromptReport
from tests.engines.vllm.far import GREEDY, LENGTH, PARAMS, Scene, asked, group, piece, settle, ticket

pytestmark = pytest.mark.anyio

NAME = group().request_id
TOKEN = piece(0, 10)
LAST = piece(0, 10, finish=LENGTH)


def requests(there: Scene) -> list[tuple[str, int, object]]:
    """Name, n and ticket of each request."""
    return [(call.ask.request_id, call.ask.n, call.ask.kv_params) for call in there.calls]


def unused(there: Scene) -> dict[str, int]:
    return dict(there.figures.tickets_unused)


@pytest.mark.parametrize("first", [TOKEN, LAST])
async def test_the_others_wait_for_its_first_token_and_go_without_ticket(first: VLLMPiece) -> None:
    async with asked(group(ticket=ticket())) as (there, stream):
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
        assert (unused(there), there.server.rejected) == ({"released": 0, "left": 0}, [])


async def test_the_ticket_tells_how_much_of_the_prompt_was_cached_where_it_was_computed() -> None:
    async with asked(group(ticket=msgspec.structs.replace(ticket(), cached_tokens=2)), leaves=True) as (there, stream):
        there.calls[0].say(TOKEN)
        assert (await anext(stream)).prompt == PromptReport(cached_tokens=2)


async def test_one_that_is_late_is_closed_and_all_are_asked_for_again_without_ticket(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with asked(group(ticket=ticket())) as (there, stream):
        with caplog.at_level(logging.WARNING, "motet"):
            there.late.pass_()
            await settle()
        assert (requests(there)[1:], there.open) == ([("g:again:0", 3, None)], [1])
        assert there.figures.pull_fallbacks == {"late": 1, "failed": 0}
        (line,) = caplog.records
        assert (fields_of(line)["request_id"], fields_of(line)["reason"]) == ("trace-g", "late")
        there.calls[1].say(*(piece(child, 10, finish=LENGTH) for child in range(3)))
        assert len((await anext(stream)).choices) == 3
        assert unused(there) == {"released": 1, "left": 0}


async def test_one_that_fails_before_its_first_token_is_asked_for_again_with_all_the_others() -> None:
    async with asked(group(ticket=ticket())) as (there, stream):
        there.calls[0].end(EngineError("KV load failure"))
        await settle()
        assert (requests(there)[1:], there.figures.pull_fallbacks) == (
            [("g:again:0", 3, None)],
            {"late": 0, "failed": 1},
        )
        # A decode server whose fetch failed tells prefill nothing.
        assert (there.server.rejected, unused(there)) == ([PARAMS], {"released": 1, "left": 0})
        there.late.pass_()
        there.calls[1].end(EngineError("sick"))
        with pytest.raises(EngineError, match="sick"):
            await anext(stream)
        assert (len(there.calls), there.figures.pull_fallbacks["failed"]) == (2, 1)


async def test_one_that_is_refused_with_an_internal_error_gives_its_ticket_back_and_all_are_asked_for_again() -> None:
    async with asked(group(ticket=ticket()), accepting=False) as (there, stream):
        there.calls[0].refuse(EngineError("500"))
        await settle()
        assert (there.server.rejected, unused(there)) == ([PARAMS], {"released": 1, "left": 0})
        assert [call.ask.n for call in there.calls] == [1, 3]
        await stream.aclose()
        assert len(there.server.rejected) == 1


@pytest.mark.parametrize("error", [RequestError("too long"), EngineDiedError("gone"), OverloadedError("full")])
@pytest.mark.parametrize("taken", [True, False])
async def test_what_would_come_again_or_is_for_another_worker_ends_the_group(error: MotetError, taken: bool) -> None:
    async with asked(group(ticket=ticket()), accepting=taken) as (there, stream):
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


async def test_a_connection_that_ends_without_a_token_is_a_server_that_died() -> None:
    async with asked(group(ticket=ticket())) as (there, stream):
        there.calls[0].end()
        with pytest.raises(EngineDiedError, match=r"broke off before choices \[0\] ended"):
            await anext(stream)


async def test_after_its_first_token_it_is_neither_late_nor_asked_for_again() -> None:
    async with asked(group(ticket=ticket())) as (there, stream):
        there.calls[0].say(TOKEN)
        await settle()
        there.late.pass_()
        await anext(stream)
        there.calls[0].end(EngineError("sick"))
        with pytest.raises(EngineError, match="sick"):
            await anext(stream)
        await settle()
        assert (len(there.calls), sum(there.figures.pull_fallbacks.values()), there.open) == (2, 0, [])


async def test_stopped_it_still_fetches_for_the_others_and_is_closed_then() -> None:
    async with asked(group(ticket=ticket())) as (there, stream):
        await there.engine.stop_choice(NAME, 0)
        await settle()
        assert there.open == [0]
        there.calls[0].say(TOKEN)
        await settle()
        assert (there.open, there.calls[1].ask.n) == ([1], 2)
        there.calls[1].say(piece(0, 11, finish=LENGTH), piece(1, 12, finish=LENGTH))
        assert [choice.index for choice in (await anext(stream)).choices] == [1, 2]


async def test_stopped_and_late_it_is_not_asked_for_again() -> None:
    async with asked(group(ticket=ticket(), seeded=True), leaves=True) as (there, _):
        await there.engine.stop_choice(NAME, 0)
        there.late.pass_()
        await settle()
        assert [(call.ask.n, call.ask.seed) for call in there.calls] == [(1, 7), (2, 8)]


async def test_those_that_were_stopped_while_they_waited_are_never_asked_for() -> None:
    async with asked(group(n=4, ticket=ticket(), seeded=True), leaves=True) as (there, _):
        await there.engine.stop_choice(NAME, 2)
        there.calls[0].say(TOKEN)
        await settle()
        assert [(call.ask.n, call.ask.seed) for call in there.calls] == [(1, 7), (1, 8), (1, 10)]


async def test_where_all_are_stopped_nothing_is_left_open_and_nobody_follows() -> None:
    async with asked(group(ticket=ticket())) as (there, stream):
        for index in range(3):
            await there.engine.stop_choice(NAME, index)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await settle()
        assert (there.open, len(there.calls), there.server.rejected) == ([], 1, [])


async def test_a_scouts_token_is_nobodys() -> None:
    choices = (ChoiceStart(0, 7, (20,)), ChoiceStart(1, 8, (21,)))
    async with asked(group(choices=choices, ticket=ticket())) as (there, stream):
        assert requests(there) == [("g:leader", 1, PARAMS)]
        there.calls[0].say(LAST)
        await settle()
        assert [call.ask.prompt[4:] for call in there.calls] == [(), (20,), (21,)]
        for call in there.calls[1:]:
            call.say(piece(0, 30, finish=LENGTH))
        assert (await anext(stream)).choices == (
            ChoiceDelta(0, (30,), None, LENGTH),
            ChoiceDelta(1, (30,), None, LENGTH),
        )


async def test_a_scout_that_ends_without_a_token_is_a_server_that_died() -> None:
    async with asked(group(choices=(ChoiceStart(0, 7, (20,)),), ticket=ticket())) as (there, stream):
        there.calls[0].end()
        with pytest.raises(EngineDiedError, match="broke off before the first token"):
            await anext(stream)


async def test_what_comes_without_a_token_lets_nobody_follow() -> None:
    async with asked(group(ticket=ticket()), leaves=True) as (there, _):
        there.calls[0].say(piece(0))
        await settle()
        assert len(there.calls) == 1
        there.calls[0].end(EngineError("KV load failure"))
        await settle()
        assert there.figures.pull_fallbacks["failed"] == 1


async def test_a_greedy_group_has_nobody_to_wait_for_it_and_falls_back_like_others() -> None:
    async with asked(group(sampling=GREEDY, ticket=ticket())) as (there, stream):
        there.calls[0].end(EngineError("KV load failure"))
        await settle()
        assert requests(there) == [("g:leader", 1, PARAMS), ("g:again:0", 1, None)]
        there.calls[1].say(LAST)
        assert len((await anext(stream)).choices) == 3

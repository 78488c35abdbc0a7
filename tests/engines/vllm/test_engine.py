"""A vLLM server as an engine, apart from its groups: tickets that are made and released, lost and closed servers,
and figures."""

import asyncio

import msgspec
import pytest

from motet.engines.vllm.requests import ticket_from
from motet.errors import EngineClosedError, EngineDiedError, EngineError, EngineSilentError, MotetError, RequestError
from motet.ids import ModelName
from motet.metrics.routing import TicketEnd, TicketLog
from motet.metrics.stats import EngineStats
from motet.types import ChoiceStart
from tests.clock import settle
from tests.engines.vllm.scripted_vllm import PARAMS, PROMPT, REPORT, group, piece, scene_with_group, ticket, vllm_scene

pytestmark = pytest.mark.anyio

RELEASED = {"released": 1, "left": 0}
LEFT = {"released": 0, "left": 1}


async def test_a_prefill_sends_the_plain_prompt_once_and_gives_a_ticket() -> None:
    async with vllm_scene() as there:
        prefilling = asyncio.ensure_future(there.engine.prefill(group(n=8)))
        await settle()
        (request,) = there.server.prefills
        assert (request.trace, request.session_id) == ("trace-g", "session-1")
        assert (request.prompt, request.n, request.kv_params) == (PROMPT, 1, None)
        assert (request.model, request.cache_salt, request.priority) == ("m", "salt", 3)
        assert there.server.prefilled is not None
        there.server.prefilled.set_result([PARAMS])
        assert await prefilling == ticket_from(PARAMS, engine_id="far-2", prompt=PROMPT)


async def test_the_first_of_several_tickets_is_used_and_the_others_are_released() -> None:
    several = [{**PARAMS, "remote_request_id": f"cmpl-{number}"} for number in range(3)]
    async with vllm_scene() as there:
        prefilling = asyncio.ensure_future(there.engine.prefill(group()))
        await settle()
        assert there.server.prefilled is not None
        there.server.prefilled.set_result(several)
        assert (await prefilling).remote_request_id == "cmpl-0"
        await settle()
        assert there.server.rejected == several[1:]
        assert there.server.reject_names == ["trace-g", "trace-g"]
        assert there.figures.tickets_unused == {"released": 2, "left": 0}


async def test_a_ticket_has_one_reader() -> None:
    async with vllm_scene() as there:
        with pytest.raises(RequestError, match="is for 1 readers, not for 2"):
            await there.engine.prefill(group(), readers=2)
        assert there.server.prefills == []


async def test_a_request_without_a_model_gets_the_servers_own() -> None:
    async with scene_with_group(msgspec.structs.replace(group(), model=ModelName("")), leaves=True) as (there, _):
        assert there.calls[0].request.model == REPORT.info.model


async def test_a_ticket_that_is_released_twice_makes_one_call() -> None:
    async with vllm_scene() as there:
        for _ in range(2):
            await there.engine.release(ticket())
        assert (there.server.rejected, there.figures.tickets_unused) == ([PARAMS], RELEASED)


@pytest.mark.parametrize("foreign", ["", "no JSON", "[1]"])
async def test_a_ticket_that_is_not_vllms_is_left_to_its_lease(foreign: str) -> None:
    async with vllm_scene() as there:
        await there.engine.release(msgspec.structs.replace(ticket(), foreign=foreign))
        assert (there.server.rejected, there.figures.tickets_unused) == ([], LEFT)


async def test_two_releases_of_a_ticket_at_once_make_one_call_with_the_clients_id() -> None:
    """When a server refuses a group, both the group and routing release its ticket."""
    async with vllm_scene() as there:
        there.server.rejecting = asyncio.get_running_loop().create_future()
        releases = [asyncio.ensure_future(there.engine.release(ticket(), trace="trace-1")) for _ in range(2)]
        await settle()
        there.server.rejecting.set_result(None)
        await asyncio.gather(*releases)
        assert (there.server.reject_names, there.figures.tickets_unused) == (["trace-1"], RELEASED)


async def test_a_ticket_whose_release_failed_can_be_released_again() -> None:
    async with vllm_scene() as there:
        there.server.rejects = False
        for _ in range(2):
            await there.engine.release(ticket())
        assert there.figures.tickets_unused == LEFT
        there.server.rejects = True
        await there.engine.release(ticket())
        assert (len(there.server.rejected), there.figures.tickets_unused) == (3, {"released": 1, "left": 1})


@pytest.mark.parametrize("error", [EngineError("broken"), EngineDiedError("gone"), RequestError("refused")])
async def test_releasing_a_ticket_never_raises(error: MotetError) -> None:
    async with vllm_scene() as there:
        there.server.rejecting = asyncio.get_running_loop().create_future()
        there.server.rejecting.set_exception(error)
        await there.engine.release(ticket())
        assert there.figures.tickets_unused == LEFT


async def test_lost_ends_groups_prefills_and_releases() -> None:
    async with vllm_scene() as there:
        there.server.rejecting = asyncio.get_running_loop().create_future()
        unread, read = there.engine.generate(group("unread")), there.engine.generate(group("read"))
        reading = asyncio.ensure_future(anext(read))
        prefilling = asyncio.ensure_future(there.engine.prefill(group("prefilled")))
        releasing = asyncio.ensure_future(there.engine.release(ticket()))
        await settle()
        there.engine.lost(EngineSilentError("it hangs"))
        there.engine.lost(EngineDiedError("said twice"))
        for waiting in (reading, prefilling, asyncio.ensure_future(anext(unread))):
            with pytest.raises(EngineSilentError, match="it hangs"):
                await waiting
        await releasing
        assert (there.open, there.figures.tickets_unused) == ([], LEFT)


async def test_a_group_that_starts_after_lost_is_sent_as_usual() -> None:
    async with vllm_scene() as there:
        there.engine.lost(EngineSilentError("it hangs"))
        stream = there.engine.generate(group(n=1))
        await settle()
        there.calls[0].say(piece(0, 10))
        assert (await anext(stream)).choices[0].token_ids == (10,)
        await stream.aclose()


async def test_close_ends_everything_and_sends_nothing_more() -> None:
    async with scene_with_group(group()) as (there, stream):
        for _ in range(2):
            await there.engine.close()
        assert there.open == []
        with pytest.raises(EngineClosedError, match="is closing"):
            await anext(stream)
        with pytest.raises(EngineClosedError, match="is closing"):
            there.engine.generate(group("late"))
        for question in (there.engine.stats(), there.engine.prefill(group())):
            with pytest.raises(EngineClosedError):
                await question
        assert (len(there.calls), there.server.prefills) == (1, [])


async def test_tickets_that_are_left_when_the_engine_closes_are_counted() -> None:
    async with scene_with_group(group(ticket=ticket()), accepting=False) as (there, stream):
        await there.engine.close()
        await stream.aclose()
        await settle()
        assert (there.server.rejected, there.figures.tickets_unused) == ([], LEFT)


async def test_two_groups_with_one_name_are_kept_apart() -> None:
    async with vllm_scene() as there:
        first = there.engine.generate(group())
        second = there.engine.generate(group())
        await settle()
        await first.aclose()
        await there.engine.stop_choice(group().request_id, 0)
        there.calls[1].say(piece(0, 10), piece(1, 11))
        assert [choice.index for choice in (await anext(second)).choices] == [1]
        await second.aclose()


async def test_stops_of_unknown_groups_and_choices_are_ignored() -> None:
    async with vllm_scene() as there:
        await there.engine.stop_choice(group().request_id, 0)
        stream = there.engine.generate(group(n=1))
        await there.engine.stop_choice(group().request_id, 7)
        await settle()
        assert there.open == [0]
        await stream.aclose()


async def test_figures_come_from_the_report() -> None:
    async with vllm_scene() as there:
        with pytest.raises(EngineSilentError, match="sends no heartbeats"):
            await there.engine.stats()
        stats = EngineStats(groups_running=3)
        there.server.answer_report = msgspec.structs.replace(REPORT, stats=stats)
        assert await there.engine.stats() == stats
        assert (there.engine.engine_id, there.engine.info) == ("far-2", REPORT.info)


@pytest.mark.parametrize("sent", [True, False])
async def test_the_ticket_of_a_group_that_ends_before_the_server_took_it_is_released(sent: bool) -> None:
    async with vllm_scene(accepting=False) as there:
        stream = there.engine.generate(group(ticket=ticket()))
        if sent:
            await settle()
        await stream.aclose()
        await settle()
        assert (len(there.calls), there.server.rejected, there.figures.tickets_unused) == (sent, [PARAMS], RELEASED)


async def test_a_leader_that_is_late_before_the_server_took_it_releases_its_ticket() -> None:
    async with scene_with_group(group(ticket=ticket()), accepting=False, leaves=True) as (there, _):
        there.leader_wait.time_out()
        await settle()
        assert (there.open, there.server.rejected) == ([1], [PARAMS])


async def test_a_ticket_that_is_being_released_is_not_released_again() -> None:
    async with vllm_scene(accepting=False) as there:
        there.server.rejecting = asyncio.get_running_loop().create_future()
        stream = there.engine.generate(group(ticket=ticket()))
        await settle()
        there.leader_wait.time_out()
        await settle()
        await stream.aclose()
        await settle()
        assert there.server.rejected == [PARAMS]
        there.server.rejecting.set_result(None)


async def test_a_ticket_that_the_server_took_is_not_released() -> None:
    async with scene_with_group(group(ticket=ticket())) as (there, stream):
        await stream.aclose()
        await there.engine.release(ticket())  # routing does this, as it cannot know that it was taken
        assert (there.server.rejected, there.figures.tickets_unused) == ([], {"released": 0, "left": 0})


async def test_the_ticket_that_a_lost_server_took_can_be_released() -> None:
    async with scene_with_group(group(ticket=ticket())) as (there, stream):
        there.engine.lost(EngineDiedError("gone"))
        with pytest.raises(EngineDiedError):
            await anext(stream)
        await there.engine.release(ticket())
        assert (there.server.rejected, there.figures.tickets_unused) == ([PARAMS], RELEASED)


async def test_the_ticket_of_a_group_that_cannot_be_planned_is_released() -> None:
    async with vllm_scene() as there:
        choices = (ChoiceStart(0, 7), ChoiceStart(1, 8, (20,) * 50))
        with pytest.raises(EngineError, match="nothing to resume"):
            await anext(there.engine.generate(group(choices=choices, ticket=ticket())))
        await settle()
        assert (there.calls, there.server.rejected) == ([], [PARAMS])


async def test_a_ticket_that_was_left_is_counted_once_and_only_if_it_was_not_taken() -> None:
    figures, lost, taken = TicketLog(), ticket(), msgspec.structs.replace(ticket(), remote_request_id="taken")
    figures.ended(taken, TicketEnd.TAKEN)
    for one in (lost, lost, taken):
        figures.left(one)
    assert figures.tickets_unused == {"released": 0, "left": 1}

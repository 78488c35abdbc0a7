"""Who gives back a ticket that the server did not take, and how often."""

import asyncio

import msgspec
import pytest

from motet.engines.vllm.figures import PDFigures, TicketEnd
from motet.errors import EngineDiedError, EngineError
from motet.types import ChoiceStart
from tests.engines.vllm.asked import PARAMS, group, ticket
from tests.engines.vllm.far import Scene, scene, settle

pytestmark = pytest.mark.anyio


def unused(there: Scene) -> dict[str, int]:
    return dict(there.figures.tickets_unused)


@pytest.mark.parametrize("sent", [True, False])
async def test_the_ticket_of_a_group_that_ends_before_the_server_took_it_is_given_back(sent: bool) -> None:
    async with scene(accepting=False) as there:
        stream = there.engine.generate(group(ticket=ticket()))
        if sent:
            await settle()
        await stream.aclose()
        await settle()
        assert (len(there.calls), there.server.rejected, unused(there)) == (sent, [PARAMS], {"released": 1, "left": 0})


async def test_one_that_is_late_before_the_server_took_it_gives_its_ticket_back() -> None:
    async with scene(accepting=False) as there:
        stream = there.engine.generate(group(ticket=ticket()))
        await settle()
        there.late.pass_()
        await settle()
        assert (there.open, there.server.rejected) == ([1], [PARAMS])
        await stream.aclose()


async def test_a_ticket_that_is_being_given_back_is_not_given_back_again() -> None:
    async with scene(accepting=False) as there:
        there.server.rejecting = asyncio.get_running_loop().create_future()
        stream = there.engine.generate(group(ticket=ticket()))
        await settle()
        there.late.pass_()
        await settle()
        await stream.aclose()
        await settle()
        assert there.server.rejected == [PARAMS]
        there.server.rejecting.set_result(None)


async def test_a_ticket_that_the_server_took_is_its_own_to_end() -> None:
    async with scene() as there:
        stream = there.engine.generate(group(ticket=ticket()))
        await settle()
        await stream.aclose()
        await there.engine.release(ticket())  # routing, which cannot know that it was taken
        assert (there.server.rejected, unused(there)) == ([], {"released": 0, "left": 0})


async def test_the_ticket_that_a_lost_server_took_can_be_given_back_through_another() -> None:
    async with scene() as there:
        stream = there.engine.generate(group(ticket=ticket()))
        await settle()
        there.engine.lost(EngineDiedError("gone"))
        with pytest.raises(EngineDiedError):
            await anext(stream)
        await there.engine.release(ticket())
        assert (there.server.rejected, unused(there)) == ([PARAMS], {"released": 1, "left": 0})


async def test_the_ticket_of_a_group_that_cannot_be_planned_is_given_back() -> None:
    async with scene() as there:
        choices = (ChoiceStart(0, 7), ChoiceStart(1, 8, (20,) * 50))
        with pytest.raises(EngineError, match="nothing to resume"):
            await anext(there.engine.generate(group(choices=choices, ticket=ticket())))
        await settle()
        assert (there.calls, there.server.rejected) == ([], [PARAMS])


async def test_a_ticket_that_nobody_was_there_to_give_back_is_counted_once_unless_it_was_taken() -> None:
    figures, lost, taken = PDFigures(), ticket(), msgspec.structs.replace(ticket(), remote_request_id="taken")
    figures.ended(taken, TicketEnd.TAKEN)
    for one in (lost, lost, taken):
        figures.left(one)
    assert figures.tickets_unused == {"released": 0, "left": 1}

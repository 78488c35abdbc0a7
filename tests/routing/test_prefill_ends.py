"""No matter how and when a group ends, no ticket is held, no group is open and no task runs."""

import asyncio
import logging

import pytest

from motet.errors import EngineClosedError, EngineDiedError, EngineError, MotetError, OverloadedError
from tests.routing.cells import CellScene
from tests.routing.scene import ControlledPrefill, answer, answers, group, tokens_of

pytestmark = pytest.mark.anyio


async def test_a_group_closed_before_its_prefill_starts_nothing() -> None:
    cell = CellScene()
    stream = cell.router.generate(group())
    await stream.aclose()
    await stream.aclose()
    assert cell.prefill.prefills == []
    assert cell.decode.requests == []


async def test_closing_a_group_during_prefill_cancels_it() -> None:
    controlled = ControlledPrefill()
    cell = CellScene(during_prefill=controlled)
    stream = cell.router.generate(group())
    await controlled.entered.wait()
    await stream.aclose()
    await stream.aclose()
    assert cell.decode.requests == []


async def test_a_reader_that_waits_for_prefill_sees_the_end_when_the_group_is_closed() -> None:
    controlled = ControlledPrefill()
    cell = CellScene(during_prefill=controlled)
    stream = cell.router.generate(group())
    reader = asyncio.ensure_future(tokens_of(stream))
    await controlled.entered.wait()
    await stream.aclose()
    assert await reader == {}


async def test_a_reader_that_is_cancelled_during_prefill_does_not_end_the_group() -> None:
    controlled = ControlledPrefill()
    cell = CellScene(during_prefill=controlled)
    stream = cell.router.generate(group())
    reader = asyncio.ensure_future(tokens_of(stream))
    await controlled.entered.wait()
    reader.cancel()
    await asyncio.wait([reader])
    controlled.may_end.set()
    assert await tokens_of(stream) == answers(2)


async def test_closing_a_group_after_the_first_delta_does_not_release_the_ticket() -> None:
    cell = CellScene()
    stream = cell.router.generate(group())
    await anext(stream)
    await stream.aclose()
    assert cell.prefill.released == []


async def test_closing_a_group_before_decode_has_read_the_ticket_releases_it() -> None:
    gate = asyncio.Semaphore(0)
    cell = CellScene(gate=gate)
    stream = cell.router.generate(group())
    reader = asyncio.ensure_future(tokens_of(stream))
    await cell.decode.submitted.wait()
    (ticket,) = cell.leases.held.values()
    await stream.aclose()
    assert (cell.prefill.released, cell.prefill.record.release_traces) == ([ticket], ["trace-g"])
    gate.release()
    await asyncio.wait([reader])


@pytest.mark.parametrize("error", [EngineDiedError("gone"), EngineClosedError("closed"), EngineError("sick")])
async def test_decode_that_fails_before_the_first_delta_leaves_no_ticket(error: MotetError) -> None:
    cell = CellScene(fail_after={0: error})
    stream = cell.router.generate(group())
    with pytest.raises(type(error)):
        await anext(stream)
    assert len(cell.prefill.released) == 1


async def test_decode_that_dies_unnoticed_leaves_no_ticket() -> None:
    """No reader gets the error, because the stream is not read. Its ticket is released when it is closed."""
    cell = CellScene()
    stream = cell.router.generate(group())
    await cell.decode.submitted.wait()
    await cell.decode.close()
    await stream.aclose()
    assert len(cell.prefill.released) == 1


async def test_the_reader_gets_the_error_if_decode_dies_after_the_first_delta() -> None:
    cell = CellScene(fail_after={1: EngineDiedError("gone")})
    stream = cell.router.generate(group())
    await anext(stream)
    with pytest.raises(EngineDiedError):
        await anext(stream)
    assert cell.prefill.released == []
    with pytest.raises(EngineDiedError):
        await anext(stream)


async def test_if_decode_refuses_at_once_the_ticket_is_released_without_a_reader() -> None:
    cell = CellScene()
    cell.decode.refusal = OverloadedError("full")
    stream = cell.router.generate(group())
    await cell.prefill.releasing.wait()
    assert len(cell.prefill.released) == 1
    with pytest.raises(OverloadedError):
        await anext(stream)


async def test_a_bypassed_group_that_decode_refuses_at_once_was_never_open() -> None:
    cell = CellScene()
    cell.decode.refusal = OverloadedError("full")
    with pytest.raises(OverloadedError):
        cell.router.generate(group(prompt_tokens=5))


async def test_a_ticket_is_released_even_if_the_task_that_closes_is_cancelled() -> None:
    cell = CellScene(gate=asyncio.Semaphore(0))
    cell.prefill.may_release.clear()
    stream = cell.router.generate(group())
    await cell.decode.submitted.wait()
    closing = asyncio.ensure_future(stream.aclose())
    await cell.prefill.releasing.wait()
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()
    cell.prefill.may_release.set()
    await cell.router.close()
    assert len(cell.prefill.released) == 1


async def test_a_choice_stopped_during_prefill_is_left_out_of_the_group() -> None:
    controlled = ControlledPrefill()
    cell = CellScene(during_prefill=controlled)
    request = group(n=3)
    stream = cell.router.generate(request)
    await controlled.entered.wait()
    await cell.router.stop_choice(request.request_id, 1)
    controlled.may_end.set()
    assert await tokens_of(stream) == {0: answer(0), 2: answer(2)}
    assert [start.index for start in cell.decode.requests[0].choices] == [0, 2]


async def test_when_every_choice_is_stopped_during_prefill_the_group_has_ended() -> None:
    controlled = ControlledPrefill()
    cell = CellScene(during_prefill=controlled)
    request = group(n=2)
    stream = cell.router.generate(request)
    await controlled.entered.wait()
    for index in (1, 0, 0, 5):
        await cell.router.stop_choice(request.request_id, index)
    assert await tokens_of(stream) == {}
    assert cell.decode.requests == []


async def test_a_choice_stopped_before_prefill_has_started_is_left_out_too() -> None:
    cell = CellScene()
    stream = cell.router.generate(group(n=2))
    await cell.router.stop_choice(group().request_id, 0)
    assert await tokens_of(stream) == {1: answer(1)}


async def test_a_choice_stopped_on_decode_is_stopped_there() -> None:
    cell = CellScene()
    stream = cell.router.generate(group(n=2))
    await anext(stream)
    await cell.router.stop_choice(group().request_id, 0)
    assert await tokens_of(stream) == {1: answer(1)[1:]}
    await cell.router.stop_choice(group("unknown").request_id, 0)


async def test_when_every_choice_is_stopped_on_decode_before_it_read_no_ticket_is_left() -> None:
    cell = CellScene()
    stream = cell.router.generate(group(n=1))
    await cell.decode.submitted.wait()
    await cell.router.stop_choice(group().request_id, 0)
    assert await tokens_of(stream) == {}


async def test_a_failed_prefill_is_logged_with_the_client_s_id(caplog: pytest.LogCaptureFixture) -> None:
    cell = CellScene(during_prefill=ControlledPrefill(error=EngineError("out of blocks"), held=False))
    with caplog.at_level(logging.WARNING, logger="motet.routing"):
        await tokens_of(cell.router.generate(group()))
    (record,) = caplog.records
    assert vars(record)["fields"] == {
        "request_id": "trace-g",
        "group": "g",
        "reason": "prefill-failed",
        "error": "out of blocks",
    }

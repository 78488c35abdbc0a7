"""Separate prefill and decode: one prefill for each group, a reason for each bypass, no error for the client."""

import asyncio

import pytest

from motet.engine import WorkerState
from motet.errors import (
    EngineClosedError,
    EngineDiedError,
    EngineError,
    MotetError,
    NoWorkerError,
    OverloadedError,
    RequestError,
)
from motet.routing.router import Router
from motet.routing.workers.fleet import Fleet
from motet.settings.server_config import CellConfig
from motet.testing.fake_engine import FakeLeases
from motet.types import Role
from tests.routing.cells import CellScene
from tests.routing.scene import (
    ANY_MODEL,
    ONE_LIFE,
    ControlledPrefill,
    Tasks,
    answer,
    answers,
    answers_of,
    cache_prefix,
    group,
    tokens_of,
    worker,
)

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("n", [1, 3, 32])
async def test_a_group_is_prefilled_once_and_transferred_once_whatever_n_is(n: int) -> None:
    cell = CellScene()
    request = group(n=n)
    assert await answers_of(cell.router, request) == {i: answer(i) for i in range(n)}
    assert cell.prefill.prefills == [request]
    (decoded,) = cell.decode.requests
    assert decoded.ticket is not None
    assert decoded.ticket.remote_engine_id == "prefill-0, start 0"
    assert decoded.ticket.num_tokens == 199
    assert decoded.choices == request.choices
    assert decoded.trace == "trace-g"
    assert cell.decode.record.pulls == 1
    assert cell.bypasses == {}


async def test_a_ticket_that_was_read_is_not_released() -> None:
    cell = CellScene()
    await answers_of(cell.router, group())
    assert cell.prefill.released == []


async def test_a_group_starts_without_being_iterated() -> None:
    controlled = ControlledPrefill()
    cell = CellScene(during_prefill=controlled)
    stream = cell.router.generate(group())
    await controlled.entered.wait()
    controlled.may_end.set()
    assert await tokens_of(stream) == answers(2)


@pytest.mark.parametrize(
    ("reason", "prompt_tokens", "cached_tokens", "prompt_logprobs"),
    [("one-token", 1, 0, None), ("short", 127, 0, None), ("short", 200, 80, None), ("prompt-logprobs", 200, 0, 0)],
)
async def test_decode_computes_prompts_for_which_prefill_does_not_pay(
    reason: str, prompt_tokens: int, cached_tokens: int, prompt_logprobs: int | None
) -> None:
    cell = CellScene()
    request = group(prompt_tokens=prompt_tokens, prompt_logprobs=prompt_logprobs)
    cache_prefix(cell.fleet, "decode-0", request, cached_tokens)
    assert await answers_of(cell.router, request) == answers(2)
    assert cell.prefill.prefills == []
    assert cell.decode.requests == [request]
    assert cell.bypasses == {reason: 1}


async def test_with_no_bypass_tokens_all_but_single_tokens_go_to_prefill() -> None:
    cell = CellScene(cell=CellConfig(bypass_tokens=0))
    await answers_of(cell.router, group("two", prompt_tokens=2))
    await answers_of(cell.router, group("one", prompt_tokens=1))
    assert [request.request_id for request in cell.prefill.prefills] == ["two"]
    assert cell.bypasses == {"one-token": 1}


async def test_while_prefill_is_busy_decode_computes() -> None:
    controlled = ControlledPrefill()
    cell = CellScene(during_prefill=controlled)
    measured = asyncio.ensure_future(answers_of(cell.router, group("measured")))
    await controlled.entered.wait()
    cell.clock.now_s += 1.0
    controlled.may_end.set()
    await measured
    controlled.may_end.clear()
    controlled.entered.clear()
    waiting = cell.router.generate(group("waiting"))
    await controlled.entered.wait()
    assert await answers_of(cell.router, group("next")) == answers(2)
    assert cell.bypasses == {"prefill-busy": 1}
    controlled.may_end.set()
    await tokens_of(waiting)


async def test_prefill_that_was_never_measured_is_not_too_busy() -> None:
    controlled = ControlledPrefill()
    cell = CellScene(during_prefill=controlled)
    streams = [cell.router.generate(group(name)) for name in ("a", "b")]
    await controlled.entered.wait()
    controlled.may_end.set()
    for stream in streams:
        await tokens_of(stream)
    assert len(cell.prefill.prefills) == 2
    assert cell.bypasses == {}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (EngineDiedError("gone"), "prefill-down"),
        (EngineClosedError("closed"), "prefill-down"),
        (OverloadedError("full"), "prefill-busy"),
        (EngineError("out of blocks"), "prefill-failed"),
    ],
)
async def test_if_prefill_fails_decode_computes_and_the_client_gets_no_error(error: MotetError, reason: str) -> None:
    cell = CellScene(during_prefill=ControlledPrefill(error=error, held=False))
    request = group()
    assert await answers_of(cell.router, request) == answers(2)
    assert len(cell.prefill.prefills) == 1
    assert cell.decode.requests == [request]
    assert cell.bypasses == {reason: 1}


async def test_a_late_prefill_is_cancelled_and_decode_computes() -> None:
    cell = CellScene(during_prefill=ControlledPrefill(), cell=CellConfig(prefill_timeout_s=0.01))
    assert await answers_of(cell.router, group()) == answers(2)
    assert cell.bypasses == {"prefill-late": 1}


async def test_a_request_that_can_never_run_is_the_client_s_error() -> None:
    cell = CellScene(during_prefill=ControlledPrefill(error=RequestError("too long", param="messages"), held=False))
    stream = cell.router.generate(group())
    with pytest.raises(RequestError, match="too long"):
        await anext(stream)
    assert cell.decode.requests == []
    assert cell.bypasses == {}


async def test_a_defect_in_prefill_reaches_the_reader() -> None:
    async def defect(_: object) -> None:
        raise ZeroDivisionError

    cell = CellScene(during_prefill=defect)
    stream = cell.router.generate(group())
    with pytest.raises(ZeroDivisionError):
        await anext(stream)
    await stream.aclose()


async def test_a_group_that_has_a_ticket_goes_directly_to_decode() -> None:
    cell = CellScene()
    request = group(ticket=await cell.prefill.prefill(group()))
    await answers_of(cell.router, request)
    assert cell.decode.requests == [request]
    assert len(cell.prefill.prefills) == 1
    assert cell.bypasses == {}


async def test_all_reasons_of_bypasses_are_counted_from_the_start() -> None:
    assert CellScene().router.counts.bypasses == {
        "one-token": 0,
        "short": 0,
        "prompt-logprobs": 0,
        "prefill-busy": 0,
        "prefill-down": 0,
        "prefill-failed": 0,
        "prefill-late": 0,
    }


async def test_a_cell_takes_no_tickets_and_a_decode_server_does() -> None:
    cell = CellScene()
    assert cell.router.info.role is Role.BOTH
    assert cell.router.info.transfer is None
    decoding = CellScene(role=Role.DECODE)
    assert decoding.router.info == decoding.decode.info


async def test_prefill_and_release_go_to_the_prefill_side_and_stats_to_decode() -> None:
    cell = CellScene()
    ticket = await cell.router.prefill(group(), readers=2)
    assert ticket.readers == 2
    assert (await cell.prefill.stats()).leases == 1
    await cell.router.release(ticket)
    assert await cell.router.stats() == await cell.decode.stats()
    assert cell.router.info.model == cell.decode.info.model


async def test_closing_ends_groups_in_both_phases_and_both_sides() -> None:
    controlled, gate = ControlledPrefill(), asyncio.Semaphore(0)
    cell = CellScene(during_prefill=controlled, gate=gate)
    decoding, prefilling = cell.router.generate(group("short", prompt_tokens=5)), cell.router.generate(group("long"))
    await controlled.entered.wait()
    await cell.router.close()
    gate.release()
    for stream in (decoding, prefilling):
        with pytest.raises(EngineClosedError):
            await anext(stream)
    assert cell.prefill.closed
    assert cell.decode.closed
    await cell.router.close()


async def test_a_group_of_a_closed_cell_ends_with_an_error_about_that() -> None:
    cell = CellScene()
    await cell.router.close()
    with pytest.raises(EngineClosedError):
        await answers_of(cell.router, group())


async def test_with_the_prefill_workers_down_decode_computes() -> None:
    cell = CellScene()
    cell.fleet.mark("prefill-0", WorkerState.DEAD)
    assert await answers_of(cell.router, group()) == answers(2)
    assert cell.bypasses == {"prefill-down": 1}


async def test_without_prefill_workers_no_bypass_is_counted() -> None:
    decoder, decode = worker("both-0")
    router = Router(Fleet([decoder]), ONE_LIFE)
    assert await answers_of(router, group()) == answers(2)
    assert set(router.counts.bypasses.values()) == {0}
    decode.check()


async def test_without_decode_workers_no_prompt_is_prefilled() -> None:
    cell = CellScene()
    cell.fleet.mark("decode-0", WorkerState.DEAD)
    with pytest.raises(NoWorkerError):
        cell.router.generate(group())
    assert cell.prefill.prefills == []


async def test_choices_are_counted_as_prefilling_until_decode_has_them() -> None:
    controlled = ControlledPrefill()
    cell = CellScene(during_prefill=controlled)
    stream = cell.router.generate(group(n=3))
    await controlled.entered.wait()
    assert cell.router.dispatcher.prefiller.choices_in_progress(ANY_MODEL) == 3
    await cell.router.stop_choice(group().request_id, 0)
    assert cell.router.dispatcher.prefiller.choices_in_progress(ANY_MODEL) == 2
    controlled.may_end.set()
    await anext(stream)
    assert cell.router.dispatcher.prefiller.choices_in_progress(ANY_MODEL) == 0
    await stream.aclose()


async def test_two_prefill_workers_take_turns_and_a_dead_one_is_skipped() -> None:
    leases, tasks = FakeLeases(), Tasks()
    first, one = worker(
        "prefill-0", leases=leases, during_prefill=ControlledPrefill(error=EngineDiedError("gone"), held=False)
    )
    second, two = worker("prefill-1", leases=leases)
    decoder, decode = worker("decode-0", leases=leases)
    router = Router(Fleet([first, second, decoder]), ONE_LIFE)
    for name in ("a", "b"):
        assert await answers_of(router, group(name)) == answers(2)
    assert [len(one.prefills), len(two.prefills), decode.record.pulls] == [1, 2, 2]
    assert set(router.counts.bypasses.values()) == {0}
    decode.check()
    tasks.check()


@pytest.mark.parametrize(("may_come", "missed"), [(False, {}), (True, {"prefill-down": 1, "short": 1})])
async def test_missing_prefill_is_counted_where_it_may_come_and_would_have_paid(
    may_come: bool, missed: dict[str, int]
) -> None:
    """A missing prefill worker can be started, if the router counts that it is missing."""
    cell = CellScene(cell=CellConfig(prefill_may_come=may_come))
    cell.fleet.remove("prefill-0")
    assert await answers_of(cell.router, group("long")) == answers(2)
    assert await answers_of(cell.router, group("short", prompt_tokens=20)) == answers(2)
    assert cell.bypasses == missed

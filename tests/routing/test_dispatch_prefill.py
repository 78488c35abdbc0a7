"""Several prefill workers: if one cannot prefill, the next one is tried, and tickets are released by their makers."""

import asyncio

import msgspec
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
from motet.routing.workers.member import REFUSAL_S
from motet.settings.server_config import Policy, RoutingConfig
from motet.testing.fake_engine import FakeLeases
from tests.routing.cells import PairScene, PerWorker
from tests.routing.scene import ControlledPrefill, group, worker

pytestmark = pytest.mark.anyio


def failing(error: MotetError) -> ControlledPrefill:
    return ControlledPrefill(error=error, held=False)


async def test_prefill_goes_to_the_worker_with_the_fewest_waiting_prompt_tokens() -> None:
    first, second = ControlledPrefill(), ControlledPrefill()
    pair = PairScene(first=first, second=second)
    calls = [asyncio.ensure_future(pair.router.prefill(group("long", prompt_tokens=500)))]
    await first.entered.wait()
    calls.append(asyncio.ensure_future(pair.router.prefill(group("short", prompt_tokens=100))))
    await second.entered.wait()
    second.entered.clear()
    calls.append(asyncio.ensure_future(pair.router.prefill(group("next", prompt_tokens=100))))
    await second.entered.wait()
    assert pair.prefill_counts == PerWorker(first=1, second=2)
    first.may_end.set()
    second.may_end.set()
    for ticket in await asyncio.gather(*calls):
        await pair.router.release(ticket)


@pytest.mark.parametrize("error", [EngineDiedError("gone"), OverloadedError("full")])
async def test_if_one_prefill_worker_fails_the_next_is_tried_in_the_same_call(error: MotetError) -> None:
    pair = PairScene(first=failing(error))
    ticket = await pair.router.prefill(group())
    assert ticket.remote_engine_id == "prefill-1, start 0"
    assert pair.prefill_counts == PerWorker(first=1, second=1)
    await pair.router.release(ticket)


async def test_a_prefill_worker_that_died_gets_nothing_until_it_is_marked_ready() -> None:
    controlled = failing(EngineDiedError("gone"))
    pair = PairScene(first=controlled)
    for now_s, second in [(0.0, 1), (1000.0, 2)]:
        pair.clock.now_s = now_s
        await pair.router.release(await pair.router.prefill(group()))
        assert pair.prefill_counts == PerWorker(first=1, second=second)
    assert [report.state for report in pair.fleet.reports()] == [WorkerState.DEAD, WorkerState.READY]
    controlled.error = None
    pair.fleet.mark("prefill-0", WorkerState.READY)
    for _ in range(2):  # they take turns
        await pair.router.release(await pair.router.prefill(group()))
    assert pair.prefill_counts == PerWorker(first=2, second=3)


async def test_a_full_prefill_worker_is_skipped_for_half_a_second() -> None:
    pair = PairScene(first=failing(OverloadedError("full")))
    for now_s, second in [(0.0, 1), (REFUSAL_S - 0.01, 2), (REFUSAL_S - 0.01, 3)]:
        pair.clock.now_s = now_s
        await pair.router.release(await pair.router.prefill(group()))
        assert pair.prefill_counts == PerWorker(first=1, second=second)
    pair.clock.now_s = REFUSAL_S
    for _ in range(2):  # they take turns
        await pair.router.release(await pair.router.prefill(group()))
    assert pair.prefill_counts == PerWorker(first=2, second=5)


async def test_a_full_prefill_worker_is_tried_again_if_there_is_no_other() -> None:
    controlled = failing(OverloadedError("full"))
    pair = PairScene(first=controlled, second=failing(EngineDiedError("gone")))
    with pytest.raises(OverloadedError):
        await pair.router.prefill(group())
    controlled.error = None
    await pair.router.release(await pair.router.prefill(group()))
    assert pair.prefill_counts == PerWorker(first=2, second=1)


@pytest.mark.parametrize("error", [RequestError("never"), EngineError("sick")])
async def test_after_an_error_of_the_group_no_other_worker_is_tried(error: MotetError) -> None:
    pair = PairScene(first=failing(error))
    with pytest.raises(type(error)):
        await pair.router.prefill(group())
    assert pair.prefill_counts == PerWorker(first=1, second=0)


async def test_with_no_prefill_worker_left_the_last_error_counts_and_then_prefill_is_down() -> None:
    first, second = (failing(EngineDiedError(f"worker {i} is gone")) for i in range(2))
    pair = PairScene(first=first, second=second)
    with pytest.raises(EngineDiedError, match="worker 1 is gone"):
        await pair.router.prefill(group())
    with pytest.raises(NoWorkerError, match="no worker can prefill now: prefill-0 is dead, prefill-1 is dead"):
        await pair.router.prefill(group())
    assert pair.prefill_counts == PerWorker(first=1, second=1)


async def test_with_one_worker_full_and_one_dead_prefill_counts_as_full() -> None:
    pair = PairScene(first=failing(OverloadedError("full")), second=failing(EngineDiedError("gone")))
    with pytest.raises(OverloadedError):
        await pair.router.prefill(group())


async def test_a_ticket_is_released_by_the_worker_that_holds_the_lease() -> None:
    pair = PairScene()
    ticket = await pair.second.prefill(group())
    await pair.router.release(ticket)
    assert (pair.first.released, pair.second.released) == ([], [ticket])


async def test_a_ticket_of_a_draining_worker_is_released_there() -> None:
    pair = PairScene()
    ticket = await pair.first.prefill(group())
    pair.fleet.mark("prefill-0", WorkerState.DRAINING)
    await pair.router.release(ticket)
    assert (pair.first.released, pair.second.released) == ([ticket], [])


async def test_a_ticket_of_an_unknown_worker_is_released_through_any_worker() -> None:
    pair = PairScene()
    stranger = msgspec.structs.replace(await pair.first.prefill(group()), remote_engine_id="elsewhere")
    await pair.router.release(stranger)
    assert pair.first.released + pair.second.released == [stranger]


async def test_a_prefill_that_is_cancelled_is_removed_from_the_load() -> None:
    controlled = ControlledPrefill()
    pair = PairScene(first=controlled)
    call = asyncio.ensure_future(pair.router.prefill(group()))
    await controlled.entered.wait()
    call.cancel()
    await asyncio.wait([call])


@pytest.mark.parametrize("policy", [Policy.KV, Policy.ROUND_ROBIN, Policy.LEAST_LOADED])
async def test_equal_prefill_workers_take_turns_and_each_choice_has_its_reason(policy: Policy) -> None:
    leases = FakeLeases()
    workers, engines = zip(*(worker(f"prefill-{i}", leases=leases) for i in range(3)), strict=True)
    fleet = Fleet(workers)
    router = Router(fleet, RoutingConfig(routing_policy=policy))
    for name in "abcdef":
        await router.release(await router.prefill(group(name)))
    assert [len(engine.prefills) for engine in engines] == [2, 2, 2]
    assert all(report.last_decision for report in fleet.reports())
    router.check()


async def test_a_prefill_worker_that_is_just_leaving_is_skipped() -> None:
    pair = PairScene(first=failing(EngineClosedError("closing")))
    ticket = await pair.router.prefill(group())
    assert ticket.remote_engine_id == "prefill-1, start 0"
    await pair.router.release(ticket)


@pytest.mark.parametrize("policy", [Policy.KV, Policy.SESSION])
async def test_the_turns_of_a_session_are_prefilled_by_one_worker(policy: Policy) -> None:
    """The turns used to alternate, because only the worker that generated for a session was remembered."""
    pair = PairScene(policy=policy)
    for number in range(4):
        request = msgspec.structs.replace(group(f"turn {number}"), session_id="session")
        await pair.router.release(await pair.router.prefill(request))
    of_session = [[one.session_id for one in engine.prefills].count("session") for engine in pair.all]
    assert sorted(of_session) == [0, 4]

"""Workers join, leave, die and return: the fleet reports them, and each start of a worker has its own load."""

import asyncio
import logging

import msgspec
import pytest

from motet.engine import Worker, WorkerState
from motet.errors import EngineDiedError, NoWorkerError, WorkerLeavingError
from motet.ids import RequestId
from motet.routing.router import Router
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.member import REFUSAL_S
from motet.routing.workers.serving import NamedBlocks, WorkKind
from motet.testing.fake_engine import FakeEngine, fake_info
from motet.types import Role
from tests.clock import Clock
from tests.routing.cells import PairScene, PerWorker
from tests.routing.scene import ONE_LIFE, Tasks, answer, answers, answers_of, group, tokens_of, worker

pytestmark = pytest.mark.anyio

LEAVING = WorkerLeavingError("it goes")


def states(fleet: Fleet) -> dict[str, WorkerState]:
    return {report.id: report.state for report in fleet.reports()}


def ready(fleet: Fleet, work: WorkKind) -> list[str]:
    serving = fleet.catalog.serving()
    return [member.id for member in (serving.prefill if work is WorkKind.PREFILL else serving.generate).members]


def test_workers_are_reported_in_the_order_in_which_they_joined() -> None:
    decode, prefill = worker("decode-0")[0], worker("prefill-0")[0]
    fleet = Fleet([decode])
    fleet.expect("decode-9", "http://nine", role=Role.DECODE)
    fleet.expect("both-8", "http://eight")
    fleet.put(prefill)
    one, nine, eight, zero = fleet.reports()
    assert (one.id, one.state, one.role, one.worker) == ("decode-0", WorkerState.READY, Role.DECODE, decode)
    assert (nine.id, nine.state, nine.role, nine.worker) == ("decode-9", WorkerState.STARTING, Role.DECODE, None)
    assert (eight.address, eight.role) == ("http://eight", None)
    assert (zero.id, zero.address) == ("prefill-0", "127.0.0.1:1")
    assert one.last_decision is None


def test_an_expected_worker_that_comes_is_one_member_and_reports_its_own_role() -> None:
    fleet = Fleet()
    expected = fleet.expect("decode-0", "http://zero")
    assert fleet.expect("decode-0", "http://other") is expected
    assert fleet.put(worker("decode-0")[0]) is expected
    (report,) = fleet.reports()
    assert (report.state, report.role, report.address) == (WorkerState.READY, Role.DECODE, "127.0.0.1:1")


@pytest.mark.parametrize(
    ("before", "expected", "level"),
    [
        (WorkerState.READY, False, logging.ERROR),
        (WorkerState.READY, True, logging.INFO),  # this server closes the engine
        (WorkerState.DRAINING, False, logging.INFO),  # the worker is stopped by its operator
    ],
)
def test_only_an_unexpected_end_of_a_worker_is_logged_as_an_error(
    before: WorkerState, expected: bool, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet([worker("decode-0")[0]])
    fleet.mark("decode-0", before)
    with caplog.at_level(logging.INFO, logger="motet.routing"):
        fleet.mark("decode-0", WorkerState.DEAD, why="it ended", expected=expected)
    assert [record.levelno for record in caplog.records] == [level]


def test_only_ready_workers_get_work() -> None:
    fleet = Fleet([worker("decode-0")[0], worker("decode-1")[0]])
    for state in WorkerState:
        fleet.mark("decode-0", state)
        assert ready(fleet, WorkKind.GENERATE) == (["decode-0"] if state is WorkerState.READY else []) + ["decode-1"]
    fleet.remove("decode-0")
    fleet.remove("decode-0")
    fleet.mark("decode-0", WorkerState.READY)
    assert states(fleet) == {"decode-1": WorkerState.READY}


def test_prefill_workers_generate_only_if_no_other_worker_could() -> None:
    fleet = Fleet([worker("prefill-0")[0]])
    assert ready(fleet, WorkKind.GENERATE) == ready(fleet, WorkKind.PREFILL) == ["prefill-0"]
    assert (fleet.catalog.serving().has_decode, fleet.catalog.serving().has_prefill) == (False, False)
    fleet.expect("decode-0", "-", role=Role.DECODE)
    assert ready(fleet, WorkKind.GENERATE) == []
    assert ready(fleet, WorkKind.PREFILL) == ["prefill-0"]
    fleet.put(worker("decode-0")[0])
    assert ready(fleet, WorkKind.GENERATE) == ["decode-0"]
    assert (fleet.catalog.serving().has_decode, fleet.catalog.serving().has_prefill) == (True, True)
    fleet.mark("decode-0", WorkerState.DEAD)
    assert ready(fleet, WorkKind.GENERATE) == []  # it will come back; until then its groups wait
    fleet.remove("decode-0")
    assert ready(fleet, WorkKind.GENERATE) == ["prefill-0"]


def test_workers_that_do_both_are_not_used_for_prefill() -> None:
    fleet = Fleet([worker("both-0")[0]])
    assert ready(fleet, WorkKind.GENERATE) == ["both-0"]
    assert ready(fleet, WorkKind.PREFILL) == []


@pytest.mark.parametrize("role", ["decode", "both", "prefill"])
def test_a_worker_is_expected_until_no_worker_that_could_generate_will_return(role: str) -> None:
    fleet = Fleet([worker(f"{role}-0")[0], worker(f"{role}-1")[0]])
    for number in range(2):
        assert fleet.catalog.serving().worker_expected
        fleet.mark(f"{role}-{number}", WorkerState.DEAD)
        assert fleet.catalog.serving().worker_expected
        fleet.give_up(f"{role}-{number}")
    assert not fleet.catalog.serving().worker_expected
    fleet.give_up("unknown")
    fleet.put(worker(f"{role}-1")[0])
    assert fleet.catalog.serving().worker_expected


def test_a_worker_that_refused_is_avoided_for_some_time_but_not_after_a_restart() -> None:
    clock = Clock()
    fleet = Fleet(clock=clock)
    member = fleet.put(worker("decode-0")[0])
    member.faults.record_refusal()
    refused = [member.faults.refused]
    for later_s in (REFUSAL_S - 0.01, 0.01):
        clock.now_s += later_s
        refused.append(member.faults.refused)
    assert refused == [True, True, False]
    member.faults.record_refusal()
    fleet.put(worker("decode-0")[0])
    assert not member.faults.refused


async def test_each_change_wakes_every_waiter() -> None:
    fleet = Fleet([worker("decode-0")[0], worker("decode-1")[0]])
    changes = {
        "dead": lambda: fleet.mark("decode-0", WorkerState.DEAD),
        "back": lambda: fleet.put(worker("decode-0")[0]),
        "back before its absence was noticed": lambda: fleet.put(worker("decode-0")[0]),
        "given up": lambda: fleet.give_up("decode-1"),
        "gone": lambda: fleet.remove("decode-1"),
        "capacity": fleet.changes.wake,
    }
    for change, happens in changes.items():
        waiters = [fleet.changes.wait(), fleet.changes.wait()]
        happens()
        assert all(waiter.done() for waiter in waiters), change
    unchanged = fleet.changes.wait()
    fleet.mark("decode-0", WorkerState.READY)
    fleet.remove("decode-1")
    assert not unchanged.done()
    with pytest.raises(AssertionError, match="1 tasks still wait"):
        fleet.check()
    unchanged.cancel()
    fleet.changes.wake()
    fleet.check()


async def test_a_change_between_the_call_and_the_await_is_not_missed() -> None:
    """It used to be missed, because the wait started only when the waiting task had its turn."""
    fleet = Fleet()
    changed = fleet.changes.wait()
    fleet.put(worker("decode-0")[0])
    await changed


async def test_a_returning_worker_has_an_empty_load_and_earlier_groups_end_in_the_old_one() -> None:
    one, engine = worker("decode-0")
    fleet = Fleet([one])
    router, member = Router(fleet, ONE_LIFE), fleet.members[0]
    former = router.generate(group("former", n=3))
    old = member.load
    again, _ = worker("decode-0")
    fleet.put(again)
    assert member.load is not old
    assert (old.open_choices, member.load.open_choices) == (3, 0)
    present = router.generate(group("present", n=2))
    engine.die()
    with pytest.raises(EngineDiedError):
        await tokens_of(former)
    old.check()
    assert member.load.open_choices == 2
    assert len(member.groups) == 1
    assert await tokens_of(present) == answers(2)
    router.check()


@pytest.mark.parametrize("removed", [False, True])
async def test_a_death_that_a_slow_reader_finds_late_does_not_mark_the_returned_worker(removed: bool) -> None:
    one, engine = worker("decode-0")
    fleet = Fleet([one])
    router = Router(fleet, ONE_LIFE)
    former = router.generate(group())
    engine.die()
    if removed:
        fleet.remove("decode-0")
    else:
        fleet.mark("decode-0", WorkerState.DEAD)
    fleet.put(worker("decode-0")[0])
    with pytest.raises(EngineDiedError):
        await anext(former)
    assert states(fleet) == {"decode-0": WorkerState.READY}
    assert await answers_of(router, group("next")) == answers(2)
    router.check()


async def test_evicted_groups_end_with_the_given_error_wherever_they_are() -> None:
    tasks = Tasks()
    gate = asyncio.Semaphore(0)
    one, engine = worker("decode-0", gate=gate)
    fleet = Fleet([one, worker("prefill-0")[0]])
    router = Router(fleet, ONE_LIFE)
    started, waiting, unread = (router.generate(group(name)) for name in ("started", "waiting", "unread"))
    gate.release()
    await anext(started)
    reader = asyncio.ensure_future(anext(waiting))
    await asyncio.sleep(0)
    await fleet.evict("decode-0", LEAVING)
    engine.check()
    with pytest.raises(WorkerLeavingError):
        await reader
    for stream in (started, unread):
        for _ in range(2):
            with pytest.raises(WorkerLeavingError):
                await anext(stream)
    assert states(fleet)["decode-0"] is WorkerState.READY  # eviction itself does not change the worker's state
    await fleet.evict("decode-0", LEAVING)
    await fleet.evict("unknown", LEAVING)
    router.check()
    tasks.check()


async def test_groups_that_have_ended_are_not_evicted() -> None:
    one, engine = worker("decode-0")
    fleet = Fleet([one])
    router = Router(fleet, ONE_LIFE)
    finished, stopped, closed = (router.generate(group(name, n=1)) for name in ("finished", "stopped", "closed"))
    for _ in answer(0):
        await anext(finished)
    await router.stop_choice(RequestId("stopped"), 0)
    await closed.aclose()
    await fleet.evict("decode-0", LEAVING)
    for stream in (finished, stopped, closed):
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    engine.check()
    router.check()


async def test_when_the_last_worker_leaves_the_fleet_is_empty() -> None:
    fleet = Fleet([worker("decode-0")[0]])
    router = Router(fleet, ONE_LIFE)
    fleet.remove("decode-0")
    with pytest.raises(NoWorkerError, match="there is none"):
        router.generate(group())
    fleet.put(worker("decode-1")[0])
    assert await answers_of(router, group()) == answers(2)


async def test_the_report_has_the_reason_why_a_worker_got_its_last_group() -> None:
    fleet = Fleet([worker("decode-0")[0]])
    await answers_of(Router(fleet, ONE_LIFE), group())
    assert [report.last_decision for report in fleet.reports()] == ["only decode-0 is available"]


async def test_choices_of_other_routers_count_and_own_choices_do_not_count_twice() -> None:
    pair = PairScene("decode")
    first, second = pair.fleet.members
    stream = pair.router.generate(group("own", n=4))
    assert (first.load.open_choices, second.load.open_choices) == (4, 0)
    for member, open_choices in ((first, 4), (second, 30)):
        member.load.record_report(open_choices)
    assert (first.load.open_choices, second.load.open_choices) == (4, 30)
    other = pair.router.generate(group("other", n=4))
    assert pair.groups == PerWorker(first=2, second=0)
    first.load.record_report(3)  # it does not have all of the router's choices yet
    assert first.load.open_choices == 8
    await stream.aclose()
    await other.aclose()


@pytest.mark.parametrize(("local", "kind"), [(True, (16, "new")), (False, (16, ""))])
def test_blocks_of_new_weights_have_new_names_only_on_engines_that_name_weights(
    local: bool, kind: tuple[int, str]
) -> None:
    """A worker on another server reports the tokens of its blocks; their follower names the blocks by these tokens."""
    fleet = Fleet()
    engine = FakeEngine(lambda _, start: [], info=msgspec.structs.replace(fake_info(), block_size=16))
    fleet.put(Worker("w", engine, "-", local=local))
    assert fleet.catalog.serving().generate.named_blocks == {NamedBlocks(16, "", "")}
    engine.info = msgspec.structs.replace(engine.info, model_digest="new", block_weights="new")
    fleet.record_worker_weights("w")
    assert fleet.catalog.serving().generate.named_blocks == {NamedBlocks(*kind, "")}

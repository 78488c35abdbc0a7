"""The state of a worker on another server, from its reports or its silence."""

import asyncio
import logging
from collections.abc import Iterator

import pytest

from motet.deploy.remote_keeper import BUSY, HEARTBEAT_S
from motet.engine import WorkerState
from motet.engines.wire import EngineReport
from motet.errors import EngineDiedError, EngineError, EngineSilentError, MotetError, OverloadedError, WorkerFaultError
from tests.deploy.keeper_scene import ID, SILENCE_S, KeeperScene, report

pytestmark = pytest.mark.anyio

REFUSED = EngineDiedError("connection refused")
NO_ANSWER = EngineSilentError("no answer in time")
LONG_SILENCE = [NO_ANSWER] * int(SILENCE_S)


class DefectError(Exception):
    """A defect of Motet."""


@pytest.fixture
def kept() -> KeeperScene:
    return KeeperScene()


async def test_the_first_report_makes_the_member_a_worker(kept: KeeperScene) -> None:
    assert kept.state() is WorkerState.STARTING
    await kept.check(report())
    assert kept.state() is WorkerState.READY
    assert [(worker.id, worker.local) for worker in kept.joined] == [(ID, False)]
    assert kept.joined[0].engine is kept.engine


LIVES: dict[str, tuple[list[EngineReport | MotetError], WorkerState, list[type[MotetError]]]] = {
    "the same again": ([report(), report(), report()], WorkerState.READY, []),
    "late, but not silent": ([report(), *LONG_SILENCE[1:]], WorkerState.READY, []),
    "late twice": ([report(), *LONG_SILENCE[1:], report(), *LONG_SILENCE[1:]], WorkerState.READY, []),
    "silent, and back": ([report(), *LONG_SILENCE, report()], WorkerState.READY, [EngineSilentError]),
    "not queried, as this machine has no file descriptor left": (
        [report(), OverloadedError("none")],
        WorkerState.READY,
        [],
    ),
    "drains": ([report(), report(state=WorkerState.DRAINING)], WorkerState.DRAINING, []),
    "does not drain any more": ([report(), report(state=WorkerState.DRAINING), report()], WorkerState.READY, []),
    "in a long step": ([report(), report(state=WorkerState.SILENT)], WorkerState.READY, []),
    "refuses connections": ([report(), REFUSED], WorkerState.DEAD, [EngineDiedError]),
}


@pytest.mark.parametrize(("answers", "state", "losses"), LIVES.values(), ids=LIVES)
async def test_reports_determine_the_state_of_a_worker_and_whether_it_loses_its_groups(
    kept: KeeperScene, answers: list[EngineReport | MotetError], state: WorkerState, losses: list[type[MotetError]]
) -> None:
    await kept.check(*answers)
    assert kept.state() is state
    assert [type(error) for error in kept.engine.losses] == losses
    assert len(kept.engines) == len(kept.joined) == 1


async def test_a_worker_that_was_never_reached_is_expected_with_a_reason(
    kept: KeeperScene, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        await kept.check(REFUSED, REFUSED, REFUSED)
    assert (kept.state(), kept.member.note) == (WorkerState.STARTING, "connection refused")
    assert caplog.text.count("connection refused") == 1
    await kept.check(report())
    assert (kept.state(), kept.member.note) == (WorkerState.READY, "")


async def test_a_long_silence_ends_the_groups_of_a_worker(kept: KeeperScene) -> None:
    await kept.check(report(), *LONG_SILENCE)
    assert kept.state() is WorkerState.SILENT
    assert [type(error) for error in kept.engine.losses] == [EngineSilentError]
    assert "has sent no heartbeat for 5 s" in kept.engine.losses[0].message


async def test_a_worker_that_loads_its_model_is_not_reported_as_silent(
    kept: KeeperScene, caplog: pytest.LogCaptureFixture
) -> None:
    """The bug: "w is still starting: w has sent no heartbeat for 5 s", and "w is silent, was dead" after a restart."""
    awaited = "no answer for 5 s; a server that starts answers when its model is loaded"
    with caplog.at_level(logging.INFO):
        await kept.check(*LONG_SILENCE, NO_ANSWER)
        await kept.check(report(), REFUSED, *LONG_SILENCE, NO_ANSWER)
    assert kept.state() is WorkerState.DEAD
    assert [line for line in caplog.messages if "no answer" in line] == [
        f"{ID} is still starting: {awaited}",
        f"{ID} is still dead: {awaited}",
    ]
    assert "heartbeat" not in caplog.text


async def test_time_in_which_the_gateway_did_not_run_does_not_count_as_silence(kept: KeeperScene) -> None:
    await kept.check(report())
    await kept.check(NO_ANSWER, each_s=3600.0)
    await kept.check(report())
    assert kept.state() is WorkerState.READY
    assert kept.engine.losses == []


async def test_a_worker_that_a_broken_group_found_dead_is_ready_when_it_answers(kept: KeeperScene) -> None:
    await kept.check(report())
    kept.fleet.mark(ID, WorkerState.DEAD, why="a connection broke")
    await kept.check(report())
    assert kept.state() is WorkerState.READY
    assert kept.engine.losses == []


async def test_a_report_requested_before_a_worker_was_found_dead_does_not_revive_it(
    kept: KeeperScene,
) -> None:
    await kept.check(report())

    def dies_during_the_request() -> Iterator[EngineReport]:
        kept.fleet.mark(ID, WorkerState.DEAD, why="a connection broke")
        yield report()

    kept.answers = dies_during_the_request()
    await kept.keeper.check()
    assert kept.state() is WorkerState.DEAD
    await kept.check(report())
    assert kept.state() is WorkerState.READY


class PanicError(BaseException):
    """The error of a Rust library that panics, which is not an `Exception`."""


async def test_a_panic_ends_only_the_current_check(kept: KeeperScene, caplog: pytest.LogCaptureFixture) -> None:
    kept.join_error = PanicError("slice index")
    kept.answers = iter([report(), report(), asyncio.CancelledError()])
    with pytest.raises(asyncio.CancelledError):
        await kept.keeper.keep()
    assert len(kept.requested_s) == 3
    assert "its report could not be used (PanicError: slice index)" in kept.member.note


async def test_a_new_engine_replaces_the_previous_one(kept: KeeperScene) -> None:
    await kept.check(report("first"))
    kept.fleet.cached_blocks.stored(ID, [b"block"])
    await kept.check(report("second"))
    previous, current = kept.engines
    assert [type(error) for error in previous.losses] == [EngineDiedError]
    assert previous.closed and not current.closed
    assert kept.state() is WorkerState.READY
    assert kept.member.worker is not None and kept.member.worker.engine is current
    assert kept.fleet.cached_blocks.blocks(ID) == 0


async def test_a_worker_without_its_engine_is_dead_until_it_has_one(kept: KeeperScene) -> None:
    await kept.check(report(), report(state=WorkerState.DEAD))
    assert kept.state() is WorkerState.DEAD
    assert "has lost its engine" in kept.engine.losses[0].message
    await kept.check(report())
    assert kept.state() is WorkerState.READY


async def test_a_worker_without_an_engine_does_not_join(kept: KeeperScene) -> None:
    await kept.check(report(state=WorkerState.DEAD))
    assert kept.state() is WorkerState.DEAD
    assert kept.joined == []


async def test_a_worker_that_does_not_fit_the_others_is_dead_and_logged_once(
    kept: KeeperScene, caplog: pytest.LogCaptureFixture
) -> None:
    kept.problem = "it serves the model b, and the other workers a"
    with caplog.at_level(logging.INFO):
        await kept.check(report(), report(), report())
    assert kept.state() is WorkerState.DEAD
    assert kept.member.note.endswith("cannot be used here: it serves the model b, and the other workers a")
    assert caplog.text.count("cannot be used here") == 1
    assert kept.engines == []


async def test_a_worker_with_an_impossible_report_is_dead_and_loses_its_groups(kept: KeeperScene) -> None:
    await kept.check(report(), WorkerFaultError("it reports block_size 0"))
    assert (kept.state(), kept.member.note) == (WorkerState.DEAD, "it reports block_size 0")
    assert [type(error) for error in kept.engine.losses] == [WorkerFaultError]
    await kept.check(report())
    assert (kept.state(), kept.member.note) == (WorkerState.READY, "")


async def test_a_worker_with_an_invalid_answer_is_unused_for_a_time_that_grows(kept: KeeperScene) -> None:
    await kept.check(report())
    for pause_s in (2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        kept.fleet.distrust(ID, why="the worker sent invalid data")
        kept.fleet.distrust(ID, why="another group got invalid data too")
        await kept.check(report(), each_s=pause_s - 0.1)
        assert (kept.state(), kept.member.note) == (WorkerState.DEAD, "the worker sent invalid data")
        await kept.check(report(), each_s=0.2)
        assert (kept.state(), kept.member.note) == (WorkerState.READY, "")
    assert {type(error) for error in kept.engine.losses} == {WorkerFaultError}  # its other groups
    kept.now_s += 60.0
    kept.fleet.distrust(ID, why="it was good for a minute")
    await kept.check(report(), each_s=2.1)
    assert kept.state() is WorkerState.READY


@pytest.mark.parametrize("error", [EngineError("it uses protocol 2"), MotetError("anything")], ids=str)
async def test_a_worker_with_an_unknown_protocol_is_dead_with_a_reason(kept: KeeperScene, error: MotetError) -> None:
    await kept.check(error)
    assert (kept.state(), kept.member.note) == (WorkerState.DEAD, error.message)


async def test_a_worker_that_an_operator_drained_stays_draining_after_any_report(kept: KeeperScene) -> None:
    await kept.check(report())
    kept.keeper.take_out()
    assert kept.state() is WorkerState.DRAINING
    await kept.check(report(), report("second"))
    assert kept.state() is WorkerState.DRAINING
    assert kept.engine.losses == []


async def test_a_worker_that_was_drained_before_its_first_report_gets_no_groups(kept: KeeperScene) -> None:
    kept.keeper.take_out()
    assert kept.state() is WorkerState.STARTING
    await kept.check(report())
    assert kept.state() is WorkerState.DRAINING


async def test_an_operator_cannot_drain_a_dead_worker(kept: KeeperScene) -> None:
    await kept.check(report(), REFUSED)
    kept.keeper.take_out()
    assert kept.state() is WorkerState.DEAD
    await kept.check(report())
    assert kept.state() is WorkerState.DRAINING


async def test_a_report_is_requested_once_per_heartbeat_for_any_response_time(kept: KeeperScene) -> None:
    kept.answers = iter([report(), report(), report(), asyncio.CancelledError()])
    kept.answer_takes_s = iter([0.0, 0.25, 2.5, 0.0])
    with pytest.raises(asyncio.CancelledError):
        await kept.keeper.keep()
    first_s = kept.requested_s[0]
    assert [asked_s - first_s for asked_s in kept.requested_s] == [
        0.0,
        HEARTBEAT_S,
        2 * HEARTBEAT_S,
        2 * HEARTBEAT_S + 2.5,
    ]
    assert kept.keeper.checked.is_set()


@pytest.mark.parametrize("where", ["during the request", "while the report is applied"])
async def test_a_defect_makes_the_worker_dead_and_it_is_queried_again(
    kept: KeeperScene, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: the keeper ended with the error, which ended the tasks of all other workers and the gateway."""
    await kept.check(report())
    answers: list[EngineReport | BaseException]
    if where == "during the request":
        answers = [DefectError("no such field"), asyncio.CancelledError()]
    else:
        kept.join_error, answers = DefectError("no such field"), [report("second"), asyncio.CancelledError()]
    kept.answers = iter(answers)
    with pytest.raises(asyncio.CancelledError):
        await kept.keeper.keep()
    assert kept.keeper.checked.is_set()
    assert kept.state() is WorkerState.DEAD
    assert kept.member.note == f"{ID}: its report could not be used (DefectError: no such field): see the log"
    assert [type(error) for error in kept.engines[0].losses] == [EngineDiedError]
    assert caplog.text.count("Traceback") == 1
    kept.join_error = None
    await kept.check(report())
    assert kept.state() is WorkerState.READY


async def test_the_blocks_of_a_worker_are_known_until_it_restarts(kept: KeeperScene) -> None:
    endpoint = "tcp://10.0.0.1:5557"
    await kept.check(report("first", block_events=endpoint), report("first", block_events=endpoint))
    await kept.follows.started.acquire()
    assert kept.fleet.cached_blocks.blocks(ID) == 1
    await kept.check(report("second", block_events=endpoint))
    assert kept.fleet.cached_blocks.blocks(ID) == 0
    await kept.follows.started.acquire()
    assert kept.follows.sources == [endpoint, endpoint]
    kept.answers = iter([asyncio.CancelledError()])
    with pytest.raises(asyncio.CancelledError):
        await kept.keeper.keep()
    assert kept.follows.open == 0


async def test_closing_a_keeper_closes_the_engine(kept: KeeperScene) -> None:
    await kept.keeper.close()
    await kept.check(report())
    await kept.keeper.close()
    assert kept.engine.closed


async def test_a_worker_that_still_sends_tokens_is_silent_later(kept: KeeperScene) -> None:
    await kept.check(report())
    for _ in range(BUSY * int(SILENCE_S) - 1):
        kept.member.groups.received = True
        await kept.check(NO_ANSWER)
        assert kept.state() is WorkerState.READY
    kept.member.groups.received = True
    await kept.check(NO_ANSWER)
    assert kept.state() is WorkerState.SILENT


async def test_tokens_from_before_a_silence_do_not_extend_it(kept: KeeperScene) -> None:
    await kept.check(report())
    kept.member.groups.received = True
    await kept.check(NO_ANSWER, *LONG_SILENCE)
    assert kept.state() is WorkerState.SILENT


async def test_a_worker_that_cannot_be_used_is_dead_and_retried(kept: KeeperScene) -> None:
    kept.join_error = EngineError("no tokenizer for m")
    await kept.check(report())
    assert kept.state() is WorkerState.DEAD
    assert kept.member.note == f"{ID} cannot be used here: no tokenizer for m"
    kept.join_error = None
    await kept.check(report())
    assert kept.state() is WorkerState.READY

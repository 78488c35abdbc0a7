"""What a gateway concludes about a worker elsewhere, from its reports or its silence."""

import asyncio
import logging
from collections.abc import Iterator

import pytest

from motet.deploy.remote_keeper import BUSY, HEARTBEAT_S
from motet.engine import WorkerState
from motet.engines.wire import EngineReport
from motet.errors import EngineDiedError, EngineError, EngineSilentError, MotetError, OverloadedError, WorkerFaultError
from tests.deploy.kept import ID, SILENCE_S, Kept, report

pytestmark = pytest.mark.anyio

REFUSED = EngineDiedError("connection refused")
UNHEARD = EngineSilentError("no answer in time")
UNHEARD_LONG = [UNHEARD] * int(SILENCE_S)


class DefectError(Exception):
    """Stands for a mistake in our own code."""


@pytest.fixture
def kept() -> Kept:
    return Kept()


async def test_the_first_report_makes_the_member_a_worker(kept: Kept) -> None:
    assert kept.state() is WorkerState.STARTING
    await kept.look(report())
    assert kept.state() is WorkerState.READY
    assert [(worker.id, worker.local) for worker in kept.welcomed] == [(ID, False)]
    assert kept.welcomed[0].engine is kept.engine


LIVES: dict[str, tuple[list[EngineReport | MotetError], WorkerState, list[type[MotetError]]]] = {
    "the same again": ([report(), report(), report()], WorkerState.READY, []),
    "late, which is no silence yet": ([report(), *UNHEARD_LONG[1:]], WorkerState.READY, []),
    "late twice": ([report(), *UNHEARD_LONG[1:], report(), *UNHEARD_LONG[1:]], WorkerState.READY, []),
    "silent, and back": ([report(), *UNHEARD_LONG, report()], WorkerState.READY, [EngineSilentError]),
    "not asked, as this machine has no file left": ([report(), OverloadedError("none")], WorkerState.READY, []),
    "drains": ([report(), report(state=WorkerState.DRAINING)], WorkerState.DRAINING, []),
    "drains no more": ([report(), report(state=WorkerState.DRAINING), report()], WorkerState.READY, []),
    "in a long step": ([report(), report(state=WorkerState.SILENT)], WorkerState.READY, []),
    "refuses connections": ([report(), REFUSED], WorkerState.DEAD, [EngineDiedError]),
}


@pytest.mark.parametrize(("heard", "state", "losses"), LIVES.values(), ids=LIVES)
async def test_a_report_decides_the_state_of_a_worker_and_whether_its_groups_go_elsewhere(
    kept: Kept, heard: list[EngineReport | MotetError], state: WorkerState, losses: list[type[MotetError]]
) -> None:
    await kept.look(*heard)
    assert kept.state() is state
    assert [type(error) for error in kept.engine.losses] == losses
    assert len(kept.engines) == len(kept.welcomed) == 1


async def test_a_worker_that_was_never_reached_is_expected_with_a_reason(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        await kept.look(REFUSED, REFUSED, REFUSED)
    assert (kept.state(), kept.member.note) == (WorkerState.STARTING, "connection refused")
    assert caplog.text.count("connection refused") == 1
    await kept.look(report())
    assert (kept.state(), kept.member.note) == (WorkerState.READY, "")


async def test_a_long_silence_ends_the_groups_of_a_worker(kept: Kept) -> None:
    await kept.look(report(), *UNHEARD_LONG)
    assert kept.state() is WorkerState.SILENT
    assert [type(error) for error in kept.engine.losses] == [EngineSilentError]
    assert "has sent no heartbeat for 5 s" in kept.engine.losses[0].message


async def test_the_sleep_of_a_gateway_does_not_count_as_a_worker_s_silence(kept: Kept) -> None:
    await kept.look(report())
    await kept.look(UNHEARD, each_s=3600.0)
    await kept.look(report())
    assert kept.state() is WorkerState.READY
    assert kept.engine.losses == []


async def test_a_worker_that_a_broken_group_found_dead_is_ready_when_it_answers(kept: Kept) -> None:
    await kept.look(report())
    kept.fleet.mark(ID, WorkerState.DEAD, why="a connection broke")
    await kept.look(report())
    assert kept.state() is WorkerState.READY
    assert kept.engine.losses == []


async def test_a_report_requested_before_a_worker_was_found_dead_does_not_revive_it(
    kept: Kept,
) -> None:
    await kept.look(report())

    def dies_meanwhile() -> Iterator[EngineReport]:
        kept.fleet.mark(ID, WorkerState.DEAD, why="a connection broke")
        yield report()

    kept.answers = dies_meanwhile()
    await kept.keeper.check()
    assert kept.state() is WorkerState.DEAD
    await kept.look(report())
    assert kept.state() is WorkerState.READY


class PanicError(BaseException):
    """Stands for the error of a library in Rust that panics, which is no `Exception`."""


async def test_a_panic_ends_nothing_but_the_look(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    kept.unusable = PanicError("slice index")
    kept.answers = iter([report(), report(), asyncio.CancelledError()])
    with pytest.raises(asyncio.CancelledError):
        await kept.keeper.keep()
    assert len(kept.asked_s) == 3
    assert "its report could not be used (PanicError: slice index)" in kept.member.note


async def test_another_engine_takes_the_place_of_the_one_before(kept: Kept) -> None:
    await kept.look(report("first"))
    kept.fleet.cached_blocks.stored(ID, [b"block"])
    await kept.look(report("second"))
    former, present = kept.engines
    assert [type(error) for error in former.losses] == [EngineDiedError]
    assert former.closed and not present.closed
    assert kept.state() is WorkerState.READY
    assert kept.member.worker is not None and kept.member.worker.engine is present
    assert kept.fleet.cached_blocks.blocks(ID) == 0


async def test_a_worker_that_has_lost_its_engine_is_dead_until_it_has_one(kept: Kept) -> None:
    await kept.look(report(), report(state=WorkerState.DEAD))
    assert kept.state() is WorkerState.DEAD
    assert "has lost its engine" in kept.engine.losses[0].message
    await kept.look(report())
    assert kept.state() is WorkerState.READY


async def test_a_worker_without_an_engine_does_not_join(kept: Kept) -> None:
    await kept.look(report(state=WorkerState.DEAD))
    assert kept.state() is WorkerState.DEAD
    assert kept.welcomed == []


async def test_a_worker_that_does_not_fit_is_dead_and_logged_once(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    kept.problem = "it serves the model b, and the other workers a"
    with caplog.at_level(logging.INFO):
        await kept.look(report(), report(), report())
    assert kept.state() is WorkerState.DEAD
    assert kept.member.note.endswith("cannot be used here: it serves the model b, and the other workers a")
    assert caplog.text.count("cannot be used here") == 1
    assert kept.engines == []


async def test_a_worker_that_reports_what_cannot_be_is_dead_and_its_groups_go_elsewhere(kept: Kept) -> None:
    await kept.look(report(), WorkerFaultError("it reports block_size 0"))
    assert (kept.state(), kept.member.note) == (WorkerState.DEAD, "it reports block_size 0")
    assert [type(error) for error in kept.engine.losses] == [WorkerFaultError]
    await kept.look(report())
    assert (kept.state(), kept.member.note) == (WorkerState.READY, "")


async def test_a_worker_with_a_wrong_answer_is_left_alone_for_a_while_and_longer_each_time(kept: Kept) -> None:
    await kept.look(report())
    for pause_s in (2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        kept.fleet.distrust(ID, why="the worker sent nonsense")
        kept.fleet.distrust(ID, why="another group got nonsense too")
        await kept.look(report(), each_s=pause_s - 0.1)
        assert (kept.state(), kept.member.note) == (WorkerState.DEAD, "the worker sent nonsense")
        await kept.look(report(), each_s=0.2)
        assert (kept.state(), kept.member.note) == (WorkerState.READY, "")
    assert {type(error) for error in kept.engine.losses} == {WorkerFaultError}  # its other groups
    kept.now_s += 60.0
    kept.fleet.distrust(ID, why="it was good for a minute")
    await kept.look(report(), each_s=2.1)
    assert kept.state() is WorkerState.READY


@pytest.mark.parametrize("error", [EngineError("it speaks protocol 2"), MotetError("anything")], ids=str)
async def test_a_worker_that_cannot_be_understood_is_dead_with_a_reason(kept: Kept, error: MotetError) -> None:
    await kept.look(error)
    assert (kept.state(), kept.member.note) == (WorkerState.DEAD, error.message)


async def test_a_worker_that_an_operator_drained_stays_so_whatever_it_reports(kept: Kept) -> None:
    await kept.look(report())
    kept.keeper.take_out()
    assert kept.state() is WorkerState.DRAINING
    await kept.look(report(), report("second"))
    assert kept.state() is WorkerState.DRAINING
    assert kept.engine.losses == []


async def test_a_worker_that_was_drained_before_it_came_gets_nothing(kept: Kept) -> None:
    kept.keeper.take_out()
    assert kept.state() is WorkerState.STARTING
    await kept.look(report())
    assert kept.state() is WorkerState.DRAINING


async def test_an_operator_cannot_drain_a_dead_worker(kept: Kept) -> None:
    await kept.look(report(), REFUSED)
    kept.keeper.take_out()
    assert kept.state() is WorkerState.DEAD
    await kept.look(report())
    assert kept.state() is WorkerState.DRAINING


async def test_a_worker_is_asked_once_a_heartbeat_however_long_an_answer_takes(kept: Kept) -> None:
    kept.answers = iter([report(), report(), report(), asyncio.CancelledError()])
    kept.answer_takes_s = iter([0.0, 0.25, 2.5, 0.0])
    with pytest.raises(asyncio.CancelledError):
        await kept.keeper.keep()
    first_s = kept.asked_s[0]
    assert [asked_s - first_s for asked_s in kept.asked_s] == [0.0, HEARTBEAT_S, 2 * HEARTBEAT_S, 2 * HEARTBEAT_S + 2.5]
    assert kept.keeper.checked.is_set()


@pytest.mark.parametrize("where", ["while it is asked", "while its report is taken"])
async def test_a_defect_that_it_runs_into_makes_it_dead_and_it_is_asked_again(
    kept: Kept, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The keeper ended with the error, and with it the tasks of all other workers: the gateway was gone."""
    await kept.look(report())
    answers: list[EngineReport | BaseException]
    if where == "while it is asked":
        answers = [DefectError("no such field"), asyncio.CancelledError()]
    else:
        kept.unusable, answers = DefectError("no such field"), [report("second"), asyncio.CancelledError()]
    kept.answers = iter(answers)
    with pytest.raises(asyncio.CancelledError):
        await kept.keeper.keep()
    assert kept.keeper.checked.is_set()
    assert kept.state() is WorkerState.DEAD
    assert kept.member.note == f"{ID}: its report could not be used (DefectError: no such field): see the log"
    assert [type(error) for error in kept.engines[0].losses] == [EngineDiedError]
    assert caplog.text.count("Traceback") == 1
    kept.unusable = None
    await kept.look(report())
    assert kept.state() is WorkerState.READY


async def test_the_blocks_of_a_worker_are_known_until_it_is_started_again(kept: Kept) -> None:
    here = "tcp://10.0.0.1:5557"
    await kept.look(report("first", block_events=here), report("first", block_events=here))
    await kept.follows.begun.acquire()
    assert kept.fleet.cached_blocks.blocks(ID) == 1
    await kept.look(report("second", block_events=here))
    assert kept.fleet.cached_blocks.blocks(ID) == 0
    await kept.follows.begun.acquire()
    assert kept.follows.sources == [here, here]
    kept.answers = iter([asyncio.CancelledError()])
    with pytest.raises(asyncio.CancelledError):
        await kept.keeper.keep()
    assert kept.follows.open == 0


async def test_closing_a_keeper_closes_the_engine(kept: Kept) -> None:
    await kept.keeper.close()
    await kept.look(report())
    await kept.keeper.close()
    assert kept.engine.closed


async def test_a_worker_whose_tokens_still_come_is_busy_and_given_up_later(kept: Kept) -> None:
    await kept.look(report())
    for _ in range(BUSY * int(SILENCE_S) - 1):
        kept.member.groups.received = True
        await kept.look(UNHEARD)
        assert kept.state() is WorkerState.READY
    kept.member.groups.received = True
    await kept.look(UNHEARD)
    assert kept.state() is WorkerState.SILENT


async def test_tokens_that_came_before_a_silence_do_not_count_for_ever(kept: Kept) -> None:
    await kept.look(report())
    kept.member.groups.received = True
    await kept.look(UNHEARD, *UNHEARD_LONG)
    assert kept.state() is WorkerState.SILENT


async def test_a_worker_that_cannot_be_used_is_dead_and_tried_again(kept: Kept) -> None:
    kept.unusable = EngineError("no tokenizer for m")
    await kept.look(report())
    assert kept.state() is WorkerState.DEAD
    assert kept.member.note == f"{ID} cannot be used here: no tokenizer for m"
    kept.unusable = None
    await kept.look(report())
    assert kept.state() is WorkerState.READY

"""What a gateway believes of a worker elsewhere, from what the worker says or does not say."""

import asyncio
import logging

import msgspec
import pytest

from motet.deploy.discover import Likeness
from motet.deploy.remote_keeper import BUSY, HEARTBEAT_S
from motet.engines.base import WorkerState
from motet.engines.wire import EngineReport
from motet.errors import EngineDiedError, EngineError, EngineSilentError, MotetError
from tests.deploy.kept import ID, SILENCE_S, URL, Kept, report

pytestmark = pytest.mark.anyio

REFUSED = EngineDiedError("connection refused")
UNHEARD = EngineSilentError("no answer in time")
UNHEARD_LONG = [UNHEARD] * int(SILENCE_S)


class DefectError(Exception):
    """Stands for a mistake in our own code."""


@pytest.fixture
def kept() -> Kept:
    return Kept()


async def test_its_first_report_makes_a_worker_of_it(kept: Kept) -> None:
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
    "drains": ([report(), report(state=WorkerState.DRAINING)], WorkerState.DRAINING, []),
    "drains no more": ([report(), report(state=WorkerState.DRAINING), report()], WorkerState.READY, []),
    "in a long step": ([report(), report(state=WorkerState.SILENT)], WorkerState.READY, []),
    "refuses connections": ([report(), REFUSED], WorkerState.DEAD, [EngineDiedError]),
}


@pytest.mark.parametrize(("heard", "state", "losses"), LIVES.values(), ids=LIVES)
async def test_what_is_heard_of_a_worker_says_how_it_is_and_whether_its_groups_go_on_elsewhere(
    kept: Kept, heard: list[EngineReport | MotetError], state: WorkerState, losses: list[type[MotetError]]
) -> None:
    await kept.look(*heard)
    assert kept.state() is state
    assert [type(error) for error in kept.engine.losses] == losses
    assert len(kept.engines) == len(kept.welcomed) == 1


async def test_one_that_nobody_has_reached_yet_is_expected_and_says_why(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        await kept.look(REFUSED, REFUSED, REFUSED)
    assert (kept.state(), kept.member.note) == (WorkerState.STARTING, "connection refused")
    assert caplog.text.count("connection refused") == 1
    await kept.look(report())
    assert (kept.state(), kept.member.note) == (WorkerState.READY, "")


async def test_a_silence_that_lasts_ends_its_groups(kept: Kept) -> None:
    await kept.look(report(), *UNHEARD_LONG)
    assert kept.state() is WorkerState.SILENT
    assert [type(error) for error in kept.engine.losses] == [EngineSilentError]
    assert "no sign of life for 5 s" in kept.engine.losses[0].message


async def test_a_gateway_that_was_asleep_does_not_take_it_for_a_silence(kept: Kept) -> None:
    await kept.look(report())
    await kept.look(UNHEARD, each_s=3600.0)
    await kept.look(report())
    assert kept.state() is WorkerState.READY
    assert kept.engine.losses == []


async def test_who_was_found_dead_by_a_broken_group_is_ready_when_it_answers(kept: Kept) -> None:
    await kept.look(report())
    kept.fleet.mark(ID, WorkerState.DEAD, why="a connection broke")
    await kept.look(report())
    assert kept.state() is WorkerState.READY
    assert kept.engine.losses == []


async def test_another_engine_takes_the_place_of_the_one_before(kept: Kept) -> None:
    await kept.look(report("first"))
    kept.fleet.index.stored(ID, [b"block"])
    await kept.look(report("second"))
    former, present = kept.engines
    assert [type(error) for error in former.losses] == [EngineDiedError]
    assert former.closed and not present.closed
    assert kept.state() is WorkerState.READY
    assert kept.member.worker is not None and kept.member.worker.engine is present
    assert kept.fleet.index.blocks(ID) == 0


async def test_one_that_has_lost_its_engine_is_dead_until_it_has_one(kept: Kept) -> None:
    await kept.look(report(), report(state=WorkerState.DEAD))
    assert kept.state() is WorkerState.DEAD
    assert "has lost its engine" in kept.engine.losses[0].message
    await kept.look(report())
    assert kept.state() is WorkerState.READY


async def test_one_without_an_engine_is_not_welcomed(kept: Kept) -> None:
    await kept.look(report(state=WorkerState.DEAD))
    assert kept.state() is WorkerState.DEAD
    assert kept.welcomed == []


async def test_one_that_is_of_no_use_is_dead_and_says_so_once(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    kept.problem = "it serves the model b, and the other workers a"
    with caplog.at_level(logging.INFO):
        await kept.look(report(), report(), report())
    assert kept.state() is WorkerState.DEAD
    assert kept.member.note.endswith("cannot be used here: it serves the model b, and the other workers a")
    assert caplog.text.count("cannot be used here") == 1
    assert kept.engines == []


async def test_one_that_comes_to_report_no_block_size_is_dead_and_its_groups_go_elsewhere(kept: Kept) -> None:
    """It joined, and the queue of a gateway divided by its block size."""
    wrong = report()
    wrong = msgspec.structs.replace(wrong, info=msgspec.structs.replace(wrong.info, block_size=0))
    await kept.look(report())
    kept.problem = Likeness().problem(ID, wrong, role=None)
    await kept.look(wrong)
    assert kept.state() is WorkerState.DEAD
    assert kept.member.note.endswith("it reports block_size 0, which must be at least 1")
    assert [type(error) for error in kept.engine.losses] == [EngineDiedError]


@pytest.mark.parametrize("error", [EngineError("it speaks protocol 2"), MotetError("anything")], ids=str)
async def test_one_that_cannot_be_understood_is_dead_and_says_why(kept: Kept, error: MotetError) -> None:
    await kept.look(error)
    assert (kept.state(), kept.member.note) == (WorkerState.DEAD, error.message)


async def test_one_that_an_operator_took_out_stays_so_whatever_it_reports(kept: Kept) -> None:
    await kept.look(report())
    kept.keeper.take_out()
    assert kept.state() is WorkerState.DRAINING
    await kept.look(report(), report("second"))
    assert kept.state() is WorkerState.DRAINING
    assert kept.engine.losses == []


async def test_one_that_is_taken_out_before_it_comes_gets_nothing_when_it_does(kept: Kept) -> None:
    kept.keeper.take_out()
    assert kept.state() is WorkerState.STARTING
    await kept.look(report())
    assert kept.state() is WorkerState.DRAINING


async def test_one_that_is_dead_is_not_made_draining_by_an_operator(kept: Kept) -> None:
    await kept.look(report(), REFUSED)
    kept.keeper.take_out()
    assert kept.state() is WorkerState.DEAD
    await kept.look(report())
    assert kept.state() is WorkerState.DRAINING


async def test_it_is_asked_once_a_heartbeat_however_long_an_answer_takes(kept: Kept) -> None:
    kept.answers = iter([report(), report(), report(), asyncio.CancelledError()])
    kept.answer_takes_s = iter([0.0, 0.25, 2.5, 0.0])
    with pytest.raises(asyncio.CancelledError):
        await kept.keeper.keep()
    first_s = kept.asked_s[0]
    assert [asked_s - first_s for asked_s in kept.asked_s] == [0.0, HEARTBEAT_S, 2 * HEARTBEAT_S, 2 * HEARTBEAT_S + 2.5]
    assert kept.keeper.looked.is_set()


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
    assert kept.keeper.looked.is_set()
    assert kept.state() is WorkerState.DEAD
    assert kept.member.note == f"{URL}: its report could not be taken (DefectError: no such field): the log has more"
    assert [type(error) for error in kept.engines[0].losses] == [EngineDiedError]
    assert caplog.text.count("Traceback") == 1
    kept.unusable = None
    await kept.look(report())
    assert kept.state() is WorkerState.READY


async def test_the_blocks_it_tells_of_are_known_as_long_as_it_is_the_same(kept: Kept) -> None:
    here = "tcp://10.0.0.1:5557"
    await kept.look(report("first", block_events=here), report("first", block_events=here))
    await kept.follows.begun.acquire()
    assert kept.fleet.index.blocks(ID) == 1
    await kept.look(report("second", block_events=here))
    assert kept.fleet.index.blocks(ID) == 0
    await kept.follows.begun.acquire()
    assert kept.follows.sources == [here, here]
    kept.answers = iter([asyncio.CancelledError()])
    with pytest.raises(asyncio.CancelledError):
        await kept.keeper.keep()
    assert kept.follows.open == 0


async def test_closing_it_closes_the_engine(kept: Kept) -> None:
    await kept.keeper.close()
    await kept.look(report())
    await kept.keeper.close()
    assert kept.engine.closed


async def test_a_worker_whose_tokens_still_come_is_busy_and_given_up_later(kept: Kept) -> None:
    await kept.look(report())
    for _ in range(BUSY * int(SILENCE_S) - 1):
        kept.member.stirred = True
        await kept.look(UNHEARD)
        assert kept.state() is WorkerState.READY
    kept.member.stirred = True
    await kept.look(UNHEARD)
    assert kept.state() is WorkerState.SILENT


async def test_tokens_that_came_before_a_silence_do_not_shorten_it_for_ever(kept: Kept) -> None:
    await kept.look(report())
    kept.member.stirred = True
    await kept.look(UNHEARD, *UNHEARD_LONG)
    assert kept.state() is WorkerState.SILENT


async def test_a_worker_that_cannot_be_used_is_dead_and_tried_again(kept: Kept) -> None:
    kept.unusable = EngineError("no tokenizer for m")
    await kept.look(report())
    assert kept.state() is WorkerState.DEAD
    assert kept.member.note == f"{URL} cannot be used here: no tokenizer for m"
    kept.unusable = None
    await kept.look(report())
    assert kept.state() is WorkerState.READY

"""A large group on two decode engines needs one prefill, and one pull for each part. Its answer equals the answer of a
single engine, even if one of the two is lost."""

import asyncio
from collections.abc import AsyncIterator
from operator import sub
from pathlib import Path

import pytest

from motet.settings.server_config import RoutingConfig
from tests.fault.answers import fetch_answer
from tests.fault.fault_requests import CHAT, COMPLETIONS, COUNTED, VOTE, chat, completion
from tests.fault.faults import generated, kill, prefilling, submitted
from tests.fault.oracle import Undisturbed
from tests.fault.running_cell import PREFILL_AND_DECODE, RunningCell
from tests.forked import ForkingProcess
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture(scope="module")
async def shared(folder: Path, forking: ForkingProcess, undisturbed: Undisturbed) -> AsyncIterator[RunningCell]:
    await undisturbed.start("float32")
    routing = RoutingConfig(engine_restarts=50, migration_wait_s=PATIENCE_S, spread_choices=8)
    async with RunningCell(folder, cell=PREFILL_AND_DECODE, routing=routing, spawn=forking.spawn) as cell:
        yield cell


async def test_a_spread_group_equals_a_group_on_one_engine_and_takes_one_prefill(
    cell: RunningCell, undisturbed: Undisturbed
) -> None:
    body = chat("spread", COUNTED, n=16, logprobs=True)
    expected = await undisturbed.answer(CHAT, body)
    spreads, before = cell.figures.spreads, await work_of(cell)
    assert await fetch_answer(cell.http, CHAT, body) == expected
    assert cell.figures.spreads == spreads + 1
    once = [(1, 0, 0), (0, 1, 1), (0, 1, 1)]
    assert [tuple(map(sub, now, then)) for now, then in zip(await work_of(cell), before, strict=True)] == once


async def work_of(cell: RunningCell) -> list[tuple[int, int, int]]:
    """Returns the prefills of each worker, its transfers, and the prompt tokens that it computed after transfers."""
    figures = [await cell.stats(member.id) for member in cell.fleet.members]
    return [(stats.prefills, stats.transfers, stats.recomputed_tokens) for stats in figures]


async def test_a_spread_group_that_loses_one_of_its_engines_continues_on_the_other(
    cell: RunningCell, undisturbed: Undisturbed
) -> None:
    body = completion("spread", COUNTED, n=16, return_token_ids=True)
    expected = await undisturbed.answer(COMPLETIONS, body)
    before = cell.figures
    cell.faults.arm(generated(20), kill)
    assert await fetch_answer(cell.http, COMPLETIONS, body) == expected
    assert cell.figures.spreads == before.spreads + 1
    assert cell.figures.choices_resumed - before.choices_resumed == 8


async def test_a_vote_over_two_engines_is_the_same_when_one_of_them_is_lost(
    cell: RunningCell, undisturbed: Undisturbed
) -> None:
    """When one engine is lost, the choices of the other get much longer. Their tokens after the decision are not
    sent."""
    body = chat("vote", COUNTED, VOTE, n=16, max_tokens=200)
    expected = await undisturbed.answer(CHAT, body)
    (result,) = expected.groups
    finished = sum(choice.finish_reason != "abort" for choice in expected.choices.values())
    assert 0 < finished < 16
    assert (result["stopped_by"], result["aborted"]) == ("agree", 16 - finished)
    cell.faults.arm(generated(5), kill)
    assert await fetch_answer(cell.http, CHAT, body) == expected


async def test_a_ticket_that_one_part_has_not_read_when_it_moves_is_released(
    cell: RunningCell, undisturbed: Undisturbed
) -> None:
    body = completion("unread", COUNTED, n=16)
    expected = await undisturbed.answer(COMPLETIONS, body)
    cell.faults.arm(submitted, kill)
    assert await fetch_answer(cell.http, COMPLETIONS, body) == expected


async def test_decode_works_without_a_prefill_engine_that_is_killed_repeatedly(
    cell: RunningCell, undisturbed: Undisturbed
) -> None:
    for round_ in range(2):
        bodies = [completion(f"flaps {round_} {i}", COUNTED, n=12 - 4 * i) for i in range(3)]
        expected = [await undisturbed.answer(COMPLETIONS, body) for body in bodies]
        await cell.restored()
        fault = cell.faults.arm(prefilling, kill)
        answers = await asyncio.gather(*(fetch_answer(cell.http, COMPLETIONS, body) for body in bodies))
        assert fault.happened.is_set()
        assert answers == expected

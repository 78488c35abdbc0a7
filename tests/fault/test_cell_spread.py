"""A large group on two decode engines needs one prefill, and one pull for each part. Its answer is the one of a single
engine, even if one of the two is lost."""

import asyncio
from collections.abc import AsyncIterator
from operator import sub
from pathlib import Path

import pytest

from motet.settings.server_config import RoutingConfig
from tests.fault.answers import ask
from tests.fault.asked import CHAT, COMPLETIONS, COUNTED, VOTE, chat, completion
from tests.fault.oracle import Undisturbed
from tests.fault.running_cell import APART, SECONDS, RunningCell
from tests.fault.striking import kill, prefilling, submitted, written
from tests.forked import ForkingProcess

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture(scope="module")
async def shared(folder: Path, forking: ForkingProcess, undisturbed: Undisturbed) -> AsyncIterator[RunningCell]:
    await undisturbed.start("float32")
    routing = RoutingConfig(engine_restarts=50, migration_wait_s=SECONDS, spread_choices=8)
    async with RunningCell(folder, cell=APART, routing=routing, spawn=forking.spawn) as cell:
        yield cell


async def test_a_spread_group_equals_that_of_one_engine_and_takes_one_prefill(
    cell: RunningCell, undisturbed: Undisturbed
) -> None:
    body = chat("spread", COUNTED, n=16, logprobs=True)
    expected = await undisturbed.answer(CHAT, body)
    spreads, before = cell.figures.spreads, await work_of(cell)
    assert await ask(cell.http, CHAT, body) == expected
    assert cell.figures.spreads == spreads + 1
    once = [(1, 0, 0), (0, 1, 1), (0, 1, 1)]
    assert [tuple(map(sub, now, then)) for now, then in zip(await work_of(cell), before, strict=True)] == once


async def work_of(cell: RunningCell) -> list[tuple[int, int, int]]:
    """Returns the prefills of each worker, its transfers, and the prompt tokens that it computed after them."""
    found = [await cell.stats(member.id) for member in cell.fleet.members]
    return [(stats.prefills, stats.transfers, stats.recomputed_tokens) for stats in found]


async def test_a_spread_group_that_loses_one_of_its_engines_goes_on_on_the_other(
    cell: RunningCell, undisturbed: Undisturbed
) -> None:
    body = completion("spread", COUNTED, n=16, return_token_ids=True)
    expected = await undisturbed.answer(COMPLETIONS, body)
    before = cell.figures
    cell.strikes.arm(written(20), kill)
    assert await ask(cell.http, COMPLETIONS, body) == expected
    assert cell.figures.spreads == before.spreads + 1
    assert cell.figures.choices_resumed - before.choices_resumed == 8


async def test_a_vote_over_two_engines_is_the_same_when_one_of_them_is_lost(
    cell: RunningCell, undisturbed: Undisturbed
) -> None:
    """The choices of the other one are far ahead then; what they wrote beyond the decision is never seen."""
    body = chat("vote", COUNTED, VOTE, n=16, max_tokens=200)
    expected = await undisturbed.answer(CHAT, body)
    (told,) = expected.groups
    finished = sum(choice.finish_reason != "abort" for choice in expected.choices.values())
    assert 0 < finished < 16
    assert (told["stopped_by"], told["aborted"]) == ("agree", 16 - finished)
    cell.strikes.arm(written(5), kill)
    assert await ask(cell.http, CHAT, body) == expected


async def test_a_ticket_that_one_part_has_not_read_when_it_moves_is_given_back(
    cell: RunningCell, undisturbed: Undisturbed
) -> None:
    body = completion("unread", COUNTED, n=16)
    expected = await undisturbed.answer(COMPLETIONS, body)
    cell.strikes.arm(submitted, kill)
    assert await ask(cell.http, COMPLETIONS, body) == expected


async def test_decode_does_without_a_prefill_engine_that_is_killed_again_and_again(
    cell: RunningCell, undisturbed: Undisturbed
) -> None:
    for life in range(2):
        bodies = [completion(f"flaps {life} {i}", COUNTED, n=12 - 4 * i) for i in range(3)]
        expected = [await undisturbed.answer(COMPLETIONS, body) for body in bodies]
        await cell.whole()
        strike = cell.strikes.arm(prefilling, kill)
        answers = await asyncio.gather(*(ask(cell.http, COMPLETIONS, body) for body in bodies))
        assert strike.fallen.is_set()
        assert answers == expected

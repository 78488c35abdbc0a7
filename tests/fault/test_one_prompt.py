"""Requests with the same prompt, with separate prefill and decode, share one prefill and one transfer.

Each answer is the same as without the other requests, even if they arrive at the same time and their worker dies.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from motet.settings.server_config import CellConfig
from tests.fault.answers import Answer, Body, fetch_answer
from tests.fault.fault_requests import COMPLETIONS, STREAMED, completion
from tests.fault.faults import Point, generated, kill, submitted
from tests.fault.oracle import Undisturbed
from tests.fault.running_cell import RunningCell
from tests.forked import ForkingProcess

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.kernels]

DTYPE = "bfloat16"
COUNT = 8
CELL = CellConfig(prefill=1, decode=2, bypass_tokens=16)
WORKERS = ("prefill-0", "decode-0", "decode-1")


def bodies_of(name: str) -> list[Body]:
    """Returns requests with one prompt. The answers are long, so that none ends before the last request arrives."""
    return [completion(name, STREAMED, n=1, max_tokens=300, seed=7 + number) for number in range(COUNT)]


async def answered(cell: RunningCell, name: str) -> list[Answer]:
    return await asyncio.gather(*(fetch_answer(cell.http, COMPLETIONS, body) for body in bodies_of(name)))


async def expected(undisturbed: Undisturbed, name: str) -> list[Answer]:
    """Returns the answer to each request alone, from one engine."""
    return [await undisturbed.answer(COMPLETIONS, body, dtype=DTYPE) for body in bodies_of(name)]


@pytest.mark.parametrize(
    "point", [None, submitted, generated(20)], ids=["undisturbed", "killed at first", "killed later"]
)
async def test_requests_with_one_prompt_are_prefilled_once_and_survive_a_worker(
    point: Point | None, folder: Path, forking: ForkingProcess, undisturbed: Undisturbed
) -> None:
    await undisturbed.start(DTYPE)
    alone = await expected(undisturbed, "one prompt")
    async with RunningCell(folder, cell=CELL, spawn=forking.spawn, dtype=DTYPE) as cell:
        if point is not None:
            cell.faults.arm(point, kill)
        assert await answered(cell, "one prompt") == alone
        await cell.restored()
        if point is None:
            prefill, *decode = [await cell.stats(worker) for worker in WORKERS]
            usage = alone[0].usage
            assert usage is not None
            assert prefill.prefills == sum(stats.transfers for stats in decode) <= len(decode)
            assert prefill.prefill_tokens <= usage.prompt_tokens + cell.engine("prefill-0").info.block_size
            assert sum(stats.prefill_tokens for stats in decode) == COUNT, "the last token, for its logits"
        await cell.check_nothing_left()


@pytest.fixture(scope="module")
async def shared(folder: Path, forking: ForkingProcess, undisturbed: Undisturbed) -> AsyncIterator[RunningCell]:
    await undisturbed.start(DTYPE)
    async with RunningCell(folder, cell=CELL, spawn=forking.spawn, dtype=DTYPE) as cell:
        yield cell


async def figures(cell: RunningCell) -> dict[str, tuple[int, int]]:
    """Returns the prompt tokens that each worker has computed, and its transfers."""
    stats = {worker: await cell.stats(worker) for worker in WORKERS}
    return {worker: (one.prefill_tokens, one.transfers) for worker, one in stats.items()}


async def test_more_choices_of_a_kept_prompt_go_to_its_worker_without_a_prefill(
    cell: RunningCell, undisturbed: Undisturbed
) -> None:
    expected_answer = await undisturbed.answer(COMPLETIONS, completion("kept", STREAMED, n=6), dtype=DTYPE)
    first = await fetch_answer(cell.http, COMPLETIONS, completion("kept", STREAMED, n=2, keep_s=60.0))
    await fetch_answer(cell.http, COMPLETIONS, completion("another", STREAMED))
    before = await figures(cell)
    (keeper,) = [worker for worker in WORKERS if (await cell.stats(worker)).trunks_kept]
    more = await fetch_answer(cell.http, COMPLETIONS, completion("kept", STREAMED, n=4, seed=9))
    assert first.choices | {2 + index: choice for index, choice in more.choices.items()} == expected_answer.choices
    tokens, transfers = before[keeper]
    assert await figures(cell) == {**before, keeper: (tokens + 1, transfers)}, "the last token, for its logits"


@pytest.mark.parametrize("refill", ["each", "all"])
async def test_choices_that_start_later_take_no_prefill_and_no_transfer(
    refill: str, cell: RunningCell, undisturbed: Undisturbed
) -> None:
    expected_answer = await undisturbed.answer(COMPLETIONS, completion(refill, STREAMED, n=6), dtype=DTYPE)
    before = await figures(cell)
    body = completion(refill, STREAMED, n=6, group={"start": 2, "refill": refill})
    assert (await fetch_answer(cell.http, COMPLETIONS, body)).choices == expected_answer.choices
    after = await figures(cell)
    transfers = sum(after[worker][1] - before[worker][1] for worker in WORKERS)
    prefilled, *others = [after[worker][0] - before[worker][0] for worker in WORKERS]
    assert expected_answer.usage is not None
    assert (transfers, prefilled) == (1, expected_answer.usage.prompt_tokens - 1)
    assert sum(others) <= 1 + 4 * 2 * cell.engine("decode-0").info.block_size, "the end of the prompt, for its logits"

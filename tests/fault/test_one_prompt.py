"""Requests with one prompt, with prefill and decode apart: they share what is computed and fetched.

Each is answered as alone, also if they come at once and a worker dies under them all.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from motet.settings.server_config import CellConfig
from tests.fault.answers import Answer, ask
from tests.fault.asked import COMPLETIONS, STREAMED, completion
from tests.fault.oracle import Undisturbed
from tests.fault.running_cell import RunningCell
from tests.fault.striking import Point, kill, submitted, written
from tests.forked import ForkingProcess

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.kernels]

DTYPE = "bfloat16"
COUNT = 8
CELL = CellConfig(prefill=1, decode=2, bypass_tokens=16)
WORKERS = ("prefill-0", "decode-0", "decode-1")


async def answered(cell: RunningCell, name: str) -> list[Answer]:
    bodies = [completion(name, STREAMED, n=1, seed=7 + number) for number in range(COUNT)]
    return await asyncio.gather(*(ask(cell.http, COMPLETIONS, body) for body in bodies))


async def expected(undisturbed: Undisturbed, name: str) -> list[Answer]:
    """What each of them is answered alone, by one engine."""
    bodies = [completion(name, STREAMED, n=1, seed=7 + number) for number in range(COUNT)]
    return [await undisturbed.answer(COMPLETIONS, body, dtype=DTYPE) for body in bodies]


@pytest.mark.parametrize(
    "point", [None, submitted, written(20)], ids=["undisturbed", "killed at first", "killed later"]
)
async def test_requests_with_one_prompt_are_prefilled_once_and_survive_a_worker(
    point: Point | None, folder: Path, forking: ForkingProcess, undisturbed: Undisturbed
) -> None:
    await undisturbed.start(DTYPE)
    wanted = await expected(undisturbed, "one prompt")
    async with RunningCell(folder, cell=CELL, spawn=forking.spawn, dtype=DTYPE) as cell:
        if point is not None:
            cell.strikes.arm(point, kill)
        assert await answered(cell, "one prompt") == wanted
        await cell.whole()
        if point is None:
            prefill, *decode = [await cell.stats(worker) for worker in WORKERS]
            usage = wanted[0].usage
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
    wanted = await undisturbed.answer(COMPLETIONS, completion("kept", STREAMED, n=6), dtype=DTYPE)
    first = await ask(cell.http, COMPLETIONS, completion("kept", STREAMED, n=2, keep_s=60.0))
    await ask(cell.http, COMPLETIONS, completion("another", STREAMED))
    before = await figures(cell)
    (keeper,) = [worker for worker in WORKERS if (await cell.stats(worker)).trunks_kept]
    more = await ask(cell.http, COMPLETIONS, completion("kept", STREAMED, n=4, seed=9))
    assert first.choices | {2 + index: choice for index, choice in more.choices.items()} == wanted.choices
    tokens, transfers = before[keeper]
    assert await figures(cell) == {**before, keeper: (tokens + 1, transfers)}, "the last token, for its logits"


@pytest.mark.parametrize("refill", ["each", "all"])
async def test_choices_that_begin_later_take_no_prefill_and_no_transfer_of_their_own(
    refill: str, cell: RunningCell, undisturbed: Undisturbed
) -> None:
    wanted = await undisturbed.answer(COMPLETIONS, completion(refill, STREAMED, n=6), dtype=DTYPE)
    before = await figures(cell)
    body = completion(refill, STREAMED, n=6, group={"start": 2, "refill": refill})
    assert (await ask(cell.http, COMPLETIONS, body)).choices == wanted.choices
    after = await figures(cell)
    transfers = sum(after[worker][1] - before[worker][1] for worker in WORKERS)
    prefilled, *others = [after[worker][0] - before[worker][0] for worker in WORKERS]
    assert wanted.usage is not None
    assert (transfers, prefilled) == (1, wanted.usage.prompt_tokens - 1)
    assert sum(others) <= 1 + 4 * 2 * cell.engine("decode-0").info.block_size, "the end of the prompt, for its logits"

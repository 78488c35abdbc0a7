"""A cell in bfloat16 with compiled kernels, without prefill engines: each engine prefills and generates.

The engines' own figures show the cost of a move: a trunk is computed once, for any n.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fault.answers import Body, fetch_answer
from tests.fault.fault_requests import CHAT, COMPLETIONS, COUNTED, ENDS_AT_RANDOM, STREAMED, chat, completion
from tests.fault.faults import FaultAction, Point, crash, generated, kill, one_finished, submitted
from tests.fault.oracle import Undisturbed
from tests.fault.running_cell import TWO_DECODE_ENGINES, RunningCell
from tests.forked import ForkingProcess

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.kernels]

DTYPE = "bfloat16"


@pytest.fixture(scope="module")
async def shared(folder: Path, forking: ForkingProcess, undisturbed: Undisturbed) -> AsyncIterator[RunningCell]:
    await undisturbed.start(DTYPE)
    async with RunningCell(
        folder, cell=TWO_DECODE_ENGINES, spawn=forking.spawn, dtype=DTYPE, max_num_batched_tokens=64
    ) as cell:
        assert "_kernels-" in cell.engine("decode-0").info.fingerprint
        yield cell


@pytest.mark.parametrize(
    ("point", "action", "route", "body"),
    [
        (submitted, kill, CHAT, chat("a", COUNTED, n=8)),
        (one_finished, crash, COMPLETIONS, completion("b", ENDS_AT_RANDOM, n=8, max_tokens=200, logprobs=1)),
        (generated(20), None, COMPLETIONS, completion("c", STREAMED, n=32, max_tokens=40)),
        (generated(20), None, CHAT, chat("d", n=1, logprobs=True, top_logprobs=2)),
    ],
    ids=["killed-while-prefilling", "crashed-when-one-has-finished", "left-with-32", "left-with-1"],
)
async def test_the_answer_is_the_undisturbed_one_with_an_engine(
    point: Point, action: FaultAction | None, route: str, body: Body, cell: RunningCell, undisturbed: Undisturbed
) -> None:
    expected = await undisturbed.answer(route, body, dtype=DTYPE)
    before = cell.figures
    fault = cell.faults.arm(point, action or cell.leave)
    assert await fetch_answer(cell.http, route, body) == expected
    assert fault.happened.is_set()
    assert cell.figures.choices_resumed - before.choices_resumed == fault.unfinished, "and no finished one"
    move = "died" if action else "leaving", "resumed"
    assert cell.figures.migrations[move] == before.migrations.get(move, 0) + 1


@pytest.mark.parametrize("n", [1, 8, 32])
async def test_a_group_that_continues_on_another_engine_computes_its_prompt_once(
    n: int, cell: RunningCell, undisturbed: Undisturbed
) -> None:
    body = completion(f"once {n}", STREAMED, n=n, max_tokens=40)
    expected = await undisturbed.answer(COMPLETIONS, body, dtype=DTYPE)
    assert expected.usage is not None
    before, replayed = await cell.stats("decode-1"), cell.figures.tokens_replayed
    assert await cell.fetch_answer_on("decode-0", COMPLETIONS, body, point=generated(20), action=cell.leave) == expected
    stats = await cell.stats("decode-1")
    assert stats.prefill_tokens - before.prefill_tokens == expected.usage.prompt_tokens
    # The last output token of a choice is computed like any other token, and gives the first new one.
    assert stats.replayed_tokens - before.replayed_tokens == cell.figures.tokens_replayed - replayed - n
    assert stats.forks - before.forks == n - 1

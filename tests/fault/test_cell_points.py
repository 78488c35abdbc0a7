"""An engine of a cell has a fault at each point of a group's progress: clients read the same as without the fault.

Separate prefill and decode, in float32, with KV over TCP as between machines, where a stopped engine cannot be read.
The tests compare complete answers: texts, ends, token ids, usage.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from motet.engine_orders import Connect
from motet.errors import EngineError
from motet.transfer.ticket import TransferAddress
from tests.fault.answers import Body, fetch_answer
from tests.fault.fault_requests import (
    CHAT,
    COMPLETIONS,
    COUNTED,
    ENDS_AT_RANDOM,
    GRAMMAR,
    STREAMED,
    VOTE,
    VOTING,
    chat,
    completion,
    request,
)
from tests.fault.faults import (
    FaultAction,
    FaultyEngine,
    Point,
    abort,
    crash,
    first_token,
    generated,
    granted,
    hang,
    kill,
    one_finished,
    one_token_left,
    prefilling,
    submitted,
)
from tests.fault.oracle import Undisturbed
from tests.fault.running_cell import RunningCell, eventually
from tests.forked import ForkingProcess

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@dataclass(frozen=True)
class Case:
    name: str
    point: Point
    action: FaultAction | None
    """None means that the worker leaves."""
    route: str
    body: Body


CASES = [
    Case("killed-in-prefill", prefilling, kill, CHAT, chat("a", COUNTED, n=8)),
    Case("hung-in-prefill", prefilling, hang, COMPLETIONS, completion("b", n=1, return_token_ids=True)),
    Case("crashed-before-the-first-token", submitted, crash, CHAT, chat("c", n=8, logprobs=True)),
    Case("left-before-the-first-token", submitted, None, COMPLETIONS, completion("d", n=8, prompts=2)),
    Case("killed-at-the-first-token", first_token, kill, CHAT, chat("e", STREAMED, n=32)),
    Case("left-at-the-first-token", first_token, None, CHAT, chat("f", n=8)),
    Case("hung-in-mid-stream", generated(20), hang, COMPLETIONS, completion("h", COUNTED, n=4, prompts=2)),
    Case("left-in-mid-stream", generated(20), None, CHAT, chat("i", n=32)),
    Case("aborted-when-one-choice-is-done", one_finished, abort, CHAT,
         chat("j", ENDS_AT_RANDOM, STREAMED, n=8, max_tokens=200)),
    Case("left-when-one-choice-is-done", one_finished, None, COMPLETIONS,
         completion("k", ENDS_AT_RANDOM, n=8, max_tokens=200, return_token_ids=True)),
    Case("killed-before-the-last-token", one_token_left, kill, CHAT,
         chat("l", ENDS_AT_RANDOM, COUNTED, n=8, max_tokens=60)),
    Case("left-before-the-last-token", one_token_left, None, COMPLETIONS, completion("m", STREAMED, n=1)),
    Case("killed-with-grammars-in-mid-answer", generated(20), kill, CHAT,
         chat("o", COUNTED, GRAMMAR, n=8, max_tokens=120)),
    Case("left-with-grammars-in-mid-answer", generated(20), None, COMPLETIONS,
         completion("p", GRAMMAR, n=4, max_tokens=120, return_token_ids=True)),
    Case("left-in-the-middle-of-a-vote", generated(20), None, CHAT,
         chat("q", STREAMED, request(VOTE, {"group": VOTING | {"start": 4, "refill": "all"}}), n=12, max_tokens=200)),
]  # fmt: skip


@pytest.fixture(scope="module")
async def shared(folder: Path, forking: ForkingProcess, undisturbed: Undisturbed) -> AsyncIterator[RunningCell]:
    await undisturbed.start("float32")
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("UCX_TLS", "tcp")
        # With a shorter time, on a busy machine, other engines would count as hung, or a pull would end too soon.
        async with RunningCell(folder, spawn=forking.spawn, heartbeat_timeout_s=10.0) as cell:
            yield cell


@pytest.mark.every_case
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_the_answer_is_the_undisturbed_one_with_an_engine(
    case: Case, cell: RunningCell, undisturbed: Undisturbed
) -> None:
    expected = await undisturbed.answer(case.route, case.body)
    moved, decoding = cell.moved, cell.decoding
    fault = cell.faults.arm(case.point, case.action or cell.leave)
    assert await fetch_answer(cell.http, case.route, case.body) == expected
    assert fault.happened.is_set(), "no group reached the point"
    if case.point is not prefilling:
        assert cell.moved > moved
    elif cell.decoding == decoding:  # if the machine was suspended, another engine can count as hung too
        assert cell.moved == moved, "decode works without prefill"


@pytest.mark.parametrize("action", [kill, None], ids=["killed", "left"])
async def test_the_answer_is_unchanged_if_a_decode_engine_is_lost_during_its_pull(
    action: FaultAction | None, cell: RunningCell, undisturbed: Undisturbed
) -> None:
    body = chat("pull killed" if action else "pull left", COUNTED, n=8)
    expected = await undisturbed.answer(CHAT, body)
    moved = cell.moved
    fault = cell.faults.arm(granted, hang)
    with cell.all_on("decode-0"):
        answering = asyncio.create_task(fetch_answer(cell.http, CHAT, body))
        await pull_posted(cell.engine("decode-0"))
    (action or cell.leave)(cell.engine("decode-0"))
    assert fault.engine is not None
    if not fault.engine.died.is_set():
        kill(fault.engine)  # otherwise the test would wait until the engine counts as hung
    assert await answering == expected
    assert cell.moved == moved + 1


async def pull_posted(engine: FaultyEngine) -> None:
    """Waits until the engine's transfer thread has started its pull. The thread carries out orders in sequence, and
    polls pulls between two orders that arrived separately."""

    async def ordered() -> bool:
        return (await engine.stats()).pulls_open == 1

    await eventually(ordered, "no pull was ordered")
    with pytest.raises(EngineError, match="no address"):
        await engine.send(Connect(TransferAddress("no-worker", "no address", 1)))

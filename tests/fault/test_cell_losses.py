"""A cell loses more than one engine, or its clients. A client that still reads gets the complete answer or an error.

Only decode engines, float32; a group may move once.
"""

import asyncio
import resource
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from motet.settings.server_config import RoutingConfig
from tests.error_response import assert_error
from tests.fault.fault_requests import CHAT, COMPLETIONS, STREAMED, TEXT, chat, completion
from tests.fault.faults import FaultyEngine, generated, kill, submitted
from tests.fault.oracle import Undisturbed
from tests.fault.running_cell import TWO_DECODE_ENGINES, RunningCell, eventually
from tests.forked import ForkingProcess
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ONCE = RoutingConfig(engine_restarts=50, migration_limit=1, migration_wait_s=PATIENCE_S)


@pytest.fixture(scope="module")
async def shared(folder: Path, forking: ForkingProcess, undisturbed: Undisturbed) -> AsyncIterator[RunningCell]:
    await undisturbed.start("float32")
    async with RunningCell(
        folder,
        cell=TWO_DECODE_ENGINES,
        routing=ONCE,
        spawn=forking.spawn,
        kv_cache_gb=0.1,
        max_num_batched_tokens=32768,
    ) as cell:
        yield cell


async def test_a_request_that_kills_every_engine_ends_with_a_clear_error(cell: RunningCell) -> None:
    for _ in range(2):
        cell.faults.arm(submitted, kill)
    answer = await cell.http.post(CHAT, json=chat("poison", STREAMED, n=4))
    assert_error(answer, status=503, code="engine_died")
    assert cell.figures.migrations["died", "limit"] == 1


async def test_an_engine_without_memory_dies_and_sends_no_wrong_tokens(
    cell: RunningCell, undisturbed: Undisturbed
) -> None:
    """A small group mostly fits into the memory that the process has; a large group makes it fail."""
    small, large = chat("memory", STREAMED, n=8), completion("memory", prompt=[f"{i} {TEXT * 18}" for i in range(48)])
    large |= {"echo": True, "logprobs": 5, "max_tokens": 10}
    expected = [await undisturbed.answer(CHAT, small), await undisturbed.answer(COMPLETIONS, large)]
    starved = cell.engine("decode-0")
    assert await cell.fetch_answer_on("decode-0", CHAT, small, point=generated(5), action=starve) == expected[0]
    await cell.restored()
    assert (
        await cell.fetch_answer_on("decode-0", COMPLETIONS, large, point=submitted, action=lambda _: None)
        == expected[1]
    )
    async with asyncio.timeout(PATIENCE_S):
        await starved.died.wait()


async def test_a_client_that_does_not_read_for_some_time_misses_nothing(
    cell: RunningCell, undisturbed: Undisturbed
) -> None:
    body = chat("slow", STREAMED, n=16, max_tokens=120, logprobs=True, top_logprobs=20)
    expected = await undisturbed.answer(CHAT, body)
    moved = cell.moved

    async def has_moved() -> bool:
        await cell.http.get("/v1/models")
        return cell.moved > moved

    cell.faults.arm(generated(10), kill)
    async with cell.started_stream(CHAT, body, chunks=1) as stream:
        await eventually(has_moved, "the group waits for a client that reads nothing")
        assert await stream.rest() == expected


async def test_a_client_that_leaves_when_its_worker_dies_leaves_nothing(cell: RunningCell) -> None:
    fault = cell.faults.arm(generated(10), kill)
    async with cell.http.stream("POST", CHAT, json=chat("gone", STREAMED, n=8, max_tokens=200)):
        await fault.happened.wait()


async def test_a_client_that_leaves_while_its_group_waits_for_a_worker_leaves_nothing(cell: RunningCell) -> None:
    before = [await engine.stats() for engine in cell.decoding]
    fault = cell.faults.arm(generated(10), cell.on_all(cell.leave))
    async with cell.http.stream("POST", CHAT, json=chat("gone too", STREAMED, n=8, max_tokens=300)):
        await fault.happened.wait()
        await eventually(cell.holds_nothing, "the engines hold the group")
    await cell.check_nothing_left()
    after = [await engine.stats() for engine in cell.decoding]
    assert sum(s.generated_tokens for s in after) - sum(s.generated_tokens for s in before) < 8 * 300


def starve(engine: FaultyEngine) -> None:
    """Injects a fault: the process cannot get more memory than it has now."""
    pid = engine.info.pid
    assert pid is not None
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * resource.getpagesize(), hard))

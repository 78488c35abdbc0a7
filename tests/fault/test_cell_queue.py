"""Groups that wait for capacity are all answered, in order, even if an engine is lost while they wait."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from motet.engine import WorkerState
from motet.settings.server_config import CellConfig, RoutingConfig
from tests.error_response import assert_error
from tests.fault.answers import fetch_answer, lines_of, read
from tests.fault.fault_requests import CHAT, COMPLETIONS, COUNTED, STREAMED, chat, completion
from tests.fault.faults import generated, kill, paused, submitted
from tests.fault.oracle import Undisturbed
from tests.fault.running_cell import TWO_DECODE_ENGINES, RunningCell, StartedStream
from tests.forked import ForkingProcess

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

MAX_CHOICES = 8
PINGS: dict[str, object] = {"sse_ping_s": 0.02}
"""Streams that wait send headers and comments. Their answers must be the same."""


@pytest.fixture(scope="module")
async def shared(folder: Path, forking: ForkingProcess, undisturbed: Undisturbed) -> AsyncIterator[RunningCell]:
    await undisturbed.start("float32")
    async with RunningCell(
        folder, cell=TWO_DECODE_ENGINES, server=PINGS, spawn=forking.spawn, max_num_seqs=MAX_CHOICES
    ) as cell:
        yield cell


async def test_a_stream_that_waits_moves_after_its_headers(cell: RunningCell, undisturbed: Undisturbed) -> None:
    body = chat("moves", STREAMED, n=2)
    expected = await undisturbed.answer(CHAT, body)
    engine = cell.engine("decode-0")
    with cell.all_on("decode-0"):
        engine.send_signal(signal.SIGSTOP, deadly=False)
        async with cell.http.stream("POST", CHAT, json=body) as response:
            stream = StartedStream(lines_of(response))
            await read(stream.lines, stream.reader, until=lambda reader: reader.comments == 2)
            assert (response.status_code, stream.reader.chunks, engine.lost) == (200, 0, False)
            cell.fleet.mark("decode-1", WorkerState.READY)
            kill(engine)
            assert await stream.rest() == expected


async def test_all_groups_are_answered_when_an_engine_is_killed_and_another_leaves(
    cell: RunningCell, undisturbed: Undisturbed
) -> None:
    """The first group with a fault moves to the second engine, waits there for capacity, and has another fault."""
    bodies = [chat(f"many {i}", COUNTED if i % 2 else STREAMED, n=MAX_CHOICES) for i in range(6)]
    expected = [await undisturbed.answer(CHAT, body) for body in bodies]
    before = sum(cell.figures.queue_seconds)
    cell.faults.arm(generated(20), kill)
    again = cell.faults.arm(lambda progress: submitted(progress) and any(progress.generated.values()), cell.leave)
    with paused(*cell.decoding):  # otherwise the last ones could arrive when there is no engine
        answering = [asyncio.create_task(fetch_answer(cell.http, CHAT, body)) for body in bodies]
        await cell.until_submitted(2, queued=len(bodies) - 2)
    assert await asyncio.gather(*answering) == expected
    assert again.happened.is_set()
    assert sum(cell.figures.queue_seconds) - before == len(bodies)


async def test_groups_of_one_size_get_their_turn_in_the_order_of_arrival(cell: RunningCell) -> None:
    started: list[str] = []

    async def watched(name: str) -> None:
        body = completion(name, STREAMED, n=MAX_CHOICES)
        async with cell.started_stream(COMPLETIONS, body, chunks=1) as stream:
            started.append(name)
            await stream.rest()

    names = [f"turn {i}" for i in range(6)]
    with cell.all_on("decode-0"):
        async with asyncio.TaskGroup() as tasks:
            with paused(cell.engine("decode-0")):
                for waiting, name in enumerate(names):
                    tasks.create_task(watched(name))
                    await cell.until_submitted(1, queued=waiting)
    assert started == names


@pytest.mark.usefixtures("cell")  # waits for its restarts: the second cell would count such an engine as its own
async def test_a_group_that_finds_no_capacity_in_time_is_refused_before_its_first_byte(
    folder: Path, forking: ForkingProcess, undisturbed: Undisturbed
) -> None:
    impatient = RoutingConfig(queue_timeout_s=0.5)
    body = chat("holds", STREAMED, n=MAX_CHOICES)
    expected = await undisturbed.answer(CHAT, body)
    async with RunningCell(
        folder, cell=CellConfig(), routing=impatient, spawn=forking.spawn, max_num_seqs=MAX_CHOICES
    ) as cell:
        with paused(*cell.decoding):
            first = asyncio.create_task(fetch_answer(cell.http, CHAT, body))
            await cell.until_submitted(1)
            late = await cell.http.post(CHAT, json=chat("late", STREAMED, n=1))
        assert_error(late, status=503, code="overloaded")
        assert late.headers["retry-after"] == "5"
        assert await first == expected
        await cell.check_nothing_left()

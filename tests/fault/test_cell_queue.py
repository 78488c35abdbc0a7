"""Groups wait for room: all are answered, and in order, even if an engine is lost while they wait."""

import asyncio
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from motet.config import CellConfig, RoutingConfig
from tests.fault.answers import Reader, ask, read
from tests.fault.asked import CHAT, COMPLETIONS, COUNTED, STREAMED, chat, completion
from tests.fault.oracle import Undisturbed
from tests.fault.running_cell import TOGETHER, RunningCell, eventually
from tests.fault.striking import StruckEngine, kill, submitted, written
from tests.forked import ForkingProcess

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PLACES = 8


@pytest.fixture(scope="module")
async def shared(folder: Path, forking: ForkingProcess, undisturbed: Undisturbed) -> AsyncIterator[RunningCell]:
    await undisturbed.start("float32")
    async with RunningCell(folder, cell=TOGETHER, spawn=forking.spawn, max_num_seqs=PLACES) as cell:
        yield cell


async def test_many_groups_are_all_answered_when_an_engine_is_killed_and_another_one_leaves(
    cell: RunningCell, undisturbed: Undisturbed
) -> None:
    """The group that is struck first moves to the second engine, waits there for room, and is struck again."""
    bodies = [chat(f"many {i}", COUNTED if i % 2 else STREAMED, n=PLACES) for i in range(6)]
    expected = [await undisturbed.answer(CHAT, body) for body in bodies]
    cell.strikes.arm(written(20), kill)
    again = cell.strikes.arm(lambda course: submitted(course) and any(course.written.values()), cell.leave)
    answers = await asyncio.gather(*(ask(cell.http, CHAT, body) for body in bodies))
    assert answers == expected
    assert again.fallen.is_set()
    assert sum(cell.figures.queue_seconds) == len(bodies)


async def test_groups_of_one_size_get_their_turn_in_the_order_in_which_they_came(cell: RunningCell) -> None:
    begun: list[str] = []

    async def watched(name: str) -> None:
        async with cell.http.stream("POST", COMPLETIONS, json=completion(name, STREAMED, n=PLACES)) as response:
            lines = response.aiter_lines()
            reader = await read(lines, Reader(), until=lambda reader: reader.chunks == 1)
            begun.append(name)
            (await read(lines, reader)).complete()

    names = [f"turn {i}" for i in range(6)]
    with cell.all_on("decode-0"):
        strike = cell.strikes.arm(written(5), stop)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watched(names[0]))
            await strike.fallen.wait()
            for waiting, name in enumerate(names[1:], 1):
                tasks.create_task(watched(name))
                await eventually(partial(queue_has, cell, waiting), f"{name} does not wait")
            cell.engine("decode-0").send(signal.SIGCONT, deadly=False)
    assert begun == names


async def queue_has(cell: RunningCell, groups: int) -> bool:
    await cell.http.get("/v1/models")
    return cell.figures.queued == groups


async def test_a_group_that_finds_no_room_in_time_is_refused_before_its_first_byte(
    folder: Path, forking: ForkingProcess, undisturbed: Undisturbed
) -> None:
    impatient = RoutingConfig(queue_timeout_s=0.5)
    body = chat("holds", STREAMED, n=PLACES)
    expected = await undisturbed.answer(CHAT, body)
    async with RunningCell(
        folder, cell=CellConfig(), routing=impatient, spawn=forking.spawn, max_num_seqs=PLACES
    ) as cell:
        strike = cell.strikes.arm(written(5), stop)
        first = asyncio.create_task(ask(cell.http, CHAT, body))
        await strike.fallen.wait()
        late = await cell.http.post(CHAT, json=chat("late", STREAMED, n=1))
        assert (late.status_code, late.json()["error"]["code"]) == (503, "overloaded")
        assert late.headers["retry-after"] == "5"
        assert strike.on is not None
        strike.on.send(signal.SIGCONT, deadly=False)
        assert await first == expected
        await cell.check_nothing_left()


def stop(engine: StruckEngine) -> None:
    """A blow that the engine recovers from."""
    engine.send(signal.SIGSTOP, deadly=False)

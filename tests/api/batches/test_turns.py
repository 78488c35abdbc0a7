"""Slots of lines: clients with requests of their own come first, and owners take turns."""

import asyncio

import pytest

from motet.api.batches.turns import LineMemory, LineTurns, first_unless
from motet.api.http.admission import ANONYMOUS, Admission, batch_client
from tests.clock import settle

pytestmark = pytest.mark.anyio


class Scene:
    """Turns that are given, and the owners of the lines that run, in the order in which they started."""

    def __init__(self, *, maximum: int) -> None:
        self.admission = Admission(99)
        self.turns = LineTurns(self.admission, maximum=maximum)
        self.started: list[str] = []
        self.giving = asyncio.create_task(self.turns.give())

    async def lines(self, *owners: str) -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(self._take(owner)) for owner in owners]
        await settle()
        return tasks

    async def _take(self, owner: str) -> None:
        await self.turns.take(owner)
        self.started.append(owner)

    async def end_line(self) -> None:
        self.turns.free()
        await settle()


async def test_owners_take_turns() -> None:
    scene = Scene(maximum=1)
    await scene.lines("a", "a", "a", "b", "c", "b")
    for _ in range(5):
        await scene.end_line()
    assert "".join(scene.started) == "abcaba"


async def test_no_line_starts_while_a_group_of_a_client_waits() -> None:
    scene = Scene(maximum=3)
    (background,) = scene.admission.admit(1, client=batch_client(ANONYMOUS))
    (slot,) = scene.admission.admit(1, client=ANONYMOUS)
    await scene.lines("a", "a", "a", "a")
    assert scene.started == []
    slot.started()
    await settle()
    assert len(scene.started) == 2  # the open group takes a slot
    slot.leave()
    await settle()
    assert len(scene.started) == 3
    background.leave()
    scene.admission.check()


async def test_open_groups_of_clients_leave_one_slot() -> None:
    scene = Scene(maximum=4)
    (slot,) = scene.admission.admit(9, client=ANONYMOUS)
    slot.started()
    await scene.lines("a", "a")
    assert len(scene.started) == 1


async def test_a_line_that_stops_waiting_takes_no_slot() -> None:
    scene, stop = Scene(maximum=1), asyncio.Event()
    await scene.lines("a")
    waiting = asyncio.create_task(first_unless(stop, scene.turns.take("b")))
    await scene.lines("c")
    stop.set()
    assert not await waiting
    await scene.end_line()
    assert scene.started == ["a", "c"] and scene.turns.running == 1


async def test_lines_together_have_a_limited_size_and_each_owner_can_have_one() -> None:
    memory, stop = LineMemory(100), asyncio.Event()
    assert await memory.take("a", 90) and await memory.take("b", 90)
    waiting = [asyncio.create_task(first_unless(stop, memory.take(owner, 20))) for owner in "ab"]
    await settle()
    memory.free("a", 90)
    await settle()
    assert [task.done() for task in waiting] == [True, False]
    stop.set()
    assert [await task for task in waiting] == [True, False]
    assert memory.num_bytes == 110


async def test_a_draining_server_starts_no_lines() -> None:
    scene = Scene(maximum=1)
    await scene.lines("a", "b")
    scene.admission.draining = True
    await scene.end_line()
    assert scene.started == ["a"] and scene.giving.done()

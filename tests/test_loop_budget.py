"""Pieces of work on the event loop, with one limit of time for all tasks together."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pytest

from motet.loop_budget import BUDGET, BUDGET_S, LoopBudget, batched_within_loop_budget, within_loop_budget
from tests.clock import Clock, TurnCounter, settle

pytestmark = pytest.mark.anyio

PIECE_S = BUDGET_S * 0.6


class Pieces:
    """Makes pieces of work that take `PIECE_S` on a clock of the test."""

    def __init__(self, turns: TurnCounter) -> None:
        self.turns = turns
        self.done: list[int] = []
        self.num_in_iteration = Counter[int]()
        """Number of pieces in each iteration of the event loop."""
        self._clock = Clock()
        BUDGET.set(LoopBudget(self._clock))

    def piece(self, number: int) -> Callable[[], int]:
        def work() -> int:
            self._clock.now_s += PIECE_S
            self.num_in_iteration[self.turns.turns] += 1
            self.done.append(number)
            return number

        return work


@pytest.fixture
async def pieces() -> AsyncIterator[Pieces]:
    with TurnCounter() as turns:
        await asyncio.sleep(0)
        yield Pieces(turns)


async def test_the_pieces_of_all_tasks_share_the_time_of_an_iteration_and_keep_their_order(pieces: Pieces) -> None:
    assert await asyncio.gather(*(within_loop_budget(pieces.piece(number)) for number in range(20))) == [*range(20)]
    assert pieces.done == [*range(20)]
    assert max(pieces.num_in_iteration.values()) == 2


async def test_the_first_pieces_run_at_once(pieces: Pieces) -> None:
    before = pieces.turns.turns
    assert [await within_loop_budget(pieces.piece(number)) for number in range(2)] == [0, 1]
    assert pieces.turns.turns == before
    await settle()  # the next iterations have their time again
    assert await within_loop_budget(pieces.piece(2)) == 2


async def test_a_piece_that_fails_fails_its_caller_alone(pieces: Pieces) -> None:
    def fail() -> None:
        raise ValueError("wrong")

    works = [pieces.piece(0), pieces.piece(1), fail, pieces.piece(2)]
    results = await asyncio.gather(*map(within_loop_budget, works), return_exceptions=True)
    assert [str(result) for result in results] == ["0", "1", "wrong", "2"]


async def test_a_piece_whose_caller_is_cancelled_does_not_run(pieces: Pieces) -> None:
    tasks = [asyncio.create_task(within_loop_budget(pieces.piece(number))) for number in range(5)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    await asyncio.wait(tasks)
    assert pieces.done == [0, 1, 2, 4]


async def test_items_are_computed_in_several_iterations(pieces: Pieces) -> None:
    computed = (pieces.piece(number)() for number in range(10))
    assert await batched_within_loop_budget(computed, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert max(pieces.num_in_iteration.values()) == 4

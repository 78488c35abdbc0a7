"""The prompt tokens that wait on a worker, and how fast it reads them: every figure is computed by hand."""

import pytest

from motet.routing.workers.member import KEPT, Load, WorkerLoad
from tests.routing.scene import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def books(clock: Clock) -> WorkerLoad:
    return WorkerLoad(clock=clock)


def test_tokens_wait_until_their_prompt_is_done_or_dropped(books: WorkerLoad) -> None:
    one, two = books.give(300), books.give(500)
    assert books.waiting_tokens == 800
    books.done(one, computed_tokens=300)
    assert books.waiting_tokens == 500
    books.drop(two)
    assert books.waiting_tokens == 0
    books.check()


def test_a_load_takes_the_time_of_all_waiting_tokens_and_its_own_prompt() -> None:
    assert Load(50, waiting_tokens=150).seconds(100.0) == 2.0


def test_a_prompt_that_waited_behind_another_is_measured_by_its_own_time(books: WorkerLoad, clock: Clock) -> None:
    first, second = books.give(400), books.give(400)
    clock.now_s += 2
    books.done(first, computed_tokens=400)  # 400 tokens in 2 s
    assert books.tokens_per_s == 200
    clock.now_s += 1
    books.done(second, computed_tokens=400)  # 400 tokens in 1 s, not in the 3 s since the worker got it
    assert books.tokens_per_s == pytest.approx((KEPT * 400 + 400) / (KEPT * 2 + 1))


def test_idle_time_does_not_count(books: WorkerLoad, clock: Clock) -> None:
    for _ in range(3):
        reading = books.give(400)
        clock.now_s += 2
        books.done(reading, computed_tokens=400)
        clock.now_s += 1000
    assert books.tokens_per_s == pytest.approx(200)


def test_old_measurements_fade(books: WorkerLoad, clock: Clock) -> None:
    for seconds in [4.0] + [1.0] * 30:
        reading = books.give(400)
        clock.now_s += seconds
        books.done(reading, computed_tokens=400)
    assert books.tokens_per_s == pytest.approx(400, rel=0.01)


def test_short_cached_and_dropped_prompts_are_not_measured(books: WorkerLoad, clock: Clock) -> None:
    for tokens in (127, 0):
        reading = books.give(400)
        clock.now_s += 1
        books.done(reading, computed_tokens=tokens)
    books.drop(books.give(400))
    assert books.tokens_per_s is None


@pytest.mark.parametrize("left", ["open_choices", "trunk_blocks", "tail_blocks", "waiting_tokens"])
def test_check_finds_books_that_are_not_empty(books: WorkerLoad, left: str) -> None:
    books.check()
    setattr(books, left, 1)
    with pytest.raises(AssertionError, match="left in the books"):
        books.check()

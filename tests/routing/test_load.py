"""What a worker has to read, and how fast it reads: computed by hand in every test."""

import pytest

from motet.routing.load import KEPT, WorkerLoad
from tests.routing.cell import group, worker


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def books(clock: Clock) -> WorkerLoad:
    return WorkerLoad(worker("prefill-0")[0], clock=clock)


def speed(books: WorkerLoad) -> float | None:
    return books.load(group()).tokens_per_s


def test_tokens_wait_until_their_prompt_is_done_or_dropped(books: WorkerLoad) -> None:
    one, two = books.give(300), books.give(500)
    assert books.load(group()).waiting_tokens == 800
    books.done(one, computed_tokens=300)
    assert books.load(group()).waiting_tokens == 500
    books.drop(two)
    assert books.load(group()).waiting_tokens == 0
    books.check()


def test_what_the_worker_has_cached_is_not_to_be_read() -> None:
    one, engine = worker("prefill-0")
    engine.cached.append(group().prompt[:150])
    books = WorkerLoad(one, clock=Clock())
    assert books.load(group(prompt_tokens=200)).own_tokens == 50


def test_a_prompt_that_waited_behind_another_is_measured_by_its_own_time(books: WorkerLoad, clock: Clock) -> None:
    first, second = books.give(400), books.give(400)
    clock.now_s += 2
    books.done(first, computed_tokens=400)  # 400 tokens in 2 s
    assert speed(books) == 200
    clock.now_s += 1
    books.done(second, computed_tokens=400)  # 400 tokens in 1 s, and not in the 3 s since it was given
    assert speed(books) == pytest.approx((KEPT * 400 + 400) / (KEPT * 2 + 1))


def test_time_in_which_nothing_was_to_be_read_does_not_count(books: WorkerLoad, clock: Clock) -> None:
    for _ in range(3):
        reading = books.give(400)
        clock.now_s += 2
        books.done(reading, computed_tokens=400)
        clock.now_s += 1000
    assert speed(books) == pytest.approx(200)


def test_old_measurements_fade(books: WorkerLoad, clock: Clock) -> None:
    for seconds in [4.0] + [1.0] * 30:
        reading = books.give(400)
        clock.now_s += seconds
        books.done(reading, computed_tokens=400)
    assert speed(books) == pytest.approx(400, rel=0.01)


def test_short_and_cached_and_dropped_prompts_are_not_measured(books: WorkerLoad, clock: Clock) -> None:
    for tokens in (127, 0):
        reading = books.give(400)
        clock.now_s += 1
        books.done(reading, computed_tokens=tokens)
    books.drop(books.give(400))
    assert speed(books) is None


def test_a_worker_that_died_is_tried_again_after_the_cooldown_and_is_up_when_it_answers(
    books: WorkerLoad, clock: Clock
) -> None:
    assert state(books) == (True, True)
    books.died(cooldown_s=1.0)
    assert state(books) == (False, False)
    clock.now_s += 1
    assert state(books) == (False, True)
    books.done(books.give(1), computed_tokens=1)
    assert state(books) == (True, True)


def state(books: WorkerLoad) -> tuple[bool, bool]:
    return books.up, books.may_be_tried


def test_books_that_are_not_empty_are_noticed(books: WorkerLoad) -> None:
    reading = books.give(1)
    with pytest.raises(AssertionError, match="1 prompt tokens left"):
        books.check()
    books.drop(reading)
    books.open_choices += 1
    with pytest.raises(AssertionError, match="1 choices"):
        books.check()

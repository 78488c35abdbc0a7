"""The prompt tokens that wait on a worker, and the speed at which it computes them. Every figure is computed by
hand."""

import pytest

from motet.routing.workers.prefix_index import PrefixIndex
from motet.routing.workers.worker_load import DECAY, PromptBacklog, PromptLoad, WorkerLoad
from tests.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def prompts(clock: Clock) -> PromptLoad:
    return PromptLoad(clock=clock)


def test_tokens_wait_until_their_prompt_is_finished_or_removed(prompts: PromptLoad) -> None:
    one, two = prompts.add(300), prompts.add(500)
    assert prompts.waiting_tokens == 800
    prompts.finish(one, computed_tokens=300)
    assert prompts.waiting_tokens == 500
    prompts.remove(two)
    assert prompts.waiting_tokens == 0


def test_a_backlog_takes_the_time_of_all_waiting_tokens_and_its_own_prompt() -> None:
    assert PromptBacklog(50, waiting_tokens=150).seconds(100.0) == 2.0


def test_a_prompt_that_waited_for_another_is_measured_by_its_own_time(prompts: PromptLoad, clock: Clock) -> None:
    first, second = prompts.add(400), prompts.add(400)
    clock.now_s += 2
    prompts.finish(first, computed_tokens=400)  # 400 tokens in 2 s
    assert prompts.tokens_per_s == 200
    clock.now_s += 1
    prompts.finish(second, computed_tokens=400)  # 400 tokens in 1 s, not in the 3 s since the worker got it
    assert prompts.tokens_per_s == pytest.approx((DECAY * 400 + 400) / (DECAY * 2 + 1))


def test_idle_time_does_not_count(prompts: PromptLoad, clock: Clock) -> None:
    for _ in range(3):
        prompt = prompts.add(400)
        clock.now_s += 2
        prompts.finish(prompt, computed_tokens=400)
        clock.now_s += 1000
    assert prompts.tokens_per_s == pytest.approx(200)


def test_old_measurements_fade(prompts: PromptLoad, clock: Clock) -> None:
    for seconds in [4.0] + [1.0] * 30:
        prompt = prompts.add(400)
        clock.now_s += seconds
        prompts.finish(prompt, computed_tokens=400)
    assert prompts.tokens_per_s == pytest.approx(400, rel=0.01)


def test_short_cached_and_removed_prompts_are_not_measured(prompts: PromptLoad, clock: Clock) -> None:
    for tokens in (127, 0):
        prompt = prompts.add(400)
        clock.now_s += 1
        prompts.finish(prompt, computed_tokens=tokens)
    prompts.remove(prompts.add(400))
    assert prompts.tokens_per_s is None


@pytest.mark.parametrize("left", ["given_choices", "trunk_blocks", "tail_blocks"])
def test_check_finds_a_load_that_is_not_empty(clock: Clock, left: str) -> None:
    load = WorkerLoad("decode-0", PrefixIndex(), client_totals={}, clock=clock)
    load.check()
    setattr(load, left, 1)
    with pytest.raises(AssertionError, match="decode-0 is loaded"):
        load.check()


def test_check_finds_a_prompt_that_is_not_finished(clock: Clock) -> None:
    load = WorkerLoad("decode-0", PrefixIndex(), client_totals={}, clock=clock)
    load.prompts.add(5)
    with pytest.raises(AssertionError, match="decode-0 is loaded"):
        load.check()

"""What a step costs the scheduler, counted in lines of Python run, not in time: it depends on the tokens scheduled, and
not on how much has been written or how many groups wait."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import pytest

from motet.engines.native.commit import Drawn
from motet.engines.native.inputs import build_inputs
from motet.engines.native.sample.sampler import Sampled
from tests.engines.native.paper import BLOCK_SIZE, PaperEngine, request

if TYPE_CHECKING:
    from _typeshed import TraceFunction


def lines_run(work: Callable[[], None]) -> int:
    """Without the garbage collector, which runs the finalizers of other tests' leftovers wherever it likes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> "TraceFunction":
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def step(engine: PaperEngine) -> None:
    """A whole step but for the model."""
    plan = engine.scheduler.plan()
    inputs = build_inputs(plan, BLOCK_SIZE)
    engine.commit.advance(plan)
    engine.commit.write([Drawn(draw.sequence, Sampled(7, None)) for draw in inputs.draws])


def cost(*, n: int, written: int, waiting: int = 0) -> int:
    """Lines run by one step of decode, the dearest of one block's length."""
    engine = PaperEngine(blocks=20_000, budget=max(512, n), max_num_seqs=n)
    engine.submit(request("a", range(64), n=n, max_tokens=10_000))
    for i in range(waiting):
        engine.submit(request(f"w{i}", range(64), n=2))  # more choices than may run
    for _ in range(written):
        step(engine)
    return max(lines_run(lambda: step(engine)) for _ in range(BLOCK_SIZE))


@pytest.fixture(scope="module")
def base() -> int:
    return cost(n=4, written=10)


def test_a_step_costs_the_same_after_ten_tokens_and_after_three_thousand(base: int) -> None:
    assert cost(n=4, written=3000) == base


def test_a_step_costs_the_same_whether_one_group_waits_or_a_thousand(base: int) -> None:
    one = cost(n=4, written=10, waiting=1)
    assert cost(n=4, written=10, waiting=1000) == one
    assert one < base * 1.2


def test_a_step_costs_in_proportion_to_the_choices_it_serves(base: int) -> None:
    assert cost(n=64, written=10) < base * 64 / 4

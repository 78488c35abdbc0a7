"""Lines of batches in an engine: they run in what the prompts of other clients leave free, and change no token."""

import math

from hypothesis import given
from hypothesis import strategies as st

from motet.engines.native.scheduling.step_cost import prompt_cost
from motet.types import BACKGROUND_PRIORITY
from tests.engines.native.paper import PaperEngine, request
from tests.engines.native.test_shares import slow
from tests.property_settings import examples

PROMPT = tuple(range(100, 160))
LINE = tuple(range(12))


def submit_batch(engine: PaperEngine, *, lines: int, n: int = 4, tokens: int = 30) -> None:
    """Submits lines of one batch, each with a prompt of its own."""
    for number in range(lines):
        prompt = (200 + number, *LINE)
        batch = {"priority": BACKGROUND_PRIORITY, "client": "batch", "client_weight": 0.01}
        engine.submit(request(f"line-{number}", prompt, n=n, max_tokens=tokens, **batch))  # type: ignore[arg-type]


def assert_lines(engine: PaperEngine, *, lines: int, n: int = 4, tokens: int = 30) -> None:
    for number in range(lines):
        engine.assert_outputs(f"line-{number}", (200 + number, *LINE), n=n, tokens=tokens)


def test_while_a_prompt_waits_nothing_of_a_batch_is_in_a_step() -> None:
    """Rows of a batch took half of each step, so the first token of another client came much later than without it."""
    engine = slow(PaperEngine(blocks=400), 10.0)
    submit_batch(engine, lines=6)
    engine.steps(20)
    engine.submit(request("own", PROMPT, client="one"))
    engine.submit(request("other", PROMPT[:9], client="other"))
    num_steps = 0
    while ("own", 0) not in engine.outputs:
        plan = engine.step()
        assert not any(chunk.group.in_background for chunk in plan.trunks)
        assert not any(chunk.sequence.group.in_background for chunk in plan.tails)
        num_steps += 1
    assert num_steps > 5
    assert any(chunk.sequence.group.in_background for chunk in engine.step().tails)
    engine.run_to_end()
    assert_lines(engine, lines=6)


def test_a_prompt_of_the_only_other_client_is_computed_in_one_step() -> None:
    """It was divided into short steps because of the batch, which was not in them."""
    engine = slow(PaperEngine(blocks=400), 2.0)
    submit_batch(engine, lines=6)
    engine.steps(20)
    engine.submit(request("own", PROMPT, client="one"))
    assert prompt_cost(0, len(PROMPT)) > engine.scheduler.timing.limit(contended=True)
    engine.step()
    assert engine.outputs["own", 0]


def test_steps_are_short_while_only_a_batch_runs() -> None:
    engine = slow(PaperEngine(blocks=400, budget=400), 2.0)
    submit_batch(engine, lines=6)
    plans = []
    while plan := engine.step():
        plans.append(plan.cost)
    assert max(plans) <= 2 * engine.scheduler.timing.limit(contended=True)


def test_a_prompt_that_needs_the_blocks_of_a_batch_starts_in_the_end() -> None:
    """Without rows the batch would keep its blocks, and nothing would run."""
    engine = PaperEngine(blocks=20)
    submit_batch(engine, lines=2, n=1, tokens=20)
    engine.steps(2)
    engine.submit(request("large", tuple(range(70)), client="one", max_tokens=4))
    engine.run_to_end()
    engine.assert_outputs("large", tuple(range(70)), n=1, tokens=4)
    assert_lines(engine, lines=2, n=1, tokens=20)


@examples(40)
@given(
    lines=st.integers(1, 5),
    n=st.integers(1, 4),
    blocks=st.integers(24, 80),
    budget=st.integers(4, 40),
    arrivals=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 40), st.integers(1, 3)), max_size=4),
)
def test_every_group_ends_whatever_runs_next_to_a_batch(
    lines: int, n: int, blocks: int, budget: int, arrivals: list[tuple[int, int, int]]
) -> None:
    engine = PaperEngine(blocks=blocks, budget=budget)
    submit_batch(engine, lines=lines, n=n, tokens=10)
    for number, (steps, length, choices) in enumerate(arrivals):
        engine.steps(steps)
        engine.submit(request(f"own-{number}", range(length), n=choices, client=f"client-{number % 2}"))
    engine.run_to_end()
    assert_lines(engine, lines=lines, n=n, tokens=10)
    for number, (_, length, choices) in enumerate(arrivals):
        engine.assert_outputs(f"own-{number}", range(length), n=choices, tokens=8)


def test_rows_of_a_batch_add_a_limited_time_to_the_steps_of_other_clients() -> None:
    """The next token of another client took twice as long next to a batch."""
    engine = slow(PaperEngine(blocks=400), 1.0)
    submit_batch(engine, lines=4, n=8, tokens=40)
    engine.steps(20)
    engine.submit(request("own", PROMPT[:5], n=2, client="one", max_tokens=30))
    while ("own", 0) not in engine.outputs:
        engine.step()
    rows: list[tuple[int, int]] = []
    while "own" in engine.groups:
        in_background = [chunk.sequence.group.in_background for chunk in engine.step().tails]
        rows.append((in_background.count(False), in_background.count(True)))
    # 8 for a step without rows, and 0.5 for each row
    most = math.ceil(0.25 * (8 + 2 * 0.5) / 0.5) + 1
    assert {own for own, _ in rows} == {2} and all(1 <= lines <= most for _, lines in rows)
    engine.run_to_end()
    assert_lines(engine, lines=4, n=8, tokens=40)

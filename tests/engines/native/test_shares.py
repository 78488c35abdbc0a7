"""Fair shares of an engine between clients, with literal block counts (blocks hold four tokens)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.engines.native.scheduling.step_cost import (
    CONTENDED_RATIO,
    SCORED_TOKEN_COST,
    STEP_COST,
    StepTiming,
    prompt_cost,
    prompt_tokens_within,
)
from motet.types import ChoiceStart, SamplingParams
from tests.engines.native.paper import (
    PaperEngine,
    PlannedChunks,
    TrunkSpan,
    answer,
    chunks,
    request,
    states,
)
from tests.property_settings import examples

PROMPT = tuple(range(10))
SMALL = (50, 51)


def steps_to_first_token(engine: PaperEngine, name: str, *, most: int = 50) -> int:
    """Returns the number of steps until the group's first token."""
    for count in range(most):
        if engine.outputs.get((name, 0)):
            return count
        engine.step()
    raise AssertionError(f"{name} has no token after {most} steps")


def slow(engine: PaperEngine, unit_ms: float) -> PaperEngine:
    """Makes rows and prompt tokens so slow that a step has time for few of them while clients share the engine."""
    engine.scheduler.timing.unit_s = unit_ms / 1000
    return engine


def test_a_small_group_is_admitted_although_another_client_has_outgrown_the_cache() -> None:
    engine = PaperEngine(blocks=12)
    hog = engine.submit(request("hog", PROMPT[:4], n=6, max_tokens=40, client="hog"))
    engine.steps(12)
    assert "waiting" in states(hog)
    engine.submit(request("small", SMALL, max_tokens=8, client="other"))
    assert steps_to_first_token(engine, "small") == 1
    engine.steps(7)
    engine.assert_outputs("small", SMALL, n=1, tokens=8)
    engine.run_to_end()
    engine.assert_outputs("hog", PROMPT[:4], n=6, tokens=40)


def test_blocks_are_taken_for_a_group_within_its_share_and_from_clients_above_theirs() -> None:
    engine = PaperEngine(blocks=12)
    starts = [ChoiceStart(0, 0, tuple(answer(SMALL, 0, 30)))]
    engine.submit(request("long", SMALL, starts=starts, max_tokens=40, client="hog"))  # 1 + 8 blocks
    engine.steps(2)
    engine.submit(request("large", range(60, 80), max_tokens=2, client="other"))  # 5 + 1 of 6, 3 are free
    assert steps_to_first_token(engine, "large") == 1
    assert engine.counters.preemptions == 1
    too_large = engine.submit(request("larger", range(80, 104), max_tokens=2, client="third"))  # 6 + 1 of 4
    engine.steps(2)
    assert not too_large.admitted
    engine.run_to_end()
    engine.assert_outputs("larger", tuple(range(80, 104)), n=1, tokens=2)
    assert engine.outputs["long", 0] == answer(SMALL, 0, 40)[30:]


def test_a_group_that_loses_its_blocks_in_a_step_is_not_admitted_again_in_this_step() -> None:
    engine = PaperEngine(blocks=9, budget=14, max_num_seqs=7)
    engine.submit(request("first", (1,), max_tokens=2, client="a", priority=2))
    engine.submit(request("other", (4, *PROMPT[:5]), max_tokens=1, client="b", client_weight=2.5, priority=1))
    engine.submit(request("last", (1,), max_tokens=1, client="a", priority=2))
    engine.submit(request("wide", range(20, 33), n=3, max_tokens=2, client="a"))
    engine.run_to_end()
    engine.assert_outputs("first", (1,), n=1, tokens=2)
    engine.assert_outputs("wide", tuple(range(20, 33)), n=3, tokens=2)


def test_no_client_takes_blocks_from_a_more_urgent_group() -> None:
    engine = PaperEngine(blocks=8)
    engine.submit(request("urgent", PROMPT[:4], n=6, max_tokens=3, client="hog", priority=-1))  # 1 + 6 blocks
    engine.step()
    late = engine.submit(request("late", PROMPT[::-1], max_tokens=1, client="other"))
    engine.step()
    assert (late.admitted, engine.counters.preemptions) == (False, 0)
    engine.run_to_end()
    engine.assert_outputs("late", PROMPT[::-1], n=1, tokens=1)


def test_a_client_that_is_alone_uses_everything() -> None:
    engine = slow(PaperEngine(blocks=21, budget=64, max_num_seqs=16), 100)
    engine.submit(request("wide", PROMPT[:4], n=16, max_tokens=4, client="one"))
    engine.step()
    plan = engine.step()
    assert len(plan.tails) == 16
    assert engine.pool.num_held == 17


def test_a_client_gets_rows_although_another_has_sequences_for_all_of_them() -> None:
    engine = PaperEngine(blocks=60, max_num_seqs=4)
    engine.submit(request("wide", PROMPT, n=4, max_tokens=12, client="hog"))
    engine.steps(2)
    own = engine.submit(request("own", PROMPT[::-1], max_tokens=2, client="hog"))
    engine.submit(request("small", SMALL, max_tokens=3, client="other"))
    assert steps_to_first_token(engine, "small") == 1
    tails = [(tail.group, tail.choice) for tail in chunks(engine.step()).tails]
    assert tails == [("wide", 0), ("wide", 1), ("wide", 2), ("small", 0)]
    tails = [(tail.group, tail.choice) for tail in chunks(engine.step()).tails]
    assert tails == [("wide", 0), ("wide", 1), ("wide", 3), ("small", 0)]  # in turn after choice 2
    assert not own.admitted
    engine.run_to_end()
    engine.assert_outputs("wide", PROMPT, n=4, tokens=12)


def test_a_wide_group_starts_beside_a_running_choice_of_its_client() -> None:
    engine = PaperEngine(blocks=60, max_num_seqs=4)
    engine.submit(request("single", SMALL, max_tokens=30))
    engine.step()
    engine.submit(request("wide", PROMPT, n=4, max_tokens=8))
    assert steps_to_first_token(engine, "wide") == 1
    assert [len(engine.step().tails) for _ in range(3)] == [4, 4, 4]
    engine.run_to_end()
    engine.assert_outputs("single", SMALL, n=1, tokens=30)
    engine.assert_outputs("wide", PROMPT, n=4, tokens=8)


def test_a_short_prompt_does_not_wait_for_a_long_one_of_another_client() -> None:
    engine = PaperEngine(blocks=80, budget=8)
    engine.submit(request("long", range(100, 200), client="hog"))
    engine.steps(2)
    engine.submit(request("small", SMALL, max_tokens=2, client="other"))
    assert chunks(engine.step()) == PlannedChunks(
        trunks=[TrunkSpan("small", tokens=range(2)), TrunkSpan("long", tokens=range(16, 22))]
    )


def test_a_short_prompt_does_not_wait_for_a_much_longer_one_of_the_same_client() -> None:
    engine = PaperEngine(blocks=400, budget=8)
    engine.submit(request("long", range(1000)))
    engine.steps(2)
    engine.submit(request("small", [5000, 5001], max_tokens=2))
    assert steps_to_first_token(engine, "small") == 1


def test_many_prompts_of_a_client_do_not_delay_another() -> None:
    engine = PaperEngine(blocks=400, budget=16)
    for number in range(20):
        engine.submit(request(f"hog{number}", range(100 * number, 100 * number + 60), max_tokens=1, client="hog"))
    engine.steps(3)
    engine.submit(request("small", [5000, 5001], max_tokens=1, client="other"))
    assert steps_to_first_token(engine, "small") == 1


def test_a_long_prompt_is_computed_although_another_client_always_has_short_ones() -> None:
    engine = PaperEngine(blocks=80, budget=16)
    long = engine.submit(request("long", range(100, 240), max_tokens=1, client="one"))
    for number in range(40):
        engine.submit(
            request(f"short{number}", range(1000 + 20 * number, 1016 + 20 * number), max_tokens=1, client="other")
        )
        if not long.sequences:
            break
        engine.step()
    assert engine.outputs["long", 0]
    assert 9 <= number <= 25, "each client has half of the steps, and the long prompt needs nine of them"


def test_a_client_with_twice_the_weight_gets_twice_the_work() -> None:
    engine = slow(PaperEngine(blocks=200, budget=8), 2)
    for client, weight in (("one", 1.0), ("two", 2.0)):
        for number in range(30):
            start = 10_000 * int(weight) + 100 * number
            engine.submit(
                request(
                    f"{client}{number}", range(start, start + 16), max_tokens=1, client=client, client_weight=weight
                )
            )
    work = {"one": 0, "two": 0}
    for _ in range(60):
        for trunk in chunks(engine.step()).trunks:
            work[trunk.group[:3]] += len(trunk.tokens)
    assert work["two"] / work["one"] == pytest.approx(2, rel=0.15)


@pytest.mark.parametrize(("first", "num_scored"), [(0, 16), (5, 12), (16, 1)])
def test_a_client_pays_for_the_logits_of_its_prompt(first: int, num_scored: int) -> None:
    costs = []
    for top in (None, 1):
        engine = PaperEngine(blocks=80)
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=top)
        engine.submit(request("scored", range(16), sampling=sampling)).facts.scored_from = first
        costs.append(engine.step().cost)
    assert costs[1] - costs[0] == pytest.approx(num_scored * SCORED_TOKEN_COST)


def test_idle_time_gives_no_credit() -> None:
    engine = PaperEngine(blocks=80)
    engine.serve(request("early", SMALL, client="idle"))
    engine.serve(request("work", range(100, 160), client="busy"))
    engine.submit(request("more work", range(200, 260), client="busy"))
    engine.submit(request("again", SMALL, client="idle"))
    engine.step()
    idle, busy = (engine.scheduler.clients.use_of(engine.groups[name]) for name in ("again", "more work"))
    assert idle.work_counter >= prompt_cost(0, 60)
    assert busy.work_counter >= idle.work_counter


@pytest.mark.slow
def test_a_step_is_short_while_clients_share_the_engine() -> None:
    engine = slow(PaperEngine(blocks=200, budget=64, max_num_seqs=32), 4)
    engine.submit(request("wide", PROMPT, n=32, max_tokens=60, client="hog"))
    engine.steps(2)
    engine.submit(request("stream", SMALL, max_tokens=40, client="other"))
    engine.steps(2)
    limit = engine.scheduler.timing.limit(contended=True)
    assert limit == (CONTENDED_RATIO - 1) * STEP_COST / 4
    counts = set()
    for _ in range(20):
        plan = engine.step()
        assert plan.cost <= limit + 1
        tails = chunks(plan).tails
        counts.add(sum(tail.group == "wide" for tail in tails))
        assert any(tail.group == "stream" for tail in tails), "the client that uses less is in every step"
    assert counts == {11}
    engine.run_to_end()
    engine.assert_outputs("wide", PROMPT, n=32, tokens=60)


@given(st.floats(0.1, 500), st.integers(0, 8000))
def test_the_tokens_within_a_cost_have_about_that_cost(cost: float, begin: int) -> None:
    count = prompt_tokens_within(cost, begin)
    assert prompt_cost(begin, begin + count) <= cost * 1.001 <= prompt_cost(begin, begin + count + 1) * 1.01


@pytest.mark.parametrize(("step_ms", "unit_ms"), [(8.0, 1.0), (60.0, 8.0), (5.0, 0.03), (20.0, 6.0)])
def test_the_limit_follows_the_speed_of_the_machine(step_ms: float, unit_ms: float) -> None:
    timing = StepTiming()
    for count in range(60):
        cost = 0.5 if count % 3 else min(timing.limit(contended=True), 500.0)
        timing.record(cost, (step_ms + cost * unit_ms) / 1000)
    assert (step_ms + timing.limit(contended=True) * unit_ms) / step_ms == pytest.approx(CONTENDED_RATIO, rel=0.25)
    timing.record(0.5, 10.0)  # the process was suspended
    assert (step_ms + timing.limit(contended=True) * unit_ms) / step_ms < 1.5 * CONTENDED_RATIO


@st.composite
def hostile_groups(draw: st.DrawFn) -> list[tuple[str, int, int, int]]:
    """Generates groups of other clients: client, prompt tokens, choices, tokens."""
    one = st.tuples(st.sampled_from("abcd"), st.integers(1, 60), st.integers(1, 8), st.integers(1, 60))
    return draw(st.lists(one, min_size=1, max_size=12))


@pytest.mark.slow
@examples(40)
@given(hostile_groups(), st.integers(0, 30), st.sampled_from([1.0, 10.0]))
def test_the_first_token_of_a_small_group_does_not_depend_on_the_groups_of_others(
    others: list[tuple[str, int, int, int]], num_steps: int, unit_ms: float
) -> None:
    engine = slow(PaperEngine(blocks=60, budget=16, max_num_seqs=8), unit_ms)
    for number, (client, length, n, tokens) in enumerate(others):
        engine.submit(
            request(f"g{number}", range(100 * number, 100 * number + length), n=n, max_tokens=tokens, client=client)
        )
    for _ in range(num_steps):
        if engine.groups:
            engine.step()
    small = request("small", [9000, 9001, 9002], max_tokens=4, client="small")
    engine.submit(small)
    num_clients = len({client for client, *_ in others}) + 1
    assert steps_to_first_token(engine, "small") <= num_clients + 1  # at most the same work of each other client first
    engine.run_to_end(max_steps=5000)
    engine.assert_outputs("small", (9000, 9001, 9002), n=1, tokens=4)
    for number, (_, length, n, tokens) in enumerate(others):
        engine.assert_outputs(f"g{number}", tuple(range(100 * number, 100 * number + length)), n=n, tokens=tokens)


def test_a_wide_group_of_a_client_that_runs_nothing_starts_although_all_rows_are_taken() -> None:
    """The router sends it to the engine for the same reason."""
    engine = PaperEngine(blocks=400, max_num_seqs=8)
    engine.submit(request("hog", PROMPT[:4], n=8, max_tokens=100, client="hog"))
    engine.steps(3)
    engine.submit(request("wide", SMALL, n=8, max_tokens=10, client="other"))
    assert steps_to_first_token(engine, "wide") == 1
    engine.run_to_end()
    engine.assert_outputs("wide", SMALL, n=8, tokens=10)


class SlowMatcher:
    """A matcher whose every token takes the same time."""

    stopped = False

    def __init__(self, token_s: float) -> None:
        self.expected_s = token_s

    def consume(self, token_id: int) -> None: ...

    def forced(self) -> list[int]:
        return []


@pytest.mark.parametrize(("token_s", "num_tokens"), [(0.030, 4), (0.0006, 39), (0.00001, 40)])
def test_expensive_grammars_take_at_most_half_of_the_time_of_other_work(token_s: float, num_tokens: int) -> None:
    """The other work of 20 steps takes 0.012 s each, so 0.120 s are left for tokens of two choices. Nothing is paid
    before the first step, so only one of the choices runs then."""
    engine = PaperEngine(blocks=40)
    group = engine.submit(request("slow", PROMPT[:4], n=2, max_tokens=30, client="slow"))
    engine.submit(request("other", SMALL, max_tokens=60, client="slow"))
    engine.steps(2)
    for sequence in group.sequences:
        sequence.sampling.matcher = SlowMatcher(token_s)  # type: ignore[assignment]
    first = before = sum(len(sequence.output_tokens) for sequence in group.sequences)
    for _ in range(20):
        engine.step()
        after = sum(len(sequence.output_tokens) for sequence in group.sequences)
        engine.scheduler.timing.grammars.record(0.012 + (after - before) * token_s)
        before = after
    assert after - first == num_tokens


def test_expensive_grammars_run_if_there_is_nothing_else() -> None:
    engine = PaperEngine(blocks=40)
    group = engine.submit(request("slow", PROMPT[:4], max_tokens=10, client="slow"))
    engine.submit(request("other", SMALL, max_tokens=3, client="other"))
    engine.steps(4)
    group.sequences[0].sampling.matcher = SlowMatcher(0.05)  # type: ignore[assignment]
    engine.run_to_end()
    engine.assert_outputs("slow", PROMPT[:4], n=1, tokens=10)


def test_the_engine_continues_if_a_group_without_time_has_taken_all_blocks_of_the_step() -> None:
    engine = slow(PaperEngine(blocks=5, budget=15, max_num_seqs=8), 10)
    prompts = [tuple(range(9)), tuple(range(100, 108)), tuple(range(200, 207))]
    for prompt, client, n in zip(prompts, "abb", (2, 3, 1), strict=True):
        weight = 1.0 if client == "a" else 2.5
        engine.submit(request(f"g{prompt[0]}", prompt, n=n, max_tokens=3, client=client, client_weight=weight))
    engine.run_to_end()
    for prompt, n in zip(prompts, (2, 3, 1), strict=True):
        engine.assert_outputs(f"g{prompt[0]}", prompt, n=n, tokens=3)

"""The simulation of routing: simulated workers take the expected times, and a tiny run fills every table."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench.program.report import table
from bench.router.__main__ import parse, plan_of, queue, record, route, ways
from bench.router.decision_cost import decision_cost
from bench.router.group_stream import groups
from bench.router.simulated_worker import (
    BLOCK_SIZE,
    ENGINES,
    EngineTimes,
    SimulatedCache,
    SimulatedGroup,
    SimulatedWorker,
)
from bench.router.simulation import RoutingRules, RoutingSimulation
from bench.router.simulation_figures import figures
from motet.routing.queue.fair_queue import FairQueue
from motet.settings.server_config import Policy

ENGINE = EngineTimes(step_ms=10, choice_ms=1, trunk_block_ms=0.5, tail_block_ms=0, prompt_token_ms=1, max_choices=8)


def group(number: int = 0, *, prompt_tokens: int = 160, lengths: Sequence[int] = (100,)) -> SimulatedGroup:
    names = [bytes([number, block]) for block in range(prompt_tokens // BLOCK_SIZE)]
    return SimulatedGroup(number, 0.0, names, prompt_tokens, lengths, None, open=len(lengths))


def worked(*submitted: SimulatedGroup, engine: EngineTimes = ENGINE) -> SimulatedWorker:
    """Returns a worker that got these groups at time 0 and has finished them."""
    cache = SimulatedCache(engine.num_blocks, stored=lambda _: None, removed=lambda _: None)
    worker = SimulatedWorker("w", engine, cache, lambda *_: None)
    for one in submitted:
        worker.submit(one, 0.0)
    while (at_s := worker.next_change_s()) is not None:
        worker.change(at_s)
    return worker


def test_a_choice_takes_the_time_of_its_prompt_and_of_a_step_for_each_token() -> None:
    one = group()
    worked(one)
    assert one.first_s is not None
    assert one.first_s == pytest.approx((10 + 160) / 1e3)
    assert one.end_s == pytest.approx(one.first_s + 100 * (10 + 1 + 10 * 0.5) / 1e3)


def test_a_step_reads_a_trunk_once_for_all_choices_of_a_group() -> None:
    four = group(lengths=(100,) * 4)
    worked(four)
    assert four.first_s is not None
    assert four.end_s == pytest.approx(four.first_s + 100 * (10 + 4 + 10 * 0.5) / 1e3)


def test_a_prompt_that_was_computed_before_is_cached() -> None:
    one, again = group(0), group(0)
    worker = worked(one)
    worker.submit(again, 10.0)
    assert (one.cached_tokens, again.cached_tokens) == (0, 159), "the last token is always computed"


def test_choices_above_the_maximum_take_turns() -> None:
    first, second = group(0, lengths=(50,) * 6), group(1, lengths=(50,) * 6)
    worked(first, second)
    assert first.end_s is not None
    assert second.first_s is not None
    assert second.first_s < first.end_s
    alone = group(0, lengths=(50,) * 6)
    worked(alone)
    assert alone.end_s is not None
    assert first.end_s > 1.2 * alone.end_s


def test_without_parts_a_group_waits_until_all_its_choices_fit() -> None:
    first, second = group(0, lengths=(50,) * 6), group(1, lengths=(50,) * 6)
    worked(first, second, engine=replace(ENGINE, starts_partially=False))
    assert first.end_s is not None
    assert second.first_s is not None
    assert second.first_s > first.end_s


@pytest.mark.parametrize("rules", [*ways(vary_weights=False).values(), RoutingRules(queue=FairQueue(max_wait_s=1e9))])
def test_every_group_ends_under_all_rules_of_routing(rules: RoutingRules) -> None:
    made = groups(150, workers=3, load=0.8, engine=ENGINES["cpu"], seed=3)
    RoutingSimulation(made, workers=3, engine=ENGINES["cpu"], rules=rules).run()
    for one in made:
        assert one.open == 0
        assert one.first_s is not None
        assert one.end_s is not None
        assert one.arrival_s < one.first_s < one.end_s


def test_the_same_seed_gives_the_same_figures() -> None:
    def once() -> object:
        made = groups(100, workers=2, load=0.7, engine=ENGINES["cpu"], seed=5)
        return figures(
            "kv", 2, 0.7, RoutingSimulation(made, workers=2, engine=ENGINES["cpu"], rules=RoutingRules()).run()
        )

    assert once() == once()


@pytest.mark.slow
def test_routing_by_cost_finds_more_prompts_in_caches_than_round_robin() -> None:
    def hits(policy: Policy) -> float:
        made = groups(600, workers=8, load=0.7, engine=ENGINES["cpu"], seed=7)
        return figures(
            "", 8, 0.7, RoutingSimulation(made, workers=8, engine=ENGINES["cpu"], rules=RoutingRules(policy)).run()
        ).hit_ratio

    assert hits(Policy.KV) > 1.2 * hits(Policy.ROUND_ROBIN)


@pytest.mark.long
@pytest.mark.slow
def test_a_tiny_run_fills_every_table() -> None:
    plan = plan_of(parse(["--quick", "--groups", "60", "--workers", "2", "--loads", "0.5", "--weights"]))
    plan = replace(plan, decisions=[(4, 100)])
    routing, queueing = list(route(plan)), list(queue(plan))
    decisions = [decision_cost(workers, blocks) for workers, blocks in plan.decisions]
    assert len(table(row.routing_cells() for row in routing).rows) == len(ways(vary_weights=True)) == len(routing)
    assert len(table(row.queue_cells() for row in queueing).rows) == len(queueing)
    assert len(table(decision.cells() for decision in decisions).rows) == 1
    assert decisions[0].total_us > 0
    assert set(record(routing, queueing, decisions)) == {"horizon_steps", "routing", "queue", "decision"}

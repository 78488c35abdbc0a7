"""Simulates ways to choose a worker and to queue, for groups of heavy-tailed n, and measures the time of a decision.

The choice of workers, the prefix index and the queue are Motet's own code. Workers (`bench/router/simulated_worker.py`)
have the step times of Motet's engine, and groups are generated (`bench/router/group_stream.py`). Prints three tables,
and JSON on the last line:

    routing     each policy over the same groups; "a group is one" counts requests, like gateways that do not know n
    queue       first tokens of small and of large groups if capacity is scarce (64 choices per worker)
    decision    microseconds on this machine

Run: python -m bench.router [--quick] [--workers 8,64] [--loads 0.7,0.9] [--engine cpu] [--weights]
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from bench.program.command_line import benchmark_parser, numbers, progress
from bench.program.report import machine, print_report, table
from bench.router.decision_cost import DecisionCost, decision_cost
from bench.router.group_stream import groups
from bench.router.simulated_worker import ENGINES, EngineTimes, SimulatedGroup
from bench.router.simulation import RoutingRules, RoutingSimulation
from bench.router.simulation_figures import SimulationFigures, figures
from motet.routing.choosing.cost import (
    CHOICE_MS,
    HORIZON_STEPS,
    PROMPT_TOKEN_MS,
    TAIL_BLOCK_MS,
    TRUNK_BLOCK_MS,
    CostWeights,
)
from motet.routing.queue.fair_queue import FairQueue
from motet.settings.server_config import Policy

SEED = 1
HORIZONS = (0, 8, 16, 32, 64, 128, 256)
SCARCE_CHOICES = 64
QUEUE_WORKERS = 8
QUEUE_LOADS = (0.7, 0.75, 0.8)
TRIED_QUEUES = [
    *((0.0, 0.0, patience_s) for patience_s in (1.0, 5.0, 20.0)),
    *((0.5, max_s, patience_s) for max_s in (5.0, 10.0, 20.0, 1e3) for patience_s in (0.0, 1.0, 5.0)),
]
"""Parameters of each queue that `--weights` tries: seconds per choice, maximum seconds, patience in seconds."""
FOREVER_S = 1e9


@dataclass(frozen=True)
class SimulationPlan:
    """The runs to simulate and the decisions to measure."""

    workers: Sequence[int]
    loads: Sequence[float]
    groups: int
    """Number of groups in a run with up to 100 workers. A larger fleet gets at least 50 groups for each worker."""
    engine: EngineTimes
    vary_weights: bool
    decisions: Sequence[tuple[int, int]]
    """Numbers of workers and of blocks of each measured decision."""


def horizon(steps: float) -> CostWeights:
    """Returns the weights with a horizon of `steps` steps."""
    a_step = steps / PROMPT_TOKEN_MS
    return CostWeights(
        choice=a_step * CHOICE_MS, trunk_block=a_step * TRUNK_BLOCK_MS, tail_block=a_step * TAIL_BLOCK_MS
    )


def ways(*, vary_weights: bool) -> dict[str, RoutingRules]:
    found = {
        "kv": RoutingRules(),
        "kv, a group is one": RoutingRules(group_is_one=True),
        "kv, no sessions": RoutingRules(sessions=False),
        "session": RoutingRules(policy=Policy.SESSION),
        "least-loaded": RoutingRules(policy=Policy.LEAST_LOADED),
        "round-robin": RoutingRules(policy=Policy.ROUND_ROBIN),
    }
    for steps in HORIZONS if vary_weights else ():
        found[f"kv, horizon {steps}"] = RoutingRules(weights=horizon(steps))
        found[f"kv, a group is one, horizon {steps}"] = RoutingRules(weights=horizon(steps), group_is_one=True)
    return found


def queues(*, vary_weights: bool) -> dict[str, FairQueue[SimulatedGroup]]:
    """Returns the queues to compare, by name. FIFO is the fair queue without delays per choice and without patience."""
    found = {
        "FIFO": FairQueue[SimulatedGroup](max_wait_s=FOREVER_S, per_choice_s=0.0, patience_s=0.0),
        "fair": FairQueue[SimulatedGroup](max_wait_s=FOREVER_S),
    }
    for per_choice_s, max_s, patience_s in TRIED_QUEUES if vary_weights else ():
        name = f"{per_choice_s:g} s per choice, at most {max_s:g} s, patience {patience_s:g} s"
        found[name] = FairQueue[SimulatedGroup](
            max_wait_s=FOREVER_S, per_choice_s=per_choice_s, max_delay_s=max_s, patience_s=patience_s
        )
    return found


def route(plan: SimulationPlan) -> Iterator[SimulationFigures]:
    for workers in plan.workers:
        for load in plan.loads:
            for way, rules in ways(vary_weights=plan.vary_weights).items():
                yield _simulated(way, rules, workers, load, plan)


def queue(plan: SimulationPlan) -> Iterator[SimulationFigures]:
    scarce = replace(plan, engine=replace(plan.engine, max_choices=SCARCE_CHOICES))
    whole = replace(scarce, engine=replace(scarce.engine, starts_partially=False))
    for load in QUEUE_LOADS:
        for way, waiting in queues(vary_weights=plan.vary_weights).items():
            yield _simulated(way, RoutingRules(queue=waiting), QUEUE_WORKERS, load, scarce)
            yield _simulated(f"{way}, groups start whole", RoutingRules(queue=waiting), QUEUE_WORKERS, load, whole)


def _simulated(way: str, rules: RoutingRules, workers: int, load: float, plan: SimulationPlan) -> SimulationFigures:
    """Simulates one way. All ways get the same groups."""
    count = max(plan.groups, 50 * workers if workers > 100 else 0)
    made = groups(count, workers=workers, load=load, engine=plan.engine, seed=SEED)
    simulation = RoutingSimulation(made, workers=workers, engine=plan.engine, rules=rules)
    return figures(way, workers, load, simulation.run())


def plan_of(options: argparse.Namespace) -> SimulationPlan:
    grid = [(workers, blocks) for workers in (8, 64, 256, 1000) for blocks in (10_000, 1_000_000)]
    return SimulationPlan(
        workers=options.workers,
        loads=[float(load) for load in options.loads.split(",")],
        groups=options.groups or (1_500 if options.quick else 16_000),
        engine=ENGINES[options.engine],
        vary_weights=options.weights,
        decisions=[(64, 10_000), (1000, 10_000)] if options.quick else grid,
    )


def with_progress(rows: Iterator[SimulationFigures]) -> Iterator[SimulationFigures]:
    """Yields the rows, and prints the name of each on standard error."""
    for row in rows:
        progress(f"{row.workers} workers, {row.load:.0%}: {row.way}")
        yield row


def record(
    routing: Sequence[SimulationFigures], queueing: Sequence[SimulationFigures], decisions: Sequence[DecisionCost]
) -> dict[str, object]:
    return {
        "horizon_steps": HORIZON_STEPS,
        "routing": [asdict(row) for row in routing],
        "queue": [asdict(row) for row in queueing],
        "decision": [asdict(row) | {"total_us": row.total_us} for row in decisions],
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = benchmark_parser("bench.router", __doc__)
    parser.add_argument("--workers", type=numbers, default=(8, 64), help="sizes of fleets, up to 1000, e.g. 8,64")
    parser.add_argument("--loads", default="0.7,0.9", help="shares of the workers' capacity (default: %(default)s)")
    parser.add_argument("--groups", type=int, help="number of groups of a run (default: 16000, 1500 with --quick)")
    parser.add_argument(
        "--engine", choices=list(ENGINES), default="cpu", help="step times of the workers (default: %(default)s)"
    )
    parser.add_argument("--weights", action="store_true", help="also vary the weights of the cost and of the queue")
    parser.add_argument("--quick", action="store_true", help="fewer groups and decisions: half a minute")
    return parser.parse_args(arguments)


def main() -> None:
    plan, conditions = plan_of(parse()), machine()
    routing, queueing = list(with_progress(route(plan))), list(with_progress(queue(plan)))
    decisions = [decision_cost(workers, blocks) for workers, blocks in plan.decisions]
    print_report(
        record(routing, queueing, decisions),
        table(row.routing_cells() for row in routing),
        table(row.queue_cells() for row in queueing),
        table(decision.cells() for decision in decisions),
        conditions=conditions,
    )


if __name__ == "__main__":
    main()

"""Measures what 1 to 10,000 workers cost their gateways, and computes how many gateways they need.

It uses the product's own objects: the prefix index (`bench/cell_size/index_memory.py`), the fleet and the decision
(`bench/cell_size/fleet_cost.py`), the directory of a cell on Ray Serve (`bench/cell_size/directory_cost.py`), status
requests, block events and tokens over real sockets (`bench/cell_size/wire_cost.py`). From these prices
`bench/cell_size/gateway_count.py` computes the number of gateways; docs/scale.md explains the results. JSON is on the
last line.

Run: python -m bench.cell_size [--workers 1,100,1000,10000] [--blocks 1000] [--quick]
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass

from bench.cell_size.directory_cost import DirectoryCost, directory_cost
from bench.cell_size.fleet_cost import FleetCost, fleet_cost
from bench.cell_size.gateway_count import Demand, Need, Prices, need
from bench.cell_size.index_memory import EVENT_BLOCKS, IndexSize, index_size
from bench.cell_size.wire_cost import (
    EventCost,
    FollowedCost,
    QuestionCost,
    TokenCost,
    event_cost,
    followed_cost,
    question_cost,
    token_cost,
)
from bench.program.command_line import numbers, progress
from bench.program.report import Table, columns_table, machine, tell

RATES = (700.0, 2000.0)
"""Tokens/s of a decode worker: this engine on two cores at n = 8, and a guess for one on a GPU."""
DECODE_A_PREFILL = 4
CHOICES = 8
"""Choices of each group in the load for which gateways are computed."""


@dataclass(frozen=True)
class Effort:
    questions: int
    messages: int
    loads: int
    """Number of loads of tokens, of which the median counts."""
    turns: int
    """Number of decisions, of which the median counts."""


FULL = Effort(questions=5000, messages=1000, loads=3, turns=200)
QUICK = Effort(questions=300, messages=200, loads=1, turns=20)


@dataclass(frozen=True)
class Wire:
    """Costs that do not depend on the number of workers."""

    question: QuestionCost
    events: Sequence[EventCost]
    followed: FollowedCost
    tokens: Sequence[TokenCost]


@dataclass(frozen=True)
class Planned:
    demand: Demand
    need: Need


def wire(ns: Sequence[int], effort: Effort) -> Wire:
    return Wire(
        question=question_cost(effort.questions),
        events=[event_cost(effort.messages, blocks) for blocks in (1, EVENT_BLOCKS)],
        followed=followed_cost(),
        tokens=[token_cost(n, repeats=effort.loads) for n in ns],
    )


def prices(fleet: FleetCost, index: IndexSize, wired: Wire) -> Prices:
    return Prices(
        token_us=next(cost.gateway_us for cost in wired.tokens if cost.n == CHOICES),
        question_us=wired.question.asker_us,
        answer_us=wired.question.answerer_us,
        message_us=wired.events[-1].message_us,
        decision_us=fleet.decision_us,
        block_bytes=max(index.own_bytes, index.pair_bytes),
    )


def prefill_of(decode: int) -> int:
    return 0 if decode == 1 else -(-decode // DECODE_A_PREFILL)


def demands(workers: int, blocks_a_worker: int) -> list[Demand]:
    """Returns a demand for each rate of a cell with `workers` decode workers; a single worker does everything."""
    prefill = prefill_of(workers)
    return [Demand(workers, prefill, rate, choices=CHOICES, blocks_a_worker=blocks_a_worker) for rate in RATES]


def table_of(title: str, rows: Sequence[object]) -> Table:
    """Shows dataclasses of one kind, a row each; the fields of dataclasses inside them are columns too."""
    cells = [_flat(row) for row in rows]
    heads = [(name.replace("_", " "), ".4g" if isinstance(value, float) else "") for name, value in cells[0].items()]
    return columns_table(heads, [list(row.values()) for row in cells], title=title)


def _flat(row: object) -> dict[str, object]:
    found: dict[str, object] = {}
    if is_dataclass(row):
        for field in fields(row):
            value = getattr(row, field.name)
            found |= _flat(value) if is_dataclass(value) else {field.name: value}
    return found


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="what 1 to 10,000 workers cost their gateways")
    parser.add_argument("--workers", type=numbers, default=(1, 100, 1000, 10_000), help="sizes, e.g. 1,100")
    parser.add_argument("--blocks", type=int, default=1000, help="blocks that a worker caches (default: %(default)s)")
    parser.add_argument("--ns", type=numbers, default=(1, CHOICES, 64), help="choices of groups; 8 must be among them")
    parser.add_argument("--quick", action="store_true", help="rough figures in a minute and a half")
    return parser.parse_args(arguments)


def record(wired: Wire, **tables: Sequence[FleetCost | IndexSize | DirectoryCost | Planned]) -> dict[str, object]:
    return {"wire": asdict(wired), "tables": {name: [asdict(row) for row in rows] for name, rows in tables.items()}}


def main() -> None:
    options = parse()
    effort, about = QUICK if options.quick else FULL, machine()
    fleets, indexes, directories = [], [], []
    for workers in options.workers:
        progress(f"{workers} workers")
        fleets.append(fleet_cost(workers, turns=effort.turns))
        indexes.append(index_size(workers, options.blocks))
        directories.append(directory_cost(workers, prefill_of(workers)))
    progress("questions, events, tokens")
    wired = wire(options.ns, effort)
    planned = [
        Planned(demand, need(demand, prices(fleet, index, wired)))
        for fleet, index in zip(fleets, indexes, strict=True)
        for demand in demands(fleet.workers, options.blocks)
    ]
    tell(
        record(wired, fleet=fleets, index=indexes, directory=directories, gateways=planned),
        *(table_of("fleet", fleets), table_of("index", indexes), table_of("directory", directories)),
        *(table_of("question", [wired.question]), table_of("followed", [wired.followed])),
        *(table_of("events", wired.events), table_of("tokens", wired.tokens), table_of("gateways", planned)),
        about=about,
    )


if __name__ == "__main__":
    main()

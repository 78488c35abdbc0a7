"""Measures the cost of 1 to 10,000 workers for their gateways, and computes the number of gateways that they need.

The benchmark uses Motet's own objects: the prefix index (`bench/cell_size/index_memory.py`), the fleet and the routing
decision (`bench/cell_size/fleet_cost.py`), the directory of a cell on Ray Serve (`bench/cell_size/directory_cost.py`),
status requests, block events and tokens over real sockets (`bench/cell_size/socket_costs.py`).
`bench/cell_size/gateway_count.py` computes the number of gateways from these prices; docs/scale.md explains the
results. Prints tables, and JSON on the last line.

Run: python -m bench.cell_size [--workers 1,100,1000,10000] [--blocks 1000] [--quick]
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass

from bench.cell_size.directory_cost import DirectoryCost, directory_cost
from bench.cell_size.fleet_cost import FleetCost, fleet_cost
from bench.cell_size.gateway_count import Demand, GatewayNeeds, Prices, gateway_needs
from bench.cell_size.index_memory import EVENT_BLOCKS, IndexSize, index_size
from bench.cell_size.socket_costs import (
    EventCost,
    FollowedCost,
    StatusCost,
    TokenCost,
    event_cost,
    followed_cost,
    status_cost,
    token_cost,
)
from bench.program.command_line import benchmark_parser, numbers, progress
from bench.program.report import Cells, Table, machine, print_report, table

RATES = (700.0, 2000.0)
"""Tokens/s of a decode worker: Motet's CPU engine on two cores at n = 8, and an estimate for an engine on a GPU."""
DECODE_A_PREFILL = 4
CHOICES = 8
"""Number of choices of each group in the load for which gateways are computed."""


@dataclass(frozen=True)
class Effort:
    status_requests: int
    messages: int
    loads: int
    """Number of loads of tokens; the median counts."""
    turns: int
    """Number of decisions; the median counts."""


FULL = Effort(status_requests=5000, messages=1000, loads=3, turns=200)
QUICK = Effort(status_requests=300, messages=200, loads=1, turns=20)


@dataclass(frozen=True)
class SocketCosts:
    """Costs that do not depend on the number of workers."""

    status: StatusCost
    events: Sequence[EventCost]
    followed: FollowedCost
    tokens: Sequence[TokenCost]


@dataclass(frozen=True)
class PlannedCell:
    demand: Demand
    need: GatewayNeeds


def socket_costs(ns: Sequence[int], effort: Effort) -> SocketCosts:
    return SocketCosts(
        status=status_cost(effort.status_requests),
        events=[event_cost(effort.messages, blocks) for blocks in (1, EVENT_BLOCKS)],
        followed=followed_cost(),
        tokens=[token_cost(n, repeats=effort.loads) for n in ns],
    )


def prices(fleet: FleetCost, index: IndexSize, sockets: SocketCosts) -> Prices:
    return Prices(
        token_us=next(cost.gateway_us for cost in sockets.tokens if cost.n == CHOICES),
        status_request_us=sockets.status.gateway_us,
        status_answer_us=sockets.status.worker_us,
        message_us=sockets.events[-1].message_us,
        decision_us=fleet.decision_us,
        block_bytes=max(index.own_bytes, index.pair_bytes),
    )


def prefill_of(decode: int) -> int:
    return 0 if decode == 1 else -(-decode // DECODE_A_PREFILL)


def demands(workers: int, blocks_a_worker: int) -> list[Demand]:
    """Returns a demand for each rate of a cell with `workers` decode workers. A single worker also does prefill."""
    prefill = prefill_of(workers)
    return [Demand(workers, prefill, rate, choices=CHOICES, blocks_a_worker=blocks_a_worker) for rate in RATES]


def table_of(title: str, rows: Sequence[object]) -> Table:
    """Returns a table with a row for each dataclass. The fields of nested dataclasses are columns too."""
    return table(map(cells_of, rows), title=title)


def cells_of(row: object) -> Cells:
    return [
        (name.replace("_", " "), value, ".4g" if isinstance(value, float) else "")
        for name, value in fields_of(row).items()
    ]


def fields_of(row: object) -> dict[str, object]:
    found: dict[str, object] = {}
    if is_dataclass(row):
        for field in fields(row):
            value = getattr(row, field.name)
            found |= fields_of(value) if is_dataclass(value) else {field.name: value}
    return found


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = benchmark_parser("bench.cell_size", __doc__)
    parser.add_argument("--workers", type=numbers, default=(1, 100, 1000, 10_000), help="sizes of cells, e.g. 1,100")
    parser.add_argument("--blocks", type=int, default=1000, help="blocks that a worker caches (default: %(default)s)")
    parser.add_argument("--ns", type=numbers, default=(1, CHOICES, 64), help="values of n; 8 must be one of them")
    parser.add_argument("--quick", action="store_true", help="rough figures in a minute and a half")
    return parser.parse_args(arguments)


def record(
    sockets: SocketCosts, **tables: Sequence[FleetCost | IndexSize | DirectoryCost | PlannedCell]
) -> dict[str, object]:
    return {"wire": asdict(sockets), "tables": {name: [asdict(row) for row in rows] for name, rows in tables.items()}}


def main() -> None:
    arguments = parse()
    effort, conditions = QUICK if arguments.quick else FULL, machine()
    fleets, indexes, directories = [], [], []
    for workers in arguments.workers:
        progress(f"{workers} workers")
        fleets.append(fleet_cost(workers, turns=effort.turns))
        indexes.append(index_size(workers, arguments.blocks))
        directories.append(directory_cost(workers, prefill_of(workers)))
    progress("status requests, events, tokens")
    sockets = socket_costs(arguments.ns, effort)
    planned = [
        PlannedCell(demand, gateway_needs(demand, prices(fleet, index, sockets)))
        for fleet, index in zip(fleets, indexes, strict=True)
        for demand in demands(fleet.workers, arguments.blocks)
    ]
    print_report(
        record(sockets, fleet=fleets, index=indexes, directory=directories, gateways=planned),
        *(table_of("fleet", fleets), table_of("index", indexes), table_of("directory", directories)),
        *(table_of("status request", [sockets.status]), table_of("followed worker", [sockets.followed])),
        *(table_of("events", sockets.events), table_of("tokens", sockets.tokens), table_of("gateways", planned)),
        conditions=conditions,
    )


if __name__ == "__main__":
    main()

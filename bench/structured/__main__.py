"""Measures the cost of a JSON schema for every choice: tokens per second with and without it, on one server.

For n = 1, 8, 32 it sends requests with n choices, in turn without a schema and with a schema that no answer completes,
so that both generate the same number of tokens. The ratio compares two consecutive requests. Then it measures a step's
time for masks, without a model. With `--vllm` it measures vLLM's CPU build too. Prints tables, and JSON on the last
line.

Target (`--check` fails if it is missed): at n = 32 with the schema at least 0.9 of the tokens per second.

With `--neighbour`, it measures the gaps between the tokens of a stream instead, next to four choices that follow each
of these schemas (`bench.structured.neighbour`). Target: their mean at most 1.5 times the mean next to free choices.

Run: python -m bench.structured [--ns 1,8,32] [--repeats 5] [--url URL] [--vllm VENV] [--check]
     python -m bench.structured --neighbour FILE [FILE ...] [--url URL] [--check]
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

from bench.client.fresh_prompts import TEXT, FreshPrompts, new_seed
from bench.client.load import LoadSetup, TimedLoad, load_parser, open_client
from bench.program.command_line import progress
from bench.program.report import Bound, Cells, Target, machine, print_report, table
from bench.servers.motet_server import motet_server
from bench.servers.peer_server import all_cores, peer_server
from bench.servers.vllm import MODEL_NAME, VLLMSetup
from bench.structured.neighbour import measure_gaps
from bench.structured.step_cost import SCHEMA, StepCost, step_costs
from motet.models.model_source import resolve
from motet.models.progress import Lines
from motet.settings.server_config import cache_folder, environment
from motet.text.tokenizer import Tokenizer

TARGET_N = 32
TARGET_RATIO = 0.9
COST_STEPS = 200
NEIGHBOUR_S = 4.0
MAX_GAP_RATIO = 1.5


@dataclass
class SchemaRow:
    """Tokens per second for one n: a figure for each repeat."""

    n: int
    free: list[float] = field(default_factory=list)
    bound: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Returns the ratio of each pair of consecutive requests, which limits the effect of other load."""
        return [bound / free for bound, free in zip(self.bound, self.free, strict=True)]

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    def record(self) -> dict[str, object]:
        return asdict(self) | {"ratio": self.ratio}

    def cells(self) -> Cells:
        return [
            ("n", self.n, ""),
            ("free tokens/s", median(self.free), ".0f"),
            ("schema tokens/s", median(self.bound), ".0f"),
            ("ratio", self.ratio, ".2f"),
            ("lowest", min(self.ratios), ".2f"),
            ("highest", max(self.ratios), ".2f"),
        ]


async def with_schema(body: dict[str, object]) -> dict[str, object]:
    """Adds the schema to a body, and removes `ignore_eos`, with which vLLM would generate tokens beyond the schema."""
    return {**body, "ignore_eos": False, "structured_outputs": {"json": SCHEMA}}


async def measure(url: str, setup: LoadSetup, tokens: list[int], *, model: str | None = None) -> list[SchemaRow]:
    """Measures one server. `model` is the name of the model in requests, for a third-party server."""
    rows = []
    async with open_client(url) as client:
        free = TimedLoad(client, setup.max_tokens, model=model, count_blocks=False, seeded=model is None)
        bound = replace(free, prepare=with_schema)
        fresh = FreshPrompts(tokens, seed=new_seed())
        for load in (free, bound):  # warm-up: the grammar is compiled
            await load.group(fresh.next(setup.prompt_tokens), max(setup.ns), seed=0)
        for n in setup.ns:
            row = SchemaRow(n)
            for repeat in range(setup.repeats):
                prompt = fresh.next(setup.prompt_tokens)
                for load, figures in ((free, row.free), (bound, row.bound)):
                    figures.append((await load.group(prompt, n, seed=repeat)).decode_tokens_per_s)
            rows.append(row)
            progress(f"n = {n}: {median(row.free):.0f} tokens/s free, {median(row.bound):.0f} with the schema")
    return rows


def cost_cells(cost: StepCost) -> Cells:
    return [
        ("n", cost.n, ""),
        ("fill ms", cost.fill_ms, ".2f"),
        ("apply ms", cost.apply_ms, ".2f"),
        ("consume ms", cost.consume_ms, ".2f"),
        ("all ms", cost.total_ms, ".2f"),
    ]


def targets(rows: Sequence[SchemaRow]) -> list[Target]:
    ratio = next((row.ratio for row in rows if row.n == TARGET_N), None)
    return [Target(f"tokens/s with a schema / free, n = {TARGET_N}", ratio, TARGET_RATIO, Bound.AT_LEAST)]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = load_parser("bench.structured", __doc__, ns=(1, 8, 32), prompt_tokens=256, max_tokens=160, repeats=5)
    parser.add_argument("--url", help="a running server to use, instead of starting one")
    parser.add_argument("--vllm", type=Path, metavar="VENV", help="virtual environment with vLLM, to measure vLLM too")
    parser.add_argument("--neighbour", type=Path, nargs="+", metavar="FILE", help="measure a stream next to schemas")
    return parser.parse_args(argv)


def report_neighbour(url: str, files: Sequence[Path], *, check: bool) -> int:
    alone, free, *others = asyncio.run(measure_gaps(url, files, seconds=NEIGHBOUR_S))
    highest = max(one.mean_ms for one in others) / free.mean_ms
    return print_report(
        {one.name: asdict(one) for one in (alone, free, *others)},
        table(one.cells(free) for one in (alone, free, *others)),
        conditions=machine(),
        targets=[Target("mean gap next to a schema / next to free choices", highest, MAX_GAP_RATIO)],
        check=check,
    )


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    setup, conditions = LoadSetup.of(arguments), machine()
    folder = resolve(arguments.model, cache=cache_folder(environment()), revision=None, progress=Lines(progress))
    tokens = Tokenizer.load(folder).encode(TEXT)
    with ExitStack() as stack:
        url = arguments.url or stack.enter_context(motet_server(arguments.model)).url
        if arguments.neighbour:
            return report_neighbour(url, arguments.neighbour, check=arguments.check)
        measured = {"motet": asyncio.run(measure(url, setup, tokens))}
    if arguments.vllm is not None:
        with peer_server(VLLMSetup(arguments.vllm, folder, all_cores())) as peer:
            peer.wait_until_ready()
            measured["vllm"] = asyncio.run(measure(peer.url, setup, tokens, model=MODEL_NAME))
    costs = step_costs(folder, setup.ns, steps=COST_STEPS)
    servers = {name: [row.record() for row in rows] for name, rows in measured.items()}
    return print_report(
        {"setup": asdict(setup), "servers": servers, "costs": [asdict(cost) for cost in costs]},
        *(table([row.cells() for row in rows], title=name) for name, rows in measured.items()),
        table(map(cost_cells, costs), title="a step, without the model"),
        conditions=conditions,
        targets=targets(measured["motet"]),
        check=arguments.check,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

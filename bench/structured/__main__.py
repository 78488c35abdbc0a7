"""Measures the cost of a JSON schema for every choice: tokens a second with it and without it, on one server.

For n = 1, 8, 32 it sends a request with n choices, in turn free and with a schema that no answer completes, so that
both write equally many tokens. The ratio compares two requests that follow each other. Then it measures a step's time
for masks, without a model. With `--vllm` it measures vLLM's CPU build too.

Floor (`--check` fails when it is missed): with the schema at n = 32 at least 0.9 of the tokens a second.

Run: python -m bench.structured [--ns 1,8,32] [--repeats 5] [--url URL] [--vllm VENV] [--check]
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

from bench.client.load import Load, LoadSetup, open_client
from bench.client.prompts import TEXT, FreshPrompts, new_seed
from bench.program.command_line import load_parser, progress
from bench.program.report import Bound, Floor, Table, columns_table, machine, tell
from bench.servers.motet_server import motet_server
from bench.servers.peer import all_cores, peer_server
from bench.servers.vllm import MODEL_NAME, VLLMSetup
from bench.structured.step_cost import SCHEMA, StepCost, step_costs
from motet.models.model_source import resolve
from motet.settings.server_config import cache_folder, environment
from motet.text.tokenizer import Tokenizer

FLOOR_N = 32
FLOOR_RATIO = 0.9
COST_STEPS = 200


@dataclass
class Row:
    """Tokens a second for one n, one figure for each repeat."""

    n: int
    free: list[float] = field(default_factory=list)
    bound: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Returns the ratio of each pair of requests that follow each other, so that other load matters less."""
        return [bound / free for bound, free in zip(self.bound, self.free, strict=True)]

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    def record(self) -> dict[str, object]:
        return asdict(self) | {"ratio": self.ratio}


async def with_schema(body: dict[str, object]) -> dict[str, object]:
    """Adds the schema to a body, and removes `ignore_eos`, which would make vLLM write beyond the schema's end."""
    return {**body, "ignore_eos": False, "structured_outputs": {"json": SCHEMA}}


async def measure(url: str, setup: LoadSetup, tokens: list[int], *, model: str | None = None) -> list[Row]:
    """`model`: the model's name in requests, for a server that is not ours."""
    rows = []
    async with open_client(url) as client:
        free = Load(client, setup.max_tokens, model=model, count_blocks=False, seeded=model is None)
        bound = replace(free, prepare=with_schema)
        fresh = FreshPrompts(tokens, seed=new_seed())
        for load in (free, bound):  # warm-up: the grammar is compiled
            await load.group(fresh.next(setup.prompt_tokens), max(setup.ns), seed=0)
        for n in setup.ns:
            row = Row(n)
            for repeat in range(setup.repeats):
                prompt = fresh.next(setup.prompt_tokens)
                for load, figures in ((free, row.free), (bound, row.bound)):
                    figures.append((await load.group(prompt, n, seed=repeat)).decode_tokens_per_s)
            rows.append(row)
            progress(f"n = {n}: {median(row.free):.0f} free, {median(row.bound):.0f} with the schema")
    return rows


def table_of(rows: Sequence[Row], title: str) -> Table:
    heads = [("n", ""), ("free tokens/s", ".0f"), ("schema tokens/s", ".0f")]
    heads += [("ratio", ".2f"), ("lowest", ".2f"), ("highest", ".2f")]
    cells = [(row.n, median(row.free), median(row.bound), row.ratio, min(row.ratios), max(row.ratios)) for row in rows]
    return columns_table(heads, cells, title=title)


def cost_table(costs: Sequence[StepCost]) -> Table:
    heads = [("n", ""), *((f"{part} ms", ".2f") for part in ("fill", "apply", "consume", "all"))]
    cells = [(cost.n, cost.fill_ms, cost.apply_ms, cost.consume_ms, cost.total_ms) for cost in costs]
    return columns_table(heads, cells, title="a step, without the model")


def floors(rows: Sequence[Row]) -> list[Floor]:
    ratio = next((row.ratio for row in rows if row.n == FLOOR_N), None)
    return [Floor(f"tokens/s with a schema over free, n = {FLOOR_N}", ratio, FLOOR_RATIO, Bound.AT_LEAST)]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = load_parser("bench.structured", __doc__, ns=(1, 8, 32), prompt_tokens=256, max_tokens=160, repeats=5)
    parser.add_argument("--url", help="a running server, in place of one started here")
    parser.add_argument("--vllm", type=Path, metavar="VENV", help="virtual environment with vLLM, to measure it too")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    setup, about = LoadSetup.of(arguments), machine()
    folder = resolve(arguments.model, cache=cache_folder(environment()), revision=None, say=progress)
    tokens = Tokenizer.load(folder).encode(TEXT)
    with ExitStack() as stack:
        url = arguments.url or stack.enter_context(motet_server(arguments.model)).url
        measured = {"motet": asyncio.run(measure(url, setup, tokens))}
    if arguments.vllm is not None:
        with peer_server(VLLMSetup(arguments.vllm, folder, all_cores())) as peer:
            peer.wait_until_ready()
            measured["vllm"] = asyncio.run(measure(peer.url, setup, tokens, model=MODEL_NAME))
    costs = step_costs(folder, setup.ns, steps=COST_STEPS)
    servers = {name: [row.record() for row in rows] for name, rows in measured.items()}
    return tell(
        {"setup": asdict(setup), "servers": servers, "costs": [asdict(cost) for cost in costs]},
        *(table_of(rows, name) for name, rows in measured.items()),
        cost_table(costs),
        about=about,
        floors=floors(measured["motet"]),
        check=arguments.check,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

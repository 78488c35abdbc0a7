"""What it costs that every choice follows a JSON schema: tokens a second with it and without it, on one server.

For n = 1, 8, 32: a request with n choices, in turn free and with a schema that no answer completes, so that both write
equally many tokens; the ratio is that of neighbours in time. Then what a step spends on masks, without a model. With
`--vllm` the same is asked of vLLM's CPU build.

Floor (`--check` fails when it is missed): with the schema at n = 32 at least 0.9 of the tokens a second.

Run: python -m bench.structured [--ns 1,8,32] [--repeats 5] [--url URL] [--vllm VENV] [--check]
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.floor import Bound, Floor
from bench.fork import connected, numbers, progress, server
from bench.load import Load
from bench.machine import machine
from bench.prompt import TEXT, FreshPrompts, seed_of_this_run
from bench.structured_cost import SCHEMA, StepCost, step_costs
from bench.vllm import MODEL_NAME, VLLMSetup, all_cores, vllm_server
from motet.config import cache_folder, environment
from motet.models import resolve
from motet.models.smollm2 import DEFAULT_MODEL
from motet.text.tokenizer import Tokenizer

FLOOR_N = 32
FLOOR_RATIO = 0.9
COST_STEPS = 200


@dataclass(frozen=True)
class Setup:
    """What is measured."""

    ns: tuple[int, ...]
    prompt_tokens: int
    max_tokens: int
    repeats: int


@dataclass
class Row:
    """Tokens a second of one n, repeat by repeat."""

    n: int
    free: list[float] = field(default_factory=list)
    bound: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Of neighbours in time, so that what else the machine does matters less; the median."""
        return median(bound / free for bound, free in zip(self.bound, self.free, strict=True))

    def record(self) -> dict[str, object]:
        return asdict(self) | {"ratio": self.ratio}


async def with_schema(body: dict[str, object]) -> dict[str, object]:
    """vLLM would take `ignore_eos` and write on."""
    return {**body, "ignore_eos": False, "structured_outputs": {"json": SCHEMA}}


async def measure(url: str, setup: Setup, tokens: list[int], *, model: str | None = None) -> list[Row]:
    """`model`: of a server that is none of ours."""
    rows = []
    async with connected(url) as client:
        free = Load(client, setup.max_tokens, model=model, count_blocks=False, seeded=model is None)
        bound = replace(free, prepare=with_schema)
        fresh = FreshPrompts(tokens, seed=seed_of_this_run())
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
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for head in ("n", "free tokens/s", "schema tokens/s", "ratio", "lowest", "highest"):
        table.add_column(head, justify="right")
    for row in rows:
        ratios = [bound / free for bound, free in zip(row.bound, row.free, strict=True)]
        figures = (median(row.free), median(row.bound))
        table.add_row(
            str(row.n), *(f"{x:.0f}" for x in figures), *(f"{x:.2f}" for x in (row.ratio, min(ratios), max(ratios)))
        )
    return table


def cost_table(costs: Sequence[StepCost]) -> Table:
    table = Table(box=None, pad_edge=False, title="a step, without the model", title_justify="left")
    for head in ("n", "fill ms", "apply ms", "consume ms", "all ms"):
        table.add_column(head, justify="right")
    for cost in costs:
        figures = (cost.fill_ms, cost.apply_ms, cost.consume_ms, cost.total_ms)
        table.add_row(str(cost.n), *(f"{x:.2f}" for x in figures))
    return table


def floors(rows: Sequence[Row]) -> list[Floor]:
    ratio = next((row.ratio for row in rows if row.n == FLOOR_N), None)
    return [Floor(f"tokens/s with a schema over free, n = {FLOOR_N}", ratio, FLOOR_RATIO, Bound.AT_LEAST)]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--url", help="a running server, in place of one started here")
    parser.add_argument("--vllm", type=Path, metavar="VENV", help="a virtual environment that has vLLM")
    parser.add_argument("--ns", type=numbers, default=(1, 8, 32), help="numbers of choices, e.g. 1,8,32")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=160, help="tokens of a choice")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="fail when the floor is missed")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    setup = Setup(arguments.ns, arguments.prompt_tokens, arguments.max_tokens, arguments.repeats)
    at_start = machine()
    folder = resolve(arguments.model, cache=cache_folder(environment()), revision=None, say=progress).path
    tokens = Tokenizer.load(folder).encode(TEXT)
    with ExitStack() as stack:
        url = arguments.url or stack.enter_context(server(arguments.model)).url
        measured = {"motet": asyncio.run(measure(url, setup, tokens))}
    if arguments.vllm is not None:
        with vllm_server(VLLMSetup(arguments.vllm, folder, all_cores())) as peer:
            peer.wait_until_ready()
            measured["vllm"] = asyncio.run(measure(peer.url, setup, tokens, model=MODEL_NAME))
    costs, kept = step_costs(folder, setup.ns, steps=COST_STEPS), floors(measured["motet"])
    console = Console(width=None if sys.stdout.isatty() else 120)
    for name, value in at_start.items():
        console.print(f"{name:12} {value}", highlight=False, soft_wrap=True)
    for name, rows in measured.items():
        console.print(table_of(rows, name))
    console.print(cost_table(costs))
    for floor in kept:
        console.print(floor.line(), highlight=False)
    record = {name: [row.record() for row in rows] for name, rows in measured.items()}
    print(
        json.dumps(
            {"machine": at_start, "setup": asdict(setup), "servers": record}
            | {"costs": [asdict(cost) for cost in costs], "floors": [floor.record() for floor in kept]}
        )
    )
    return 1 if arguments.check and not all(floor.met for floor in kept) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

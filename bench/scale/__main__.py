"""Measures how the costs of a server grow with its work: no cost is allowed to grow faster than the work.

    choices    one request with n = 1, 2, 4 ... 256 choices: the time of a step, in which every choice gets a token
    groups     1, 2, 4 ... 64 requests with 8 choices each, sent at once: the total time

None of the prompts is cached. The exponent of a cost, log(cost) over log(work), shows its growth from row to row: 0 if
more work costs nothing, 1 if the cost is proportional. Prints two tables, and JSON on the last line.

Limit (--check fails above it): an exponent of 1.1 from any row to the next. 0.1 more than 1 allows for noise.

Run: python -m bench.scale [--url URL] [--ns 1,2,4] [--groups 1,2,4] [--repeats 3] [--check] [--plot FOLDER]
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import uvloop

from bench.client.fresh_prompts import TEXT, FreshPrompts, new_seed
from bench.client.load import load_parser
from bench.program.command_line import numbers, progress
from bench.program.report import machine, print_report
from bench.scale.growth import CHOICE_COSTS, GROUP_COSTS, WorkPoint, WorkSeries
from bench.servers.compared_server import ComparedServer, RequestStyle, connect_server, median_sample
from motet.deploy.child import ChildServer

NS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GROUPS = (1, 2, 4, 8, 16, 32, 64)
SERVER_FLAGS = "--max-n 256 --max-num-seqs 512 --kv-cache-gb 4"
"""Flags for the largest rows: 64 groups of 8 are 512 choices, which take 3 GB of KV with prompts of 1340 tokens."""
WARM_UP_N = 8


class ScaleBench:
    """Sends more and more work to one server."""

    def __init__(self, server: ComparedServer, fresh: FreshPrompts, arguments: argparse.Namespace) -> None:
        self._server = server
        self._fresh = fresh
        self._arguments = arguments

    async def measure(self) -> list[WorkSeries]:
        await self.point(1, WARM_UP_N, self._arguments.prompt_tokens, work=0)
        choices = [await self.point(1, n, self._arguments.prompt_tokens, work=n) for n in self._arguments.ns]
        group_size, length = self._arguments.choices_of_a_group, self._arguments.group_prompt_tokens
        groups = [await self.point(count, group_size, length, work=count) for count in self._arguments.groups]
        return [WorkSeries("choices", CHOICE_COSTS, choices), WorkSeries("groups", GROUP_COSTS, groups)]

    async def point(self, groups: int, n: int, length: int, *, work: int) -> WorkPoint:
        """Returns the medians of the repeats, each with new prompts."""
        samples = []
        for repeat in range(self._arguments.repeats):
            prompts = [self._fresh.next(length) for _ in range(groups)]
            samples.append(await self._server.timed(prompts, n, max_tokens=self._arguments.max_tokens, seed=repeat))
        typical = median_sample(samples)
        progress(f"{groups} x n = {n}: {typical.timing.total_s:.2f} s")
        return WorkPoint(work, self._arguments.max_tokens, typical.timing, typical.peak_mib)


async def scale(url: str, arguments: argparse.Namespace) -> int:
    """Runs the benchmark and returns the exit code."""
    load = f"prompts of {arguments.prompt_tokens} tokens, {arguments.group_prompt_tokens} for several groups"
    shape = f"{arguments.max_tokens} tokens per choice, {arguments.choices_of_a_group} choices per group"
    conditions = {**machine(), "load": f"{load}, {shape}", "seed": str(arguments.seed)}
    async with connect_server("ours", url, RequestStyle(settle_s=arguments.settle)) as server:
        fresh = FreshPrompts(await server.load(1).tokens_of(TEXT), seed=arguments.seed)
        all_series = await ScaleBench(server, fresh, arguments).measure()
    if arguments.plot:
        plot(all_series, arguments.plot)
    shown = [part for series in all_series for part in series.shown()]
    record = {"series": [series.record() for series in all_series]}
    checked = [target for series in all_series for target in series.targets()]
    return print_report(record, *shown, conditions=conditions, targets=checked, check=arguments.check)


def plot(all_series: Sequence[WorkSeries], folder: Path) -> None:
    """Draws a picture for each series: total time, time per token, peak memory."""
    from bench.program.plot import Curve, PlotPanel, save  # matplotlib is an extra

    for series in all_series:
        curves = (
            ("total", "s", [(p.work, p.timing.total_s) for p in series.points]),
            ("time per token", "ms", [(p.work, p.ms_per_token) for p in series.points]),
            ("peak memory", "MiB", [(p.work, p.peak_mib) for p in series.points if p.peak_mib is not None]),
        )
        panels = [PlotPanel(title, series.work, unit, [Curve(title, points)]) for title, unit, points in curves]
        save(panels, folder / f"scale-{series.work}.png")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = load_parser("bench.scale", __doc__, ns=NS, prompt_tokens=1340, max_tokens=64, repeats=3)
    parser.add_argument("--url", help="a running server to use, instead of starting one")
    parser.add_argument(
        "--server-arguments", default=SERVER_FLAGS, help="flags of the server to start (default: %(default)s)"
    )
    parser.add_argument("--groups", type=numbers, default=GROUPS, help="numbers of requests sent at once")
    parser.add_argument("--choices-of-a-group", type=int, default=8, help="n of these requests")
    parser.add_argument("--group-prompt-tokens", type=int, default=256, help="number of tokens of their prompts")
    parser.add_argument("--seed", type=int, default=new_seed(), help="seed of the prompts")
    parser.add_argument("--settle", type=float, default=0.5, help="pause before each request in seconds")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="folder for scale-choices.png and scale-groups.png")
    arguments = parser.parse_args(argv)
    if arguments.plot and not find_spec("matplotlib"):
        parser.error("--plot needs matplotlib: pip install 'motet[bench]'")
    return arguments


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    with ExitStack() as stack:
        url = arguments.url
        if url is None:
            url = stack.enter_context(ChildServer([arguments.model, *shlex.split(arguments.server_arguments)])).url
        return uvloop.run(scale(url, arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

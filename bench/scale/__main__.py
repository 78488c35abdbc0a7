"""Measures how a server's costs grow with its work: none may grow faster than the work.

    choices    one request with n = 1, 2, 4 ... 256 choices: the time of a step, in which every choice gets a token
    groups     1, 2, 4 ... 64 requests with 8 choices each, sent at once: the total

No cache has any of the prompts. The exponent of a cost, log(cost) over log(work), shows its growth from row to row: 0
if more work costs nothing, 1 if it costs in proportion. Prints two tables, and JSON on the last line.

Limit (--check fails above it): an exponent of 1.1 from any row to the next; 0.1 is for noise.

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

from bench.client.prompts import TEXT, FreshPrompts, new_seed
from bench.program.command_line import load_parser, numbers, progress
from bench.program.report import machine, tell
from bench.scale.growth import OF_CHOICES, OF_GROUPS, Point, Series
from bench.servers.compared_server import ComparedServer, RequestStyle, connect_server, median_sample
from motet.deploy.child import ChildServer

NS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GROUPS = (1, 2, 4, 8, 16, 32, 64)
ROOM = "--max-n 256 --max-num-seqs 512 --kv-cache-gb 4"
"""Flags for the largest rows: 64 groups of 8 are 512 choices, which with prompts of 1340 tokens take 3 GB of KV."""
WARM_UP_N = 8


class ScaleBench:
    """Gives one server more and more work."""

    def __init__(self, server: ComparedServer, fresh: FreshPrompts, arguments: argparse.Namespace) -> None:
        self._server = server
        self._fresh = fresh
        self._arguments = arguments

    async def measure(self) -> list[Series]:
        await self.point(1, WARM_UP_N, self._arguments.prompt_tokens, work=0)
        choices = [await self.point(1, n, self._arguments.prompt_tokens, work=n) for n in self._arguments.ns]
        group_size, length = self._arguments.choices_of_a_group, self._arguments.group_prompt_tokens
        groups = [await self.point(count, group_size, length, work=count) for count in self._arguments.groups]
        return [Series("choices", OF_CHOICES, choices), Series("groups", OF_GROUPS, groups)]

    async def point(self, groups: int, n: int, length: int, *, work: int) -> Point:
        """Returns the medians of the repeats, each with prompts of its own."""
        samples = []
        for repeat in range(self._arguments.repeats):
            prompts = [self._fresh.next(length) for _ in range(groups)]
            samples.append(await self._server.timed(prompts, n, max_tokens=self._arguments.max_tokens, seed=repeat))
        typical = median_sample(samples)
        progress(f"{groups} x n = {n}: {typical.timing.total_s:.2f} s")
        return Point(work, self._arguments.max_tokens, typical.timing, typical.peak_mib)


async def scale(url: str, arguments: argparse.Namespace) -> int:
    """Runs the whole benchmark and returns the exit code."""
    load = f"prompts of {arguments.prompt_tokens} tokens, {arguments.group_prompt_tokens} where groups are counted"
    shape = f"{arguments.max_tokens} tokens a choice, {arguments.choices_of_a_group} choices a group"
    conditions = {**machine(), "load": f"{load}, {shape}", "seed": str(arguments.seed)}
    async with connect_server("ours", url, RequestStyle(settle_s=arguments.settle)) as server:
        fresh = FreshPrompts(await server.load(1).tokens_of(TEXT), seed=arguments.seed)
        series = await ScaleBench(server, fresh, arguments).measure()
    if arguments.plot:
        plot(series, arguments.plot)
    shown = [part for one in series for part in one.shown()]
    record = {"series": [one.record() for one in series]}
    promised = [floor for one in series for floor in one.floors()]
    return tell(record, *shown, about=conditions, floors=promised, check=arguments.check)


def plot(series: Sequence[Series], folder: Path) -> None:
    """Draws a picture for each series: total time, time for each token, peak memory."""
    from bench.program.plot import Curve, Panel, save  # matplotlib is an extra

    for one in series:
        curves = (
            ("total", "s", [(p.work, p.timing.total_s) for p in one.points]),
            ("cost of a token", "ms", [(p.work, p.ms_per_token) for p in one.points]),
            ("peak memory", "MiB", [(p.work, p.peak_mib) for p in one.points if p.peak_mib is not None]),
        )
        panels = [Panel(title, one.work, unit, [Curve(title, points)]) for title, unit, points in curves]
        save(panels, folder / f"scale-{one.work}.png")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = load_parser("bench.scale", __doc__, ns=NS, prompt_tokens=1340, max_tokens=64, repeats=3)
    parser.add_argument("--url", help="a running server, in place of one started here")
    parser.add_argument("--server-arguments", default=ROOM, help=f"flags of the server started here (default: {ROOM})")
    parser.add_argument("--groups", type=numbers, default=GROUPS, help="numbers of requests at once")
    parser.add_argument("--choices-of-a-group", type=int, default=8, help="n of these requests")
    parser.add_argument("--group-prompt-tokens", type=int, default=256, help="tokens of their prompts")
    parser.add_argument("--seed", type=int, default=new_seed(), help="seed of the prompts")
    parser.add_argument("--settle", type=float, default=0.5, help="seconds of quiet before each request")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write scale-choices.png and scale-groups.png")
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

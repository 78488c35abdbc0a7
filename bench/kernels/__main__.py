"""Measures the ways to multiply on this CPU, each compared with Motet's: microseconds, GB/s of weights, GFLOP/s.

For each shape and number of rows all ways take turns, so that other load on the machine affects all of them alike.
Figures are medians over the turns. "/ ours" is the time of a way divided by the time of Motet's bf16 product. `--block`
compares entire layers with `torch.compile` instead (`bench.kernels.compiled_layers`). Prints a table, and JSON on the
last line.

Run: python -m bench.kernels [--rows 1,8] [--shapes 576x960] [--ways ours,torch] [--repeats 5] [--threads 2] [--block]
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import torch

from bench.kernels.compiled_layers import measure_layers
from bench.kernels.multiplications import BYTES, ONEDNN_PACKED, WAYS, Multiply
from bench.kernels.weight_copies import weights_in_huge_pages
from bench.program.command_line import benchmark_parser, numbers
from bench.program.report import Cells, machine, print_report, table

SHAPES = ("576x960", "576x3072", "1536x576", "576x49152", "4096x4096")
"""Depth x columns: queries, keys and values; gate and up; down; head of the default model; a large matrix."""
ROWS = (1, 2, 4, 8, 12, 32, 128, 512)
OURS = "ours"
TURN_S = 0.02
SETTLE_S = 0.03


@dataclass(frozen=True)
class ProductCost:
    shape: str
    rows: int
    way: str
    us: float
    gb_per_s: float
    """Rate at which weights are read from memory."""
    gflop_per_s: float
    relative_time: float
    """Time of the way divided by the time of Motet's bf16 product. Motet's product is faster if it is above 1."""

    def cells(self) -> Cells:
        return [
            ("depth x columns", self.shape, "<"),
            ("rows", self.rows, ""),
            ("way", self.way, "<"),
            ("us", self.us, ".1f"),
            ("GB/s", self.gb_per_s, ".1f"),
            ("GFLOP/s", self.gflop_per_s, ".0f"),
            ("/ ours", self.relative_time, ".2f"),
        ]


def parse_shape(text: str) -> tuple[int, int]:
    depth, _, columns = text.partition("x")
    return int(depth), int(columns)


def costs_of(shape: str, rows: int, seconds: Mapping[str, float]) -> list[ProductCost]:
    """Returns the costs of all ways. `seconds` are the times of one product by way."""
    depth, columns = parse_shape(shape)
    return [
        ProductCost(
            shape,
            rows,
            way,
            us=s * 1e6,
            gb_per_s=BYTES.get(way, 2.0) * depth * columns / s / 1e9,
            gflop_per_s=2.0 * rows * depth * columns / s / 1e9,
            relative_time=s / seconds[OURS],
        )
        for way, s in seconds.items()
    ]


class Turns:
    """Times one way. Each product uses the next copy of the weights."""

    def __init__(self, multiply: Multiply, copies: int, x: torch.Tensor) -> None:
        self._multiply, self._copies, self._x = multiply, copies, x
        self._next = 0
        self._calls = max(3, int(TURN_S / self.turn(3)))

    def turn(self, calls: int | None = None) -> float:
        """Returns the seconds of one product."""
        calls = calls or self._calls
        self._settle()
        begin = time.perf_counter()
        self._run(calls)
        return (time.perf_counter() - begin) / calls

    def _settle(self) -> None:
        """Waits, because the threads of the way before still spin for some milliseconds on the cores."""
        time.sleep(SETTLE_S)
        self._run(2)

    def _run(self, calls: int) -> None:
        for _ in range(calls):
            self._multiply(self._next, self._x)
            self._next = (self._next + 1) % self._copies


@torch.inference_mode()
def measure(shape: str, rows: Sequence[int], ways: Sequence[str], repeats: int) -> list[ProductCost]:
    depth, columns = parse_shape(shape)
    weights = weights_in_huge_pages(depth, columns)
    packed = {way: WAYS[way](weights, max(rows)) for way in ways if way != ONEDNN_PACKED}
    costs = []
    for count in rows:
        x = torch.randn(count, depth).bfloat16()
        if ONEDNN_PACKED in ways:
            packed[ONEDNN_PACKED] = WAYS[ONEDNN_PACKED](weights, count)
        turns = {way: Turns(packed[way], len(weights), x) for way in ways}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(repeats):
            for way, turn in turns.items():
                seconds[way].append(turn.turn())
        costs += costs_of(shape, count, {way: median(times) for way, times in seconds.items()})
    return costs


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = benchmark_parser("bench.kernels", __doc__)
    parser.add_argument("--shapes", type=lambda text: tuple(text.split(",")), default=SHAPES, help="depth x columns")
    parser.add_argument("--rows", type=numbers, default=ROWS, help="numbers of rows, e.g. 1,8")
    parser.add_argument("--ways", type=lambda text: tuple(text.split(",")), default=tuple(WAYS), help="names of ways")
    parser.add_argument("--repeats", type=int, default=5, help="number of turns of each way")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="number of threads of a product")
    parser.add_argument("--block", action="store_true", help="measure entire layers, also with torch.compile")
    args = parser.parse_args(argv)
    if OURS not in args.ways or not set(args.ways) <= WAYS.keys():
        parser.error(f"--ways is {','.join(args.ways)}; choose from {', '.join(WAYS)}, with {OURS!r} among them")
    return args


def main() -> None:
    args = parse()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    conditions = machine()
    if args.block:
        layers = measure_layers(args.repeats)
        shown = table(cost.cells() for cost in layers)
        print_report({"blocks": [asdict(cost) for cost in layers]}, shown, conditions=conditions)
        return
    costs = [cost for shape in args.shapes for cost in measure(shape, args.rows, args.ways, args.repeats)]
    shown = table(cost.cells() for cost in costs)
    print_report({"figures": [asdict(cost) for cost in costs]}, shown, conditions=conditions)


if __name__ == "__main__":
    main()

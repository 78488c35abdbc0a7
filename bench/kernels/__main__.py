"""Measures the ways to multiply on this CPU, each against ours: microseconds, GB/s of weights, GFLOP/s.

For each shape and number of rows all ways take turns, so that other load on the machine affects all alike. Figures are
medians over turns. "against ours" is a way's time divided by that of our bf16 product. `--block` compares whole layers
with `torch.compile` instead (`bench.kernels.blocked_products`). Prints a table, and JSON on the last line.

Run: python -m bench.kernels [--rows 1,8] [--shapes 576x960] [--ways ours,torch] [--repeats 5] [--threads 2] [--block]
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from statistics import median

import torch

from bench.kernels.blocked_products import block_table, measure_blocks
from bench.kernels.multiplications import BYTES, ONEDNN_PACKED, WAYS, Multiply
from bench.program.command_line import numbers
from bench.program.report import Table, columns_table, machine, tell
from motet.engines.native.cpu.panels import Arena

SHAPES = ("576x960", "576x3072", "1536x576", "576x49152", "4096x4096")
"""Depth x columns: queries, keys and values; gate and up; down; head of the default model; and a large one."""
ROWS = (1, 2, 4, 8, 12, 32, 128, 512)
OURS = "ours"
CACHED_BYTES = 2**28
"""Bytes of bf16 weights in all copies: many times a last-level cache, also as int8."""
TURN_S = 0.02
SETTLE_S = 0.03


@dataclass(frozen=True)
class Figure:
    shape: str
    rows: int
    way: str
    us: float
    gb_per_s: float
    """Rate at which weights are read from memory."""
    gflop_per_s: float
    against_ours: float
    """Its time divided by ours; above 1, ours is quicker."""


def parse_shape(text: str) -> tuple[int, int]:
    depth, _, columns = text.partition("x")
    return int(depth), int(columns)


def num_copies(depth: int, columns: int) -> int:
    return max(2, -(-CACHED_BYTES // (2 * depth * columns)))


def figures_of(shape: str, rows: int, seconds: Mapping[str, float]) -> list[Figure]:
    """`seconds`: time of one product by way."""
    depth, columns = parse_shape(shape)
    return [
        Figure(
            shape,
            rows,
            way,
            us=s * 1e6,
            gb_per_s=BYTES.get(way, 2.0) * depth * columns / s / 1e9,
            gflop_per_s=2.0 * rows * depth * columns / s / 1e9,
            against_ours=s / seconds[OURS],
        )
        for way, s in seconds.items()
    ]


class Turns:
    """Times one way; each product uses the next copy of the weights."""

    def __init__(self, multiply: Multiply, copies: int, x: torch.Tensor) -> None:
        self._multiply, self._copies, self._x = multiply, copies, x
        self._next = 0
        self._calls = max(3, int(TURN_S / self.turn(3)))

    def turn(self, calls: int | None = None) -> float:
        """Returns seconds of one product."""
        calls = calls or self._calls
        self._settle()
        begin = time.perf_counter()
        self._go(calls)
        return (time.perf_counter() - begin) / calls

    def _settle(self) -> None:
        """Waits, because the threads of the way before spin for some milliseconds on the cores that this one needs."""
        time.sleep(SETTLE_S)
        self._go(2)

    def _go(self, calls: int) -> None:
        for _ in range(calls):
            self._multiply(self._next, self._x)
            self._next = (self._next + 1) % self._copies


def in_huge_pages(depth: int, columns: int) -> list[torch.Tensor]:
    """Returns copies of the weights in huge pages, like the engine's; other memory would have them only by chance."""
    count = num_copies(depth, columns)
    arena = Arena(2 * depth * columns * count, count)
    weights = [arena.take((columns, depth), torch.bfloat16) for _ in range(count)]
    for weight in weights:
        weight.normal_()
    return weights


@torch.inference_mode()
def measure(shape: str, rows: Sequence[int], ways: Sequence[str], repeats: int) -> list[Figure]:
    depth, columns = parse_shape(shape)
    weights = in_huge_pages(depth, columns)
    packed = {way: WAYS[way](weights, max(rows)) for way in ways if way != ONEDNN_PACKED}
    figures = []
    for count in rows:
        x = torch.randn(count, depth).bfloat16()
        if ONEDNN_PACKED in ways:
            packed[ONEDNN_PACKED] = WAYS[ONEDNN_PACKED](weights, count)
        turns = {way: Turns(packed[way], len(weights), x) for way in ways}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(repeats):
            for way, turn in turns.items():
                seconds[way].append(turn.turn())
        figures += figures_of(shape, count, {way: median(taken) for way, taken in seconds.items()})
    return figures


def table_of(figures: Sequence[Figure]) -> Table:
    heads = [("depth x columns", "<"), ("rows", ""), ("way", "<"), ("us", ".1f"), ("GB/s", ".1f"), ("GFLOP/s", ".0f")]
    return columns_table([*heads, ("against ours", ".2f")], map(astuple, figures))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="ways to multiply on this CPU")
    parser.add_argument("--shapes", type=lambda text: tuple(text.split(",")), default=SHAPES, help="depth x columns")
    parser.add_argument("--rows", type=numbers, default=ROWS, help="numbers of rows, e.g. 1,8")
    parser.add_argument("--ways", type=lambda text: tuple(text.split(",")), default=tuple(WAYS), help="names of ways")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each way")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of a product")
    parser.add_argument("--block", action="store_true", help="whole layers, against torch.compile")
    args = parser.parse_args(argv)
    if OURS not in args.ways or not set(args.ways) <= WAYS.keys():
        parser.error(f"--ways is {','.join(args.ways)}; choose from {', '.join(WAYS)}, with {OURS!r} among them")
    return args


def main() -> None:
    args = parse()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    about = machine()
    if args.block:
        blocks = measure_blocks(args.repeats)
        tell({"blocks": [asdict(block) for block in blocks]}, block_table(blocks), about=about)
        return
    figures = [f for shape in args.shapes for f in measure(shape, args.rows, args.ways, args.repeats)]
    tell({"figures": [asdict(figure) for figure in figures]}, table_of(figures), about=about)


if __name__ == "__main__":
    main()

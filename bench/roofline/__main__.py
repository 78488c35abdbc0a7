"""Measures how near to the limits of this machine a step of the engine on the CPU is, and each of its parts.

The same run measures the limits: the rate at which both threads read memory of the size of the weights, and the best
rate of a large bf16 product, ours or oneDNN's. No part can be quicker than its bytes at the one rate and its operations
at the other allow; its share is that time over its own. Everything takes turns, and of each the median counts: memory
is quick for a moment now and then, and the least of many reads is luck that no step has from end to end. With
`--threads 1` times are CPU time, which other programs disturb less.

A step's bytes and operations are what it must cost: every weight, key and value once, the operations of all products
and of attention; the last layer of a prompt counts only for the row whose logits are wanted. Prints tables, and JSON
on the last line.

Run: python -m bench.roofline [--ns 1,8,32,128] [--prompt-tokens 1340] [--repeats 7] [--threads 2] [--quick] [--check]
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import torch

from bench.kernels.multiplications import ONEDNN_PACKED, WAYS, Multiply
from bench.kernels.weight_copies import weights_in_huge_pages
from bench.program.command_line import numbers, progress
from bench.program.report import Bound, Floor, Table, columns_table, machine, tell
from bench.roofline.step_parts import FORWARD, WHOLE, Stage, Times, Work, parts_from
from motet.models.model_source import resolve
from motet.models.smollm2 import DEFAULT_MODEL
from motet.settings.server_config import cache_folder, environment

NS = (1, 8, 32, 128)
LARGE = 4096
"""Depth and columns of the product that measures the rate of products."""
LARGE_ROWS = 512
TILES = 2000
"""Tiles of the product from the nearest cache: 0.2 GFLOP of bf16."""
WARM_UP = 24
"""Tokens that choices have written before a step of theirs is measured."""
STEPS_A_TURN = 3
PREFILL = "prefill"


@dataclass(frozen=True)
class Limits:
    """The machine's best rates."""

    bytes_per_s: float
    operations_per_s: float
    """Of the best product with large matrices."""
    product: str
    """Whose product that is."""
    peak_operations_per_s: float
    """Of the instruction, with numbers from the nearest cache."""

    def least_s(self, work: Work) -> float:
        """Returns the time that a part must take at least."""
        return max(work.bytes_read / self.bytes_per_s, work.operations / self.operations_per_s)


class Noted(defaultdict[str, list[float]]):
    """The seconds of everything that was timed, by its name."""

    def __init__(self) -> None:
        super().__init__(list)

    def note(self, times: Times) -> None:
        for name, seconds in times.items():
            self[name].append(seconds)

    def medians(self) -> Times:
        return {name: median(seconds) for name, seconds in self.items()}


class LimitTurns:
    """Measures the machine's rates, one turn after the other."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._weights = stage.model.memory.arena.memory
        self._x = torch.randn(LARGE_ROWS, LARGE).bfloat16()
        large = weights_in_huge_pages(LARGE, LARGE)
        self._products: dict[str, Multiply] = {
            name: WAYS[name](large, LARGE_ROWS) for name in ("ours", ONEDNN_PACKED) if name in WAYS
        }
        self._noted = Noted()
        self._tile_operations = 0.0

    @torch.inference_mode()
    def turn(self) -> None:
        stage, clock = self._stage, self._stage.clock
        begin = clock()
        stage.kernels.motet_read_memory(stage.handle, self._weights.data_ptr(), len(self._weights))
        read = clock()
        self._tile_operations = stage.kernels.motet_multiply_tiles(stage.handle, TILES)
        self._noted.note({"read": read - begin, "tiles": clock() - read})
        for name, multiply in self._products.items():
            begin = clock()
            multiply(0, self._x)
            self._noted.note({name: clock() - begin})

    def limits(self) -> Limits:
        seconds = self._noted.medians()
        product = min(self._products, key=lambda name: seconds[name])
        return Limits(
            bytes_per_s=len(self._weights) / seconds["read"],
            operations_per_s=2.0 * LARGE_ROWS * LARGE**2 / seconds[product],
            product=product,
            peak_operations_per_s=self._tile_operations / seconds["tiles"],
        )


@dataclass(frozen=True)
class Part:
    """A part of a step, or a whole one."""

    case: str
    part: str
    ms: float
    of_step: float
    gigabytes: float | None
    gflop: float | None
    least_ms: float | None
    """The time that the machine's rates allow; None for a part that only costs time."""
    of_limit: float | None
    of_bandwidth: float | None
    of_products: float | None


def part_of(case: str, name: str, seconds: float, *, whole_s: float, work: Work | None, limits: Limits) -> Part:
    if work is None:
        return Part(case, name, seconds * 1e3, seconds / whole_s, None, None, None, None, None, None)
    least_s = limits.least_s(work)
    return Part(
        case,
        name,
        ms=seconds * 1e3,
        of_step=seconds / whole_s,
        gigabytes=work.bytes_read / 1e9,
        gflop=work.operations / 1e9,
        least_ms=least_s * 1e3,
        of_limit=least_s / seconds,
        of_bandwidth=work.bytes_read / seconds / limits.bytes_per_s,
        of_products=work.operations / seconds / limits.operations_per_s,
    )


def parts_of(case: str, times: Mapping[str, float], works: Mapping[str, Work], limits: Limits) -> Iterator[Part]:
    """Yields the parts of a step, and last the whole step."""
    whole_s = times[WHOLE]
    for name in (name for name in times if name not in {FORWARD, WHOLE}):
        yield part_of(case, name, times[name], whole_s=whole_s, work=works.get(name), limits=limits)
    total = sum(works.values(), Work())
    for name in (FORWARD, WHOLE):
        yield part_of(case, name, times[name], whole_s=whole_s, work=total, limits=limits)


@torch.inference_mode()
def measure(stage: Stage, ns: Sequence[int], repeats: int) -> tuple[Limits, list[Part]]:
    limit_turns = LimitTurns(stage)
    times = {case: Noted() for case in (PREFILL, *map(case_of, ns))}
    works: dict[str, Mapping[str, Work]] = {}
    stage.begin(1)  # memory is touched for the first time
    for turn in range(repeats):
        progress(f"turn {turn + 1} of {repeats}")
        limit_turns.turn()
        times[PREFILL].note(stage.begin(1))
        times[PREFILL].note(stage.again())
        works[PREFILL] = stage.works()
        for n in ns:
            case = case_of(n)
            stage.begin(n)
            for _ in range(WARM_UP):
                stage.step()
            for _ in range(STEPS_A_TURN):
                times[case].note(stage.step())
            times[case].note(stage.again())
            works[case] = stage.works()
            limit_turns.turn()
    limits = limit_turns.limits()
    return limits, [
        part
        for case, noted in times.items()
        for part in parts_of(case, parts_from(noted.medians()), works[case], limits)
    ]


def case_of(n: int) -> str:
    return f"n = {n}"


def table_of(parts: Iterable[Part]) -> Table:
    heads = [("case", "<"), ("part", "<"), ("ms", ".2f"), ("of step", ".1%"), ("GB", ".3f"), ("GFLOP", ".2f")]
    heads += [("least ms", ".2f"), ("of limit", ".0%"), ("of bandwidth", ".0%"), ("of products", ".0%")]
    return columns_table(heads, ([*asdict(part).values()] for part in parts))


LEAST_SHARES = {"n = 1": 0.65, "n = 8": 0.35, "n = 32": 0.55, "n = 128": 0.6, PREFILL: 0.75}
"""Shares that whole steps must reach: at n = 1 of the bandwidth, else of the rate of products. At 8 rows it is memory
that limits a step where nothing else computes, so more of the products cannot be asked for."""


def floors(parts: Sequence[Part]) -> list[Floor]:
    found = []
    for part in parts:
        if part.part == WHOLE and part.case in LEAST_SHARES:
            alone = part.case == "n = 1"
            value, of = (part.of_bandwidth, "bandwidth") if alone else (part.of_products, "products")
            found.append(Floor(f"{part.case}, share of {of}", value, LEAST_SHARES[part.case], Bound.AT_LEAST))
    return found


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a model that the compiled kernels run in bf16")
    parser.add_argument("--ns", type=numbers, help="numbers of choices, e.g. 1,8")
    parser.add_argument("--prompt-tokens", type=int, default=1340, help="tokens of the prompt")
    parser.add_argument("--repeats", type=int, help="turns of everything")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of the engine")
    parser.add_argument("--kv-cache-gb", type=float, default=2.0, help="memory for keys and values, in GiB")
    parser.add_argument("--quick", action="store_true", help="n = 1 and 32, and fewer turns")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a floor is missed")
    arguments = parser.parse_args(argv)
    arguments.ns = arguments.ns or ((1, 32) if arguments.quick else NS)
    arguments.repeats = arguments.repeats or (3 if arguments.quick else 7)
    return arguments


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    about = machine()
    folder = resolve(arguments.model, cache=cache_folder(environment()), say=progress)
    stage = Stage(
        folder,
        threads=arguments.threads,
        most=max(arguments.ns),
        prompt_tokens=arguments.prompt_tokens,
        steps=WARM_UP + STEPS_A_TURN + 2,
        kv_cache_gb=arguments.kv_cache_gb,
    )
    limits, parts = measure(stage, arguments.ns, arguments.repeats)
    stage.close()
    shown = (
        f"{arguments.threads} threads, prompt of {arguments.prompt_tokens} tokens, {WARM_UP} written",
        f"memory {limits.bytes_per_s / 1e9:.1f} GB/s; products {limits.operations_per_s / 1e9:.0f} GFLOP/s "
        f"({limits.product}, {LARGE_ROWS} x {LARGE} x {LARGE}); the instruction "
        f"{limits.peak_operations_per_s / 1e9:.0f} GFLOP/s",
    )
    record = {"limits": asdict(limits), "parts": [asdict(part) for part in parts]}
    return tell(record, *shown, table_of(parts), about=about, floors=floors(parts), check=arguments.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

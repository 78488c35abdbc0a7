"""Measures how close a step of the engine on the CPU, and each of its parts, is to the limits of this machine.

The same run measures the limits: the rate at which both threads read memory of the size of the weights, and the best
rate of a large bf16 product, Motet's or oneDNN's. The minimum time of a part is the longer of two times: for its bytes
at the memory rate, and for its operations at the product rate. Its share is this minimum divided by its own time.
Everything takes turns, and medians count: memory is fast for short moments, so the minimum of many reads says nothing
about an entire step. With `--threads 1` times are CPU time, which other programs disturb less.

The bytes and operations of a step are the necessary ones: every weight, key and value once, the operations of all
products and of attention. The last layer of a prompt counts only for the row whose logits are needed. Prints a table,
and JSON on the last line.

Run: python -m bench.roofline [--ns 1,8,32,128] [--prompt-tokens 1340] [--repeats 7] [--threads 2] [--quick] [--check]
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import torch

from bench.kernels.multiplications import ONEDNN_PACKED, WAYS, Multiply
from bench.kernels.weight_copies import weights_in_huge_pages
from bench.program.command_line import add_check, benchmark_parser, numbers, progress
from bench.program.report import Bound, Cells, Target, machine, print_report, table
from bench.roofline.step_parts import FORWARD, STEP, MeasuredEngine, PartWork, Times, parts_from
from motet.models.model_source import resolve
from motet.models.progress import Lines
from motet.models.smollm2 import DEFAULT_MODEL
from motet.settings.server_config import cache_folder, environment

NS = (1, 8, 32, 128)
LARGE = 4096
"""Depth and columns of the product that measures the product rate."""
LARGE_ROWS = 512
TILES = 2000
"""Number of tiles of the product from the nearest cache: 0.2 GFLOP of bf16."""
WARM_UP = 24
"""Number of tokens of each choice before its steps are measured."""
STEPS_A_TURN = 3
PREFILL = "prefill"


@dataclass(frozen=True)
class MachineLimits:
    """The machine's best rates."""

    bytes_per_s: float
    operations_per_s: float
    """Rate of the best product of large matrices."""
    product: str
    """Implementation of that product."""
    peak_operations_per_s: float
    """Rate of the instruction, with numbers from the nearest cache."""

    def least_s(self, work: PartWork) -> float:
        """Returns the minimum time of a part."""
        return max(work.bytes_read / self.bytes_per_s, work.operations / self.operations_per_s)


class TimesByName(defaultdict[str, list[float]]):
    """The seconds of everything that was timed, by name."""

    def __init__(self) -> None:
        super().__init__(list)

    def add(self, times: Times) -> None:
        for name, seconds in times.items():
            self[name].append(seconds)

    def medians(self) -> Times:
        return {name: median(seconds) for name, seconds in self.items()}


class LimitTurns:
    """Measures the machine's rates, in one turn after the other."""

    def __init__(self, engine: MeasuredEngine) -> None:
        self._engine = engine
        self._weights = engine.model.memory.arena.memory
        self._x = torch.randn(LARGE_ROWS, LARGE).bfloat16()
        large = weights_in_huge_pages(LARGE, LARGE)
        self._products: dict[str, Multiply] = {
            name: WAYS[name](large, LARGE_ROWS) for name in ("ours", ONEDNN_PACKED) if name in WAYS
        }
        self._times = TimesByName()
        self._tile_operations = 0.0

    @torch.inference_mode()
    def turn(self) -> None:
        engine, clock = self._engine, self._engine.clock
        begin = clock()
        engine.kernels.motet_read_memory(engine.handle, self._weights.data_ptr(), len(self._weights))
        read = clock()
        self._tile_operations = engine.kernels.motet_multiply_tiles(engine.handle, TILES)
        self._times.add({"read": read - begin, "tiles": clock() - read})
        for name, multiply in self._products.items():
            begin = clock()
            multiply(0, self._x)
            self._times.add({name: clock() - begin})

    def limits(self) -> MachineLimits:
        seconds = self._times.medians()
        product = min(self._products, key=lambda name: seconds[name])
        return MachineLimits(
            bytes_per_s=len(self._weights) / seconds["read"],
            operations_per_s=2.0 * LARGE_ROWS * LARGE**2 / seconds[product],
            product=product,
            peak_operations_per_s=self._tile_operations / seconds["tiles"],
        )


@dataclass(frozen=True)
class StepPart:
    """A part of a step, or an entire step."""

    case: str
    part: str
    ms: float
    of_step: float
    gigabytes: float | None
    gflop: float | None
    least_ms: float | None
    """Minimum time at the machine's rates. None for a part without necessary work."""
    of_limit: float | None
    of_bandwidth: float | None
    of_products: float | None

    def cells(self) -> Cells:
        return [
            ("case", self.case, "<"),
            ("part", self.part, "<"),
            ("ms", self.ms, ".2f"),
            ("of step", self.of_step, ".1%"),
            ("GB", self.gigabytes, ".3f"),
            ("GFLOP", self.gflop, ".2f"),
            ("minimum ms", self.least_ms, ".2f"),
            ("of limit", self.of_limit, ".0%"),
            ("of bandwidth", self.of_bandwidth, ".0%"),
            ("of products", self.of_products, ".0%"),
        ]


def part_of(
    case: str, name: str, seconds: float, *, step_s: float, work: PartWork | None, limits: MachineLimits
) -> StepPart:
    if work is None:
        return StepPart(case, name, seconds * 1e3, seconds / step_s, None, None, None, None, None, None)
    least_s = limits.least_s(work)
    return StepPart(
        case,
        name,
        ms=seconds * 1e3,
        of_step=seconds / step_s,
        gigabytes=work.bytes_read / 1e9,
        gflop=work.operations / 1e9,
        least_ms=least_s * 1e3,
        of_limit=least_s / seconds,
        of_bandwidth=work.bytes_read / seconds / limits.bytes_per_s,
        of_products=work.operations / seconds / limits.operations_per_s,
    )


def parts_of(
    case: str, times: Mapping[str, float], works: Mapping[str, PartWork], limits: MachineLimits
) -> Iterator[StepPart]:
    """Yields the parts of a step, the forward pass, and last the entire step."""
    step_s = times[STEP]
    for name in (name for name in times if name not in {FORWARD, STEP}):
        yield part_of(case, name, times[name], step_s=step_s, work=works.get(name), limits=limits)
    total = sum(works.values(), PartWork())
    for name in (FORWARD, STEP):
        yield part_of(case, name, times[name], step_s=step_s, work=total, limits=limits)


@torch.inference_mode()
def measure(engine: MeasuredEngine, ns: Sequence[int], repeats: int) -> tuple[MachineLimits, list[StepPart]]:
    limit_turns = LimitTurns(engine)
    times = {case: TimesByName() for case in (PREFILL, *map(case_of, ns))}
    works: dict[str, Mapping[str, PartWork]] = {}
    engine.start(1)  # memory is used for the first time
    for turn in range(repeats):
        progress(f"turn {turn + 1} of {repeats}")
        limit_turns.turn()
        times[PREFILL].add(engine.start(1))
        times[PREFILL].add(engine.again())
        works[PREFILL] = engine.works()
        for n in ns:
            case = case_of(n)
            engine.start(n)
            for _ in range(WARM_UP):
                engine.step()
            for _ in range(STEPS_A_TURN):
                times[case].add(engine.step())
            times[case].add(engine.again())
            works[case] = engine.works()
            limit_turns.turn()
    limits = limit_turns.limits()
    return limits, [
        part
        for case, found in times.items()
        for part in parts_of(case, parts_from(found.medians()), works[case], limits)
    ]


def case_of(n: int) -> str:
    return f"n = {n}"


MIN_SHARES = {"n = 1": 0.65, "n = 8": 0.35, "n = 32": 0.55, "n = 128": 0.6, PREFILL: 0.75}
"""Minimum shares of entire steps: of the bandwidth at n = 1, otherwise of the product rate. At 8 rows, memory limits a
step that computes nothing else, so the share of the product rate cannot be higher."""


def targets(parts: Sequence[StepPart]) -> list[Target]:
    found = []
    for part in parts:
        if part.part == STEP and part.case in MIN_SHARES:
            alone = part.case == "n = 1"
            value, of = (part.of_bandwidth, "bandwidth") if alone else (part.of_products, "products")
            found.append(Target(f"{part.case}, share of {of}", value, MIN_SHARES[part.case], Bound.AT_LEAST))
    return found


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = benchmark_parser("bench.roofline", __doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a model that the compiled kernels run in bf16")
    parser.add_argument("--ns", type=numbers, help="values of n, e.g. 1,8")
    parser.add_argument("--prompt-tokens", type=int, default=1340, help="number of tokens of the prompt")
    parser.add_argument("--repeats", type=int, help="number of turns of everything")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="number of threads of the engine")
    parser.add_argument("--kv-cache-gb", type=float, default=2.0, help="memory for keys and values, in GiB")
    parser.add_argument("--quick", action="store_true", help="n = 1 and 32, and fewer turns")
    add_check(parser)
    arguments = parser.parse_args(argv)
    arguments.ns = arguments.ns or ((1, 32) if arguments.quick else NS)
    arguments.repeats = arguments.repeats or (3 if arguments.quick else 7)
    return arguments


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    conditions = machine()
    folder = resolve(arguments.model, cache=cache_folder(environment()), progress=Lines(progress))
    engine = MeasuredEngine(
        folder,
        threads=arguments.threads,
        max_choices=max(arguments.ns),
        prompt_tokens=arguments.prompt_tokens,
        steps=WARM_UP + STEPS_A_TURN + 2,
        kv_cache_gb=arguments.kv_cache_gb,
    )
    limits, parts = measure(engine, arguments.ns, arguments.repeats)
    engine.close()
    lines = (
        f"{arguments.threads} threads, prompt of {arguments.prompt_tokens} tokens, {WARM_UP} generated",
        f"memory {limits.bytes_per_s / 1e9:.1f} GB/s; products {limits.operations_per_s / 1e9:.0f} GFLOP/s "
        f"({limits.product}, {LARGE_ROWS} x {LARGE} x {LARGE}); the instruction "
        f"{limits.peak_operations_per_s / 1e9:.0f} GFLOP/s",
    )
    record = {"limits": asdict(limits), "parts": [asdict(part) for part in parts]}
    shown = (*lines, table(part.cells() for part in parts))
    return print_report(record, *shown, conditions=conditions, targets=targets(parts), check=arguments.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

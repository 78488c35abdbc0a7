"""Measures the cost of LoRA adapters in an engine: tokens per second with adapters, relative to the base model.

The adapters have random numbers, and change all linear layers of the decoder layers. All cases take turns, and a case
counts with the lower quartile of the durations of its steps, so that other programs on the machine matter less. At the
end, one adapter is loaded and unloaded repeatedly. Prints a table, and JSON on the last line.

Run: python -m bench.kernels.adapters MODEL_FOLDER [--rank 16] [--ns 1,8,32] [--adapters 8] [--threads 2]
"""

import argparse
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import quantiles

from bench.program.command_line import benchmark_parser, numbers, progress
from bench.program.report import Cells, machine, print_report, table
from motet.engine_orders import LoadAdapter
from motet.engines.native.build import Parts, build_parts
from motet.engines.native.core import EngineCore
from motet.ids import ModelName, RequestId
from motet.models.checkpoint import CheckpointKind
from motet.system.machine import read_memory
from motet.types import GenerateRequest, SamplingParams, choice_starts
from tests.engines.native.adapter_files import save_adapter
from tests.tiny_engine import engine_config

PROMPT_TOKENS, DECODED = 64, 32
SMALL = 0.01
"""Size of the numbers of B, with which the texts stay like the base model's."""


@dataclass(frozen=True)
class AdapterCost:
    case: str
    base: float
    """Tokens per second."""
    adapters: float

    def cells(self) -> Cells:
        return [
            ("case", self.case, "<"),
            ("base model, tokens/s", self.base, ".0f"),
            ("adapters, tokens/s", self.adapters, ".0f"),
            ("adapters / base", self.adapters / self.base, ".2f"),
        ]


def rate(core: EngineCore, models: list[str], *, n: int) -> float:
    """Returns the output tokens per second of one group of n choices for each model."""
    for number, model in enumerate(models):
        core.submit(
            GenerateRequest(
                request_id=RequestId(f"{number}"),
                prompt=tuple(3 + (number * 997 + at * 31) % 8000 for at in range(PROMPT_TOKENS)),
                choices=choice_starts(n, number * 1000),
                sampling=SamplingParams(ignore_eos=True, max_tokens=DECODED),
                model=ModelName(model),
            )
        )
    seconds: list[float] = []
    while core.busy:
        start_s = time.perf_counter()
        core.step()
        seconds.append(time.perf_counter() - start_s)
    return len(models) * n / quantiles(seconds[2:], n=4)[0]


def order(name: str, folder: Path) -> LoadAdapter:
    return LoadAdapter(ModelName(name), CheckpointKind.FILES, str(folder))


def measure(args: argparse.Namespace, parts: Parts, folder: Path) -> list[AdapterCost]:
    core = EngineCore(parts.info, parts.runner, options=replace(parts.options, draft_tokens=0))
    names = [f"{number}" for number in range(args.adapters)]
    for number, name in enumerate(names):
        adapter = save_adapter(Path(args.model), folder / name, targets=(), rank=args.rank, seed=number, size=SMALL)
        core.adapters.load(parts.adapters.load(order(name, adapter)), in_place=False)
    last = max(args.ns)
    cases = {f"one adapter, n = {n}": ([names[0]], n) for n in args.ns}
    cases[f"{len(names)} adapters, {last} choices"] = names, max(1, last // len(names))
    rates: dict[str, tuple[list[float], list[float]]] = {case: ([], []) for case in cases}
    for repeat in range(args.repeats):
        progress(f"repeat {repeat + 1} of {args.repeats}")
        for case, (models, n) in cases.items():
            rates[case][0].append(rate(core, [""] * len(models), n=n))
            rates[case][1].append(rate(core, models, n=n))
    start_s, before = time.perf_counter(), read_memory().available_bytes
    for _ in range(args.loads):
        core.adapters.load(parts.adapters.load(order(names[0], folder / names[0])), in_place=True)
        core.adapters.unload(ModelName(names[0]))
        core.adapters.load(parts.adapters.load(order(names[0], folder / names[0])), in_place=False)
    seconds, used = time.perf_counter() - start_s, before - read_memory().available_bytes
    progress(f"{2 * args.loads} loads: {seconds / (2 * args.loads or 1):.3f} s each, {used / 2**20:.0f} MB less memory")
    return [AdapterCost(case, max(base), max(adapters)) for case, (base, adapters) in rates.items()]


def main() -> None:
    parser = benchmark_parser("bench.kernels.adapters", __doc__)
    parser.add_argument("model", help="folder of the base model")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--ns", type=numbers, default=(1, 8, 32), help="numbers of choices, separated by commas")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--loads", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    config = engine_config(
        Path(args.model), dtype="bfloat16", max_model_len=2048, kv_cache_gb=0.5, num_threads=args.threads
    )
    with tempfile.TemporaryDirectory() as made:
        costs = measure(args, build_parts(config), Path(made))
    report = {"adapters": [asdict(cost) for cost in costs]}
    print_report(report, table(cost.cells() for cost in costs), conditions=machine())


if __name__ == "__main__":
    main()

"""Measures a step on a GPU: prefill and decode of a model with the shape of Llama 3 8B, n choices of one prompt.

The benchmark runs the engine's own core: scheduler, runner, graphs, sampler. Figures are absolute, and shares of the
device's best rates, which the same run measures (`device_ceilings`): the memory rate, for the weights and KV that a
step must read at least once; the matrix rate, for the operations that it must compute. "shared" is group attention.
With "alone", each choice reads the trunk separately, so its KV is read n times. "device" is the part of a step's time
on the device before sampling. Needs the repository, torch, transformers and msgspec, but no files and no network.
Prints a table, and JSON on the last line.

Run: PYTHONPATH=src python -m bench.gpu [--shape llama-3-8b] [--ns 1,8,32,128] [--prompts 1024,8192] [--out FOLDER]
On the CPU, `--shape tiny --device cpu` only shows that the benchmark runs.
"""

import argparse
import gc
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from bench.gpu.device_ceilings import Ceilings, ceilings
from bench.gpu.random_model import BLOCK_SIZE, SHAPES, LlamaShape, ModelLimits, TimedRunner, core_over, random_model
from bench.program.command_line import benchmark_parser, numbers, progress
from bench.program.report import Cells, json_of, machine, print_report, table
from motet.engines.native.core import EngineCore
from motet.ids import RequestId
from motet.types import GenerateRequest, SamplingParams, choice_starts

WARM_UP = 4
"""Number of decode steps before the timed ones."""


@dataclass(frozen=True)
class GpuCase:
    prompt: int
    n: int
    shared: bool


@dataclass(frozen=True)
class GpuRow:
    """The results of one case. Fields with `of_` in their names are shares of a ceiling."""

    prompt: int
    n: int
    attention: str
    prefill_ms: float
    prefill_tokens_per_s: float
    prefill_of_matrix_rate: float
    step_ms: float
    device_ms: float | None
    """Median time of a step on the device before sampling; None on the CPU."""
    tokens_per_s: float
    of_memory_rate: float
    of_matrix_rate: float

    def cells(self) -> Cells:
        return [
            ("prompt", self.prompt, ""),
            ("n", self.n, ""),
            ("trunk", self.attention, "<"),
            ("prefill ms", self.prefill_ms, ".1f"),
            ("tokens/s", self.prefill_tokens_per_s, ".0f"),
            ("of matrix rate", self.prefill_of_matrix_rate, ".1%"),
            ("step ms", self.step_ms, ".2f"),
            ("device", self.device_ms, ".2f"),
            ("tokens/s", self.tokens_per_s, ".0f"),
            ("of memory rate", self.of_memory_rate, ".1%"),
            ("of matrix rate", self.of_matrix_rate, ".1%"),
        ]


@dataclass(frozen=True)
class GpuBench:
    core: EngineCore
    timed: TimedRunner
    shape: LlamaShape
    best: Ceilings
    steps: int

    def measure(self, case: GpuCase) -> GpuRow:
        """Runs one group from its prompt to the last timed step."""
        self.core.submit(self._request(case))
        start, first = time.perf_counter(), 0
        while not first:
            first = sum(len(delta.choices) for delta in self.core.step().deltas)
        prefill_s = time.perf_counter() - start
        for _ in range(WARM_UP):
            self.core.step()
        self.timed.take_ms()
        times = []
        for _ in range(self.steps):
            start = time.perf_counter()
            self.core.step()
            times.append(time.perf_counter() - start)
        device_ms = self.timed.take_ms()
        self.core.abort(RequestId("bench"))
        return self._figures(case, prefill_s, median(times), median(device_ms) if device_ms else None)

    def _request(self, case: GpuCase) -> GenerateRequest:
        tokens = random.Random(case.prompt).choices(range(self.shape.vocab), k=case.prompt)
        sampling = SamplingParams(max_tokens=WARM_UP + self.steps + 2, ignore_eos=True)
        return GenerateRequest(
            request_id=RequestId("bench"), prompt=tuple(tokens), choices=choice_starts(case.n, 1), sampling=sampling
        )

    def _figures(self, case: GpuCase, prefill_s: float, step_s: float, device_ms: float | None) -> GpuRow:
        shape, best, item = self.shape, self.best, 2 if self.core.info.dtype != "float32" else 4
        tail = WARM_UP + 1 + self.steps // 2
        keys_read = (case.prompt if case.shared else case.n * case.prompt) + case.n * tail
        bytes_read = item * (shape.block_weights + keys_read * shape.kv_values)
        prefill_keys = case.prompt * (case.prompt + 1) // 2
        prefill_work = shape.operations(case.prompt, prefill_keys)
        return GpuRow(
            prompt=case.prompt,
            n=case.n,
            attention="shared" if case.shared else "alone",
            prefill_ms=1e3 * prefill_s,
            prefill_tokens_per_s=case.prompt / prefill_s,
            prefill_of_matrix_rate=prefill_work / prefill_s / best.operations_per_s,
            step_ms=1e3 * step_s,
            device_ms=device_ms,
            tokens_per_s=case.n / step_s,
            of_memory_rate=bytes_read / step_s / best.bytes_per_s,
            of_matrix_rate=shape.operations(case.n, case.n * (case.prompt + tail)) / step_s / best.operations_per_s,
        )


def measure_all(options: argparse.Namespace) -> Iterator[GpuRow | Ceilings]:
    """Yields the ceilings, then the rows of all cases that start within the time limit."""
    deadline = time.monotonic() + 60 * options.minutes
    device, shape, dtype = torch.device(options.device), SHAPES[options.shape], getattr(torch, options.dtype)
    best = ceilings(device, dtype, copy_bytes=options.copy_mib * 2**20, matrix=options.matrix)
    yield best
    longest = -(-(max(options.prompts) + WARM_UP + options.steps + 2) // BLOCK_SIZE) * BLOCK_SIZE
    limits = ModelLimits(longest, max(options.ns), options.max_num_batched_tokens, options.kv_cache_gb)
    for shared in (True, False):
        model = random_model(shape, dtype, device, max_model_len=longest)
        core, timed = core_over(model, shape, limits, share_trunks=shared, enforce_eager=options.enforce_eager)
        bench = GpuBench(core, timed, shape, best, options.steps)
        for prompt in options.prompts:
            bench.measure(GpuCase(prompt, min(options.ns), shared))  # kernels are compiled and loaded at first use
            for n in options.ns:
                if time.monotonic() < deadline:
                    yield bench.measure(GpuCase(prompt, n, shared))
        del bench, core, timed, model
        gc.collect()  # before the next model takes its memory


def main() -> int:
    options = parse(sys.argv[1:])
    rows: list[GpuRow] = []
    best: Ceilings | None = None
    for found in measure_all(options):
        if isinstance(found, Ceilings):
            best = found
        else:
            rows.append(found)
            progress(f"{found.attention}, prompt {found.prompt}, n = {found.n}: {found.step_ms:.2f} ms per step")
    record = {"ceilings": asdict(best) if best else None, "rows": [asdict(row) for row in rows]}
    conditions = machine(("torch", "transformers")) | device_facts(options)
    if options.out:
        folder = Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "gpu.json").write_text(json_of(record, conditions) + "\n")
    lines = []
    if best:
        copy, product = best.bytes_per_s / 1e12, best.operations_per_s / 1e12
        lines.append(f"copy {copy:.2f} TB/s, product {product:.1f} TFLOP/s")
    requested = 2 * len(options.ns) * len(options.prompts)
    if len(rows) < requested:
        lines.append(f"{requested - len(rows)} of {requested} cases were left out after --minutes {options.minutes:g}")
    return print_report(record, *lines, table(row.cells() for row in rows), conditions=conditions)


def device_facts(options: argparse.Namespace) -> dict[str, str]:
    device = torch.device(options.device)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "cuda": str(torch.version.cuda),
        "model": f"{options.shape}, {options.dtype}, random weights",
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = benchmark_parser("bench.gpu", __doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b", help="sizes of the model")
    parser.add_argument("--device", default="cuda:0", help="device to measure (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of weights and KV (default: %(default)s)")
    parser.add_argument("--ns", type=numbers, default=(1, 8, 32, 128), help="values of n (default: 1,8,32,128)")
    parser.add_argument("--prompts", type=numbers, default=(1024, 8192), help="lengths (default: 1024,8192)")
    parser.add_argument("--steps", type=int, default=32, help="number of timed decode steps of a case")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, help="maximum number of tokens of a step")
    parser.add_argument("--kv-cache-gb", type=float, default=8.0, help="GiB of KV")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--copy-mib", type=int, default=4096, help="size of the copy that measures the memory rate")
    parser.add_argument("--matrix", type=int, default=8192, help="size of the matrices that measure the matrix rate")
    parser.add_argument("--minutes", type=float, default=6.0, help="time after which no further case is started")
    parser.add_argument("--out", help="folder for gpu.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

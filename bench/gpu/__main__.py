"""Measures a step on a GPU: prefill and decode of a model with the shape of Llama 3 8B, n choices of one prompt.

It runs the engine's own core: scheduler, runner, graphs, sampler. Figures are absolute, and shares of the device's best
rates, which the same run measures (`device_ceilings`): of its memory, for the weights and KV that a step must at least
read; of its matrix units, for the operations that it must do. "shared" is group attention. With "alone" each choice
reads the trunk by itself, so its KV is read n times. "device" is the part of a step's time that passes on the device
before sampling. Needs the repository, torch, transformers and msgspec, but no files and no network. Prints a table, and
JSON on the last line.

Run: PYTHONPATH=src python -m bench.gpu [--shape llama-3-8b] [--ns 1,8,32,128] [--prompts 1024,8192] [--out FOLDER]
On the CPU, `--shape tiny --device cpu` only shows that it runs.
"""

import argparse
import gc
import json
import platform
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import transformers

import motet
from bench.gpu.device_ceilings import Ceilings, ceilings
from bench.gpu.random_model import BLOCK_SIZE, SHAPES, Limits, Shape, Timed, core_over, random_model
from motet.engines.native.core import EngineCore
from motet.ids import RequestId
from motet.types import GenerateRequest, SamplingParams, choice_starts

WARM_UP = 4
"""Number of decode steps before the timed ones."""


@dataclass(frozen=True)
class Case:
    prompt: int
    n: int
    shared: bool


@dataclass(frozen=True)
class Figures:
    """The results of one case. Fields with `of_` in their names are shares of that rate's ceiling."""

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


@dataclass(frozen=True)
class Bench:
    core: EngineCore
    timed: Timed
    shape: Shape
    best: Ceilings
    steps: int

    def measure(self, case: Case) -> Figures:
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

    def _request(self, case: Case) -> GenerateRequest:
        tokens = random.Random(case.prompt).choices(range(self.shape.vocab), k=case.prompt)
        sampling = SamplingParams(max_tokens=WARM_UP + self.steps + 2, ignore_eos=True)
        return GenerateRequest(
            request_id=RequestId("bench"), prompt=tuple(tokens), choices=choice_starts(case.n, 1), sampling=sampling
        )

    def _figures(self, case: Case, prefill_s: float, step_s: float, device_ms: float | None) -> Figures:
        shape, best, item = self.shape, self.best, 2 if self.core.info.dtype != "float32" else 4
        tail = WARM_UP + 1 + self.steps // 2
        keys_read = (case.prompt if case.shared else case.n * case.prompt) + case.n * tail
        bytes_read = item * (shape.block_weights + keys_read * shape.kv_values)
        prefill_keys = case.prompt * (case.prompt + 1) // 2
        prefill_work = shape.operations(case.prompt, prefill_keys)
        return Figures(
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


def measure_all(options: argparse.Namespace) -> Iterator[Figures | Ceilings]:
    """Yields the ceilings, then every case for which there is time."""
    deadline = time.monotonic() + 60 * options.minutes
    device, shape, dtype = torch.device(options.device), SHAPES[options.shape], getattr(torch, options.dtype)
    best = ceilings(device, dtype, copy_bytes=options.copy_mib * 2**20, matrix=options.matrix)
    yield best
    ns, prompts = numbers(options.ns), numbers(options.prompts)
    longest = -(-(max(prompts) + WARM_UP + options.steps + 2) // BLOCK_SIZE) * BLOCK_SIZE
    limits = Limits(longest, max(ns), options.max_num_batched_tokens, options.kv_cache_gb)
    for shared in (True, False):
        model = random_model(shape, dtype, device, max_model_len=longest)
        core, timed = core_over(model, shape, limits, share_trunks=shared, enforce_eager=options.enforce_eager)
        bench = Bench(core, timed, shape, best, options.steps)
        for prompt in prompts:
            bench.measure(Case(prompt, min(ns), shared))  # kernels are compiled and loaded at first use
            for n in ns:
                if time.monotonic() < deadline:
                    yield bench.measure(Case(prompt, n, shared))
        del bench, core, timed, model
        gc.collect()  # before the next model takes its memory


def main() -> int:
    options = parse(sys.argv[1:])
    rows: list[Figures] = []
    best: Ceilings | None = None
    for found in measure_all(options):
        if isinstance(found, Ceilings):
            best = found
            print(f"copy {found.bytes_per_s / 1e12:.2f} TB/s, product {found.operations_per_s / 1e12:.1f} TFLOP/s")
            print(HEAD)
        else:
            rows.append(found)
            print(line(found), flush=True)
    wanted = 2 * len(numbers(options.ns)) * len(numbers(options.prompts))
    if len(rows) < wanted:
        print(f"{wanted - len(rows)} of {wanted} cases were left out: --minutes {options.minutes:g} were over")
    report = json.dumps(
        {"machine": about(options), "ceilings": asdict(best) if best else None, "rows": [asdict(row) for row in rows]}
    )
    if options.out:
        folder = Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "gpu.json").write_text(report + "\n")
    for name, value in about(options).items():
        print(f"{name:12} {value}")
    print(report)
    return 0


HEAD = (
    f"{'prompt':>6} {'n':>4} {'trunk':>6} | {'prefill ms':>10} {'tokens/s':>9} {'of matrix':>9} | "
    f"{'step ms':>8} {'device':>8} {'tokens/s':>9} {'of memory':>9} {'of matrix':>9}"
)


def line(row: Figures) -> str:
    device = "-" if row.device_ms is None else f"{row.device_ms:.2f}"
    return (
        f"{row.prompt:6} {row.n:4} {row.attention:>6} | {row.prefill_ms:10.1f} {row.prefill_tokens_per_s:9.0f} "
        f"{row.prefill_of_matrix_rate:9.1%} | {row.step_ms:8.2f} {device:>8} {row.tokens_per_s:9.0f} "
        f"{row.of_memory_rate:9.1%} {row.of_matrix_rate:9.1%}"
    )


def about(options: argparse.Namespace) -> dict[str, str]:
    device = torch.device(options.device)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "motet": motet.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": f"{options.shape}, {options.dtype}, random weights",
        "command": " ".join(sys.orig_argv),
    }


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="what a step costs on a GPU")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b", help="sizes of the model")
    parser.add_argument("--device", default="cuda:0", help="device to measure (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of weights and KV (default: %(default)s)")
    parser.add_argument("--ns", default="1,8,32,128", help="choices of a prompt (default: %(default)s)")
    parser.add_argument("--prompts", default="1024,8192", help="lengths of prompts (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="timed decode steps of a case")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, help="most tokens of a step")
    parser.add_argument("--kv-cache-gb", type=float, default=8.0, help="GiB of KV")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--copy-mib", type=int, default=4096, help="size of the copy that measures memory")
    parser.add_argument("--matrix", type=int, default=8192, help="size of the matrices whose product is measured")
    parser.add_argument("--minutes", type=float, default=6.0, help="cases that would begin later are left out")
    parser.add_argument("--out", help="folder for gpu.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

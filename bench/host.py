"""What the engine's Python costs a step: microseconds around a model that does nothing.

"around" is everything but model and sampler: news, scheduling, the flat batch, commit, deltas. "sampler" is all
of sampling, its tensor operations too, so the vocabulary is small. "sent" is the step's message, encoded. Medians over
steps in the middle of answers to a 1340-token prompt, one thread. Prints a table, and JSON on the last line.

Run: python -m bench.host [--steps 200]
"""

import argparse
import json
import time
from statistics import median

import msgspec
import torch

from bench.machine import machine
from motet.engines.native.core import CoreOptions, EngineCore
from motet.engines.native.inputs import StepInputs
from motet.engines.native.protocol import Stepped
from motet.ids import ModelName, RequestId
from motet.types import EngineInfo, GenerateRequest, Role, SamplingParams, choice_starts

VOCAB_SIZE = 1024
PROMPT = tuple(range(1340))
SHAPES = ((1, 1), (8, 1), (32, 1), (128, 1), (256, 1), (8, 4), (8, 32))
"""(n, groups)"""
WARM_UP = 20


class ClockedRunner:
    """A model that takes no time, and tells when the engine left it and came back."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._logits = torch.randn(512, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).bfloat16()
        self.left_s = self.back_s = 0.0

    def run(self, inputs: StepInputs) -> torch.Tensor:
        self.left_s = time.perf_counter()
        return self._logits[: len(inputs.logit_rows)]

    def verify(self) -> None:
        """Called when the tokens have been drawn."""
        self.back_s = time.perf_counter()

    def copy_slots(self, source: list[int], target: list[int]) -> None: ...

    def settle(self) -> None: ...


def core_over(runner: ClockedRunner) -> EngineCore:
    info = EngineInfo(
        model=ModelName("blank"),
        max_model_len=8192,
        vocab_size=VOCAB_SIZE,
        block_size=16,
        num_blocks=20_000,
        bytes_per_block=1,
        max_num_seqs=256,
        role=Role.BOTH,
        eos_token_ids=(),
        dtype="bfloat16",
        device="cpu",
        fingerprint="",
    )
    return EngineCore(info, runner, CoreOptions(512, prefix_cache=True, cache_answers=False))


def measure(n: int, groups: int, steps: int) -> dict[str, float]:
    """Microseconds a step."""
    runner, encoder = ClockedRunner(), msgspec.msgpack.Encoder()
    core = core_over(runner)
    for i in range(groups):
        sampling = SamplingParams(max_tokens=6000)
        starts = choice_starts(n, seed=i * n)
        core.submit(GenerateRequest(request_id=RequestId(f"{i}"), prompt=PROMPT, choices=starts, sampling=sampling))
    while core.counters.generated_tokens < WARM_UP * n * groups:
        core.step()
    times: dict[str, list[float]] = {"around": [], "sampler": [], "sent": []}
    for _ in range(steps):
        begin = time.perf_counter()
        result = core.step()
        end = time.perf_counter()
        encoder.encode(Stepped(result.deltas))
        sent = time.perf_counter()
        sampling_s = runner.back_s - runner.left_s
        for name, seconds in (("around", end - begin - sampling_s), ("sampler", sampling_s), ("sent", sent - end)):
            times[name].append(seconds * 1e6)
    return {name: round(median(values), 1) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="microseconds of Python a step")
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    results = []
    print(f"{'n':>5}{'groups':>8}{'around':>10}{'a token':>10}{'sampler':>10}{'a token':>10}{'sent':>8}")
    for n, groups in SHAPES:
        us, tokens = measure(n, groups, steps), n * groups
        print(
            f"{n:5}{groups:8}{us['around']:10.1f}{us['around'] / tokens:10.2f}"
            f"{us['sampler']:10.1f}{us['sampler'] / tokens:10.2f}{us['sent']:8.1f}"
        )
        results.append({"n": n, "groups": groups, **us})
    print(json.dumps({"machine": machine(), "us_a_step": results}))


if __name__ == "__main__":
    main()

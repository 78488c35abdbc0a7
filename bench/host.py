"""Measures the time of a step in the engine's Python: microseconds around a model that does nothing.

"around" is everything except the model and the sampler: commands, scheduling, the flat batch, commit, deltas. "sampler"
is all of sampling; the vocabulary is small, because this includes the sampler's tensor operations. "sent" is the
encoding of the step's message. Figures are medians over steps in the middle of answers to a 1340-token prompt, on one
thread. Prints a table, and JSON on the last line.

Run: python -m bench.host [--steps 200]
"""

import time
from statistics import median

import msgspec
import torch

from bench.program.command_line import benchmark_parser
from bench.program.report import Cells, machine, print_report, table
from motet.engine_info import EngineInfo
from motet.engines.native.core import CoreOptions, EngineCore
from motet.engines.native.protocol import StepReport
from motet.engines.native.step.inputs import StepInputs
from motet.ids import ModelName, RequestId
from motet.types import GenerateRequest, Role, SamplingParams, choice_starts

VOCAB_SIZE = 1024
PROMPT = tuple(range(1340))
SHAPES = ((1, 1), (8, 1), (32, 1), (128, 1), (256, 1), (8, 4), (8, 32))
"""Values of n and numbers of groups of the rows."""
WARM_UP = 20


class ClockedRunner:
    """A model that takes no time. It stores when it returned, and when the step's tokens were sampled."""

    device = torch.device("cpu")
    trunk_tokens_saved = 0

    def __init__(self) -> None:
        self._logits = torch.randn(512, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).bfloat16()
        self.left_s = self.back_s = 0.0

    def run(self, inputs: StepInputs) -> torch.Tensor:
        self.left_s = time.perf_counter()
        return self._logits[: len(inputs.logit_rows)]

    def verify(self) -> None:
        """Called by the engine after it has sampled the tokens."""
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
    options = CoreOptions(max_num_batched_tokens=512, prefix_cache=True, cache_answers=False, lease_s=60.0)
    return EngineCore(info, runner, options=options)


def measure(n: int, groups: int, steps: int) -> dict[str, float]:
    """Returns microseconds per step for each part."""
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
        encoder.encode(StepReport(result.deltas))
        sent = time.perf_counter()
        sampling_s = runner.back_s - runner.left_s
        for name, seconds in (("around", end - begin - sampling_s), ("sampler", sampling_s), ("sent", sent - end)):
            times[name].append(seconds * 1e6)
    return {name: round(median(values), 1) for name, values in times.items()}


def main() -> None:
    parser = benchmark_parser("bench.host", __doc__)
    parser.add_argument("--steps", type=int, default=200, help="number of timed steps of a case")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    results = [{"n": n, "groups": groups, **measure(n, groups, steps)} for n, groups in SHAPES]
    print_report({"us_a_step": results}, table(map(cells_of, results)), conditions=machine())


def cells_of(us: dict[str, float]) -> Cells:
    tokens = us["n"] * us["groups"]
    return [
        ("n", us["n"], ".0f"),
        ("groups", us["groups"], ".0f"),
        ("around", us["around"], ".1f"),
        ("per token", us["around"] / tokens, ".2f"),
        ("sampler", us["sampler"], ".1f"),
        ("per token", us["sampler"] / tokens, ".2f"),
        ("sent", us["sent"], ".1f"),
    ]


if __name__ == "__main__":
    main()

"""Measures decode steps whose block tables share blocks: many groups with one prompt, or with a common prefix.

The model has the sizes of the default model and random weights. All cases take turns, so that other load on the machine
affects all equally. Prints a table of milliseconds per step, and JSON on the last line. To compare two builds of
the kernels, run the benchmark with each of them in turn. `--kernels torch` measures torch's operators.

Run: python -m bench.kernel_trunks [--kernels torch] [--repeats 9] [--threads 2] [--cases "1 group of 32"]
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from statistics import median

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from bench.program.command_line import benchmark_parser
from bench.program.report import machine, print_report, table
from motet.engines.native.attention.attention_plan import AttentionPlan, TailReads, TrunkRead, padded_keys
from motet.engines.native.compiled_kernels import library
from motet.engines.native.cpu.cpu_runner import CpuRunner
from motet.engines.native.cpu.packed_weights import PackedModel
from motet.engines.native.kv.storage import KVLayout, KVStorage
from motet.engines.native.step.inputs import StepInputs
from motet.engines.native.step.run import ATTENTION_NAME, ModelRunner, TorchRunner
from motet.errors import StartupError

BLOCK_SIZE, TAIL, LAYERS = 16, 24, 30
"""Number of tokens per block, number of tokens that each choice has generated, number of layers."""
VOCAB_SIZE = 49152


@dataclass(frozen=True)
class TrunkCase:
    """A step of `groups` groups with `n` choices. Each prompt has `common` shared tokens, and `own` more tokens."""

    groups: int
    n: int
    common: int
    own: int = 0

    @property
    def trunk(self) -> int:
        return self.common + self.own

    @property
    def shared_blocks(self) -> int:
        """Number of blocks in all tables. A block that is not full is shared only if the prompts are equal."""
        return self.common // BLOCK_SIZE if self.own else -(-self.common // BLOCK_SIZE)

    @property
    def num_blocks(self) -> int:
        own = -(-self.trunk // BLOCK_SIZE) - self.shared_blocks
        return self.shared_blocks + self.groups * (own + self.n * -(-TAIL // BLOCK_SIZE))


CASES = {
    "32 groups, one prompt of 1340": TrunkCase(32, 1, 1340),
    "32 groups, one prompt of 200": TrunkCase(32, 1, 200),
    "32 groups, 1200 in common, 40 own": TrunkCase(32, 1, 1200, 40),
    "8 groups, one prompt of 1340": TrunkCase(8, 1, 1340),
    "2 groups, one prompt of 1340": TrunkCase(2, 1, 1340),
    "2 groups, one prompt of 40": TrunkCase(2, 1, 40),
    "32 groups, 64 in common, 500 own": TrunkCase(32, 1, 64, 500),
    "32 groups, nothing in common": TrunkCase(32, 1, 0, 1340),
    "1 group of 32": TrunkCase(1, 32, 1340),
}


def inputs_of(case: TrunkCase) -> StepInputs:
    """Returns the step in which every choice runs its last generated token."""
    free = count()

    def take(tokens: int) -> list[int]:
        return list(islice(free, -(-tokens // BLOCK_SIZE)))

    shared = take(case.shared_blocks * BLOCK_SIZE)
    tails, trunks, slots = TailReads(), [], []
    for first in range(0, case.groups * case.n, case.n):
        rows = range(first, first + case.n)
        tables = [take(TAIL) for _ in rows]
        slots += [table[-1] * BLOCK_SIZE + (TAIL - 1) % BLOCK_SIZE for table in tables]
        for row, blocks in zip(rows, tables, strict=True):
            tails.add(row, TAIL - 1, count=1, num_keys=padded_keys(TAIL), table=blocks)
        trunk = [*shared, *take(max(0, case.trunk - len(shared) * BLOCK_SIZE))]
        positions = (case.trunk + TAIL - 1,) * case.n
        trunks.append(TrunkRead(first, first + case.n, positions, case.trunk, trunk))
    num_rows = len(slots)
    plan = AttentionPlan(num_rows, (), tuple(trunks), tails.finished())
    positions_of_rows = [case.trunk + TAIL - 1] * num_rows
    return StepInputs([0] * num_rows, positions_of_rows, slots, [*range(num_rows)], num_rows, [], [], plan)


def runner_for(num_blocks: int, num_threads: int, *, compiled: bool) -> ModelRunner:
    """Returns the compiled kernels, or torch's operators, over random weights, keys and values."""
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=VOCAB_SIZE,
        tie_word_embeddings=True,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
    )
    storage = KVStorage(KVLayout(LAYERS, BLOCK_SIZE, 3, 64, torch.bfloat16), num_blocks, device=torch.device("cpu"))
    for pool in (storage.keys, storage.values):
        pool.copy_(torch.randn(pool.shape[1:], dtype=torch.bfloat16))
    if not compiled:
        torch.set_num_threads(num_threads)
        return TorchRunner(model, storage)
    if (kernels := library()) is None:
        raise StartupError("the compiled kernels were not built, or this processor has neither AVX-512 nor AVX2")
    packed = PackedModel(model, storage, max_positions=8192, kernels=kernels)
    return CpuRunner(packed, storage, num_threads=num_threads, kernels=kernels)


def measure(
    cases: dict[str, TrunkCase], *, repeats: int, num_threads: int, compiled: bool
) -> Iterator[tuple[str, float, float]]:
    """Yields the name of each case with the median and the minimum of its milliseconds per step."""
    runner = runner_for(max(case.num_blocks for case in cases.values()), num_threads, compiled=compiled)
    inputs = {name: inputs_of(case) for name, case in cases.items()}
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, step in inputs.items():
            begin = time.perf_counter()
            runner.run(step)
            taken[name].append(1e3 * (time.perf_counter() - begin))
    for name, times in taken.items():
        yield name, median(times), min(times)


def main(argv: Sequence[str]) -> int:
    parser = benchmark_parser("bench.kernel_trunks", __doc__)
    parser.add_argument("--kernels", choices=("compiled", "torch"), default="compiled", help="kernels to measure")
    parser.add_argument("--repeats", type=int, default=9, help="number of timed steps of each case")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="number of threads")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=[*CASES], help="names of cases")
    arguments = parser.parse_args(argv)
    chosen = {name: CASES[name] for name in arguments.cases}
    compiled = arguments.kernels == "compiled"
    rows = list(measure(chosen, repeats=arguments.repeats, num_threads=arguments.threads, compiled=compiled))
    shown = table([("case", name, "<"), ("ms per step", ms, ".2f"), ("minimum", low, ".2f")] for name, ms, low in rows)
    title = f"{arguments.kernels} kernels, {TAIL} generated tokens, {arguments.threads} threads"
    return print_report({"rows": rows}, title, shown, conditions=machine())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

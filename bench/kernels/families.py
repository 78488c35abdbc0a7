"""Measures families of models on the compiled kernels and on torch's operators, with the same random weights.

Each family has a small model with its properties (`tests.tiny_architectures`), enlarged to the sizes of the default
model with four layers. "decode" is the rate of a group of n choices after a prompt of 256 tokens, "prompt" the rate of
a prompt of 1024 tokens. The backends take turns, with one thread. Times are CPU times, which other programs disturb
less; figures are medians. Prints a table, and JSON on the last line.

With `--save`, the ratios are stored in `families.json`, from which `tools.models_page` generates a column of
docs/models.md.

Run: python -m bench.kernels.families [--names Llama,Olmo2] [--ns 1,8] [--repeats 2] [--dtype bfloat16] [--save]
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from bench.program.command_line import benchmark_parser, numbers, progress
from bench.program.report import Cells, machine, print_report, table
from motet.engines.native.build import build_parts, core_over
from motet.engines.native.core import EngineCore
from motet.ids import RequestId
from motet.types import GenerateRequest, SamplingParams, choice_starts
from tests.tiny_architectures import ARCHITECTURES, WITHOUT_KERNELS, save_tiny_architecture
from tests.tiny_engine import engine_config
from tests.tiny_models import FAMILIES

SIZES: dict[str, object] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
    "initializer_range": 0.05,
}
BACKENDS = ("compiled", "torch")
DECODED, SHORT, LONG = 32, 256, 1024
"""Numbers of tokens: of each choice, and of the prompts."""
PROMPT = "prompt"
SAVED = Path(__file__).with_name("families.json")
"""File of the ratios on the machine that is named in it."""


@dataclass(frozen=True)
class FamilyCost:
    family: str
    case: str
    compiled: float
    """Tokens per second."""
    torch: float

    @property
    def ratio(self) -> float:
        return self.compiled / self.torch

    def cells(self) -> Cells:
        return [
            ("family", self.family, "<"),
            ("case", self.case, "<"),
            ("kernels, tokens/s", self.compiled, ".0f"),
            ("torch, tokens/s", self.torch, ".0f"),
            ("kernels / torch", self.ratio, ".1f"),
        ]


@dataclass(frozen=True)
class SavedRatios:
    """What `--save` stores: kernels / torch, and the conditions under which they were measured. Ratios of families that
    are not measured again stay if the conditions are the same."""

    conditions: Mapping[str, str]
    ratios: Mapping[str, Mapping[str, float]]
    """Ratios of each family by the name of the case."""

    @classmethod
    def of(cls, costs: Sequence[FamilyCost], dtype: str) -> "SavedRatios":
        ratios: dict[str, dict[str, float]] = {cost.family: {} for cost in costs}
        for cost in costs:
            ratios[cost.family][cost.case] = round(cost.ratio, 2)
        found, date = machine(), datetime.now(UTC).date().isoformat()
        conditions = {"date": date, "cpu": found["cpu"], "cores": found["cores"], "dtype": dtype}
        saved = cls.read() if SAVED.exists() else cls({}, {})
        return cls(conditions, {**(saved.ratios if saved.conditions == conditions else {}), **ratios})

    @classmethod
    def read(cls) -> "SavedRatios":
        return cls(**json.loads(SAVED.read_text()))

    def write(self) -> None:
        SAVED.write_text(f"{json.dumps(asdict(self), indent=1)}\n")


def decode_case(n: int) -> str:
    return f"decode, n = {n}"


def request(name: str, *, prompt: int, n: int, max_tokens: int, seed: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(name),
        prompt=tuple(3 + (seed * 997 + at * 31) % 8000 for at in range(prompt)),
        choices=choice_starts(n, seed),
        sampling=SamplingParams(ignore_eos=True, max_tokens=max_tokens),
    )


def rate(core: EngineCore, *, prompt: int, n: int, max_tokens: int, seed: int) -> float:
    """Returns prompt tokens per second for answers of one token, else output tokens per second after the prompt."""
    core.submit(request(f"{seed}", prompt=prompt, n=n, max_tokens=max_tokens, seed=seed))
    start_s, first_s = time.process_time(), None
    while core.busy:
        if core.step().deltas and first_s is None:
            first_s = time.process_time()
    end_s = time.process_time()
    if max_tokens == 1:
        return prompt / (end_s - start_s)
    return n * (max_tokens - 1) / (end_s - (first_s or start_s))


def measure(name: str, args: argparse.Namespace) -> list[FamilyCost]:
    with tempfile.TemporaryDirectory() as made:
        folder = save_tiny_architecture(name, Path(made), **SIZES | enlarged(name))  # type: ignore[arg-type]
        configs = [
            engine_config(
                folder, dtype=args.dtype, kernels=kernels, max_model_len=2048, kv_cache_gb=0.5, max_num_seqs=64
            )
            for kernels in BACKENDS
        ]
        cores = [core_over(build_parts(config), config) for config in configs]
    cases = {PROMPT: (LONG, 1, 1)} | {decode_case(n): (SHORT, n, DECODED) for n in args.ns}
    costs: list[FamilyCost] = []
    for case, (prompt, n, max_tokens) in cases.items():
        rates: list[list[float]] = [[], []]
        for repeat in range(args.repeats):
            for core, found in zip(cores, rates, strict=True):
                found.append(rate(core, prompt=prompt, n=n, max_tokens=max_tokens, seed=1 + repeat + 100 * len(costs)))
        costs.append(FamilyCost(name, case, *map(median, rates)))
    return costs


def enlarged(name: str) -> dict[str, object]:
    """Returns the sizes that a family names differently, or that depend on each other in it."""
    own = ARCHITECTURES.get(name, {})
    sizes: dict[str, object] = {
        field: None for field in ("head_dim", "num_key_value_heads") if field in own and own[field] is None
    }
    return sizes | ({"partial_rotary_factor": 0.5} if name == "Phi" else {})  # 0.4 of 64 is not an even number


def main(argv: Sequence[str]) -> int:
    parser = benchmark_parser("bench.kernels.families", __doc__)
    known = [*map(str.title, FAMILIES), *(name for name in ARCHITECTURES if name not in WITHOUT_KERNELS)]
    parser.add_argument("--names", default=",".join(known), help="architectures, separated by commas")
    parser.add_argument("--ns", type=numbers, default=(1, 8), help="numbers of choices, separated by commas")
    parser.add_argument("--repeats", type=int, default=2, help="number of measurements of each case")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32")
    parser.add_argument("--save", action="store_true", help=f"store the ratios in {SAVED.name}")
    args = parser.parse_args(argv)
    costs: list[FamilyCost] = []
    for name in args.names.split(","):
        progress(name)
        costs += measure(name, args)
        if args.save:
            SavedRatios.of(costs, args.dtype).write()
    report = {"families": [asdict(cost) for cost in costs]}
    shown = table(cost.cells() for cost in costs)
    return print_report(report, shown, conditions=machine())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Measures what the check at load costs a start: the reference of transformers in float32, and the comparison of the
backend with it (`motet.engines.native.checks.reference`).

The models are the default model, and models of Llama-2-7B's sizes with random weights and a few of its layers. The last
row extrapolates the times of all 32 layers from the times with two numbers of layers. Each part is repeated. "first" is
the time of the first pass, as in a start, and the other figures are minima. "backend" is the time to read the structure
of the model and to pack its weights, which is not a part of the check. Prints a table, and JSON on the last line.

Run: python -m bench.kernels.load_checks [--model smollm2] [--layers 4,8] [--repeats 5] [--dtype bfloat16] [--threads 2]
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from bench.program.command_line import benchmark_parser, numbers, progress
from bench.program.report import Cells, machine, print_report, table
from motet.engines.native.build import choose_backend
from motet.engines.native.checks.reference import CLOSE, NUM_TOKENS, compare, reference_pass
from motet.engines.native.kv.storage import KVLayout, KVStorage
from motet.engines.native.model import DTYPES, load_model, read_config, read_shape
from motet.engines.native.step.run import ATTENTION_NAME
from motet.models.model_source import resolve
from motet.models.progress import Lines
from motet.models.smollm2 import DEFAULT_MODEL
from motet.settings.server_config import cache_folder, environment

Result = TypeVar("Result")
BLOCK_SIZE, MAX_MODEL_LEN = 16, 2048
ALL_LAYERS = 32
PATTERN = 1048573
"""Number of random weights that are repeated. It is a prime number, so that no two rows of a weight are equal."""


@dataclass(frozen=True)
class CheckCost:
    """Seconds of the parts of a check."""

    model: str
    layers: int
    reference_first_s: float
    reference_s: float
    backend_s: float
    comparison_first_s: float
    comparison_s: float
    kernels: str | None
    """None for times that were extrapolated."""
    difference: float | None

    @property
    def check_first_s(self) -> float:
        return self.reference_first_s + self.comparison_first_s

    @property
    def check_s(self) -> float:
        return self.reference_s + self.comparison_s

    def cells(self) -> Cells:
        return [
            ("model", self.model, "<"),
            ("layers", self.layers, ""),
            ("kernels", self.kernels, "<"),
            ("difference", self.difference, ".1g"),
            ("backend, s", self.backend_s, ".2f"),
            ("reference, first, s", self.reference_first_s, ".3f"),
            ("minimum, s", self.reference_s, ".3f"),
            ("comparison, first, s", self.comparison_first_s, ".3f"),
            ("minimum, s ", self.comparison_s, ".3f"),
            ("check, first, s", self.check_first_s, ".3f"),
            ("minimum, s  ", self.check_s, ".3f"),
        ]


def extrapolated(few: CheckCost, more: CheckCost, layers: int = ALL_LAYERS) -> CheckCost:
    """Returns the times of a model with `layers` layers, as each layer costs the same."""

    def at(field: str) -> float:
        first, second = getattr(few, field), getattr(more, field)
        slope = (second - first) / (more.layers - few.layers)
        return float(second + slope * (layers - more.layers))

    fields = ("reference_first_s", "reference_s", "backend_s", "comparison_first_s", "comparison_s")
    seconds = {field: at(field) for field in fields}
    return CheckCost(model=f"{more.model}, extrapolated", layers=layers, kernels=None, difference=None, **seconds)


def measure(model: PreTrainedModel, name: str, *, repeats: int, storage: KVStorage) -> CheckCost:
    def timed(run: Callable[[], Result]) -> tuple[Result, float, float]:
        """Returns the result, and the first and the minimum time."""
        seconds = []
        for _ in range(repeats):
            start_s = time.perf_counter()
            result = run()
            seconds.append(time.perf_counter() - start_s)
        return result, seconds[0], min(seconds)

    vocab_size = model.config.vocab_size
    reference, reference_first_s, reference_s = timed(
        lambda: reference_pass(model, num_tokens=NUM_TOKENS, vocab_size=vocab_size)
    )
    start_s = time.perf_counter()
    backend = choose_backend(model, storage, kernels="auto", max_model_len=MAX_MODEL_LEN)
    backend_s = time.perf_counter() - start_s
    found, comparison_first_s, comparison_s = timed(lambda: compare(backend.runner, reference, storage=storage))
    limit = CLOSE[storage.keys.dtype]
    progress(f"{name}: {found.description(limit)}, equal bits: {found.same}")
    return CheckCost(
        name,
        len(storage.keys),
        reference_first_s,
        reference_s,
        backend_s,
        comparison_first_s,
        comparison_s,
        backend.kernels,
        found.logits,
    )


def random_llama(layers: int, dtype: torch.dtype) -> PreTrainedModel:
    """Returns a model of Llama-2-7B's sizes, which are the default values of transformers."""
    config = LlamaConfig(num_hidden_layers=layers, max_position_embeddings=MAX_MODEL_LEN)
    with no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    pattern = torch.randn(PATTERN, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(dtype)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            for piece in torch.split(module.weight.data.view(-1), PATTERN):
                piece.copy_(pattern[: len(piece)])
    nn.Module.eval(model)
    return model


def storage_of(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVStorage:
    layout = KVLayout(layers, BLOCK_SIZE, kv_heads, head_dim, dtype)
    return KVStorage(layout, NUM_TOKENS // BLOCK_SIZE + 1, device=torch.device("cpu"))


def saved_model_cost(args: argparse.Namespace, dtype: torch.dtype) -> CheckCost:
    folder = resolve(args.model, cache=cache_folder(environment()), progress=Lines(progress))
    config = read_config(folder)
    shape = read_shape(folder, config)
    model = load_model(folder, config, dtype=dtype, device=torch.device("cpu"))
    storage = storage_of(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype)
    return measure(model, args.model, repeats=args.repeats, storage=storage)


def random_model_cost(layers: int, args: argparse.Namespace, dtype: torch.dtype) -> CheckCost:
    model = random_llama(layers, dtype)
    config = model.config
    storage = storage_of(layers, config.num_key_value_heads, config.hidden_size // config.num_attention_heads, dtype)
    return measure(model, "Llama-2-7B's sizes", repeats=args.repeats, storage=storage)


def main(argv: Sequence[str]) -> int:
    parser = benchmark_parser("bench.kernels.load_checks", __doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a saved model; empty for none")
    parser.add_argument("--layers", type=numbers, default=(4, 8), help="numbers of layers of the random models")
    parser.add_argument("--repeats", type=int, default=5, help="number of measurements of each part")
    parser.add_argument("--dtype", default="bfloat16", help=" or ".join(DTYPES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="number of threads")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    dtype, conditions = DTYPES[args.dtype], machine()
    costs = [saved_model_cost(args, dtype)] if args.model else []
    random = [random_model_cost(layers, args, dtype) for layers in args.layers]
    costs += random
    if len(random) > 1:
        costs.append(extrapolated(random[-2], random[-1]))
    record = {"costs": [asdict(cost) | {"check_s": cost.check_s} for cost in costs]}
    return print_report(record, table(cost.cells() for cost in costs), conditions=conditions)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

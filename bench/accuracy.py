"""Measures the distance of the engine's numbers from float32: in bf16, with int8 weights, and with torch's operators.

The reference is `transformers` in float32, over a text that is cut into windows. The benchmark compares next-token
distributions: mean and 99th percentile of the Kullback-Leibler divergence in nats, perplexity, and the share of tokens
after which another token is the most likely one. Prints a table, and JSON on the last line.

Run: python -m bench.accuracy MODEL_FOLDER TEXT_FILE... [--tokens 4096] [--window 512]
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bench.program.command_line import benchmark_parser
from bench.program.report import Cells, machine, print_report, table
from motet.engines.native.attention.attention_plan import AttentionPlan, PromptRead, pieces
from motet.engines.native.build import Parts, build_parts
from motet.engines.native.step.inputs import StepInputs
from motet.settings.engine_config import EngineConfig

WAYS = {
    "bf16 by torch": {"kernels": "torch"},
    "bf16": {"kernels": "compiled"},
    "int8": {"quantization": "int8"},
}


@dataclass(frozen=True)
class Accuracy:
    perplexity: float
    mean_kl: float = 0.0
    """Mean divergence in nats per token, from the float32 distribution to this one."""
    p99_kl: float = 0.0
    other_first: float = 0.0
    """Share of tokens after which another token is the most likely one."""


def accuracy(windows: torch.Tensor, logits: torch.Tensor, reference: torch.Tensor) -> Accuracy:
    """Compares logits with the reference, both [windows, tokens, vocabulary], after the tokens [windows, tokens]."""
    measured, true = logits.float().log_softmax(-1), reference.float().log_softmax(-1)
    divergence = (true.exp() * (true - measured)).sum(-1).flatten()
    surprise = -measured[:, :-1].gather(-1, windows[:, 1:, None])
    return Accuracy(
        perplexity=surprise.mean().exp().item(),
        mean_kl=divergence.mean().item(),
        p99_kl=divergence.quantile(0.99).item(),
        other_first=(measured.argmax(-1) != true.argmax(-1)).float().mean().item(),
    )


def by_transformers(folder: Path, windows: torch.Tensor) -> Iterator[torch.Tensor]:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for window in windows:
        with torch.inference_mode():
            yield model(window[None], use_cache=False).logits[0]


def by_engine(folder: Path, windows: torch.Tensor, **fields: Any) -> Iterator[torch.Tensor]:
    config = EngineConfig(model_path=str(folder), model_name="", device="cpu", dtype="bfloat16", max_model_len=2048)
    parts = build_parts(replace(config, **fields))
    for window in windows:
        yield prompt_logits(parts, window.tolist()).clone()


def prompt_logits(parts: Parts, tokens: list[int]) -> torch.Tensor:
    """Returns the logits after every token of a prompt, from one pass. The prompt's length must be a multiple of 4."""
    rows = list(range(len(tokens)))
    table = list(range(-(-len(tokens) // parts.info.block_size)))
    reads = tuple(PromptRead(first, last, first, keys, table) for first, last, keys in pieces(0, len(tokens)))
    plan = AttentionPlan(0, reads, (), ())
    return parts.runner.run(StepInputs(tokens, rows, rows, rows, len(rows), [], [], plan))


def compare(folder: Path, windows: torch.Tensor) -> dict[str, Accuracy]:
    reference = torch.stack(list(by_transformers(folder, windows)))
    found = {"float32": accuracy(windows, reference, reference)}
    for way, fields in WAYS.items():
        found[way] = accuracy(windows, torch.stack(list(by_engine(folder, windows, **fields))), reference)
    return found


def cells_of(way: str, found: Accuracy) -> Cells:
    return [
        ("way", way, "<"),
        ("perplexity", found.perplexity, ".3f"),
        ("mean KL", found.mean_kl, ".5f"),
        ("KL p99", found.p99_kl, ".5f"),
        ("other first", found.other_first, ".4f"),
    ]


def main() -> None:
    parser = benchmark_parser("bench.accuracy", __doc__)
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("texts", type=Path, nargs="+", help="text files")
    parser.add_argument("--tokens", type=int, default=4096, help="maximum number of tokens of all texts together")
    parser.add_argument("--window", type=int, default=512, help="number of tokens of a window, a multiple of 4")
    args = parser.parse_args()
    text = "\n".join(path.read_text() for path in args.texts)
    tokens = AutoTokenizer.from_pretrained(args.model)(text)["input_ids"][: args.tokens]
    windows = torch.tensor(tokens[: len(tokens) // args.window * args.window]).view(-1, args.window)
    print(f"{windows.numel()} tokens in windows of {args.window}")
    found = compare(args.model, windows)
    shown = table(cells_of(way, accuracy) for way, accuracy in found.items())
    print_report({"accuracy": {way: asdict(accuracy) for way, accuracy in found.items()}}, shown, conditions=machine())


if __name__ == "__main__":
    main()

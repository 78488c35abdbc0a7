"""Measures how far from float32 the engine's numbers are: in bf16, with int8 weights, and by torch's operators.

The truth is `transformers` in float32, over a text that is cut into windows. It compares next-token distributions: mean
and 99th percentile of the Kullback-Leibler divergence in nats, perplexity, how often another token is the likeliest.
Prints a table, and JSON on the last line.

Run: python -m bench.accuracy MODEL_FOLDER TEXT_FILE... [--tokens 4096] [--window 512]
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bench.results.report import machine, table, tell
from motet.engines.native.attention.attention_plan import AttentionPlan, PromptRead, pieces
from motet.engines.native.build import Parts, build_parts
from motet.engines.native.step.inputs import StepInputs
from motet.settings.server_config import EngineConfig

WAYS = {
    "bf16 by torch": {"kernels": "torch"},
    "bf16": {"kernels": "compiled"},
    "int8": {"quantization": "int8"},
}


@dataclass(frozen=True)
class Accuracy:
    perplexity: float
    mean_kl: float = 0.0
    """Mean divergence in nats a token, from the float32 distribution to this one."""
    p99_kl: float = 0.0
    other_first: float = 0.0
    """Share of tokens after which another one is the likeliest."""


def accuracy(windows: torch.Tensor, logits: torch.Tensor, truth: torch.Tensor) -> Accuracy:
    """Compares logits [windows, tokens, vocabulary] with the true ones; they follow the tokens [windows, tokens]."""
    ours, true = logits.float().log_softmax(-1), truth.float().log_softmax(-1)
    divergence = (true.exp() * (true - ours)).sum(-1).flatten()
    surprise = -ours[:, :-1].gather(-1, windows[:, 1:, None])
    return Accuracy(
        perplexity=surprise.mean().exp().item(),
        mean_kl=divergence.mean().item(),
        p99_kl=divergence.quantile(0.99).item(),
        other_first=(ours.argmax(-1) != true.argmax(-1)).float().mean().item(),
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
    """Returns the logits after every token of a prompt, from one pass. Its length must be a multiple of 4."""
    rows = list(range(len(tokens)))
    table = list(range(-(-len(tokens) // parts.info.block_size)))
    reads = tuple(PromptRead(first, last, first, keys, table) for first, last, keys in pieces(0, len(tokens)))
    plan = AttentionPlan(0, reads, (), ())
    return parts.runner.run(StepInputs(tokens, rows, rows, rows, len(rows), [], [], plan))


def compare(folder: Path, windows: torch.Tensor) -> dict[str, Accuracy]:
    truth = torch.stack(list(by_transformers(folder, windows)))
    found = {"float32": accuracy(windows, truth, truth)}
    for way, fields in WAYS.items():
        found[way] = accuracy(windows, torch.stack(list(by_engine(folder, windows, **fields))), truth)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="distance of the engine's numbers from float32")
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("texts", type=Path, nargs="+", help="text files")
    parser.add_argument("--tokens", type=int, default=4096, help="most tokens of all texts together")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window, a multiple of 4")
    args = parser.parse_args()
    text = "\n".join(path.read_text() for path in args.texts)
    tokens = AutoTokenizer.from_pretrained(args.model)(text)["input_ids"][: args.tokens]
    windows = torch.tensor(tokens[: len(tokens) // args.window * args.window]).view(-1, args.window)
    print(f"{windows.numel()} tokens in windows of {args.window}")
    found = compare(args.model, windows)
    heads = [("way", "<"), ("perplexity", ".3f"), ("mean KL", ".5f"), ("99 %", ".5f"), ("other first", ".4f")]
    shown = table(heads, [(way, *astuple(one)) for way, one in found.items()])
    tell({"accuracy": {way: asdict(one) for way, one in found.items()}}, shown, about=machine())


if __name__ == "__main__":
    main()

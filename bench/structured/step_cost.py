"""Measures a step's work for grammars on one thread, without a model: to fill and apply masks, and to consume tokens.

Every choice follows the same answer with its own matcher, so the masks are like the masks with a model.
"""

import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

from bench.client.fresh_prompts import TEXT
from motet.engines.native.sample.edits import GrammarMasks
from motet.engines.native.sample.state import ChoiceSampling, PromptTokens
from motet.grammar.compiled_grammar import Grammars
from motet.text.tokenizer import Tokenizer
from motet.types import Grammar, GrammarKind, SamplingParams

ITEMS = 20
SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "parts": {
            "type": "array",
            "minItems": ITEMS,
            "maxItems": ITEMS,
            "items": {
                "type": "object",
                "properties": {
                    "voice": {"type": "string", "minLength": 60, "maxLength": 200},
                    "bars": {"type": "integer", "minimum": 1, "maximum": 999},
                    "kind": {"enum": ["tenor", "motetus", "triplum"]},
                },
                "required": ["voice", "bars", "kind"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["parts"],
    "additionalProperties": False,
}
"""A schema that is so long that no answer completes it, so answers with and without it have the same number of
tokens."""
GRAMMAR = Grammar(GrammarKind.JSON, json.dumps(SCHEMA))
WARM_UP_STEPS = 5


@dataclass(frozen=True)
class StepCost:
    """Median times of a step with n choices."""

    n: int
    fill_ms: float
    apply_ms: float
    consume_ms: float

    @property
    def total_ms(self) -> float:
        return self.fill_ms + self.apply_ms + self.consume_ms


def step_costs(folder: Path, ns: tuple[int, ...], *, steps: int) -> list[StepCost]:
    tokenizer = Tokenizer.load(folder)
    config = json.loads((folder / "config.json").read_text())
    vocab_size, eos = int(config["vocab_size"]), int(config["eos_token_id"])
    grammars = Grammars(lambda: tokenizer, vocab_size=vocab_size, eos_token_ids=(eos,))
    measured = partial(_measured, tokenizer.encode(answer())[:steps], grammars, vocab_size, eos)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [measured(n) for n in ns]
    finally:
        torch.set_num_threads(num_threads)


def answer() -> str:
    """Returns an answer that satisfies the schema."""
    parts = [
        {"voice": (2 * TEXT)[31 * i : 31 * i + 150], "bars": 7 * i + 1, "kind": ("tenor", "motetus")[i % 2]}
        for i in range(ITEMS)
    ]
    return json.dumps({"parts": parts})


@torch.inference_mode()
def _measured(tokens: list[int], grammars: Grammars, vocab_size: int, eos: int, n: int) -> StepCost:
    params = SamplingParams(max_tokens=len(tokens) + 1, ignore_eos=True, grammar=GRAMMAR)
    compiled, prompt = grammars.get(GRAMMAR), PromptTokens()
    states = [
        ChoiceSampling(params, seed=i, prompt=prompt, eos_token_ids=(eos,), matcher=compiled.matcher())
        for i in range(n)
    ]
    masks, logits = GrammarMasks(vocab_size, torch.device("cpu")), torch.randn(n, -(-vocab_size // 256) * 256)
    x, spare = torch.empty_like(logits), torch.empty_like(logits)
    seconds: list[tuple[float, float, float]] = []
    for token_id in tokens:
        x.copy_(logits)
        start = time.perf_counter()
        filled = masks.fill(states)
        at_fill = time.perf_counter()
        masks.apply(x, filled, spare=spare)
        at_apply = time.perf_counter()
        for state in states:
            state.append(token_id)
        seconds.append((at_fill - start, at_apply - at_fill, time.perf_counter() - at_apply))

    fill, apply, consume = (1000 * median(column) for column in zip(*seconds[WARM_UP_STEPS:], strict=True))
    return StepCost(n, fill, apply, consume)

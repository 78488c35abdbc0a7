"""Tiny random models of every supported family, and the answers of `transformers.generate` for them.

The default initializer makes models that repeat one token, which would hide almost any fault. These models use a wide
one, no tied embeddings, and sliding windows short enough to matter (`assert_lively` checks it).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
KV_NUMBERS_PER_TOKEN = 2 * 3 * 2 * 32
"""K and V, layers, kv heads, head_dim."""
_WINDOWED: dict[str, Any] = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {**_WINDOWED, "use_sliding_window": True, "max_window_layers": 0}),
    "qwen3": (Qwen3Config, {}),
    "mistral": (MistralConfig, {"sliding_window": 16}),
    "gemma": (GemmaConfig, {}),
    "gemma2": (Gemma2Config, {**_WINDOWED, "attn_logit_softcapping": 5.0}),
    "gemma3": (Gemma3TextConfig, _WINDOWED),
}
FAMILIES = tuple(CONFIGS)


def config_of(family: str) -> PreTrainedConfig:
    """Returns a tiny config; `family` is one of FAMILIES."""
    kind, own = CONFIGS[family]
    return kind(**SIZES, **own)


def save_tiny_model(family: str, folder: Path, *, seed: int = 3) -> Path:
    """Writes config and random float32 weights."""
    return save_model_of(config_of(family), folder, seed=seed)


def save_model_of(config: PreTrainedConfig, folder: Path, *, seed: int = 3) -> Path:
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32
    )
    model.save_pretrained(folder)
    return folder


class Reference:
    """`transformers` itself, one prompt at a time, with the attention that its authors call the reference."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self._device = device
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", device_map=device
        )

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """Returns the new tokens of greedy decoding that ignores end-of-sequence."""
        out = self.model.generate(  # type: ignore[operator]
            torch.tensor([list(prompt)], device=self._device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64, device=self._device),
            max_new_tokens=max_new_tokens,
            min_new_tokens=None,
            eos_token_id=None,
            pad_token_id=0,
            do_sample=False,
        )
        return [int(token) for token in out[0, len(prompt) :]]

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[tokens, vocab] float32."""
        logits = self.model(torch.tensor([list(tokens)], device=self._device), use_cache=False).logits[0]
        assert isinstance(logits, torch.Tensor)
        return logits

    def margin(self, tokens: Sequence[int]) -> float:
        """Returns the difference between the logits of the two best next tokens."""
        best = self.logits(tokens)[-1].topk(2).values
        return float(best[0] - best[1])


def assert_lively(tokens: Sequence[int], at_least: int) -> None:
    """Checks that the tokens vary: a model that always generates the same token proves nothing."""
    assert len(set(tokens)) >= at_least, f"only {len(set(tokens))} distinct tokens of {len(tokens)}"


def assert_greedy_equal(
    reference: Reference, prompt: Sequence[int], found: Sequence[int], expected: Sequence[int]
) -> None:
    """Compares token for token. Where the two differ, the reference must have been undecided to within rounding."""
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one != other:
            margin = reference.margin([*prompt, *expected[:i]])
            assert margin < 1e-4, f"token {i} is {one}, not {other}; the reference's margin is {margin}"
            return

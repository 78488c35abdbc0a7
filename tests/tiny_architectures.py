"""Tiny random models of architectures without compiled kernels. Each has the properties that distinguish it."""

from pathlib import Path
from typing import Any

import transformers

from tests.tiny_models import SIZES, save_model_of

_KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_WINDOWED: dict[str, Any] = {"sliding_window": 16, "layer_types": _KINDS}
_EXPERTS: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_FACTORS: dict[str, Any] = {"embedding_multiplier": 3.0, "attention_multiplier": 0.1, "residual_multiplier": 0.4}
_NO_HEADS: dict[str, Any] = {"head_dim": None, "num_key_value_heads": None}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "SmolLM3": {"no_rope_layers": [1, 1, 1, 0]},
    "Granite": {**_FACTORS, "logits_scaling": 2.0},
    "Phi3": {},
    "Olmo2": {},
    "Cohere2": {**_WINDOWED, "logit_scale": 0.3},
    "Qwen3Moe": {**_EXPERTS, "norm_topk_prob": True},
    "GPTNeoX": {**_NO_HEADS, "rotary_pct": 0.25},
    "Glm4": {"partial_rotary_factor": 0.5},
    "Apertus": {},
    "Arcee": {},
    "Cohere": {"logit_scale": 0.3},
    "Dots1": {**_ROUTED, **_WINDOWED, "n_shared_experts": 1},
    "Ernie4_5": {},
    "Ernie4_5_Moe": {"moe_num_experts": 16, "moe_k": 3, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
    "Exaone4": _WINDOWED,
    "FlexOlmo": _EXPERTS,
    "GPT2": {**_NO_HEADS, "n_positions": 1024},
    "Glm": {"partial_rotary_factor": 0.5},
    "Glm4Moe": _ROUTED,
    "GraniteMoe": {**_FACTORS, "num_local_experts": 8, "num_experts_per_tok": 3},
    "Helium": {"head_dim": 16},
    "HunYuanDenseV1": {},
    "Mixtral": {"num_local_experts": 8},
    "OPT": {**_NO_HEADS, "word_embed_proj_dim": 64, "ffn_dim": 128},
    "Olmo": {},
    "Olmo3": _WINDOWED,
    "Olmoe": {**_EXPERTS, "head_dim": None},
    "Persimmon": _NO_HEADS,
    "Phi": {"partial_rotary_factor": 0.5},
    "Qwen2Moe": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "Starcoder2": {"sliding_window": 16},
    "VaultGemma": _WINDOWED,
}
"""Fields of the configuration by the name of the architecture. None leaves out a field of `SIZES`."""


def save_tiny_architecture(name: str, folder: Path, **fields: object) -> Path:
    """Writes config and random float32 weights of a model with four layers."""
    given = {**SIZES, "num_hidden_layers": 4, **ARCHITECTURES.get(name, {}), **fields}
    kind = getattr(transformers, f"{name}Config")
    return save_model_of(kind(**{key: value for key, value in given.items() if value is not None}), folder)

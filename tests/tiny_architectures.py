"""Tiny random models of many architectures. Each has the properties that distinguish it."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.tiny_models import CONFIGS, SIZES

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
_LATENT: dict[str, Any] = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
_FACTORS: dict[str, Any] = {"embedding_multiplier": 3.0, "attention_multiplier": 0.1, "residual_multiplier": 0.4}
_NO_HEADS: dict[str, Any] = {"head_dim": None, "num_key_value_heads": None}
_ROWS: dict[str, Any] = {"head_dim": None, "hidden_size": 128}
_HEADS_OF_80: dict[str, Any] = {"hidden_size": 320, "initializer_range": 0.1}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "SmolLM3": {"no_rope_layers": [1, 1, 1, 0]},
    "Granite": {**_FACTORS, "logits_scaling": 2.0},
    "Phi3": {},
    "Olmo2": {},
    "Cohere2": {**_WINDOWED, "logit_scale": 0.3},
    "Qwen3Moe": {**_EXPERTS, "norm_topk_prob": True},
    "GPTNeoX": {**_ROWS, **_HEADS_OF_80, "num_key_value_heads": None, "rotary_pct": 0.25},
    "Glm4": {"partial_rotary_factor": 0.5},
    "Apertus": {},
    "Arcee": {},
    "Cohere": {**_ROWS, "logit_scale": 0.3, "use_qk_norm": True},
    "DeepseekV2": {**_ROUTED, **_LATENT, "topk_method": "group_limited_greedy", "n_shared_experts": 1},
    "DeepseekV3": {**_ROUTED, **_LATENT, "n_shared_experts": 1},
    "Dots1": {**_ROUTED, **_WINDOWED, "n_shared_experts": 1},
    "Ernie4_5": {},
    "Ernie4_5_Moe": {"moe_num_experts": 16, "moe_k": 3, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
    "Exaone4": _WINDOWED,
    "FlexOlmo": _EXPERTS,
    "GPT2": {**_NO_HEADS, "n_positions": 1024},
    "Glm": {"partial_rotary_factor": 0.5, "attention_bias": True},
    "Glm4Moe": _ROUTED,
    "GptOss": {**_WINDOWED, "num_local_experts": 8, "num_experts_per_tok": 3},
    "GraniteMoe": {**_FACTORS, "num_local_experts": 8, "num_experts_per_tok": 3},
    "Helium": {"hidden_size": 128},
    "HunYuanDenseV1": {},
    "Mixtral": {"num_local_experts": 8},
    "Nemotron": {"partial_rotary_factor": 0.5},
    "OPT": {**_NO_HEADS, "word_embed_proj_dim": 64, "ffn_dim": 128},
    "Olmo": {},
    "Olmo3": _WINDOWED,
    "Olmoe": {**_EXPERTS, "head_dim": None, "num_attention_heads": 2},
    "Persimmon": {**_ROWS, "num_key_value_heads": None, "partial_rotary_factor": 0.5},
    "Phi": {**_ROWS, **_HEADS_OF_80, "partial_rotary_factor": 0.4, "qk_layernorm": True},
    "Qwen2Moe": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "SeedOss": {"attention_bias": True},
    "StableLm": {**_ROWS, "partial_rotary_factor": 0.25, "use_qkv_bias": True, "use_parallel_residual": True},
    "Starcoder2": {"sliding_window": 16},
    "VaultGemma": _WINDOWED,
}
"""Fields of the configuration by the name of the architecture. None leaves out a field of `SIZES`."""

WITHOUT_KERNELS: dict[str, str] = {
    "Apertus": "the activation XIELUActivation",
    "DeepseekV2": "the RoPE of DeepseekV2RotaryEmbedding",
    "DeepseekV3": "4 products before attention",
    "GPT2": "the part transformer.wpe",
    "OPT": "the part model.decoder.embed_positions",
}
"""Part of the reason why the compiled kernels do not run an architecture. They run all others of `ARCHITECTURES`."""


MODELS: dict[str, str] = {
    "Llama": "Llama 2 and 3, SmolLM 1 and 2, TinyLlama",
    "SmolLM3": "SmolLM 3",
    "GPTNeoX": "GPT-NeoX, Pythia",
    "Glm": "GLM 4 (9B)",
    "Glm4": "GLM 4 0414",
    "Olmo": "OLMo 1",
    "Olmo2": "OLMo 2",
    "Olmo3": "OLMo 3",
    "Cohere": "Command R",
    "Cohere2": "Command R7B, Command A",
    "DeepseekV2": "DeepSeek V2",
    "DeepseekV3": "DeepSeek V3 and R1",
    "Phi": "Phi 1 to 2",
    "Phi3": "Phi 3 and 4",
    "Exaone4": "EXAONE 4",
    "HunYuanDenseV1": "HunYuan",
    "Ernie4_5": "ERNIE 4.5",
    "SeedOss": "Seed-OSS",
    "StableLm": "StableLM",
    "Qwen2": "Qwen 2 and 2.5",
    "Qwen3": "Qwen 3",
    "Gemma2": "Gemma 2",
    "Gemma3": "Gemma 3",
    "GptOss": "GPT-OSS",
    "Qwen2Moe": "Qwen 1.5 and 2, mixtures of experts",
    "Qwen3Moe": "Qwen 3, mixtures of experts",
    "Ernie4_5_Moe": "ERNIE 4.5, mixtures of experts",
    "GraniteMoe": "Granite, mixtures of experts",
    "Glm4Moe": "GLM 4.5 to 4.7",
    "Dots1": "dots.llm1",
    "Olmoe": "OLMoE",
    "Starcoder2": "StarCoder 2",
}
"""Names of models whose names differ from the name of their architecture."""


def save_tiny_architecture(name: str, folder: Path, *, seed: int = 3, **fields: object) -> Path:
    """Writes config and random float32 weights of a model with four layers. Biases and norms are random too: their
    initial zeros and ones would hide that one is not used."""
    given = {**SIZES, "num_hidden_layers": 4, **ARCHITECTURES.get(name, {}), **fields}
    kind = CONFIGS[name.lower()][0] if name.lower() in CONFIGS else getattr(transformers, f"{name}Config")
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        kind(**{key: value for key, value in given.items() if value is not None}), dtype=torch.float32
    )
    for path, tensor in model.state_dict().items():
        if "norm" in path or path.endswith("bias") or tensor.dim() == 1:
            tensor.add_(torch.empty_like(tensor).uniform_(-0.5, 0.5))
    model.save_pretrained(folder)
    return folder

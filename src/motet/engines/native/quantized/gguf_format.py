"""GGUF files of llama.cpp, dequantized in float32 by the library `gguf`.

llama.cpp has other names than transformers. It also changes two kinds of weights, which is undone here: it reorders the
rows of Llama's query and key products, because its RoPE rotates adjacent pairs, and adds 1 to the norms of Gemma.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gguf
import torch
from torch import Tensor

from motet.engines.native.quantized.stored_tensors import LogicalTensor, StoredTensor, pieces_of
from motet.errors import ModelLoadError, UnsupportedModelError
from motet.log import cut
from motet.models.folder import read_object
from motet.models.gguf_files.gguf_header import QUANTIZED, GgufHeader, read_gguf

GEMMA = ("gemma2", "gemma3")
ARCHITECTURES = ("llama", "qwen2", "qwen3", *GEMMA)
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of modules in transformers by the names in GGUF."""
GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
TENSOR = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"
MAX_VALUE_CHARS = 100


@dataclass(frozen=True)
class GgufFormat:
    architecture: str
    kinds: tuple[str, ...]
    """Types of the quantized tensors, the type with the most bytes first."""
    heads: Mapping[str, int]
    """Numbers of query and key heads, by the name of the tensor; empty if the rows are not reordered."""

    @classmethod
    def of(cls, file: Path) -> "GgufFormat":
        """Raises UnsupportedModelError for metadata that is not supported, and ModelLoadError."""
        header = read_gguf(file)
        architecture = header.metadata.get("general.architecture")
        if architecture not in ARCHITECTURES or not isinstance(architecture, str):
            raise UnsupportedModelError(
                f"{file}: general.architecture is {cut(repr(architecture), MAX_VALUE_CHARS)}, which is not supported; "
                f"it can be {', '.join(ARCHITECTURES)}"
            )
        if header.metadata.get("split.count", 1) not in (0, 1):
            raise UnsupportedModelError(f"{file} is one part of a model: join the parts with llama-gguf-split --merge")
        if ROPE_FACTORS in header.tensors:
            _check_rope(file)
        sizes: dict[str, int] = {}
        for entry in header.tensors.values():
            if entry.dtype in QUANTIZED:
                sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.num_bytes
        heads = _heads(header, file=file) if architecture == "llama" else {}
        return cls(architecture, tuple(sorted(sizes, key=lambda kind: -sizes[kind])), heads)

    @property
    def description(self) -> str:
        return f"GGUF {', '.join(self.kinds) or 'without quantization'}"

    def tensors(self, stored: Mapping[str, StoredTensor]) -> list[LogicalTensor]:
        return [self._tensor(tensor) for name, tensor in stored.items() if name != ROPE_FACTORS]

    def _tensor(self, tensor: StoredTensor) -> LogicalTensor:
        gemma = self.architecture in GEMMA
        found = TENSOR.fullmatch(tensor.name)
        module = (NAMES | GEMMA_NAMES if gemma else NAMES).get(found[2]) if found else None
        if found is None or module is None:
            raise tensor.error(f"{self.architecture} models do not have it")
        name = f"{module if found[1] is None else f'model.layers.{int(found[1])}.{module}'}.{found[3]}"
        added = 1.0 if gemma and module.endswith("norm") else 0.0
        heads = self.heads.get(found[2])
        if heads is not None and tensor.shape[0] % (2 * heads):
            raise tensor.error(f"its shape is {list(tensor.shape)}, and it has {heads} heads")
        if tensor.dtype not in QUANTIZED and heads is None and not added:
            return LogicalTensor(name, tensor.shape, {"": tensor})
        dequantize = partial(_dequantize, kind=tensor.dtype, heads=heads, added=added)
        return LogicalTensor(name, tensor.shape, {"": tensor}, dequantize)


def _check_rope(file: Path) -> None:
    """Raises UnsupportedModelError unless the config has the RoPE of Llama 3. The file has its factors in a tensor."""
    config = read_object(file.parent / "config.json")
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) != "llama3":
        raise UnsupportedModelError(f"{file} has RoPE factors ({ROPE_FACTORS}), and its config.json does not have them")


def _heads(header: GgufHeader, *, file: Path) -> dict[str, int]:
    queries = header.metadata.get("llama.attention.head_count")
    keys = header.metadata.get("llama.attention.head_count_kv", queries)
    if type(queries) is not int or type(keys) is not int or min(queries, keys) < 1:
        raise ModelLoadError(f"{file}: llama.attention.head_count is {queries!r}, and head_count_kv is {keys!r}")
    return {"attn_q": queries, "attn_k": keys}


def _dequantize(parts: Mapping[str, Tensor], out: Tensor, *, kind: str, heads: int | None, added: float) -> None:
    numbers = parts[""].view(len(out), -1)  # the bytes of blocks, or floats
    order = torch.arange(len(out))
    if heads is not None:  # row 2 * i + j of a head is row j * head_dim / 2 + i in transformers
        order = order.view(heads, -1, 2).transpose(1, 2).flatten()
    for rows in pieces_of(len(out), max(1, out.numel() // len(out))):
        piece = numbers[order[rows]]
        if kind in QUANTIZED:
            piece = torch.from_numpy(gguf.dequantize(piece.numpy(), gguf.GGMLQuantizationType(QUANTIZED[kind][0])))
        out[rows] = (piece.float() - added).view(out[rows].shape)

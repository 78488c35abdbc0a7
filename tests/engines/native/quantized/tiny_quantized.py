"""Writes quantized checkpoints of tiny models, and the same models with dequantized weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP, BLOCK = 32, 32
Made = tuple[dict[str, Tensor], Tensor]
"""The stored tensors of a layer by the last part of their names, and the dequantized weight."""


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Packs [..., n] into int32 words, lowest bits first."""
    parts = numbers.long().view(*numbers.shape[:-1], -1, 32 // bits) << torch.arange(0, 32, bits)
    words = parts.sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns numbers from 0 to 15 [out, in], whose zero point is 8, and the scales [out, groups] in float16."""
    groups = weight.view(len(weight), -1, GROUP)
    scales = (groups.abs().amax(-1) / 7).half()
    return ((groups / scales.float().unsqueeze(-1)).round().clamp(-8, 7) + 8).flatten(1).int(), scales


def expanded(numbers: Tensor, scales: Tensor) -> Tensor:
    return (numbers - 8).to(scales.dtype) * scales.repeat_interleave(GROUP, 1)


def gptq(weight: Tensor) -> Made:
    numbers, scales = rounded(weight)
    zeros = torch.full_like(scales.T, 7).contiguous()  # less 1, as in the first version of the format
    parts = {"qweight": pack(numbers, 4).T, "qzeros": pack(zeros, 4), "scales": scales.T}
    return parts | {"g_idx": torch.arange(weight.shape[1]).int() // GROUP}, expanded(numbers, scales)


def awq(weight: Tensor) -> Made:
    numbers, scales = rounded(weight)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    columns = numbers.T.reshape(weight.shape[1], -1, 8)[..., order].flatten(1)
    parts = {"qweight": pack(columns, 4), "qzeros": pack(torch.full(scales.T.shape, 8), 4), "scales": scales.T}
    return parts, expanded(numbers, scales)


def compressed(weight: Tensor) -> Made:
    numbers, scales = rounded(weight)
    parts = {"weight_packed": pack(numbers, 4), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    return parts, expanded(numbers, scales)


def fp8(weight: Tensor) -> Made:
    rows, columns = (size // BLOCK for size in weight.shape)
    scales = weight.view(rows, BLOCK, columns, BLOCK).abs().amax((1, 3)) / 448
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    numbers = (weight / wide).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale_inv": scales}, numbers.float() * wide


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
METHODS: dict[str, tuple[Callable[[Tensor], Made], dict[str, object]]] = {
    "gptq": (gptq, {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
    "awq": (awq, {"bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "compressed-tensors": (compressed, {"format": "pack-quantized", "config_groups": {"group_0": {"weights": INT4}}}),
    "fp8": (fp8, {"weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3", "activation_scheme": "dynamic"}),
}


def quantize(source: Path, folder: Path, method: str) -> tuple[Path, Path]:
    """Returns the folder of the quantized checkpoint of a model, and the folder of the dequantized one."""
    make, fields = METHODS[method]
    quantized, plain = folder / "quantized", folder / "plain"
    for target in (quantized, plain):
        shutil.copytree(source, target)
    stored: dict[str, Tensor] = {}
    dequantized: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = dequantized[name] = tensor
            continue
        parts, weight = make(tensor)
        stored |= {f"{name.removesuffix('.weight')}.{part}": parts[part].contiguous() for part in parts}
        dequantized[name] = weight.float()
    save_file(stored, quantized / "model.safetensors", metadata={"format": "pt"})
    save_file(dequantized, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_bytes())
    config["quantization_config"] = {"quant_method": method} | fields
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized, plain

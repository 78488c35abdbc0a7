"""MXFP4 as in GPT-OSS: 4-bit numbers for the weights of experts, with an exponent for each group of 32 numbers.

gate_up_proj_blocks  [experts, out, groups, 16] uint8, two numbers in a byte, the lower 4 bits first
gate_up_proj_scales  [experts, out, groups] uint8, the exponent plus 127

gate_up_proj[e, 32 * g + k, o] = number * 2^exponent (OCP Microscaling Formats 1.0)
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from motet.engines.native.quantized.fields import Fields
from motet.engines.native.quantized.stored_tensors import LogicalTensor, StoredTensor, pieces_of, plain

NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value of each 4-bit code."""
BLOCK_BYTES = 16
BIAS = 127


@dataclass(frozen=True)
class Mxfp4Format:
    description: str = "MXFP4, groups of 32"

    @classmethod
    def of(cls, fields: Fields) -> "Mxfp4Format":
        return cls()

    def tensors(self, stored: Mapping[str, StoredTensor]) -> list[LogicalTensor]:
        found: list[LogicalTensor] = []
        for name, tensor in stored.items():
            if name.endswith("_blocks"):
                found.append(_tensor(tensor, stored))
            elif name.endswith("_scales"):
                if f"{name.removesuffix('_scales')}_blocks" not in stored:
                    raise tensor.error(f"{name.removesuffix('_scales')}_blocks is missing")
            else:
                found.append(plain(tensor))
        return found


def _tensor(blocks: StoredTensor, stored: Mapping[str, StoredTensor]) -> LogicalTensor:
    name = blocks.name.removesuffix("_blocks")
    scales = stored.get(f"{name}_scales")
    if scales is None:
        raise blocks.error(f"{name}_scales is missing")
    blocks.check(("U8",))
    if len(blocks.shape) != 4 or blocks.shape[-1] != BLOCK_BYTES:
        raise blocks.error(f"its shape is {list(blocks.shape)}, and should be [experts, out, groups, {BLOCK_BYTES}]")
    scales.check(("U8",), blocks.shape[:-1])
    experts, outputs, groups, _ = blocks.shape
    shape = (experts, groups * BLOCK_BYTES * 2, outputs)
    return LogicalTensor(name, shape, {"blocks": blocks, "scales": scales}, _dequantize)


def _dequantize(parts: Mapping[str, Tensor], out: Tensor) -> None:
    numbers = torch.tensor(NUMBERS)
    for expert, blocks, scales in zip(out, parts["blocks"], parts["scales"], strict=True):
        for rows in pieces_of(len(blocks), expert.shape[0]):
            halves = torch.stack((blocks[rows] & 0xF, blocks[rows] >> 4), dim=-1).flatten(-2)  # [rows, groups, 32]
            values = torch.ldexp(numbers[halves.int()], scales[rows].int().unsqueeze(-1) - BIAS)
            expert[:, rows] = values.flatten(-2).T

"""FP8 as in DeepSeek V3 and Qwen3-FP8, with a scale for each square block, or with one scale for each tensor.

weight            [rows, columns] float8_e4m3fn
weight_scale_inv  [rows / 128, columns / 128], rounded up     with `weight_block_size`
weight_scale      [1]                                         without

weight * scale, computed in float32 (`weight_dequant` of DeepSeek V3)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from motet.engines.native.quantized.blocks import BlockGrid
from motet.engines.native.quantized.fields import Fields
from motet.engines.native.quantized.stored_tensors import LogicalTensor, Parts, StoredTensor, modules_of

ACTIVATIONS = frozenset({"input_scale", "activation_scale", "k_scale", "v_scale"})
"""Scales of activations and of the KV cache, which are not quantized here."""


@dataclass(frozen=True)
class Fp8Format:
    block: tuple[int, int] | None
    """Rows and columns of a block; None for one scale per tensor."""

    @classmethod
    def of(cls, fields: Fields) -> "Fp8Format":
        """Raises UnsupportedModelError for a value that is not supported."""
        fields.text("fmt", ("e4m3", "float8_e4m3fn"), default="e4m3")
        fields.empty("modules_to_convert")
        return cls(fields.pair("weight_block_size"))

    @property
    def description(self) -> str:
        return "FP8, " + ("one scale per tensor" if self.block is None else "blocks of {} x {}".format(*self.block))

    def tensors(self, stored: Mapping[str, StoredTensor]) -> list[LogicalTensor]:
        marker = "weight_scale" if self.block is None else "weight_scale_inv"
        modules, others = modules_of(stored, marker, required={"weight"}, optional=frozenset(), unused=ACTIVATIONS)
        return [*others, *(self._tensor(parts, marker) for parts in modules.values())]

    def _tensor(self, parts: Parts, marker: str) -> LogicalTensor:
        weight = parts["weight"]
        weight.check(("F8_E4M3",))
        if len(weight.shape) != 2:
            raise weight.error(f"its shape is {list(weight.shape)}, and should have two dimensions")
        grid = BlockGrid(*weight.shape, self.block or (max(1, weight.shape[0]), max(1, weight.shape[1])))
        grid.check(parts[marker], ("F32", "BF16", "F16", "F8_E8M0"))
        return LogicalTensor(weight.name, weight.shape, parts, partial(_dequantize, grid=grid, marker=marker))


def _dequantize(parts: Mapping[str, Tensor], out: Tensor, *, grid: BlockGrid, marker: str) -> None:
    weight = parts["weight"]
    grid.write(out, lambda rows: weight[rows], scales=parts[marker].float(), zeros=None, dtype=torch.float32)

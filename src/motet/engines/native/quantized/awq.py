"""AWQ in the layout `gemm`: 4-bit integers, packed along the outputs of a linear layer, as AutoAWQ writes them.

qweight  [in, out / 8]      int32; from the lowest bits on, a word contains its columns 0, 2, 4, 6, 1, 3, 5, 7
qzeros   [groups, out / 8]  int32, in the same order
scales   [groups, out]

weight[o, i] = (qweight[i, o] - qzeros[g, o]) * scales[g, o], in the dtype of the scales (AutoAWQ)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from motet.engines.native.quantized.fields import Fields, groups_text
from motet.engines.native.quantized.stored_tensors import (
    LogicalTensor,
    Parts,
    StoredTensor,
    modules_of,
    tiles_of,
    unpack,
)
from motet.models.safetensors_header import ITEM_BYTES

BITS, PER_WORD = 4, 8
POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of each of a word's 8 columns, from the lowest 4 bits on."""


@dataclass(frozen=True)
class AwqFormat:
    group_size: int
    """Number of inputs of a group; -1 for one group."""

    @classmethod
    def of(cls, fields: Fields) -> "AwqFormat":
        """Raises UnsupportedModelError for a value that is not supported."""
        fields.number("bits", (BITS,))
        for name in ("version", "format", "checkpoint_format"):
            fields.text(name, ("gemm",), default="gemm")
        return cls(fields.size("group_size"))

    @property
    def description(self) -> str:
        return f"AWQ {BITS}-bit, {groups_text(self.group_size)}"

    def tensors(self, stored: Mapping[str, StoredTensor]) -> list[LogicalTensor]:
        modules, others = modules_of(
            stored, "qweight", required={"qzeros", "scales"}, optional=frozenset(), unused=frozenset()
        )
        return [*others, *(self._tensor(module, parts) for module, parts in modules.items())]

    def _tensor(self, module: str, parts: Parts) -> LogicalTensor:
        qweight = parts["qweight"]
        qweight.check(("I32",))
        if len(qweight.shape) != 2:
            raise qweight.error(f"its shape is {list(qweight.shape)}, and should have two dimensions")
        inputs, outputs = qweight.shape[0], qweight.shape[1] * PER_WORD
        groups = 1 if self.group_size == -1 else -(-inputs // self.group_size)
        parts["scales"].check((*ITEM_BYTES,), (groups, outputs))
        parts["qzeros"].check(("I32",), (groups, qweight.shape[1]))
        return LogicalTensor(
            f"{module}.weight", (outputs, inputs), parts, partial(_dequantize, group_size=self.group_size)
        )


def _dequantize(parts: Mapping[str, Tensor], out: Tensor, *, group_size: int) -> None:
    qweight, scales = parts["qweight"], parts["scales"]
    zeros = _columns(parts["qzeros"])
    for inputs, columns in tiles_of(len(qweight), scales.shape[1]):
        group = torch.arange(inputs.start, inputs.stop) // (len(qweight) if group_size == -1 else group_size)
        codes = _columns(qweight[inputs, columns.start // PER_WORD : columns.stop // PER_WORD])
        numbers = (codes - zeros[:, columns][group]).to(scales.dtype) * scales[:, columns][group]
        out[columns, inputs] = numbers.T


def _columns(words: Tensor) -> Tensor:
    """Returns the integers in words [rows, n] in the order of the columns, [rows, n * 8] int32."""
    columns = unpack(words, BITS).view(len(words), -1, PER_WORD)
    return columns[..., POSITIONS].flatten(-2)

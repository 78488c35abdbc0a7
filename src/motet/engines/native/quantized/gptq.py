"""GPTQ: 4-bit or 8-bit integers, packed along the inputs of a linear layer, as GPTQModel, AutoGPTQ and Optimum write
them.

qweight  [in * bits / 32, out]      int32, lowest bits first
qzeros   [groups, out * bits / 32]  int32; the format `gptq` stores each zero point minus 1, `gptq_v2` does not
scales   [groups, out]
g_idx    [in] int32                 the group of each input; without it, groups are consecutive inputs

weight[o, i] = scales[g, o] * (qweight[i, o] - qzeros[g, o]), in the dtype of the scales (GPTQModel)
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

FORMS = ("gptq", "gptq_v2")
ONES = {4: 0x11111111, 8: 0x01010101}
"""A word of ones, by the number of bits. It is added to entire words as in GPTQModel, so that a carry undoes the borrow
of the subtraction."""


@dataclass(frozen=True)
class GptqFormat:
    bits: int
    group_size: int
    """Number of inputs of a group; -1 for one group."""
    zeros_minus_one: bool

    @classmethod
    def of(cls, fields: Fields) -> "GptqFormat":
        """Raises UnsupportedModelError for a value that is not supported."""
        fields.empty("dynamic", "is_marlin_format")
        fields.text("pack_dtype", ("int32",), default="int32")
        # GPTQModel writes both fields since 2026.
        form = fields.text("format", FORMS, default=fields.text("checkpoint_format", FORMS, default=FORMS[0]))
        if fields.text("checkpoint_format", FORMS, default=form) != form:
            raise fields.refused("checkpoint_format", f"{form}, as in format")
        return cls(fields.number("bits", (4, 8)), fields.size("group_size"), form == FORMS[0])

    @property
    def description(self) -> str:
        return f"GPTQ {self.bits}-bit, {groups_text(self.group_size)}"

    def tensors(self, stored: Mapping[str, StoredTensor]) -> list[LogicalTensor]:
        modules, others = modules_of(
            stored, "qweight", required={"qzeros", "scales"}, optional={"g_idx"}, unused=frozenset()
        )
        return [*others, *(self._tensor(module, parts) for module, parts in modules.items())]

    def _tensor(self, module: str, parts: Parts) -> LogicalTensor:
        qweight, per_word = parts["qweight"], 32 // self.bits
        qweight.check(("I32",))
        if len(qweight.shape) != 2:
            raise qweight.error(f"its shape is {list(qweight.shape)}, and should have two dimensions")
        inputs, outputs = qweight.shape[0] * per_word, qweight.shape[1]
        groups = 1 if self.group_size == -1 else -(-inputs // self.group_size)
        parts["scales"].check((*ITEM_BYTES,), (groups, outputs))
        parts["qzeros"].check(("I32",), (groups, -(-outputs // per_word)))
        if "g_idx" in parts:
            parts["g_idx"].check(("I32", "I64"), (inputs,))
        return LogicalTensor(f"{module}.weight", (outputs, inputs), parts, partial(self._dequantize, stored=parts))

    def _dequantize(self, parts: Mapping[str, Tensor], out: Tensor, *, stored: Parts) -> None:
        qweight, scales, per_word = parts["qweight"], parts["scales"], 32 // self.bits
        groups, outputs = scales.shape
        words = parts["qzeros"] + ONES[self.bits] if self.zeros_minus_one else parts["qzeros"]
        zeros = unpack(words, self.bits)[:, :outputs]
        if "g_idx" in parts:
            group_of = parts["g_idx"].long()
            if group_of.numel() and not 0 <= int(group_of.min()) <= int(group_of.max()) < groups:
                raise stored["g_idx"].error(f"it names a group that does not exist; there are {groups}")
        else:
            count = len(qweight) * per_word
            group_of = torch.arange(count) // (count if self.group_size == -1 else self.group_size)
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32).unsqueeze(1)
        for inputs, columns in tiles_of(len(qweight) * per_word, outputs):
            words = qweight[inputs.start // per_word : inputs.stop // per_word, columns]
            codes = ((words.unsqueeze(1) >> shifts) & ((1 << self.bits) - 1)).flatten(0, 1)  # [inputs, columns]
            group = group_of[inputs]
            numbers = (codes - zeros[:, columns][group]).to(scales.dtype) * scales[:, columns][group]
            out[columns, inputs] = numbers.T

"""The ways to compute a matrix product on a CPU. Each way packs the weights in its own format, and multiplies.

All ways take bf16 rows; Motet's return float32, torch's bf16. Every way has several copies of the weights and uses them
in turn, so that they come from memory and not from a cache, as in a decode step.
"""

import ctypes
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from motet.engines.native import compiled_kernels as c
from motet.engines.native.cpu.panels import Packer
from motet.errors import StartupError

Multiply = Callable[[int, torch.Tensor], object]
"""Function of the number of a copy of the weights and of rows [rows, depth]. Returns their product."""
INT4_GROUP = 64
ONEDNN_PACKED = "oneDNN packed"
TAKES_BF16, PACK_ONEDNN, ONEDNN, INT8, PACK_INT4, INT4 = (
    getattr(module, name)  # operators without a public name: what inductor and torchao call
    for module, name in (
        (torch.ops.mkldnn, "_is_mkldnn_bf16_supported"),
        (torch.ops.mkldnn, "_reorder_linear_weight"),
        (torch.ops.mkldnn, "_linear_pointwise"),
        (torch.ops.aten, "_weight_int8pack_mm"),
        (torch.ops.aten, "_convert_weight_to_int4pack_for_cpu"),
        (torch.ops.aten, "_weight_int4pack_mm_for_cpu"),
    )
)


def by_torch(weights: Sequence[torch.Tensor], _: int) -> Multiply:
    return lambda copy, x: F.linear(x, weights[copy])


def by_onednn(weights: Sequence[torch.Tensor], rows: int) -> Multiply:
    """Packs the weights for the given number of rows."""
    copies = [PACK_ONEDNN(weight, rows) for weight in weights]
    return lambda copy, x: ONEDNN(x, copies[copy], None, "none", [], "")


def by_torch_int8(weights: Sequence[torch.Tensor], _: int) -> Multiply:
    scales = [weight.abs().amax(1) / 127 for weight in weights]
    copies = [
        (weight.float() / scale[:, None]).round().to(torch.int8) for weight, scale in zip(weights, scales, strict=True)
    ]
    return lambda copy, x: INT8(x, copies[copy], scales[copy])


def by_torch_int4(weights: Sequence[torch.Tensor], _: int) -> Multiply:
    """Computes wrong values, because all scales are 1: only the time is measured."""
    copies = [PACK_INT4((weight * 2 + 8).clamp(0, 15).to(torch.int32), 1) for weight in weights]
    columns, depth = weights[0].shape
    scales = torch.ones(depth // INT4_GROUP, columns, 2, dtype=torch.bfloat16)  # and zero points
    return lambda copy, x: INT4(x, copies[copy], INT4_GROUP, scales)


def by_kernels(weights: Sequence[torch.Tensor], _: int) -> Multiply:
    return MotetProduct(weights, int8=False)


def by_kernels_int8(weights: Sequence[torch.Tensor], _: int) -> Multiply:
    return MotetProduct(weights, int8=True)


class MotetProduct:
    """Motet's compiled product."""

    def __init__(self, weights: Sequence[torch.Tensor], *, int8: bool) -> None:
        if (found := c.library()) is None:
            raise StartupError("the compiled kernels were not built, or this processor has neither AVX-512 nor AVX2")
        columns, depth = weights[0].shape
        packer = Packer(found, [(columns, depth)] * len(weights), dtype=torch.int8 if int8 else torch.bfloat16)
        self._kernels, self._panels = found, [packer.pack(weight) for weight in weights]
        self._linears = [
            c.PackedLinear(
                panels=panels.numbers.data_ptr(),
                scales=None if panels.scales is None else panels.scales.data_ptr(),
                columns=columns,
                depth=depth,
            )
            for panels in self._panels
        ]
        self._model = c.Model()
        self._forward = found.motet_open(ctypes.byref(self._model), torch.get_num_threads())
        self._output = torch.empty(0, columns)

    def __call__(self, copy: int, x: torch.Tensor) -> torch.Tensor:
        if len(self._output) != len(x):
            self._output = torch.empty(len(x), self._output.shape[1])
        linear = ctypes.byref(self._linears[copy])
        self._kernels.motet_multiply(self._forward, linear, x.data_ptr(), len(x), self._output.data_ptr())
        return self._output

    def __del__(self) -> None:
        self._kernels.motet_close(self._forward)


WAYS: dict[str, Callable[[Sequence[torch.Tensor], int], Multiply]] = {
    "torch bf16": by_torch,
    **({ONEDNN_PACKED: by_onednn} if TAKES_BF16() else {}),
    "torch int8": by_torch_int8,
    "torch int4": by_torch_int4,
    "ours": by_kernels,
    "ours int8": by_kernels_int8,
}
BYTES = {"torch int8": 1.0, "torch int4": 0.5, "ours int8": 1.0}
"""Bytes of a weight in memory, for ways without the two bytes of bf16."""

"""The formats of compressed-tensors, which LLM Compressor and vLLM's quantized checkpoints use.

pack-quantized                    weight_packed      [out, in * bits / 32] int32, lowest bits first; each integer has
                                                     2^(bits - 1) added
                                  weight_shape       [2]
int-, float-, naive-quantized     weight             [out, in] int8 or float8_e4m3fn
all                               weight_scale       one scale per group, row, tensor or block (`blocks`)
                                  weight_zero_point  if not symmetric; packed along the rows in pack-quantized
                                  weight_g_idx       with `actorder` group: the group of each input, or -1

(weight - zero point) * scale, in the dtype of the scales
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from motet.engines.native.quantized.blocks import BlockGrid
from motet.engines.native.quantized.fields import Fields
from motet.engines.native.quantized.fp8 import ACTIVATIONS
from motet.engines.native.quantized.stored_tensors import (
    LogicalTensor,
    Parts,
    StoredTensor,
    modules_of,
    pieces_of,
    unpack,
)
from motet.models.safetensors_header import ITEM_BYTES

PACKED = "pack-quantized"
UNPACKED = ("int-quantized", "float-quantized", "naive-quantized")
UNUSED = ACTIVATIONS | {"input_zero_point", "output_scale", "output_zero_point", "input_global_scale"}


@dataclass(frozen=True)
class CompressedFormat:
    packed: bool
    number: str
    """`int` or `float`."""
    bits: int
    strategy: str
    """`tensor`, `channel`, `group` or `block`."""
    block: tuple[int, int]
    """Numbers of rows and columns of a block; 0 means all."""
    symmetric: bool

    @classmethod
    def of(cls, fields: Fields) -> "CompressedFormat":
        """Raises UnsupportedModelError for a value that is not supported."""
        packed = fields.text("format", (PACKED, *UNPACKED)) == PACKED
        sparsity, transforms = fields.object("sparsity_config"), fields.object("transform_config")
        sparsity.text("format", ("dense",), default="dense")
        transforms.empty("config_groups")
        found = [cls._of_group(fields, name, packed=packed) for name in fields.object("config_groups").names()]
        if not found or any(other != found[0] for other in found):
            raise fields.refused("config_groups", "groups with equal parameters of their weights")
        return found[0]

    @classmethod
    def _of_group(cls, fields: Fields, name: str, *, packed: bool) -> "CompressedFormat":
        group = fields.object("config_groups").object(name)
        group.text("format", (PACKED,) if packed else UNPACKED, default=PACKED if packed else UNPACKED[0])
        weights = group.object("weights")
        number = weights.text("type", ("int",) if packed else ("int", "float"), default="int")
        bits = weights.number("num_bits", (4, 8) if packed else (8,))
        default = "group" if weights.get("group_size") is not None else "tensor"
        strategy = weights.text("strategy", ("tensor", "channel", "group", "block"), default=default)
        block = {"tensor": (0, 0), "channel": (1, 0), "group": (1, 0), "block": (0, 0)}[strategy]
        if strategy == "group":
            block = (1, max(0, weights.size("group_size")))
        if strategy == "block":
            pair = weights.pair("block_structure")
            if packed:
                raise weights.refused("strategy", f"tensor, channel or group in {PACKED}")
            if pair is None:
                raise weights.refused("block_structure", "two positive integers")
            block = pair
        symmetric = weights.get("symmetric") is not False
        if not symmetric and strategy == "block":
            raise weights.refused("symmetric", "true with the strategy block")
        return cls(packed, number, bits, strategy, block, symmetric)

    @property
    def description(self) -> str:
        kind = "FP8" if self.number == "float" else f"{self.bits}-bit"
        scales = f"one scale per {self.strategy}"
        if self.strategy in ("group", "block"):
            scales = "groups of {1}" if self.strategy == "group" else "blocks of {0} x {1}"
        return f"compressed-tensors {kind}, {scales.format(*self.block)}"

    def tensors(self, stored: Mapping[str, StoredTensor]) -> list[LogicalTensor]:
        required = {"weight_scale", *({"weight_shape"} if self.packed else {"weight"})}
        required |= set() if self.symmetric else {"weight_zero_point"}
        optional = {"weight_g_idx"} if self.packed and self.strategy == "group" else set()
        marker = "weight_packed" if self.packed else "weight_scale"
        # The zero points of a symmetric weight, if it has any, are 0 and not needed.
        unused = UNUSED | ({"weight_zero_point"} if self.symmetric else set())
        modules, others = modules_of(stored, marker, required=required, optional=optional, unused=unused - required)
        make = self._packed_tensor if self.packed else self._unpacked_tensor
        return [*others, *(make(module, parts) for module, parts in modules.items())]

    def _grid(self, rows: int, columns: int) -> BlockGrid:
        return BlockGrid(rows, columns, (self.block[0] or max(1, rows), self.block[1] or max(1, columns)))

    def _unpacked_tensor(self, module: str, parts: Parts) -> LogicalTensor:
        weight = parts["weight"]
        weight.check(("I8",) if self.number == "int" else ("F8_E4M3",))
        if len(weight.shape) != 2:
            raise weight.error(f"its shape is {list(weight.shape)}, and should have two dimensions")
        grid = self._grid(*weight.shape)
        grid.check(parts["weight_scale"], (*ITEM_BYTES,))
        if not self.symmetric:
            grid.check(parts["weight_zero_point"], ("I8", *ITEM_BYTES))
        return LogicalTensor(weight.name, weight.shape, parts, partial(_dequantize_unpacked, grid=grid))

    def _packed_tensor(self, module: str, parts: Parts) -> LogicalTensor:
        packed, per_word = parts["weight_packed"], 32 // self.bits
        packed.check(("I32",))
        if len(packed.shape) != 2:
            raise packed.error(f"its shape is {list(packed.shape)}, and should have two dimensions")
        rows, columns = packed.shape[0], packed.shape[1] * per_word
        grid = self._grid(rows, columns)
        grid.check(parts["weight_scale"], (*ITEM_BYTES,))
        parts["weight_shape"].check(("I64", "I32"), (2,))
        if not self.symmetric:
            if self.strategy == "tensor":
                grid.check(parts["weight_zero_point"], ("I8", *ITEM_BYTES))
            else:
                parts["weight_zero_point"].check(("I32",), (-(-rows // per_word), grid.shape[1]))
        if "weight_g_idx" in parts:
            parts["weight_g_idx"].check(("I32", "I64"), (columns,))
        return LogicalTensor(
            f"{module}.weight", (rows, columns), parts, partial(self._dequantize_packed, grid=grid, stored=parts)
        )

    def _dequantize_packed(self, parts: Mapping[str, Tensor], out: Tensor, *, grid: BlockGrid, stored: Parts) -> None:
        packed, scales, middle = parts["weight_packed"], parts["weight_scale"], 1 << (self.bits - 1)
        if (shape := parts["weight_shape"].tolist()) != list(out.shape):
            raise stored["weight_shape"].error(f"it is {shape}, and the packed numbers have {list(out.shape)}")
        zeros = parts.get("weight_zero_point")
        if zeros is not None and self.strategy != "tensor":
            zeros = unpack(zeros.T, self.bits).T[: grid.rows] - middle

        def numbers(rows: slice) -> Tensor:
            return unpack(packed[rows], self.bits) - middle

        group = parts["weight_g_idx"].long() if "weight_g_idx" in parts else None
        if group is None or bool((group == -1).all()):
            grid.write(out, numbers, scales=scales, zeros=zeros, dtype=scales.dtype)
            return
        if group.numel() and not 0 <= int(group.min()) <= int(group.max()) < grid.shape[1]:
            raise stored["weight_g_idx"].error(f"it names a group that does not exist; there are {grid.shape[1]}")
        for rows in pieces_of(grid.rows, grid.columns):
            piece = numbers(rows).to(scales.dtype)
            if zeros is not None:
                piece = piece - zeros[rows][:, group].to(scales.dtype)
            out[rows] = piece * scales[rows][:, group]


def _dequantize_unpacked(parts: Mapping[str, Tensor], out: Tensor, *, grid: BlockGrid) -> None:
    weight, scales = parts["weight"], parts["weight_scale"]
    grid.write(out, lambda rows: weight[rows], scales=scales, zeros=parts.get("weight_zero_point"), dtype=scales.dtype)

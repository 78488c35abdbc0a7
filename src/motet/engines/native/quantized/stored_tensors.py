"""Tensors as the files of a checkpoint store them, and as a model has them.

    safetensors files ─► stored tensors ─► format ─► logical tensors ─► read one by one, in the engine's dtype
                         qweight, scales             q_proj.weight

Names, dtypes and shapes are checked before any data is read. A logical tensor is dequantized in pieces: it needs memory
for itself and for its stored tensors, and about 60 MB more.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from motet.errors import ModelLoadError
from motet.log import cut
from motet.models.file_reading import FileReading
from motet.models.gguf_files.gguf_header import QUANTIZED
from motet.models.safetensors_header import ITEM_BYTES, MAX_NAME_CHARS, Header

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""The dtypes that can be read, by their safetensors names."""
FLOATS = (*ITEM_BYTES, "F64")
"""Dtypes of tensors that are not quantized."""
PIECE_NUMBERS, TILE_OUTPUTS = 2**18, 512
"""Maximum number of weights that are dequantized at a time, and of their outputs in formats that store weights
transposed. Larger pieces are slower, and the C library does not return their memory to the system."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file or a GGUF file."""

    name: str
    file: Path
    begin: int
    """Offset in the file."""
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]

    def read(self, reading: FileReading) -> Tensor:
        """Reads the tensor; for quantized tensors of a GGUF file, the bytes of its blocks. Raises OSError, and
        ModelLoadError if the file has become shorter."""
        numbers = torch.empty(self.num_bytes, dtype=torch.uint8)
        reading.read_into(numbers.numpy().data, self.file, begin=self.begin)
        return numbers if self.dtype in QUANTIZED else numbers.view(DTYPES[self.dtype]).view(self.shape)

    def error(self, why: str) -> ModelLoadError:
        return ModelLoadError(f"tensor {cut(self.name, MAX_NAME_CHARS)} in {self.file}: {why}")

    def check(self, dtypes: tuple[str, ...], shape: tuple[int, ...] | None = None) -> None:
        """Raises ModelLoadError unless the tensor has one of the dtypes, and the shape if it is not None."""
        if self.dtype not in dtypes:
            raise self.error(f"its dtype is {cut(self.dtype, MAX_NAME_CHARS)}; {', '.join(dtypes)} can be used")
        if shape is not None and self.shape != shape:
            raise self.error(f"its shape is {list(self.shape)}, and should be {list(shape)}")


Parts = Mapping[str, StoredTensor]
"""The stored tensors of a weight, by the last part of their names: `qweight`, `scales`."""
Dequantize = Callable[[Mapping[str, Tensor], Tensor], None]
"""Computes a weight from its parts (first argument), and writes it to the second argument in the engine's dtype."""


@dataclass(frozen=True)
class LogicalTensor:
    """A tensor of the model, and how it is computed."""

    name: str
    shape: tuple[int, ...]
    parts: Parts
    dequantize: Dequantize | None = None
    """Computes the tensor from its parts. None if its only part is the tensor itself."""

    @property
    def file(self) -> Path:
        return next(iter(self.parts.values())).file

    def read(self, reading: FileReading, dtype: torch.dtype) -> Tensor:
        """Returns the tensor in the given dtype. Raises OSError and ModelLoadError."""
        parts = {role: part.read(reading) for role, part in self.parts.items()}
        if self.dequantize is None:
            return next(iter(parts.values())).to(dtype)
        numbers = torch.empty(self.shape, dtype=dtype)
        self.dequantize(parts, numbers)
        return numbers


class Format(Protocol):
    """A format of quantized checkpoints, with its parameters."""

    @property
    def description(self) -> str:
        """The format in words, such as `GPTQ 4-bit, groups of 128`."""
        ...

    def tensors(self, stored: Mapping[str, StoredTensor]) -> list[LogicalTensor]:
        """Returns the tensors of the model without reading data. Raises ModelLoadError for a stored tensor that is
        missing or has the wrong dtype or shape."""
        ...


def stored_tensors(headers: Mapping[Path, tuple[Header, int]]) -> dict[str, StoredTensor]:
    """Returns the tensors of a checkpoint by name. Raises ModelLoadError if a tensor is in two files."""
    stored: dict[str, StoredTensor] = {}
    for file, (header, data_begin) in headers.items():
        for name, entry in header.items():
            tensor = StoredTensor(
                name, file, data_begin + entry.data_offsets[0], entry.num_bytes, entry.dtype, entry.shape
            )
            if name in stored:
                raise tensor.error(f"it is also in {stored[name].file.name}")
            stored[name] = tensor
    return stored


def plain_tensors(headers: Mapping[Path, tuple[Header, int]]) -> Mapping[str, LogicalTensor]:
    """Returns the tensors of a checkpoint without quantization. Raises ModelLoadError if a tensor is in two files."""
    return {name: LogicalTensor(name, one.shape, {"": one}) for name, one in stored_tensors(headers).items()}


def plain(tensor: StoredTensor) -> LogicalTensor:
    """Returns the logical tensor of a stored tensor that is not quantized. Raises ModelLoadError."""
    tensor.check(FLOATS)
    return LogicalTensor(tensor.name, tensor.shape, {"": tensor})


def modules_of(
    stored: Mapping[str, StoredTensor], marker: str, *, required: Set[str], optional: Set[str], unused: Set[str]
) -> tuple[dict[str, Parts], list[LogicalTensor]]:
    """Groups stored tensors by module, such as `model.layers.0.mlp.down_proj`.

    Returns the parts of each module that has the part `marker`, and all tensors that are not quantized. `unused`: parts
    to leave out, such as the scales of activations. Raises ModelLoadError if a module lacks a required part, or has
    parts but no marker."""
    roles = {marker, *required, *optional}
    quantized: dict[str, dict[str, StoredTensor]] = {
        name.removesuffix(f".{marker}"): {} for name in stored if name.endswith(f".{marker}")
    }
    others: list[LogicalTensor] = []
    for name, tensor in stored.items():
        module, _, role = name.rpartition(".")
        if role in unused:
            continue
        if module in quantized and role in roles:
            quantized[module][role] = tensor
        elif role in roles - {"weight"}:
            raise tensor.error(f"it is a part of a quantized weight, but {module}.{marker} is missing")
        else:
            others.append(plain(tensor))
    for module, parts in quantized.items():
        if missing := sorted(required - parts.keys()):
            raise parts[marker].error(f"it is a part of a quantized weight, but {module}.{missing[0]} is missing")
    return {**quantized}, others


def pieces_of(count: int, numbers_per_item: int) -> Iterator[slice]:
    """Yields ranges of `count` items to dequantize at a time. `numbers_per_item`: number of weights of an item."""
    step = max(1, PIECE_NUMBERS // max(1, numbers_per_item))
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))


def tiles_of(inputs: int, outputs: int) -> Iterator[tuple[slice, slice]]:
    """Yields the ranges of inputs and outputs of a transposed weight to dequantize at a time. The ranges are multiples
    of 8, except at the end."""
    for begin in range(0, outputs, TILE_OUTPUTS):
        columns = slice(begin, min(begin + TILE_OUTPUTS, outputs))
        for rows in pieces_of(-(-inputs // 8), 8 * TILE_OUTPUTS):
            yield slice(rows.start * 8, min(rows.stop * 8, inputs)), columns


def unpack(words: Tensor, bits: int) -> Tensor:
    """Returns the unsigned integers in int32 words [..., n] as [..., n * 32 / bits] int32, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)

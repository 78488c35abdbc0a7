"""A quantized checkpoint, read as the tensors of the model."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from motet.engines.native.quantized.detect import format_of
from motet.engines.native.quantized.stored_tensors import (
    Format,
    LogicalTensor,
    StoredTensor,
    stored_tensors,
)
from motet.models.file_reading import FileReading
from motet.models.safetensors_header import Header
from motet.models.weight_digest import read_headers


@dataclass(frozen=True)
class DequantizedCheckpoint:
    """The tensors of a folder with a quantized checkpoint, by name."""

    format: Format
    stored: Mapping[str, StoredTensor]
    tensors: Mapping[str, LogicalTensor]

    @classmethod
    def of(cls, form: Format, headers: Mapping[Path, tuple[Header, int]]) -> "DequantizedCheckpoint":
        """Reads no data of tensors. Raises ModelLoadError if a tensor is missing, or has the wrong dtype or shape."""
        stored = stored_tensors(headers)
        tensors: dict[str, LogicalTensor] = {}
        for tensor in form.tensors(stored):
            if tensor.name in tensors:
                part = next(iter(tensor.parts.values()))
                raise part.error(f"the checkpoint has {tensor.name} twice, quantized and not quantized")
            tensors[tensor.name] = tensor
        return cls(form, stored, tensors)

    @classmethod
    def open(cls, folder: Path) -> "DequantizedCheckpoint | None":
        """Returns the checkpoint in a folder; None if it is not quantized. Raises UnsupportedModelError for a format
        that is not supported, and ModelLoadError."""
        form = format_of(folder)
        return None if form is None else cls.of(form, read_headers([folder], FileReading()))

    @property
    def num_weights(self) -> int:
        return sum(torch.Size(tensor.shape).numel() for tensor in self.tensors.values())

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Returns the memory of the dequantized tensors."""
        return self.num_weights * dtype.itemsize

    def description(self, dtype: torch.dtype) -> str:
        """Returns a sentence about the format and its cost in memory."""
        file_bytes = sum(tensor.num_bytes for tensor in self.stored.values())
        name = str(dtype).removeprefix("torch.")
        return (
            f"{self.format.description}: {file_bytes / 1e9:.3g} GB in the files, "
            f"{self.num_bytes(dtype) / 1e9:.3g} GB in {name} in memory"
        )

    def state_dict(self, dtype: torch.dtype) -> dict[str, "UnreadTensor"]:
        """Returns the tensors for `from_pretrained`, which reads each of them once."""
        reading = FileReading()
        return {name: UnreadTensor(tensor, reading, dtype=dtype) for name, tensor in self.tensors.items()}

    def without_zero_biases(self, names: Iterable[str]) -> "DequantizedCheckpoint":
        """Returns the checkpoint without the biases that are zero and not in `names`: AutoGPTQ writes a bias for each
        linear layer. Raises OSError and ModelLoadError."""
        known, reading = set(names), FileReading()
        kept = {
            name: tensor
            for name, tensor in self.tensors.items()
            if name in known or not name.endswith(".bias") or bool(tensor.read(reading, torch.float32).any())
        }
        return DequantizedCheckpoint(self.format, self.stored, kept)


class UnreadTensor:
    """A tensor that is read when transformers indexes it, like a slice of safetensors."""

    def __init__(self, tensor: LogicalTensor, reading: FileReading, *, dtype: torch.dtype) -> None:
        self._tensor = tensor
        self._reading = reading
        self._dtype = dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._tensor.shape)

    def __getitem__(self, index: object) -> Tensor:
        return self._tensor.read(self._reading, self._dtype)

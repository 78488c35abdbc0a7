"""Checkpoints: the tensors that engines read, in safetensors files in a folder or in memory (`memory_file`)."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from motet.models.folder import weight_files
from motet.models.memory_file import MemoryFile
from motet.models.safetensors_header import ITEM_BYTES, MAX_HEADER_BYTES

MAX_HEADERS_BYTES = 16 * MAX_HEADER_BYTES
"""Maximum size of the headers of all files of one checkpoint."""


def max_checkpoint_bytes(num_weights: int) -> int:
    """Returns the maximum size of a checkpoint's files with this number of weights: the size in float32."""
    return num_weights * max(ITEM_BYTES.values()) + MAX_HEADERS_BYTES


class TensorFacts(msgspec.Struct, frozen=True):
    """The name, dtype and shape of a tensor in a safetensors file."""

    name: str
    dtype: str
    """A key of `ITEM_BYTES`."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def safetensors_header(tensors: Iterable[TensorFacts], *, metadata: Mapping[str, str] | None = None) -> bytes:
    """Returns the start of a file in which the elements of these tensors follow in this order: the length of the
    header, 8 bytes little endian, and the header as JSON. `metadata`: texts of the file."""
    entries: dict[str, Mapping[str, object]] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.num_bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header


class CheckpointKind(StrEnum):
    FILES = "files"
    MEMORY = "memory"
    """Files in memory. Their digest is not kept: no later start reads them."""
    ZEROS = "zeros"
    """All tensors are zeros. There are no files."""
    START = "start"
    """The weights with which an engine was started. There are no files."""


@dataclass(frozen=True)
class Checkpoint:
    """All tensors of a model, or some of them. `close` closes the files in memory."""

    kind: CheckpointKind
    paths: tuple[Path, ...] = ()
    """Folders, or safetensors files."""
    memory: tuple[MemoryFile, ...] = ()

    @property
    def name(self) -> str:
        """Name of the checkpoint in messages."""
        return ", ".join(map(str, self.paths)) if self.kind is CheckpointKind.FILES else self.kind

    @classmethod
    def of(cls, *paths: Path) -> "Checkpoint":
        """Returns the checkpoint in these folders or files."""
        return cls(CheckpointKind.FILES, paths)

    @classmethod
    def of_memory(cls, files: Iterable[MemoryFile]) -> "Checkpoint":
        memory = tuple(files)
        return cls(CheckpointKind.MEMORY, tuple(file.path for file in memory), memory)

    def settle(self) -> None:
        """Called when the weights of this checkpoint serve."""
        for file in self.memory:
            file.settle()

    def close(self) -> None:
        for file in self.memory:
            file.close()


ZEROS = Checkpoint(CheckpointKind.ZEROS)
START = Checkpoint(CheckpointKind.START)


def checkpoint_files(paths: Sequence[Path]) -> list[Path]:
    """Returns the safetensors files. Raises ModelLoadError if a folder has none."""
    return [file for path in paths for file in ([path] if path.is_file() else weight_files(path))]

"""Checkpoints: the tensors that engines read, in safetensors files in a folder or in memory.

A file in memory (Linux's memfd) is in no folder. Processes open it as `/proc/PID/fd/FD`, and it exists while a process
has it open. A complete file is sealed: no process can write to it or truncate it, so all readers read the same
data."""

import contextlib
import errno
import fcntl
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from motet.errors import ModelLoadError
from motet.models.folder import weight_files

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
MEMORY_FILE = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
"""Bytes per element of each dtype that weights can have, by its safetensors name. Engines round to their own dtype."""


class TensorFacts(msgspec.Struct, frozen=True):
    """The name, dtype and shape of a tensor in a safetensors file."""

    name: str
    dtype: str
    """A key of `ITEM_BYTES`."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def safetensors_header(tensors: Iterable[TensorFacts]) -> bytes:
    """Returns the start of a file in which the elements of these tensors follow in this order: the length of the
    header, 8 bytes little endian, and the header as JSON."""
    entries: dict[str, dict[str, object]] = {}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.num_bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header


def write_all(descriptor: int, data: bytes | memoryview, *, at: int) -> int:
    """Writes all of `data` to an open file from offset `at` on, and returns the offset after it."""
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, at)
        left, at = left[written:], at + written
    return at


class MemoryFile:
    """A file in memory that this process keeps open until `close`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        """The name under which processes of the same user can open it."""

    @classmethod
    def create(cls, num_bytes: int) -> "MemoryFile":
        """Returns a file of zeros whose memory is allocated. Raises OSError if there is not enough memory."""
        if num_bytes > (free := available_bytes()):
            raise OSError(errno.ENOMEM, f"{num_bytes} bytes are needed, and {free} bytes of memory are free")
        file = cls(os.memfd_create("motet-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        try:
            os.posix_fallocate(file._descriptor, 0, max(1, num_bytes))  # ten times as fast as page by page
            os.ftruncate(file._descriptor, num_bytes)
        except BaseException:
            file.close()
            raise
        return file

    @classmethod
    def opened(cls, path: Path) -> "MemoryFile":
        """Opens the file of another process. Raises ModelLoadError unless it is in memory and sealed."""
        if MEMORY_FILE.fullmatch(str(path)) is None:
            raise ModelLoadError(f"{path} is not a file in memory: its name would be /proc/PID/fd/FD")
        try:
            file = cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError as exc:
            raise ModelLoadError(f"{path} cannot be opened: {exc.strerror}") from exc
        with contextlib.suppress(OSError):  # a file of another kind has no seals
            if fcntl.fcntl(file._descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS:
                return file
        file.close()
        raise ModelLoadError(f"{path} is not a file in memory that is sealed against writing and truncation")

    def write(self, data: bytes | memoryview, at: int) -> int:
        """Writes all of `data`, and returns the offset after it."""
        return write_all(self._descriptor, data, at=at)

    def seal(self) -> None:
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, SEALS)

    def close(self) -> None:
        """Closes the file. Can be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


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

    def close(self) -> None:
        for file in self.memory:
            file.close()


ZEROS = Checkpoint(CheckpointKind.ZEROS)
START = Checkpoint(CheckpointKind.START)


def checkpoint_files(paths: Sequence[Path]) -> list[Path]:
    """Returns the safetensors files. Raises ModelLoadError if a folder has none."""
    return [file for path in paths for file in ([path] if path.is_file() else weight_files(path))]


def available_bytes() -> int:
    """Returns the system's estimate of the available memory, in bytes."""
    with Path("/proc/meminfo").open() as lines:
        free = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(free) * 1024

"""Makes and counts files in memory."""

import os
from pathlib import Path

from motet.models.memory_file import MemoryFile


def memory_file_of(data: bytes) -> MemoryFile:
    file = MemoryFile.create(len(data))
    assert file.write(data, 0) == len(data)
    file.seal()
    return file


def open_files() -> int:
    """Returns the number of files in memory that this process has open."""
    return sum("memfd:motet" in os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())

"""Counts the files in memory that hold weights."""

import os
from pathlib import Path


def open_files() -> int:
    """Returns the number of files in memory that this process has open."""
    return sum("memfd:motet" in os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())

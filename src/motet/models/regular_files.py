"""Opens files whose names come from requests or model folders. Only regular files are opened: opening or reading a
FIFO, a socket or a device can block for ever, and opening some devices has an effect."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

NOT_REGULAR = "it is not a regular file"
_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""With O_NONBLOCK, opening a FIFO returns at once."""


def open_regular(path: Path) -> BufferedReader:
    """Opens a regular file for reading. Raises OSError if the file does not exist, or is of another kind."""
    if "\0" in str(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    _check_mode(os.stat(path), path)
    descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    try:
        _check_mode(os.fstat(descriptor), path)  # the file can have been replaced since
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, *, max_bytes: int) -> bytes:
    """Returns the content of a regular file. Raises OSError, also if it has more than `max_bytes`."""
    with open_regular(path) as opened:
        size = os.fstat(opened.fileno()).st_size
        if size > max_bytes:
            raise OSError(errno.EFBIG, f"it has {size} bytes, and at most {max_bytes} are read", str(path))
        return opened.read(max_bytes) or b""  # None for a file of the kernel that has nothing to read now


def check_folder(folder: Path) -> None:
    """Raises OSError if the folder has an entry that is neither a regular file nor a folder. Ignores broken links."""
    for entry in sorted(folder.iterdir()):
        try:
            mode = entry.stat().st_mode
        except OSError:
            continue
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise OSError(errno.EINVAL, NOT_REGULAR, str(entry))


def _check_mode(facts: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(facts.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EINVAL, NOT_REGULAR, str(path))

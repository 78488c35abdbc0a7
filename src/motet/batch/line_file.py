"""Files to which complete lines are appended, even if the process is killed: the results of `motet batch`, and of the
batches of a server.

    append   a line is written completely; otherwise the file is cut to its former size
    sync     what was appended is on the disk
    cut      what an interrupted write has left at the end is removed

After SIGKILL a file ends with a part of a line, after a power failure possibly with zeros. At the next start, the lines
are read to decide what is cut."""

import contextlib
import os
from collections.abc import Callable, Generator
from pathlib import Path

from motet.batch.line_reader import FileLine, read_lines

MAX_RESULT_BYTES = 2**29
"""Maximum size of a line that is read. The sender of requests reads at most half as much of a response."""
BINARY = getattr(os, "O_BINARY", 0)
"""Flag for a file without conversion of line ends; only Windows has it."""

Write = Callable[[int, memoryview], int]


class LineFile:
    """An open file of lines. All methods block; `sync` can be called in another thread than the others."""

    def __init__(self, path: Path, *, mode: int = 0o666, write: Write = os.write) -> None:
        """Opens or creates the file. Raises OSError, as all methods do."""
        self.path = path
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | BINARY, mode)
        self.num_bytes = os.fstat(self.descriptor).st_size
        self._write = write
        self._is_synced = True
        self._is_open = True

    def append(self, *pieces: bytes) -> None:
        """Writes one or more lines, which can be given in pieces, or nothing. Raises OSError, for example if the disk
        is full."""
        try:
            for piece in pieces:
                rest = memoryview(piece)
                while rest:
                    rest = rest[self._write(self.descriptor, rest) :]
        except OSError:
            with contextlib.suppress(OSError):  # otherwise the next start removes the incomplete line
                os.ftruncate(self.descriptor, self.num_bytes)
            raise
        self.num_bytes += sum(map(len, pieces))
        self._is_synced = False

    def sync(self) -> None:
        """Waits until all lines are on the disk."""
        if not self._is_synced:
            self._is_synced = True  # before the call, since lines can be appended during it
            os.fsync(self.descriptor)

    def cut(self, size: int) -> None:
        """Removes what is after the first `size` bytes."""
        if size < self.num_bytes:
            os.ftruncate(self.descriptor, size)
            self.num_bytes, self._is_synced = size, False

    def read(self, start: int = 0) -> Generator[FileLine, None, None]:
        """Yields the lines from the offset `start`. The iterator must be closed before the file is read again."""
        with os.fdopen(os.dup(self.descriptor), "rb", buffering=2**20) as file:
            yield from read_lines(file, max_bytes=MAX_RESULT_BYTES, start=start)

    def close(self, *, keep_empty: bool = True) -> None:
        """Closes the file. Can be called repeatedly. `keep_empty`: False to remove a file without lines."""
        if not self._is_open:
            return
        self._is_open = False
        if not self.num_bytes and not keep_empty:
            with contextlib.suppress(OSError):
                self.path.unlink()
        os.close(self.descriptor)

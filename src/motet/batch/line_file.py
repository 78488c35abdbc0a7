"""The output and the errors of a batch: files to which complete lines are appended, even if the process is killed.

    open     the file is locked, so that two runs do not write to it
    check    the results in it are counted; what an interrupted write has left at its end is removed
    append   a line is written with one call; if it cannot be written completely, the file is cut to its former size
    sync     what was appended is on the disk

After SIGKILL the file ends with a part of a line, after a power failure possibly with zeros. Only such ends are
repaired. Any other line that is not a result means that the file is not the output of a batch: nothing is changed."""

import contextlib
import importlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from motet.batch.id_table import IdMark, IdTable
from motet.batch.line_reader import FileLine, read_lines
from motet.batch.lines import ID_PREFIX, is_blank, read_result
from motet.errors import BatchStoppedError, ConfigError
from motet.log import notice

fcntl: Any
try:
    fcntl = importlib.import_module("fcntl")
except ImportError:  # on Windows, where files are not locked
    fcntl = None

MAX_RESULT_BYTES = 2**29
"""Maximum size of a line of results that is read. The sender reads at most half as much of a response."""
FIRST_BYTES = f'{{"id":"{ID_PREFIX}'.encode()
"""The start of every line that Motet writes."""
NUL = b"\x00"
BINARY = getattr(os, "O_BINARY", 0)
"""Flag for a file without conversion of line ends; only Windows has it."""

Write = Callable[[int, memoryview], int]


class LineFile:
    """A locked file of lines. Used as a context manager, it is closed at the end."""

    def __init__(self, path: Path, *, keep_empty: bool = True, write: Write = os.write) -> None:
        """Opens or creates the file. `keep_empty`: False to remove it at the end if it has no line. Raises ConfigError
        if it cannot be opened, or if another process has locked it."""
        self.path = path
        self._keep_empty = keep_empty
        self._write = write
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | BINARY, 0o666)
        except OSError as error:
            raise ConfigError(f"{path} cannot be opened for writing: {error.strerror}") from error
        self._is_synced = True
        try:
            self._check_kind()
        except BaseException:
            os.close(self._descriptor)
            raise
        self._size = os.fstat(self._descriptor).st_size

    def __enter__(self) -> "LineFile":
        return self

    def __exit__(self, *error: object) -> None:
        """Closes the file, which releases the lock."""
        if not self._size and not self._keep_empty:
            with contextlib.suppress(OSError):
                self.path.unlink()
        os.close(self._descriptor)

    @property
    def num_bytes(self) -> int:
        return self._size

    @property
    def status(self) -> os.stat_result:
        return os.fstat(self._descriptor)

    def append(self, line: bytes) -> None:
        """Writes a line, or nothing. Raises BatchStoppedError, for example if the disk is full."""
        try:
            append_all(self._descriptor, line, size=self._size, write=self._write)
        except OSError as error:
            raise self._failed(error) from error
        self._size += len(line)
        self._is_synced = False

    def sync(self) -> None:
        """Waits until all lines are on the disk. Can be called in another thread. Raises BatchStoppedError."""
        if not self._is_synced:
            self._is_synced = True  # before the call, since lines can be appended during it
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                raise self._failed(error) from error

    def cut(self, size: int) -> None:
        """Removes what is after the first `size` bytes."""
        if size < self._size:
            os.ftruncate(self._descriptor, size)
            self._size, self._is_synced = size, False

    def add_finished(self, table: IdTable) -> int:
        """Marks the ids of all results as finished, repairs the end of the file, and returns the number of bytes that
        were removed. Raises ConfigError if the file is not the output of a batch."""
        broken: FileLine | None = None
        good_end = 0
        with self._reader() as file:
            for line in read_lines(file, max_bytes=MAX_RESULT_BYTES):
                result = read_result(line.text) if line.text is not None and line.is_complete else None
                if result is not None and broken is None:
                    if result.custom_id is not None:
                        table.add(result.custom_id, IdMark.FINISHED, line_id=result.id)
                elif line.text is None or not (is_blank(line.text) or _is_unfinished(line, after=good_end)):
                    raise ConfigError(f"{self.path} is not the output of a batch: line {line.number} is not a result")
                elif not is_blank(line.text):
                    broken = broken or line
                if broken is None and line.is_complete:
                    good_end = line.end
        num_removed = self._size - good_end
        self.cut(good_end)
        return num_removed

    def start_again(self) -> None:
        """Removes all lines, the errors of an earlier run. Raises ConfigError if the file is something else."""
        with self._reader() as file:
            first = next(read_lines(file, max_bytes=MAX_RESULT_BYTES), None)
        if first and not (first.text and (read_result(first.text) or _is_unfinished(first, after=0))):
            raise ConfigError(
                f"{self.path} is not the errors of a batch, and would be overwritten: choose another --errors"
            )
        self.cut(0)

    def _check_kind(self) -> None:
        if not stat.S_ISREG(self.status.st_mode):
            raise ConfigError(f"{self.path} is not a regular file: results must be read again at the next start")
        if fcntl is None:
            return
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{self.path} is in use: another run of motet batch writes to it") from error
        except OSError as error:  # some network file systems have no locks
            notice(f"{self.path} cannot be locked ({error.strerror}): start no other run with it")

    def _reader(self) -> Any:
        return os.fdopen(os.dup(self._descriptor), "rb", buffering=2**20)

    def _failed(self, error: OSError) -> BatchStoppedError:
        return BatchStoppedError(
            f"{self.path} cannot be written: {error.strerror}. Its {self._size:,} bytes are complete lines: start the "
            "same command again to continue."
        )


def append_all(descriptor: int, lines: bytes, *, size: int, write: Write = os.write) -> None:
    """Appends lines to an open file, or nothing. `size`: the size of the file before the call. Raises OSError, for
    example if the disk is full."""
    rest = memoryview(lines)
    try:
        while rest:
            rest = rest[write(descriptor, rest) :]
    except OSError:
        with contextlib.suppress(OSError):  # otherwise the next start removes the incomplete line
            os.ftruncate(descriptor, size)
        raise


def _is_unfinished(line: FileLine, *, after: int) -> bool:
    """Returns True for what an interrupted write leaves: a part of a line, or zeros. `after`: size of the complete
    results before it."""
    text = line.text or b""
    if line.is_complete and NUL not in text:
        return False
    start = text.rstrip(b"\0\n")
    return after > 0 or start.startswith(FIRST_BYTES) or FIRST_BYTES.startswith(start)

"""The output and the errors of `motet batch`: files of results that one run writes and the next one continues.

    open     the file is locked, so that two runs do not write to it
    check    the results in it are counted, and an incomplete end is removed

Only an end that an interrupted write can have left is removed (`line_file`). Any other line that is not a result means
that the file is not the output of a batch: nothing is changed."""

import contextlib
import importlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from motet.batch.id_table import IdMark, IdTable
from motet.batch.line_file import LineFile, Write
from motet.batch.line_reader import FileLine
from motet.batch.lines import ID_PREFIX, is_blank, read_result
from motet.errors import BatchStoppedError, ConfigError
from motet.log import notice

fcntl: Any
try:
    fcntl = importlib.import_module("fcntl")
except ImportError:  # on Windows, where files are not locked
    fcntl = None

FIRST_BYTES = f'{{"id":"{ID_PREFIX}'.encode()
"""The start of every line that Motet writes."""
NUL = b"\x00"


class OutputFile:
    """A locked file of results. Used as a context manager, it is closed at the end."""

    def __init__(self, path: Path, *, keep_empty: bool = True, write: Write = os.write) -> None:
        """Opens or creates the file. `keep_empty`: False to remove it at the end if it has no line. Raises ConfigError
        if it cannot be opened, or if another process has locked it."""
        self.path = path
        self._keep_empty = keep_empty
        try:
            self._file = LineFile(path, write=write)
        except OSError as error:
            raise ConfigError(f"{path} cannot be opened for writing: {error.strerror}") from error
        try:
            self._check_kind()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "OutputFile":
        return self

    def __exit__(self, *error: object) -> None:
        """Closes the file, which releases the lock."""
        self._file.close(keep_empty=self._keep_empty)

    @property
    def num_bytes(self) -> int:
        return self._file.num_bytes

    @property
    def status(self) -> os.stat_result:
        return os.fstat(self._file.descriptor)

    def append(self, line: bytes) -> None:
        """Writes a line, or nothing. Raises BatchStoppedError, for example if the disk is full."""
        with self._writing():
            self._file.append(line)

    def sync(self) -> None:
        """Waits until all lines are on the disk. Can be called in another thread. Raises BatchStoppedError."""
        with self._writing():
            self._file.sync()

    def add_finished(self, table: IdTable) -> int:
        """Marks the ids of all results as finished, repairs the end of the file, and returns the number of bytes that
        were removed. Raises ConfigError if the file is not the output of a batch."""
        broken: FileLine | None = None
        good_end = 0
        for line in self._file.read():
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
        num_removed = self.num_bytes - good_end
        with self._writing():
            self._file.cut(good_end)
        return num_removed

    def start_again(self) -> None:
        """Removes all lines, the errors of an earlier run. Raises ConfigError if the file is something else."""
        with contextlib.closing(self._file.read()) as lines:
            first = next(lines, None)
        if first and not (first.text and (read_result(first.text) or _is_unfinished(first, after=0))):
            raise ConfigError(
                f"{self.path} is not the errors of a batch, and would be overwritten: choose another --errors"
            )
        with self._writing():
            self._file.cut(0)

    def _check_kind(self) -> None:
        if not stat.S_ISREG(self.status.st_mode):
            raise ConfigError(f"{self.path} is not a regular file: results must be read again at the next start")
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{self.path} is in use: another run of motet batch writes to it") from error
        except OSError as error:  # some network file systems have no locks
            notice(f"{self.path} cannot be locked ({error.strerror}): start no other run with it")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Raises BatchStoppedError for an OSError in this context."""
        try:
            yield
        except OSError as error:
            raise BatchStoppedError(
                f"{self.path} cannot be written: {error.strerror}. Its {self.num_bytes:,} bytes are complete lines: "
                "start the same command again to continue."
            ) from error


def _is_unfinished(line: FileLine, *, after: int) -> bool:
    """Returns True for what an interrupted write leaves: a part of a line, or zeros. `after`: size of the complete
    results before it."""
    text = line.text or b""
    if line.is_complete and NUL not in text:
        return False
    start = text.rstrip(b"\0\n")
    return after > 0 or start.startswith(FIRST_BYTES) or FIRST_BYTES.startswith(start)

"""Reads files in daemon threads, and raises an error if nothing arrives for some time: a read from a network mount that
hangs never returns.

    thread that waits                      daemon threads
    run, ahead, wait_for  ◄── results ───  read_into, pieces: call `note` for each piece that was read

A read that is slow, but continues, can take any time. A read that hangs cannot be ended: its thread remains until the
system answers, and then ends at its next piece. It keeps only the memory of the piece or the tensor that it reads."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, wait
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

from motet.errors import ModelLoadError
from motet.models.regular_files import open_regular
from motet.system.threads import in_daemon_thread

T = TypeVar("T")

STALL_S = 60.0
"""Time without a new piece after which a read counts as hanging. Network file systems recover from a lost packet or a
change of servers in less."""
PIECE_BYTES = 4 * 2**20
CHECKS = 4
"""Number of checks in `STALL_S`. A read hangs if no check finds a new piece. Several checks are necessary because the
entire process can be stopped for a while, which delays at most one of them."""
AHEAD = 1
"""Number of items that are read while one is used."""


class FileReading:
    """The reads of one checkpoint. Daemon threads call `note`, `read_into` and `pieces`. The thread that waits calls
    the other methods."""

    def __init__(self, *, stall_s: float | None = None) -> None:
        self._check_s = (STALL_S if stall_s is None else stall_s) / CHECKS
        self._file: Path | None = None
        self._pieces = 0
        self._over = False

    def note(self, file: Path) -> None:
        """Called before a file is opened, and after each piece. Raises ModelLoadError after `close`, to end the
        thread."""
        self._file = file
        self._pieces += 1  # several threads can lose a count, but the number changes
        if self._over:
            raise ModelLoadError(f"{file} is not needed any more")

    def close(self) -> None:
        """Makes the threads end at their next piece. Can be called twice."""
        self._over = True

    def run(self, work: Callable[[], T]) -> T:
        """Runs `work`, which reads files, in a daemon thread. Returns its result. Raises its error, and ModelLoadError
        if it hangs."""
        return self.wait_for(in_daemon_thread(work, name="read"))

    def wait_for(self, future: "Future[T]") -> T:
        """Returns the result of a daemon thread that reads files. Raises its error, and ModelLoadError if it hangs."""
        self._await(lambda timeout_s: bool(wait([future], timeout_s).done))
        return future.result()

    def ahead(self, items: Iterator[T]) -> Generator[T]:
        """Yields items. The next item is read in a daemon thread while the caller uses the last one. Raises the
        iterator's error, and ModelLoadError if it hangs."""
        read: deque[T] = deque()
        room, arrived, stopped = threading.Semaphore(AHEAD), threading.Semaphore(0), threading.Event()

        def read_all() -> None:
            for item in items:
                read.append(item)
                arrived.release()
                room.acquire()
                if stopped.is_set():
                    break

        end = in_daemon_thread(read_all, name="read")
        end.add_done_callback(lambda _: arrived.release())
        try:
            while True:
                self._await(lambda timeout_s: arrived.acquire(timeout=timeout_s))
                if not read:
                    return end.result()
                yield read.popleft()
                room.release()
        finally:
            stopped.set()
            room.release()

    def read_into(self, memory: memoryview, file: Path, *, begin: int) -> None:
        """Fills the memory with the file's bytes from `begin` on. Raises OSError, and ModelLoadError if the file is
        shorter."""
        self.note(file)
        with open_regular(file) as opened:
            opened.seek(begin)
            for start in range(0, len(memory), PIECE_BYTES):
                self._fill(memory[start : start + PIECE_BYTES], opened, file=file)

    def pieces(self, file: Path, *, begin: int, end: int) -> Iterator[memoryview]:
        """Yields the bytes from `begin` to `end`, half-open, in pieces. A piece is valid until the next one. Raises the
        errors of `read_into`."""
        memory = memoryview(bytearray(min(PIECE_BYTES, end - begin)))
        self.note(file)
        with open_regular(file) as opened:
            opened.seek(begin)
            for start in range(begin, end, PIECE_BYTES):
                piece = memory[: end - start]
                self._fill(piece, opened, file=file)
                yield piece

    def _fill(self, piece: memoryview, opened: BufferedReader, *, file: Path) -> None:
        if (opened.readinto(piece) or 0) < len(piece):
            raise ModelLoadError(f"{file} has become shorter while it was read")
        self.note(file)

    def _await(self, arrived: Callable[[float], bool]) -> None:
        """Waits until `arrived` returns True. It takes the time in seconds for which it waits."""
        num_silent, seen = 0, self._pieces
        while not arrived(self._check_s):
            num_silent = num_silent + 1 if self._pieces == seen else 0
            seen = self._pieces
            if num_silent == CHECKS:
                self.close()
                raise ModelLoadError(
                    f"{self._file} cannot be read: nothing has arrived for {self._check_s * CHECKS:g} s, as from a "
                    "network mount that hangs"
                )

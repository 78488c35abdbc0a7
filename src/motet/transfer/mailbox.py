"""A queue between two threads, whose reader can wait for it and for sockets at the same time."""

import contextlib
import os
import threading
from typing import Generic, TypeVar

Letter = TypeVar("Letter")


class Mailbox(Generic[Letter]):
    """Any thread puts, one thread takes. It has no limit, since the reader empties it in every round or step."""

    def __init__(self) -> None:
        self._letters: list[Letter] = []
        self._lock = threading.Lock()
        """Held for a few instructions and a system call that does not block."""
        self._readable, self._writable = os.pipe()
        os.set_blocking(self._readable, False)
        os.set_blocking(self._writable, False)
        self._closed = False

    def fileno(self) -> int:
        """Returns a descriptor that is readable while there is something to take, or after `ring`."""
        return self._readable

    def put(self, letter: Letter) -> None:
        """Adds a letter; also to a closed mailbox, whose letters `take` still returns."""
        with self._lock:
            self._letters.append(letter)
            self._make_readable()

    def ring(self) -> None:
        """Wakes up the taker, with nothing to take."""
        with self._lock:
            self._make_readable()

    def take(self) -> list[Letter]:
        """Takes everything there is, in order."""
        with self._lock:
            letters, self._letters = self._letters, []
            with contextlib.suppress(BlockingIOError):
                while not self._closed and os.read(self._readable, 4096):
                    pass
        return letters

    def close(self) -> None:
        """Closes the descriptor; a second call changes nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._readable)
                os.close(self._writable)

    def _make_readable(self) -> None:
        if not self._closed:
            with contextlib.suppress(BlockingIOError):  # a full pipe is readable already
                os.write(self._writable, b"\0")

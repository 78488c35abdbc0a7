"""A queue between two threads whose other end can be slept on together with sockets."""

import contextlib
import os
import threading
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """Any thread puts, one thread takes. Unbounded: who takes does so in every round or step, and what
    peers can say in between is bounded by the side channel."""

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._lock = threading.Lock()
        """Held for a few instructions and a system call that does not block."""
        self._readable, self._writable = os.pipe()
        os.set_blocking(self._readable, False)
        os.set_blocking(self._writable, False)
        self._closed = False

    def fileno(self) -> int:
        """Readable while there is something to take, or after `ring`."""
        return self._readable

    def put(self, item: Item) -> None:
        """Into a closed mailbox too, from which nothing but `take` comes out any more."""
        with self._lock:
            self._items.append(item)
            self._make_readable()

    def ring(self) -> None:
        """Wakes up who takes, with nothing to take."""
        with self._lock:
            self._make_readable()

    def take(self) -> list[Item]:
        """Everything there is, in order."""
        with self._lock:
            items, self._items = self._items, []
            with contextlib.suppress(BlockingIOError):
                while not self._closed and os.read(self._readable, 4096):
                    pass
        return items

    def close(self) -> None:
        """Gives the descriptor back; twice changes nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._readable)
                os.close(self._writable)

    def _make_readable(self) -> None:
        if not self._closed:
            with contextlib.suppress(BlockingIOError):  # a full pipe is readable, which is all that is wanted
                os.write(self._writable, b"\0")

"""A queue between two threads with a socket that is readable while the queue holds an item. So its reader can wait for
it and for other sockets in one `poll`, which `queue.Queue` does not allow. A pipe cannot be polled on Windows."""

import contextlib
import socket
import threading
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """Any thread puts items, and one thread takes all of them in every round or step, so their number has no limit."""

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._lock = threading.Lock()
        """Held for a few instructions and a system call that does not block."""
        self._readable, self._writable = socket.socketpair()
        self._readable.setblocking(False)
        self._writable.setblocking(False)
        self._descriptor = self._readable.fileno()
        self._closed = False

    def fileno(self) -> int:
        """Returns a descriptor that is readable while there are items, or after `wake`."""
        return self._descriptor

    def put(self, item: Item) -> None:
        """Adds an item. A closed mailbox accepts it too, and `take` still returns it."""
        with self._lock:
            self._items.append(item)
            self._make_readable()

    def wake(self) -> None:
        with self._lock:
            self._make_readable()

    def take(self) -> list[Item]:
        """Returns all items, in order, and removes them."""
        with self._lock:
            items, self._items = self._items, []
            with contextlib.suppress(BlockingIOError):
                while not self._closed and self._readable.recv(4096):
                    pass
        return items

    def close(self) -> None:
        """Closes the descriptor; a second call changes nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._readable.close()
                self._writable.close()

    def _make_readable(self) -> None:
        if not self._closed:
            with contextlib.suppress(BlockingIOError):  # a full socket is readable already
                self._writable.send(b"\0")

"""Signs of life of an engine process, sent by a thread beside the one that computes.

A process that is stopped sends none; neither does one whose computing thread hangs and keeps the interpreter's lock.
One that hangs without it still beats, and its beats say for how long it has been in the same step.
"""

import contextlib
import threading
from typing import Self

import msgspec
import zmq

from motet.engines.native.protocol import Beat


class Heart:
    """Beats between entering and leaving."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, *, every_s: float) -> None:
        self._context = context
        self._address = address
        self._every_s = every_s
        self._stretches = 0
        self._present: int | None = None
        """The stretch of work that the computing thread is in; it alone writes it, so there is no lock."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def work(self) -> None:
        """The computing thread begins a stretch of work that must come to an end."""
        self._stretches += 1
        self._present = self._stretches

    def rest(self) -> None:
        """It has come to its end."""
        self._present = None

    def _beat(self) -> None:
        """Time in a step is counted in beats: while the whole process was stopped, no step took any."""
        seen, busy_s = None, 0.0
        with self._context.socket(zmq.PUSH) as events:  # its own: a socket is for one thread
            events.setsockopt(zmq.LINGER, 0)
            events.set_hwm(1)
            events.connect(self._address)
            while not self._over.wait(self._every_s):
                present = self._present
                busy_s = busy_s + self._every_s if present is not None and present == seen else 0.0
                seen = present
                with contextlib.suppress(zmq.Again):  # beats enough are waiting to be read
                    events.send(msgspec.msgpack.encode(Beat(busy_s)), zmq.NOBLOCK)

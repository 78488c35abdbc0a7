"""Threads for long work, in which clients take turns.

Work whose time grows with a client's data runs on the event loop if the data is short. Otherwise it runs piece by piece
in a single thread for all requests (`in_thread`), because each thread that competes for the GIL delays the event loop.
If several clients wait, one piece of each client runs before the second piece of any client. So a client waits for at
most one piece of each other client. The limits on bodies (`body`) bound a piece.

Work that waits for another process, and does not hold the GIL, has a thread for each process (`in_thread_of`).
"""

import asyncio
import gc
import re
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

import anyio
from anyio import to_thread
from anyio.lowlevel import RunVar
from starlette.types import Scope

LONG_WORK = 8192
"""Minimum size of long work, in characters of a text that is tokenised. For shorter texts the switch between threads
costs more."""
CONTAINER_CHARS = 64
"""Number of characters whose tokenisation takes as long as the work for an object or an array, such as a message or a
tool call."""
EXPANDED = re.compile(rb'\\?"(?:not|if|oneOf|dependent\w+|dependencies|uniqueItems)\\?"')
"""Keywords of schemas that are replaced (`grammar.limits`), also in JSON in a string. A schema of 2,000 characters with
them can take 30 ms or more."""
ESCAPED_LETTER = re.compile(rb"\\u00[4-7]")
"""An escape of a letter, which can hide a keyword. No encoder escapes letters of ASCII."""

T = TypeVar("T")


class WorkThread:
    """A thread that runs one piece of work at a time. Clients that wait take turns; the pieces of one client keep their
    order."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """The waiting pieces of each client that has any, in the order of the clients' turns."""
        self._busy = False
        self._latest = ""
        """The client that had the latest turn."""
        self._limiter = anyio.CapacityLimiter(1)

    async def run(self, work: Callable[[], T], *, client: str) -> T:
        """Runs a piece of work in the client's turn. Returns its result, or raises its error."""
        async with self.turn(client):
            result, error = await to_thread.run_sync(partial(_outcome, work), limiter=self._limiter)
        try:
            if error is not None:
                raise error
            return cast(T, result)
        finally:
            # The error refers to this frame: with a reference back, only a garbage collection would free them.
            del result, error

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Waits for the client's turn, which lasts until the end of the context."""
        if self._busy:
            await self._wait(client)
        self._busy, self._latest = True, client
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, client: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the piece had got the turn, and must pass it on
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Gives the turn to the next client. Pieces whose requests were cancelled are skipped."""
        if self._latest in self._waiting:
            self._waiting.move_to_end(self._latest)
        while self._waiting:
            client, turns = self._waiting.popitem(last=False)
            while turns:
                if not (turn := turns.popleft()).done():
                    if turns:
                        self._waiting[client] = turns
                    turn.set_result(None)
                    return
        self._busy = False


_THREAD: RunVar[WorkThread] = RunVar("work_thread")
"""The thread for long work of the running event loop."""
_THREAD_OF: RunVar[WeakKeyDictionary[object, WorkThread]] = RunVar("work_thread_of")
"""The threads of `in_thread_of`."""


async def in_thread(work: Callable[[], T], *, client: str) -> T:
    """Runs a piece of work in the thread for long work, in the client's turn (`work_client`)."""
    if (thread := _THREAD.get(None)) is None:
        _THREAD.set(thread := WorkThread())
    return await thread.run(work, client=client)


async def in_thread_of(owner: object, work: Callable[[], T], *, client: str) -> T:
    """Runs work that waits for a process of `owner`, in the owner's thread and the client's turn. It does not delay the
    thread for long work, or the threads of other owners."""
    if (thread_of := _THREAD_OF.get(None)) is None:
        _THREAD_OF.set(thread_of := WeakKeyDictionary())
    return await thread_of.setdefault(owner, WorkThread()).run(work, client=client)


def _outcome(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Returns the result or the error of work. No garbage is collected while it runs: a collection visits all objects
    made of a long body, for up to 80 ms in which no other thread runs, and is repeated as their number grows."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return work(), None
    except Exception as error:
        return None, error
    finally:
        if enabled:
            gc.enable()


def work_size(body: bytes) -> int:
    """Returns the size of the work on a body: of rendering and tokenising it, and of closing the objects of a schema.
    JSON in its strings counts. It is long if the body can have a keyword of a schema that is replaced by many others.
    """
    if len(body) >= LONG_WORK:
        return len(body)
    size = len(body) + CONTAINER_CHARS * (body.count(b"{") + body.count(b"["))
    return size + LONG_WORK if EXPANDED.search(body) or ESCAPED_LETTER.search(body) else size


def work_client(scope: Scope, cache_salt: str = "") -> str:
    """Returns the client in whose turns long work for a request is done: its API key by name; without a key, the
    request's `cache_salt` or, without a salt or before the body is read, its address. All lines of batches are one
    client."""
    if scope["state"].get("batch"):
        return "batch"
    key_name: str = scope["state"].get("client", "")
    address = scope.get("client")
    return key_name or cache_salt or (address[0] if address else "")

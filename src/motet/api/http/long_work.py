"""The thread for long work, in which clients take turns.

Work whose time grows with a client's data runs on the event loop if the data is short, otherwise in one thread, piece
by piece: each thread that competes for the GIL delays the event loop. If several clients wait, each has one piece done
before any has its second, so a client waits for at most one piece of each other client. The limits on bodies (`body`)
bound a piece.
"""

import asyncio
import gc
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
"""Minimum size of work for the thread, in characters of a text that is tokenised. For shorter texts the switch between
threads costs more."""
BRACKET_CHARS = 64
"""Number of characters whose tokenisation costs as much as an object or an array, such as a message or a tool call."""

T = TypeVar("T")


class Turns:
    """Lets one piece of work run at a time. Clients that wait take turns; the pieces of one client keep their order."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """The waiting pieces of each client that has any, in the order of the clients' turns."""
        self._busy = False
        self._latest = ""
        """The client that had the latest turn."""
        self.limiter = anyio.CapacityLimiter(1)

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
            if not turn.cancelled():  # the turn had been given, and must be passed on
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


_TURNS: RunVar[Turns] = RunVar("turns")
_TURNS_OF: RunVar[WeakKeyDictionary[object, Turns]] = RunVar("turns_of")


async def in_thread(work: Callable[[], T], *, client: str) -> T:
    """Runs a piece of long work in the thread, in the client's turn (`work_client`)."""
    if (turns := _TURNS.get(None)) is None:
        _TURNS.set(turns := Turns())
    return await _in_turn(turns, work, client=client)


async def in_thread_of(owner: object, work: Callable[[], T], *, client: str) -> T:
    """Runs work that waits for a process of `owner`, in a thread and the client's turn. It delays no work of others."""
    if (turns_of := _TURNS_OF.get(None)) is None:
        _TURNS_OF.set(turns_of := WeakKeyDictionary())
    turns = turns_of.setdefault(owner, Turns())
    return await _in_turn(turns, work, client=client)


async def _in_turn(turns: Turns, work: Callable[[], T], *, client: str) -> T:
    async with turns.turn(client):
        result, error = await to_thread.run_sync(partial(_outcome, work), limiter=turns.limiter)
    try:
        if error is not None:
            raise error
        return cast(T, result)
    finally:
        del result, error  # the error refers to this frame: with a reference back, only a collection would free them


def _outcome(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Returns the result or the error of work. No garbage is collected during this time: a collection visits all
    objects that a long body has become, for up to 80 ms in which no other thread runs, and again as their number
    grows."""
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
    """Returns the size of the work of checking a body, rendering it and tokenising it. JSON in its strings counts."""
    if len(body) >= LONG_WORK:
        return len(body)
    return len(body) + BRACKET_CHARS * (body.count(b"{") + body.count(b"["))


def work_client(scope: Scope, cache_salt: str = "") -> str:
    """Returns the client in whose turns long work for a request is done: the API key, or without one the `cache_salt`
    or the address."""
    key: str = scope["state"].get("client", "")
    address = scope.get("client")
    return key or cache_salt or (address[0] if address else "")

"""Replicas as others reach them: through the handle of their deployment. The directory is asked so, with bytes in our
own encoding."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from motet.deploy.ray.directory import Announcement, Listing, Version
from motet.errors import DirectoryError

ASK_TIMEOUT_S = 3.0
"""So short that a worker whose announcement was lost announces itself again before it is forgotten."""
LISTEN_S = 30.0
"""How long a listing that has not changed is waited for."""

_T = TypeVar("_T")


class Handle(Protocol):
    """Of a Serve deployment: an attribute is a method, whose `remote` gives what can be awaited."""

    def __getattr__(self, name: str) -> Any: ...


class NoAnswerError(Exception):
    """None will come."""


async def answer(call: Callable[[], Any]) -> Any:
    """What a replica says. Raises NoAnswerError, whatever Ray makes of one, a node or a controller that is gone."""
    try:
        return await call()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise NoAnswerError("it ended before it answered") from error  # then the call is cancelled, and not we
    except Exception as error:
        raise NoAnswerError(str(error)) from error


class RayDirectory:
    """A `DirectoryClient`."""

    def __init__(self, handle: Handle, *, ask_timeout_s: float = ASK_TIMEOUT_S, listen_s: float = LISTEN_S) -> None:
        self._handle = handle
        self._ask_timeout_s = ask_timeout_s
        self._listen_s = listen_s

    async def announce(self, announcement: Announcement, known: Version) -> Listing:
        said, version = msgspec.msgpack.encode(announcement), msgspec.msgpack.encode(known)
        return _listing(await self._call(lambda: self._handle.announce.remote(said, version)))

    async def withdraw(self, id: str) -> None:
        await self._call(lambda: self._handle.withdraw.remote(id))

    async def changed(self, version: Version) -> Listing:
        known = msgspec.msgpack.encode(version)
        listen_s = self._listen_s
        return _listing(await self._call(lambda: self._handle.changed.remote(known, listen_s), longer_s=listen_s))

    async def _call(self, call: Callable[[], Any], *, longer_s: float = 0.0) -> Any:
        timeout_s = self._ask_timeout_s + longer_s
        try:
            async with asyncio.timeout(timeout_s):
                return await answer(call)
        except TimeoutError as error:
            raise DirectoryError(f"the directory of workers did not answer within {timeout_s:g} s") from error
        except NoAnswerError as error:
            raise DirectoryError(f"the directory of workers cannot be asked: {error}") from error


def _listing(answer: bytes) -> Listing:
    try:
        return msgspec.msgpack.decode(answer, type=Listing)
    except msgspec.DecodeError as error:
        raise DirectoryError(f"the directory of workers is of another version: {error}") from error

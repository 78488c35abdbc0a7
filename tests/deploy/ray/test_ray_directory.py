"""Calls to the directory through Serve: encoded as bytes, with a time limit, and with one error for all failures."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from motet.deploy.ray.directory import (
    DirectoryReplica,
    DirectoryVersion,
    Listing,
    RayDirectory,
    WorkerStage,
)
from motet.errors import DirectoryError
from motet.types import Role
from tests.deploy.ray.directories import ended, worker

pytestmark = pytest.mark.anyio

WAIT_S = 0.01


class Remote:
    """A method of a handle."""

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call

    def remote(self, *arguments: Any) -> Awaitable[Any]:
        return self._call(*arguments)


class FakeHandle:
    """A handle of a deployment with a directory. `instead` replaces every call."""

    def __init__(self, instead: Callable[[], Awaitable[bytes]] | None = None) -> None:
        self._replica = DirectoryReplica()
        self._instead = instead

    def __getattr__(self, name: str) -> Any:
        if (instead := self._instead) is not None:
            return Remote(lambda *_: instead())
        return Remote(getattr(self._replica, name))


async def test_announcements_and_listings_arrive_unchanged() -> None:
    directory = RayDirectory(FakeHandle(), wait_s=WAIT_S)
    announced = worker("a", Role.DECODE, WorkerStage.CONNECTING, engine_id="engine", connected=("b", "c"))
    listing = await directory.announce(announced, DirectoryVersion())
    assert listing.workers == (announced,)
    assert await directory.changed(DirectoryVersion()) == listing
    assert await directory.changed(listing.version) == listing
    await directory.withdraw("a")
    assert (await directory.changed(listing.version)).workers == ()


class ReplicaGoneError(Exception):
    """Any error of Ray."""


async def gone() -> bytes:
    raise ReplicaGoneError("the actor died")


async def silent() -> bytes:
    await asyncio.Event().wait()
    return b""


async def cancelled() -> bytes:
    raise asyncio.CancelledError


async def strange() -> bytes:
    return msgspec.msgpack.encode({"version": 7})


async def cut() -> bytes:
    return msgspec.msgpack.encode(Listing(version=DirectoryVersion("a"), settled=True))[:-3]


ANSWERS = [
    (gone, "cannot be reached: the actor died"),
    (silent, r"did not answer within 0\.0"),
    (cancelled, "ended before it answered"),
    (strange, "has another version"),
    (cut, "has another version"),
]


@pytest.mark.parametrize(("instead", "says"), ANSWERS)
async def test_every_failure_is_the_same_error(instead: Callable[[], Awaitable[bytes]], says: str) -> None:
    """A follower of the directory continues after such an error. Regression: other errors ended it."""
    directory = RayDirectory(FakeHandle(instead), timeout_s=0.01, wait_s=WAIT_S)
    with pytest.raises(DirectoryError, match=says):
        await directory.changed(DirectoryVersion())
    with pytest.raises(DirectoryError, match=says):
        await directory.announce(worker("a"), DirectoryVersion())


async def test_a_call_that_cannot_be_made_is_the_same_error() -> None:
    class NoHandle:
        def __getattr__(self, name: str) -> Any:
            raise ReplicaGoneError("Serve was shut down")

    with pytest.raises(DirectoryError, match="Serve was shut down"):
        await RayDirectory(NoHandle()).withdraw("a")


async def test_a_caller_that_is_cancelled_stays_cancelled() -> None:
    call = asyncio.create_task(RayDirectory(FakeHandle(silent)).withdraw("a"))
    await asyncio.sleep(0)
    await ended(call)
    assert call.cancelled()

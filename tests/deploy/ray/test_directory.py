"""The workers in a directory."""

import asyncio

import pytest

from motet.deploy.ray.directory import EXPIRY_S, WITHDRAWN_S, Directory, DirectoryVersion, Listing, WorkerStage
from motet.types import Role
from tests.clock import Clock, settle
from tests.deploy.ray.directories import worker

pytestmark = pytest.mark.anyio


class ClockedDirectory:
    """A directory and its clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.directory = Directory(clock=self.clock, gather_s=0.0)

    def advance(self, seconds: float) -> None:
        """Advances the clock, with a call every second, as followers of the directory make them."""
        until_s = self.clock.now_s + seconds
        while self.clock.now_s < until_s:
            self.clock.now_s = min(until_s, self.clock.now_s + 1.0)
            self.directory.listing()

    @property
    def ids(self) -> list[str]:
        return [worker.id for worker in self.directory.listing().workers]

    @property
    def version(self) -> DirectoryVersion:
        return self.directory.listing().version

    def waiting(self, version: DirectoryVersion, *, timeout_s: float = 60.0) -> "asyncio.Task[Listing]":
        return asyncio.ensure_future(self.directory.changed(version, timeout_s=timeout_s))


def test_a_worker_that_announces_itself_receives_the_list() -> None:
    clocked = ClockedDirectory()
    clocked.directory.announce(worker("a", Role.PREFILL))
    listing = clocked.directory.announce(worker("b", Role.DECODE, connected=("engine",)))
    assert listing.workers == (worker("a", Role.PREFILL), worker("b", Role.DECODE, connected=("engine",)))


def test_a_silent_worker_expires_and_can_come_back() -> None:
    clocked = ClockedDirectory()
    clocked.directory.announce(worker("a"))
    clocked.directory.announce(worker("b"))
    clocked.advance(EXPIRY_S)
    clocked.directory.announce(worker("b"))
    assert clocked.ids == ["a", "b"]
    clocked.advance(0.1)
    assert clocked.ids == ["b"]
    clocked.directory.announce(worker("a"))
    assert clocked.ids == ["b", "a"]


def test_a_repeated_announcement_is_no_change() -> None:
    clocked = ClockedDirectory()
    first = clocked.directory.announce(worker("a", stage=WorkerStage.CONNECTING)).version
    assert clocked.directory.announce(worker("a", stage=WorkerStage.CONNECTING)).version == first
    ready = clocked.directory.announce(worker("a")).version
    assert (ready.epoch, ready.number) == (first.epoch, first.number + 1)
    clocked.directory.withdraw("unknown")
    assert clocked.version == ready


def test_a_late_announcement_does_not_bring_back_a_worker_that_withdrew() -> None:
    """Regression: it was listed for another ten seconds, and requests to it failed."""
    clocked = ClockedDirectory()
    clocked.directory.announce(worker("a"))
    clocked.directory.withdraw("a")
    before = clocked.version
    assert clocked.directory.announce(worker("a")).workers == ()
    assert clocked.version == before


def test_a_worker_that_withdrew_is_forgotten_after_a_while() -> None:
    clocked = ClockedDirectory()
    clocked.directory.withdraw("a")
    clocked.advance(WITHDRAWN_S + 0.1)
    assert [listed.id for listed in clocked.directory.announce(worker("a")).workers] == ["a"]


def test_a_worker_replaces_an_older_one_at_the_same_address() -> None:
    """The old worker was killed, and would be listed until it expires, with its role at the address of another role."""
    clocked = ClockedDirectory()
    clocked.directory.announce(worker("killed", Role.PREFILL, url="http://10.0.0.1:4000"))
    clocked.directory.announce(worker("other", Role.PREFILL, url="http://10.0.0.1:4001"))
    clocked.directory.announce(worker("new", Role.DECODE, url="http://10.0.0.1:4000"))
    assert clocked.ids == ["other", "new"]


def test_a_directory_that_was_suspended_removes_no_worker_and_is_not_settled() -> None:
    """Regression: all workers were removed at once, since none could announce itself, and came back one by one."""
    clocked = ClockedDirectory()
    clocked.directory.announce(worker("a"))
    clocked.clock.now_s += 3600.0
    assert clocked.ids == ["a"]
    assert not clocked.directory.listing().settled
    clocked.advance(EXPIRY_S / 2 - 0.1)
    assert clocked.ids == ["a"]
    clocked.advance(0.2)
    assert clocked.ids == []


async def test_an_old_version_is_answered_at_once() -> None:
    clocked = ClockedDirectory()
    old = clocked.version
    clocked.directory.announce(worker("a"))
    assert [listed.id for listed in (await clocked.directory.changed(old, timeout_s=60)).workers] == ["a"]
    assert [listed.id for listed in (await clocked.directory.changed(DirectoryVersion(), timeout_s=60)).workers] == [
        "a"
    ]


async def test_a_change_wakes_every_waiter_once() -> None:
    clocked = ClockedDirectory()
    waiting = [clocked.waiting(clocked.version) for _ in range(3)]
    await asyncio.sleep(0)
    clocked.directory.announce(worker("a"))
    listings = await asyncio.gather(*waiting)
    assert [[listed.id for listed in listing.workers] for listing in listings] == [["a"]] * 3
    again = clocked.waiting(listings[0].version)
    clocked.directory.announce(worker("a"))
    await settle()
    assert not again.done()
    clocked.directory.withdraw("a")
    assert (await again).workers == ()


async def test_a_waiter_is_answered_when_its_time_is_up() -> None:
    clocked = ClockedDirectory()
    version = clocked.directory.announce(worker("a")).version
    assert (await clocked.directory.changed(version, timeout_s=0.0)).version == version


async def test_a_worker_that_expires_is_reported_to_waiters() -> None:
    clock = Clock()
    directory = Directory(clock=clock, expiry_s=0.02, gather_s=0.0)
    version = directory.announce(worker("a")).version
    waiting = asyncio.ensure_future(directory.changed(version, timeout_s=60.0))
    await asyncio.sleep(0)
    clock.now_s += 0.01
    directory.listing()
    clock.now_s += 0.011
    assert (await waiting).workers == ()


async def test_a_listing_is_settled_when_every_worker_had_time_to_announce_itself() -> None:
    clocked = ClockedDirectory()
    first = clocked.directory.listing()
    assert not first.settled
    clocked.advance(EXPIRY_S + 0.1)
    assert (await clocked.directory.changed(first.version, timeout_s=60.0)).settled


def test_two_starts_of_a_directory_have_different_versions() -> None:
    assert ClockedDirectory().version.epoch != ClockedDirectory().version.epoch


def test_an_announcement_without_changes_is_answered_without_workers() -> None:
    clocked = ClockedDirectory()
    known = clocked.directory.announce(worker("a")).version
    assert clocked.directory.announce(worker("a"), known).workers == ()
    assert [listed.id for listed in clocked.directory.announce(worker("b"), known).workers] == ["a", "b"]


async def test_a_new_connection_is_a_change_and_fewer_listed_connections_are_not() -> None:
    clocked = ClockedDirectory()
    known = clocked.directory.announce(worker("a", Role.DECODE)).version
    connected = clocked.directory.announce(worker("a", Role.DECODE, connected=("x", "y"))).version
    assert connected != known
    assert clocked.directory.announce(worker("a", Role.DECODE, connected=("x",))).version == connected
    assert clocked.directory.announce(worker("a", Role.DECODE, connected=("x", "z"))).version != connected


async def test_changes_that_come_together_are_reported_together() -> None:
    directory = Directory(gather_s=0.05)
    known = directory.announce(worker("a")).version
    waiting = asyncio.ensure_future(directory.changed(known, timeout_s=10.0))
    asyncio.get_running_loop().call_soon(directory.announce, worker("b"))
    asyncio.get_running_loop().call_later(0.001, directory.announce, worker("c"))
    assert [listed.id for listed in (await waiting).workers] == ["a", "b", "c"]

"""The workers that a directory lists."""

import asyncio

import pytest

from motet.deploy.ray.directory import EXPIRY_S, WITHDRAWN_S, Directory, DirectoryVersion, Listing, WorkerStage
from motet.types import Role
from tests.deploy.ray.directories import Clock, worker

pytestmark = pytest.mark.anyio


class Book:
    """A directory and its clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.directory = Directory(clock=self.clock, gather_s=0.0)

    def let_pass(self, seconds: float) -> None:
        """Lets time pass, with a look every second, as if somebody were there."""
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


def test_a_worker_that_announces_itself_learns_who_is_there() -> None:
    book = Book()
    book.directory.announce(worker("a", Role.PREFILL))
    listing = book.directory.announce(worker("b", Role.DECODE, met=("engine",)))
    assert listing.workers == (worker("a", Role.PREFILL), worker("b", Role.DECODE, met=("engine",)))


def test_a_silent_worker_is_forgotten_and_may_come_back() -> None:
    book = Book()
    book.directory.announce(worker("a"))
    book.directory.announce(worker("b"))
    book.let_pass(EXPIRY_S)
    book.directory.announce(worker("b"))
    assert book.ids == ["a", "b"]
    book.let_pass(0.1)
    assert book.ids == ["b"]
    book.directory.announce(worker("a"))
    assert book.ids == ["b", "a"]


def test_a_repeated_announcement_is_no_change() -> None:
    book = Book()
    first = book.directory.announce(worker("a", stage=WorkerStage.MEETING)).version
    assert book.directory.announce(worker("a", stage=WorkerStage.MEETING)).version == first
    ready = book.directory.announce(worker("a")).version
    assert (ready.epoch, ready.number) == (first.epoch, first.number + 1)
    book.directory.withdraw("nobody")
    assert book.version == ready


def test_a_late_announcement_does_not_bring_back_a_worker_that_withdrew() -> None:
    """It used to be listed for another ten seconds, and was asked in vain."""
    book = Book()
    book.directory.announce(worker("a"))
    book.directory.withdraw("a")
    before = book.version
    assert book.directory.announce(worker("a")).workers == ()
    assert book.version == before


def test_a_worker_that_withdrew_is_not_remembered_for_ever() -> None:
    book = Book()
    book.directory.withdraw("a")
    book.let_pass(WITHDRAWN_S + 0.1)
    assert [listed.id for listed in book.directory.announce(worker("a")).workers] == ["a"]


def test_a_worker_takes_the_place_of_an_older_one_at_the_same_address() -> None:
    """The old worker was killed, and would be listed until it expires, with its role at an address of another role."""
    book = Book()
    book.directory.announce(worker("killed", Role.PREFILL, url="http://10.0.0.1:4000"))
    book.directory.announce(worker("other", Role.PREFILL, url="http://10.0.0.1:4001"))
    book.directory.announce(worker("new", Role.DECODE, url="http://10.0.0.1:4000"))
    assert book.ids == ["other", "new"]


def test_a_directory_that_was_asleep_forgets_nobody_and_is_not_settled() -> None:
    """Nobody could announce itself meanwhile. All workers used to vanish at once, and came back one by one."""
    book = Book()
    book.directory.announce(worker("a"))
    book.clock.now_s += 3600.0
    assert book.ids == ["a"]
    assert not book.directory.listing().settled
    book.let_pass(EXPIRY_S / 2 - 0.1)
    assert book.ids == ["a"]
    book.let_pass(0.2)
    assert book.ids == []


async def test_an_old_version_is_answered_at_once() -> None:
    book = Book()
    old = book.version
    book.directory.announce(worker("a"))
    assert [listed.id for listed in (await book.directory.changed(old, timeout_s=60)).workers] == ["a"]
    assert [listed.id for listed in (await book.directory.changed(DirectoryVersion(), timeout_s=60)).workers] == ["a"]


async def test_a_change_wakes_every_waiter_once() -> None:
    book = Book()
    waiting = [book.waiting(book.version) for _ in range(3)]
    await asyncio.sleep(0)
    book.directory.announce(worker("a"))
    listings = await asyncio.gather(*waiting)
    assert [[listed.id for listed in listing.workers] for listing in listings] == [["a"]] * 3
    again = book.waiting(listings[0].version)
    book.directory.announce(worker("a"))
    await asyncio.wait([again], timeout=0.01)
    assert not again.done()
    book.directory.withdraw("a")
    assert (await again).workers == ()


async def test_a_waiter_is_answered_when_its_time_is_up() -> None:
    book = Book()
    version = book.directory.announce(worker("a")).version
    assert (await book.directory.changed(version, timeout_s=0.0)).version == version


async def test_a_waiter_hears_that_a_worker_fell_silent() -> None:
    clock = Clock()
    directory = Directory(clock=clock, expiry_s=0.02, gather_s=0.0)
    version = directory.announce(worker("a")).version
    waiting = asyncio.ensure_future(directory.changed(version, timeout_s=60.0))
    await asyncio.sleep(0)
    clock.now_s += 0.01
    directory.listing()
    clock.now_s += 0.011
    assert (await waiting).workers == ()


async def test_a_listing_is_settled_once_every_worker_had_time_to_announce_itself() -> None:
    book = Book()
    first = book.directory.listing()
    assert not first.settled
    book.let_pass(EXPIRY_S + 0.1)
    assert (await book.directory.changed(first.version, timeout_s=60.0)).settled


def test_no_two_starts_of_a_directory_have_the_same_versions() -> None:
    assert Book().version.epoch != Book().version.epoch


def test_an_announcement_that_says_nothing_new_is_answered_without_a_listing() -> None:
    book = Book()
    known = book.directory.announce(worker("a")).version
    assert book.directory.announce(worker("a"), known).workers == ()
    assert [listed.id for listed in book.directory.announce(worker("b"), known).workers] == ["a", "b"]


async def test_a_meeting_is_news_and_that_fewer_wait_is_none() -> None:
    book = Book()
    known = book.directory.announce(worker("a", Role.DECODE)).version
    met = book.directory.announce(worker("a", Role.DECODE, met=("x", "y"))).version
    assert met != known
    assert book.directory.announce(worker("a", Role.DECODE, met=("x",))).version == met
    assert book.directory.announce(worker("a", Role.DECODE, met=("x", "z"))).version != met


async def test_changes_that_come_together_are_reported_together() -> None:
    directory = Directory(gather_s=0.05)
    known = directory.announce(worker("a")).version
    waiting = asyncio.ensure_future(directory.changed(known, timeout_s=10.0))
    asyncio.get_running_loop().call_soon(directory.announce, worker("b"))
    asyncio.get_running_loop().call_later(0.001, directory.announce, worker("c"))
    assert [listed.id for listed in (await waiting).workers] == ["a", "b", "c"]

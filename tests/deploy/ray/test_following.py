"""What a follower knows of the workers while the directory answers, is silent, or says something old."""

import asyncio

import pytest

from motet.deploy.ray.directory import (
    Announcement,
    DirectoryCopy,
    DirectoryVersion,
    ListedWorkers,
    Listing,
    WorkerStage,
)
from motet.settings.named_worker import NamedWorker
from motet.types import EngineKind, Role
from tests.deploy.ray.directories import FakeDirectory, ended, until_listed, worker

pytestmark = pytest.mark.anyio

FIRST, SECOND = "first", "second"
"""Ids of two starts of a directory."""


def listing(epoch: str, number: int, *workers: Announcement, settled: bool = True) -> Listing:
    return Listing(version=DirectoryVersion(epoch, number), settled=settled, workers=workers)


def ids(following: DirectoryCopy) -> list[str]:
    return [known.id for known in following.workers]


class Waits:
    """Counts the waits, and ends each at once."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []

    async def __call__(self, wait_s: float) -> None:
        self.waits_s.append(wait_s)
        await asyncio.sleep(0)


def test_listed_workers_are_known() -> None:
    following = DirectoryCopy(FakeDirectory())
    following.take(listing(FIRST, 1, worker("a"), worker("b")))
    following.take(listing(FIRST, 2, worker("b", stage=WorkerStage.LEAVING)))
    assert following.workers == (worker("b", stage=WorkerStage.LEAVING),)


def test_an_older_listing_that_comes_later_is_ignored() -> None:
    """Announcements and questions for changes overlap: a worker that had come was gone again."""
    following = DirectoryCopy(FakeDirectory())
    following.take(listing(FIRST, 3, worker("a"), worker("b")))
    following.take(listing(FIRST, 2, worker("a")))
    assert ids(following) == ["a", "b"]


def test_late_answers_of_a_former_directory_are_ignored() -> None:
    following = DirectoryCopy(FakeDirectory())
    following.take(listing(FIRST, 9, worker("a")))
    following.take(listing(SECOND, 1, worker("b"), settled=False))
    following.take(listing(FIRST, 10))
    assert ids(following) == ["a", "b"]
    following.take(listing(SECOND, 2, worker("b")))
    assert ids(following) == ["b"]


def test_a_restarted_directory_removes_no_worker_until_it_is_settled() -> None:
    following = DirectoryCopy(FakeDirectory())
    following.take(listing(FIRST, 9, worker("a"), worker("b"), worker("c")))
    following.take(listing(SECOND, 0, settled=False))
    assert ids(following) == ["a", "b", "c"]
    following.take(listing(SECOND, 1, worker("b", stage=WorkerStage.LEAVING), settled=False))
    assert ids(following) == ["a", "c", "b"]
    following.take(listing(SECOND, 2, worker("c"), settled=True))
    assert ids(following) == ["c"]


def test_a_worker_that_leaves_an_unsettled_directory_is_gone_at_once() -> None:
    """The new directory had heard of the worker, so its absence now means something."""
    following = DirectoryCopy(FakeDirectory())
    following.take(listing(FIRST, 9, worker("a"), worker("b")))
    following.take(listing(SECOND, 1, worker("a"), settled=False))
    following.take(listing(SECOND, 2, settled=False))
    assert ids(following) == ["b"]


def test_two_directories_started_one_after_the_other_make_nobody_disappear() -> None:
    following = DirectoryCopy(FakeDirectory())
    following.take(listing(FIRST, 9, worker("a"), worker("b")))
    following.take(listing(SECOND, 1, worker("a"), settled=False))
    following.take(listing("third", 0, settled=False))
    assert sorted(ids(following)) == ["a", "b"]


def test_a_worker_whose_address_another_one_has_is_not_waited_for() -> None:
    following = DirectoryCopy(FakeDirectory())
    following.take(listing(FIRST, 9, worker("a", url="http://x:1")))
    following.take(listing(SECOND, 1, worker("b", url="http://x:1"), settled=False))
    assert ids(following) == ["b"]


async def test_a_change_wakes_waiters_and_an_earlier_change_is_not_missed() -> None:
    following = DirectoryCopy(FakeDirectory())
    revision = following.revision
    following.take(listing(FIRST, 1, worker("a")))
    await following.change(revision)
    waiting = asyncio.ensure_future(following.change(following.revision))
    following.take(listing(FIRST, 2, worker("a")))
    await asyncio.wait([waiting], timeout=0.01)
    assert not waiting.done()
    following.take(listing(FIRST, 3))
    await waiting


async def test_following_keeps_up_and_asks_once_a_change() -> None:
    directory = FakeDirectory()
    following = DirectoryCopy(directory)
    task = asyncio.create_task(following.follow())
    for number, id in enumerate("abc"):
        directory.book.announce(worker(id))
        await until_listed(following, lambda known, id=id: id in known)  # type: ignore[misc]
        await directory.until(lambda number=number: directory.asked == number + 2)  # type: ignore[misc]
    await ended(task)
    assert directory.asked == 4


async def test_workers_stay_known_while_the_directory_is_away_and_one_line_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory, waits = FakeDirectory(), Waits()
    directory.book.announce(worker("a"))
    following = DirectoryCopy(directory, wait=waits)
    task = asyncio.create_task(following.follow())
    await until_listed(following, lambda known: known == ("a",))
    directory.go_away()
    directory.begin_again()
    asked = directory.asked
    await directory.until(lambda: directory.asked >= asked + 5)
    assert ids(following) == ["a"]
    assert caplog.text.count("the list of workers stays as it was") == 1
    directory.fails = None
    directory.book.announce(worker("b"))
    await until_listed(following, lambda known: known == ("a", "b"))
    directory.settle()
    directory.book.withdraw("b")
    await until_listed(following, lambda known: known == ())
    await ended(task)
    assert set(waits.waits_s) == {0.5}


async def test_a_former_directory_that_still_answers_is_not_asked_without_pause() -> None:
    """Its versions never match the known one, so it answers at once."""
    directory, waits = FakeDirectory(), Waits()
    following = DirectoryCopy(directory, wait=waits)
    following.take(directory.book.listing())
    following.take(listing(SECOND, 1))
    task = asyncio.create_task(following.follow())
    await directory.until(lambda: directory.asked >= 4)
    await ended(task)
    assert len(waits.waits_s) >= 3


def named(id: str, role: Role) -> NamedWorker:
    return NamedWorker(f"http://{id}:1", role, EngineKind.MOTET)


def test_a_worker_is_named_from_when_it_is_ready_until_it_leaves() -> None:
    following = DirectoryCopy(FakeDirectory())
    listed = ListedWorkers(following, (Role.DECODE, Role.PREFILL))
    following.take(
        listing(
            FIRST,
            1,
            worker("meeting", Role.DECODE, WorkerStage.MEETING),
            worker("ready", Role.DECODE),
            worker("leaving", Role.PREFILL, WorkerStage.LEAVING),
            worker("other", Role.BOTH),
        )
    )
    assert listed.named == [named("ready", Role.DECODE)]


async def test_a_list_has_what_came_before_the_question() -> None:
    """A gateway that is watched again, as at its start, used to miss workers that came in between, for ever."""
    following = DirectoryCopy(FakeDirectory())
    listed = ListedWorkers(following, tuple(Role), repeat_s=3600.0)
    assert listed.named == []
    following.take(listing(FIRST, 1, worker("a", Role.DECODE)))
    assert await listed.next() == [named("a", Role.DECODE)]
    following.take(listing(FIRST, 2, worker("b", Role.DECODE)))
    assert await listed.next() == [named("b", Role.DECODE)]


async def test_a_list_is_repeated_after_a_while() -> None:
    """A worker that is listed again while it leaves is heeded only after that, maybe without other changes."""
    following = DirectoryCopy(FakeDirectory())
    following.take(listing(FIRST, 1, worker("a", Role.DECODE)))
    listed = ListedWorkers(following, tuple(Role), repeat_s=0.001)
    assert await listed.next() == await listed.next() == [named("a", Role.DECODE)]

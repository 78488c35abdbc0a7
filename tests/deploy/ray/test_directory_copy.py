"""The copy of the list of workers, while the directory answers, fails, or sends old listings."""

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
from motet.engine_info import EngineKind
from motet.settings.named_worker import NamedWorker
from motet.types import Role
from tests.clock import settle
from tests.deploy.ray.directories import FakeDirectory, ended, until_listed, worker

pytestmark = pytest.mark.anyio

FIRST, SECOND = "first", "second"
"""Ids of two starts of a directory."""


def listing(epoch: str, number: int, *workers: Announcement, settled: bool = True) -> Listing:
    return Listing(version=DirectoryVersion(epoch, number), settled=settled, workers=workers)


def ids(copy: DirectoryCopy) -> list[str]:
    return [known.id for known in copy.workers]


class Waits:
    """Records the requested waits, and ends each one at once."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []

    async def __call__(self, wait_s: float) -> None:
        self.waits_s.append(wait_s)
        await asyncio.sleep(0)


def test_the_copy_has_the_listed_workers() -> None:
    copy = DirectoryCopy(FakeDirectory())
    copy.apply(listing(FIRST, 1, worker("a"), worker("b")))
    copy.apply(listing(FIRST, 2, worker("b", stage=WorkerStage.LEAVING)))
    assert copy.workers == (worker("b", stage=WorkerStage.LEAVING),)


def test_an_older_listing_that_comes_later_is_ignored() -> None:
    """Regression: announcements and waits for changes overlap, and a worker that had come was removed again."""
    copy = DirectoryCopy(FakeDirectory())
    copy.apply(listing(FIRST, 3, worker("a"), worker("b")))
    copy.apply(listing(FIRST, 2, worker("a")))
    assert ids(copy) == ["a", "b"]


def test_late_answers_of_an_earlier_directory_are_ignored() -> None:
    copy = DirectoryCopy(FakeDirectory())
    copy.apply(listing(FIRST, 9, worker("a")))
    copy.apply(listing(SECOND, 1, worker("b"), settled=False))
    copy.apply(listing(FIRST, 10))
    assert ids(copy) == ["a", "b"]
    copy.apply(listing(SECOND, 2, worker("b")))
    assert ids(copy) == ["b"]


def test_a_restarted_directory_removes_no_worker_until_it_is_settled() -> None:
    copy = DirectoryCopy(FakeDirectory())
    copy.apply(listing(FIRST, 9, worker("a"), worker("b"), worker("c")))
    copy.apply(listing(SECOND, 0, settled=False))
    assert ids(copy) == ["a", "b", "c"]
    copy.apply(listing(SECOND, 1, worker("b", stage=WorkerStage.LEAVING), settled=False))
    assert ids(copy) == ["a", "c", "b"]
    copy.apply(listing(SECOND, 2, worker("c"), settled=True))
    assert ids(copy) == ["c"]


def test_a_worker_that_leaves_an_unsettled_directory_is_removed_at_once() -> None:
    """The new directory knew the worker, so its absence means that it has left."""
    copy = DirectoryCopy(FakeDirectory())
    copy.apply(listing(FIRST, 9, worker("a"), worker("b")))
    copy.apply(listing(SECOND, 1, worker("a"), settled=False))
    copy.apply(listing(SECOND, 2, settled=False))
    assert ids(copy) == ["b"]


def test_two_restarts_of_the_directory_in_a_row_remove_no_worker() -> None:
    copy = DirectoryCopy(FakeDirectory())
    copy.apply(listing(FIRST, 9, worker("a"), worker("b")))
    copy.apply(listing(SECOND, 1, worker("a"), settled=False))
    copy.apply(listing("third", 0, settled=False))
    assert sorted(ids(copy)) == ["a", "b"]


def test_a_worker_whose_address_belongs_to_another_worker_is_removed() -> None:
    copy = DirectoryCopy(FakeDirectory())
    copy.apply(listing(FIRST, 9, worker("a", url="http://x:1")))
    copy.apply(listing(SECOND, 1, worker("b", url="http://x:1"), settled=False))
    assert ids(copy) == ["b"]


async def test_a_change_wakes_waiters_and_an_earlier_change_is_not_missed() -> None:
    copy = DirectoryCopy(FakeDirectory())
    revision = copy.revision
    copy.apply(listing(FIRST, 1, worker("a")))
    await copy.change(revision)
    waiting = asyncio.ensure_future(copy.change(copy.revision))
    copy.apply(listing(FIRST, 2, worker("a")))
    await settle()
    assert not waiting.done()
    copy.apply(listing(FIRST, 3))
    await waiting


async def test_the_copy_is_kept_up_to_date_with_one_call_per_change() -> None:
    directory = FakeDirectory()
    copy = DirectoryCopy(directory)
    task = asyncio.create_task(copy.follow())
    for number, id in enumerate("abc"):
        directory.inner.announce(worker(id))
        await until_listed(copy, lambda known, id=id: id in known)  # type: ignore[misc]
        await directory.until(lambda number=number: directory.num_waits == number + 2)  # type: ignore[misc]
    await ended(task)
    assert directory.num_waits == 4


async def test_workers_stay_while_the_directory_is_unavailable_and_one_line_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory, waits = FakeDirectory(), Waits()
    directory.inner.announce(worker("a"))
    copy = DirectoryCopy(directory, sleep=waits)
    task = asyncio.create_task(copy.follow())
    await until_listed(copy, lambda known: known == ("a",))
    directory.fail()
    directory.restart()
    num_waits = directory.num_waits
    await directory.until(lambda: directory.num_waits >= num_waits + 5)
    assert ids(copy) == ["a"]
    assert caplog.text.count("the list of workers stays as it was") == 1
    directory.fails = None
    directory.inner.announce(worker("b"))
    await until_listed(copy, lambda known: known == ("a", "b"))
    directory.settle()
    directory.inner.withdraw("b")
    await until_listed(copy, lambda known: known == ())
    await ended(task)
    assert set(waits.waits_s) == {0.5}


async def test_an_old_directory_that_still_answers_is_not_called_without_a_pause() -> None:
    """The version of such a directory never equals the known one, so it answers at once."""
    directory, waits = FakeDirectory(), Waits()
    copy = DirectoryCopy(directory, sleep=waits)
    copy.apply(directory.inner.listing())
    copy.apply(listing(SECOND, 1))
    task = asyncio.create_task(copy.follow())
    await directory.until(lambda: directory.num_waits >= 4)
    await ended(task)
    assert len(waits.waits_s) >= 3


def named(id: str, role: Role) -> NamedWorker:
    return NamedWorker(f"http://{id}:1", role, EngineKind.MOTET)


def test_a_worker_is_in_the_list_from_when_it_is_ready_until_it_leaves() -> None:
    copy = DirectoryCopy(FakeDirectory())
    listed = ListedWorkers(copy, (Role.DECODE, Role.PREFILL))
    copy.apply(
        listing(
            FIRST,
            1,
            worker("connecting", Role.DECODE, WorkerStage.CONNECTING),
            worker("ready", Role.DECODE),
            worker("leaving", Role.PREFILL, WorkerStage.LEAVING),
            worker("other", Role.BOTH),
        )
    )
    assert listed.named == [named("ready", Role.DECODE)]


async def test_a_list_contains_changes_from_before_the_call() -> None:
    """Regression: a gateway that is watched again, as at its start, never saw workers that came in between."""
    copy = DirectoryCopy(FakeDirectory())
    listed = ListedWorkers(copy, tuple(Role), repeat_s=3600.0)
    assert listed.named == []
    copy.apply(listing(FIRST, 1, worker("a", Role.DECODE)))
    assert await listed.next() == [named("a", Role.DECODE)]
    copy.apply(listing(FIRST, 2, worker("b", Role.DECODE)))
    assert await listed.next() == [named("b", Role.DECODE)]


async def test_a_list_is_repeated_after_a_while() -> None:
    """A worker that is listed again while it leaves can be added only after that, perhaps without other changes."""
    copy = DirectoryCopy(FakeDirectory())
    copy.apply(listing(FIRST, 1, worker("a", Role.DECODE)))
    listed = ListedWorkers(copy, tuple(Role), repeat_s=0.001)
    assert await listed.next() == await listed.next() == [named("a", Role.DECODE)]

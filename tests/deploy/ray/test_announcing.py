"""What a worker says of itself, and when."""

import asyncio

import pytest

from motet.deploy.ray.announcing import Announcing
from motet.deploy.ray.directory import Announcement, Listing, Stage, Version
from motet.deploy.ray.following import Following
from motet.errors import DirectoryError
from motet.types import Role
from tests.deploy.ray.directories import AWAY, FakeDirectory, ended, worker

pytestmark = pytest.mark.anyio

NEVER_S = 3600.0


class Said:
    """A worker with something to say."""

    def __init__(self, directory: FakeDirectory | None = None, *, period_s: float = NEVER_S) -> None:
        self.met: tuple[str, ...] = ()
        self.directory = directory or FakeDirectory()
        self.following = Following(self.directory)
        self.announcing = Announcing(self.directory, self.following, self._say, period_s=period_s, retry_s=0.01)

    @property
    def said(self) -> list[tuple[Stage, tuple[str, ...]]]:
        return [(said.stage, said.met) for said in self.directory.announced]

    def _say(self, stage: Stage) -> Announcement:
        return worker("a", Role.DECODE, stage, met=self.met)


async def test_the_directory_s_answer_is_known_before_anything_else_is_done() -> None:
    """Of two that start at once, the second one sees the first one before it goes on."""
    said = Said()
    said.directory.book.announce(worker("other"))
    await said.announcing.reach(Stage.MEETING, limit_s=1.0)
    assert [known.id for known in said.following.workers] == ["other", "a"]


async def test_news_are_told_at_once_and_the_rest_every_few_seconds() -> None:
    said = Said(period_s=0.01)
    await said.announcing.reach(Stage.READY, limit_s=1.0)
    keeping = asyncio.create_task(said.announcing.keep())
    await said.directory.until(lambda: len(said.said) >= 3)
    await ended(keeping)
    assert set(said.said) == {(Stage.READY, ())}
    quiet = Said()
    keeping = asyncio.create_task(quiet.announcing.keep())
    for number in range(1, 3):
        quiet.met += (str(number),)
        quiet.announcing.has_news()
        await quiet.directory.until(lambda number=number: len(quiet.said) == number)  # type: ignore[misc]
    await asyncio.wait([keeping], timeout=0.01)
    await ended(keeping)
    assert quiet.said == [(Stage.MEETING, ("1",)), (Stage.MEETING, ("1", "2"))]


class SlowDirectory(FakeDirectory):
    """Answers an announcement when it is let to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = asyncio.Semaphore(0)

    async def announce(self, announcement: Announcement, known: Version) -> Listing:
        listing = await super().announce(announcement, known)
        await self.may_answer.acquire()
        return listing


async def test_what_is_new_while_it_announces_is_told_right_after() -> None:
    directory = SlowDirectory()
    said = Said(directory)
    keeping = asyncio.create_task(said.announcing.keep())
    said.announcing.has_news()
    await directory.until(lambda: len(said.said) == 1)
    said.met = ("new",)
    said.announcing.has_news()
    directory.may_answer.release()
    await directory.until(lambda: len(said.said) == 2)
    await ended(keeping)
    assert said.said == [(Stage.MEETING, ()), (Stage.MEETING, ("new",))]


async def test_one_announcement_comes_after_the_other() -> None:
    """Two on their way could arrive in another order, and a worker that leaves would be ready again."""
    directory = SlowDirectory()
    said = Said(directory)
    keeping = asyncio.create_task(said.announcing.keep())
    said.announcing.has_news()
    await directory.until(lambda: len(said.said) == 1)
    leaving = asyncio.create_task(said.announcing.reach(Stage.LEAVING, limit_s=NEVER_S))
    await asyncio.sleep(0)
    assert len(said.said) == 1
    directory.may_answer.release()
    directory.may_answer.release()
    await leaving
    await ended(keeping)
    assert said.said == [(Stage.MEETING, ()), (Stage.LEAVING, ())]


async def test_a_directory_that_is_away_for_a_moment_is_told_when_it_is_back() -> None:
    said = Said()
    said.directory.fails = AWAY
    reaching = asyncio.create_task(said.announcing.reach(Stage.MEETING, limit_s=NEVER_S))
    await said.directory.until(lambda: len(said.said) == 1)
    said.directory.fails = None
    await reaching
    assert len(said.said) == 2


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_directory_that_is_away_is_not_waited_for_longer_than_its_limit(hangs: bool) -> None:
    said = Said()
    said.directory.hangs, said.directory.fails = hangs, None if hangs else AWAY
    why = "does not answer" if hangs else "it is away"
    with pytest.raises(DirectoryError, match=rf"{why}; it was tried for 0\.02 s"):
        await said.announcing.reach(Stage.READY, limit_s=0.02)


async def test_who_was_not_heard_says_it_again() -> None:
    said = Said(period_s=0.01)
    said.directory.fails = AWAY
    keeping = asyncio.create_task(said.announcing.keep())
    await said.directory.until(lambda: len(said.said) >= 2)
    said.directory.fails = None
    count = len(said.said)
    await said.directory.until(lambda: len(said.said) > count + 1)
    await ended(keeping)
    assert [known.id for known in said.directory.book.listing().workers] == ["a"]

"""A directory in the test's own loop, behind a client that may fail, hang, or find a new directory in its place."""

import asyncio
from collections.abc import Callable

from motet.deploy.ray.directory import (
    Announcement,
    Directory,
    DirectoryCopy,
    DirectoryVersion,
    Listing,
    RayDirectory,
    WorkerStage,
)
from motet.deploy.shutdown import first_of
from motet.errors import DirectoryError
from motet.transfer.ticket import TransferAddress
from motet.types import Role

AWAY = DirectoryError("the directory of workers cannot be reached: it is away")


class Clock:
    """A clock that stands still until the test moves it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class FakeDirectory(RayDirectory):
    """`announced` and `withdrawn` hold everything that it was told, in order, even if it could not be reached."""

    def __init__(self, book: Directory | None = None) -> None:
        """`book` may be the one of another directory."""
        super().__init__(handle=None)
        self.clock = Clock()
        self.book = book or Directory(clock=self.clock, gather_s=0.0)
        self.announced: list[Announcement] = []
        self.withdrawn: list[str] = []
        self.asked = 0
        """Number of times that it was asked for changes."""
        self.fails: DirectoryError | None = None
        self.hangs = False
        self._told = asyncio.Event()
        self._over = asyncio.Event()

    def begin_again(self) -> None:
        """Begins again as a new directory that knows nobody, and ends all waits for changes."""
        self.book = Directory(clock=self.clock, gather_s=0.0)
        self._end_waits()

    def go_away(self) -> None:
        """Cannot be reached until `fails` is None again. It ends all waits for changes."""
        self.fails = AWAY
        self._end_waits()

    def settle(self) -> None:
        """Lets time pass until every worker could announce itself; those in the book do so meanwhile."""
        while not (listing := self.book.listing()).settled:
            self.clock.now_s += 1.0
            for known in listing.workers:
                self.book.announce(known)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Looks whenever it is told or asked something, and returns once `holds` is true."""
        while not holds():
            self._told.clear()
            await self._told.wait()

    async def announce(self, announcement: Announcement, known: DirectoryVersion) -> Listing:
        self.announced.append(announcement)
        self._told.set()
        await self._reach()
        return self.book.announce(announcement, known)

    async def withdraw(self, id: str) -> None:
        self.withdrawn.append(id)
        self._told.set()
        await self._reach()
        self.book.withdraw(id)

    async def changed(self, version: DirectoryVersion) -> Listing:
        self.asked += 1
        self._told.set()
        await self._reach()
        changed = asyncio.ensure_future(self.book.changed(version, timeout_s=60.0))
        try:
            await first_of(asyncio.wait([changed]), self._over.wait())
            if not changed.done():
                raise AWAY
            return changed.result()
        finally:
            changed.cancel()

    def _end_waits(self) -> None:
        over, self._over = self._over, asyncio.Event()
        over.set()

    async def _reach(self) -> None:
        if self.fails is not None:
            raise self.fails
        if self.hangs:
            await asyncio.Event().wait()

    def stages(self, id: str) -> list[WorkerStage]:
        """Returns the stages that a worker has announced, without repetitions."""
        stages = [announcement.stage for announcement in self.announced if announcement.id == id]
        return [stage for number, stage in enumerate(stages) if number == 0 or stages[number - 1] is not stage]


def worker(
    id: str,
    role: Role = Role.BOTH,
    stage: WorkerStage = WorkerStage.READY,
    *,
    engine_id: str = "",
    met: tuple[str, ...] = (),
    url: str = "",
) -> Announcement:
    transfer = TransferAddress(engine_id, "127.0.0.1", 1) if engine_id else None
    return Announcement(id=id, url=url or f"http://{id}:1", role=role, stage=stage, transfer=transfer, met=met)


async def until_listed(following: DirectoryCopy, holds: Callable[[tuple[str, ...]], bool]) -> None:
    """Returns once `holds` is true of the known ids."""
    while True:
        revision = following.revision
        if holds(tuple(known.id for known in following.workers)):
            return
        await following.change(revision)


async def ended(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)

"""A directory in the test's own event loop. Calls to it can fail, hang, or reach a new directory in its place."""

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
from tests.clock import Clock

UNAVAILABLE = DirectoryError("the directory of workers cannot be reached: it is unavailable")


class FakeDirectory(RayDirectory):
    """`announced` and `withdrawn` contain all calls in order, including those that failed."""

    def __init__(self, inner: Directory | None = None) -> None:
        """`inner`: the directory that holds the list, for sharing it with another fake."""
        super().__init__(handle=None)
        self.clock = Clock()
        self.inner = inner or Directory(clock=self.clock, gather_s=0.0)
        self.announced: list[Announcement] = []
        self.withdrawn: list[str] = []
        self.num_waits = 0
        """Number of calls that waited for changes."""
        self.fails: DirectoryError | None = None
        self.hangs = False
        self._called = asyncio.Event()
        self._interrupted = asyncio.Event()

    def restart(self) -> None:
        """Becomes a new directory without workers, and ends all waits for changes."""
        self.inner = Directory(clock=self.clock, gather_s=0.0)
        self._end_waits()

    def fail(self) -> None:
        """Makes all calls fail until `fails` is None again, and ends all waits for changes."""
        self.fails = UNAVAILABLE
        self._end_waits()

    def settle(self) -> None:
        """Advances the clock until the listing is settled. Listed workers announce themselves during this time."""
        while not (listing := self.inner.listing()).settled:
            self.clock.now_s += 1.0
            for known in listing.workers:
                self.inner.announce(known)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Returns when `holds` is true, which is checked at each call to the directory."""
        while not holds():
            self._called.clear()
            await self._called.wait()

    async def announce(self, announcement: Announcement, known: DirectoryVersion) -> Listing:
        self.announced.append(announcement)
        self._called.set()
        await self._reach()
        return self.inner.announce(announcement, known)

    async def withdraw(self, id: str) -> None:
        self.withdrawn.append(id)
        self._called.set()
        await self._reach()
        self.inner.withdraw(id)

    async def changed(self, version: DirectoryVersion) -> Listing:
        self.num_waits += 1
        self._called.set()
        await self._reach()
        changed = asyncio.ensure_future(self.inner.changed(version, timeout_s=60.0))
        try:
            await first_of(asyncio.wait([changed]), self._interrupted.wait())
            if not changed.done():
                raise UNAVAILABLE
            return changed.result()
        finally:
            changed.cancel()

    def _end_waits(self) -> None:
        interrupted, self._interrupted = self._interrupted, asyncio.Event()
        interrupted.set()

    async def _reach(self) -> None:
        if self.fails is not None:
            raise self.fails
        if self.hangs:
            await asyncio.Event().wait()

    def stages(self, id: str) -> list[WorkerStage]:
        """Returns the stages that a worker has announced, without consecutive duplicates."""
        stages = [announcement.stage for announcement in self.announced if announcement.id == id]
        return [stage for number, stage in enumerate(stages) if number == 0 or stages[number - 1] is not stage]


def worker(
    id: str,
    role: Role = Role.BOTH,
    stage: WorkerStage = WorkerStage.READY,
    *,
    engine_id: str = "",
    connected: tuple[str, ...] = (),
    url: str = "",
) -> Announcement:
    transfer = TransferAddress(engine_id, "127.0.0.1", 1) if engine_id else None
    return Announcement(
        id=id, url=url or f"http://{id}:1", role=role, stage=stage, transfer=transfer, connected=connected
    )


async def until_listed(copy: DirectoryCopy, holds: Callable[[tuple[str, ...]], bool]) -> None:
    """Returns when `holds` is true for the ids in the copy."""
    while True:
        revision = copy.revision
        if holds(tuple(known.id for known in copy.workers)):
            return
        await copy.change(revision)


async def ended(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)

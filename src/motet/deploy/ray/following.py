"""What a directory says, kept up to date by who wants to know it."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence

from motet.deploy.ray.directory import Announcement, DirectoryClient, Listing, Stage, Version
from motet.errors import DirectoryError
from motet.settings.named_worker import NamedWorker
from motet.types import EngineKind, Role

logger = logging.getLogger(__name__)

RETRY_S = 0.5
REPEAT_S = 1.0
"""How long a list of workers stays unsaid that was not heeded in full: a gateway takes nobody who is still leaving."""


class Following:
    """While the directory cannot be asked, and while it is new itself, who was known stays known."""

    def __init__(self, directory: DirectoryClient, *, wait: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._directory = directory
        self._wait = wait
        self._version = Version()
        self._former: set[str] = set()
        """Epochs that are over."""
        self._unheard: dict[str, Announcement] = {}
        """Whom this start of the directory has not heard of yet; those before it had."""
        self._workers: dict[str, Announcement] = {}
        self._changed = asyncio.Event()
        """Of the next change; replaced at each."""
        self._complained = False
        self.revision = 0
        """One more at each change of `workers`."""

    @property
    def version(self) -> Version:
        """Of the listing that was taken last."""
        return self._version

    @property
    def workers(self) -> Sequence[Announcement]:
        return tuple(self._workers.values())

    def take(self, listing: Listing) -> None:
        """Listings come as answers to two questions that are asked side by side: an older one may come later, and is
        passed over."""
        if not self._is_news(listing.version):
            return
        if listing.version.epoch != self._version.epoch:
            self._former.add(self._version.epoch)
            self._unheard = self._workers
        self._version = listing.version
        ids, urls = {worker.id for worker in listing.workers}, {worker.url for worker in listing.workers}
        still_unheard = [] if listing.settled else self._unheard.values()
        self._unheard = {
            worker.id: worker for worker in still_unheard if worker.id not in ids and worker.url not in urls
        }
        workers = self._unheard | {worker.id: worker for worker in listing.workers}
        if workers != self._workers:
            self._workers = workers
            self.revision += 1
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def change(self, since: int) -> None:
        """Returns when somebody has come, gone or said something new after the revision `since`."""
        while self.revision == since:
            await self._changed.wait()

    async def follow(self) -> None:
        """Runs until it is cancelled."""
        while True:
            try:
                listing = await self._directory.changed(self._version)
            except DirectoryError as error:
                if not self._complained:
                    logger.warning("the workers stay as they are known: %s", error.message)
                self._complained = True
            else:
                self._complained = False
                self.take(listing)
                if listing.version.epoch == self._version.epoch:
                    continue
            await self._wait(RETRY_S)  # also while one answers that is at its end: it would answer at once, for ever

    def _is_news(self, version: Version) -> bool:
        if version.epoch == self._version.epoch:
            return version.number > self._version.number
        return version.epoch not in self._former


class ListedWorkers:
    """Workers of some roles, as a gateway wants them named: each from when it is ready until it begins to leave."""

    def __init__(self, following: Following, roles: Collection[Role], *, repeat_s: float = REPEAT_S) -> None:
        self._following = following
        self._roles = roles
        self._repeat_s = repeat_s
        self._said = -1
        """Revision of what `next` said last; what came before it was asked first is said then."""

    @property
    def named(self) -> Sequence[NamedWorker]:
        return [
            NamedWorker(worker.url, worker.role, EngineKind.MOTET)
            for worker in self._following.workers
            if worker.role in self._roles and worker.stage is Stage.READY
        ]

    async def next(self) -> Sequence[NamedWorker]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._repeat_s):
                await self._following.change(self._said)
        self._said = self._following.revision
        return self.named

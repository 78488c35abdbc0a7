"""The list of replicas: workers announce themselves, and followers of the directory hear of each change.

1. a worker announces itself at its start and every few seconds; after `EXPIRY_S` of silence it is forgotten
2. a listing has a version; a follower with an old one gets the new one at once, with the newest it waits for a change
3. a directory that was itself started again does not know all workers yet: until `EXPIRY_S` have passed its listings
   are not `settled`, and a worker that is missing in them may still be there
4. a worker that has withdrawn does not come back: a later announcement of it was on its way
5. time in which the directory could not listen, on a machine that was asleep, does not count as silence
6. messages stay short: changes within `GATHER_S` are sent together, an announcement is answered with a listing only
   if there is a new one, and a worker names the workers that it has met only while somebody waits for that

`Directory` is the book, `DirectoryReplica` the replica that keeps it, and `RayDirectory` the way to ask it, in bytes of
our own encoding. `DirectoryCopy` is a copy of the list elsewhere, kept up to date; `ListedWorkers` gives it to a
gateway.
Nothing here imports Ray, engines or servers, so that the directory's replica starts quickly: before that, no worker
hears of a new one.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from motet.errors import DirectoryError
from motet.ids import new_request_id
from motet.settings.named_worker import NamedWorker
from motet.transfer.ticket import TransferAddress
from motet.types import EngineKind, Role

logger = logging.getLogger(__name__)

ANNOUNCE_S = 2.0
"""Seconds between two announcements of a worker without news."""
EXPIRY_S = 10.0
GATHER_S = 0.1
WITHDRAWN_S = 60.0
"""Seconds for which a withdrawn worker is remembered: longer than an announcement can be on its way."""
RETRY_S = 0.5
REPEAT_S = 1.0
"""Seconds after which a list is returned again: a gateway cannot add a worker while the former one is leaving."""
ASK_TIMEOUT_S = 3.0
"""Short, so that a worker whose announcement was lost announces itself again before it is forgotten."""
LISTEN_S = 30.0
"""Seconds for which a question waits if the listing does not change."""

Handle = Any
"""A handle of a Serve deployment: an attribute is a method, whose `remote` returns an awaitable."""


class WorkerStage(StrEnum):
    """The stage of a worker's life."""

    MEETING = "meeting"
    """It connects to the workers with which it exchanges KV."""
    READY = "ready"
    LEAVING = "leaving"
    """It finishes its groups."""


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's report about itself."""

    id: str
    """Names this start of its replica."""
    url: str
    role: Role
    stage: WorkerStage
    transfer: TransferAddress | None = None
    """The address where its engine's KV can be fetched, if any."""
    met: tuple[str, ...] = ()
    """Engine ids of the waiting prefill workers that it has met, or has given up."""


class DirectoryVersion(msgspec.Struct, frozen=True):
    """The version of a listing: the start of the directory that made it, and the number of its changes."""

    epoch: str = ""
    number: int = 0


NOTHING_KNOWN = DirectoryVersion()


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """A list of the workers that are there."""

    version: DirectoryVersion
    settled: bool
    workers: tuple[Announcement, ...] = ()
    """Empty in an answer to a follower that has this version already."""


class Directory:
    """The list itself, in one event loop."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, expiry_s: float = EXPIRY_S, gather_s: float = GATHER_S
    ) -> None:
        self._clock = clock
        self._expiry_s = expiry_s
        self._gather_s = gather_s
        self._settles_s = clock() + expiry_s
        self._looked_s = clock()
        self._version = DirectoryVersion(new_request_id("directory"))
        self._workers: dict[str, Announcement] = {}
        self._heard_s: dict[str, float] = {}
        self._withdrawn_s: dict[str, float] = {}
        self._settled = False
        self._changed = asyncio.Event()
        """Set at the next change, and replaced then."""

    def announce(self, announcement: Announcement, known: DirectoryVersion = NOTHING_KNOWN) -> Listing:
        self._look()
        if announcement.id not in self._withdrawn_s:
            self._heard_s[announcement.id] = self._clock()
            if _is_news(announcement, self._workers.get(announcement.id)):
                self._enter(announcement)
            else:
                self._workers[announcement.id] = announcement
        listing = self.listing()
        return msgspec.structs.replace(listing, workers=()) if listing.version == known else listing

    def withdraw(self, id: str) -> None:
        self._withdrawn_s[id] = self._clock()
        self._drop(id)

    def listing(self) -> Listing:
        self._look()
        return Listing(version=self._version, settled=self._settled, workers=tuple(self._workers.values()))

    async def changed(self, version: DirectoryVersion, *, timeout_s: float) -> Listing:
        """Returns a listing of another version; the same one when the time is up."""
        deadline_s = self._clock() + timeout_s
        while (listing := self.listing()).version == version and (left_s := deadline_s - self._clock()) > 0:
            try:
                async with asyncio.timeout(min(left_s, self._expiry_s / 4)):  # silence is only noticed by looking
                    await self._changed.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(self._gather_s)
        return listing

    def _enter(self, announcement: Announcement) -> None:
        """Adds a worker; an earlier worker at its address must be gone, even if nobody noticed."""
        for other in [other for other in self._workers.values() if other.url == announcement.url]:
            if other.id != announcement.id:
                self._drop(other.id)
        self._workers[announcement.id] = announcement
        self._change()

    def _drop(self, id: str) -> None:
        self._heard_s.pop(id, None)
        if self._workers.pop(id, None) is not None:
            self._change()

    def _look(self) -> None:
        """Forgets silent workers. A pause between calls counts as half of `EXPIRY_S` at most, as we did not listen."""
        now_s = self._clock()
        deaf_s = now_s - self._looked_s - self._expiry_s / 2
        self._looked_s = now_s
        if deaf_s > 0:
            self._settles_s += deaf_s
            self._heard_s = {id: heard_s + deaf_s for id, heard_s in self._heard_s.items()}
        for id in [id for id, heard_s in self._heard_s.items() if now_s - heard_s > self._expiry_s]:
            self._drop(id)
        for id in [id for id, withdrawn_s in self._withdrawn_s.items() if now_s - withdrawn_s > WITHDRAWN_S]:
            del self._withdrawn_s[id]
        if not self._settled and now_s > self._settles_s:
            self._settled = True
            self._change()

    def _change(self) -> None:
        self._version = DirectoryVersion(self._version.epoch, self._version.number + 1)
        self._changed.set()
        self._changed = asyncio.Event()


def _is_news(announcement: Announcement, former: Announcement | None) -> bool:
    """Returns True if the announcement is news; that a worker has met fewer than before is not."""
    if former is None or not set(announcement.met) <= set(former.met):
        return True
    return msgspec.structs.replace(announcement, met=()) != msgspec.structs.replace(former, met=())


class DirectoryReplica:
    """The replica that keeps the directory and that `RayDirectory` asks."""

    def __init__(self) -> None:
        self._directory = Directory()

    async def announce(self, announcement: bytes, known: bytes) -> bytes:
        said = msgspec.msgpack.decode(announcement, type=Announcement)
        version = msgspec.msgpack.decode(known, type=DirectoryVersion)
        return msgspec.msgpack.encode(self._directory.announce(said, version))

    async def withdraw(self, id: str) -> None:
        self._directory.withdraw(id)

    async def changed(self, version: bytes, timeout_s: float) -> bytes:
        known = msgspec.msgpack.decode(version, type=DirectoryVersion)
        return msgspec.msgpack.encode(await self._directory.changed(known, timeout_s=timeout_s))


async def answer(call: Callable[[], Any], failure: str) -> Any:
    """Returns a replica's answer. For any error of Ray it raises a DirectoryError that begins with `failure`."""
    try:
        return await call()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise DirectoryError(f"{failure}: it ended before it answered") from error  # the call's cancellation, not ours
    except Exception as error:
        raise DirectoryError(f"{failure}: {error}") from error


class RayDirectory:
    """Asks the directory through a handle. Each method raises `DirectoryError` if that fails."""

    def __init__(self, handle: Handle, *, ask_timeout_s: float = ASK_TIMEOUT_S, listen_s: float = LISTEN_S) -> None:
        self._handle = handle
        self._ask_timeout_s = ask_timeout_s
        self._listen_s = listen_s

    async def announce(self, announcement: Announcement, known: DirectoryVersion) -> Listing:
        """Announces a worker; the listing has its workers only if it is another one than `known`."""
        said, version = msgspec.msgpack.encode(announcement), msgspec.msgpack.encode(known)
        return _listing(await self._call(lambda: self._handle.announce.remote(said, version)))

    async def withdraw(self, id: str) -> None:
        await self._call(lambda: self._handle.withdraw.remote(id))

    async def changed(self, version: DirectoryVersion) -> Listing:
        """Returns a listing of another version, or the same one after a while."""
        known, listen_s = msgspec.msgpack.encode(version), self._listen_s
        return _listing(await self._call(lambda: self._handle.changed.remote(known, listen_s), longer_s=listen_s))

    async def _call(self, call: Callable[[], Any], *, longer_s: float = 0.0) -> Any:
        timeout_s = self._ask_timeout_s + longer_s
        try:
            async with asyncio.timeout(timeout_s):
                return await answer(call, "the directory of workers cannot be reached")
        except TimeoutError as error:
            raise DirectoryError(f"the directory of workers did not answer within {timeout_s:g} s") from error


def _listing(answer: bytes) -> Listing:
    try:
        return msgspec.msgpack.decode(answer, type=Listing)
    except msgspec.DecodeError as error:
        raise DirectoryError(f"the directory of workers has another version: {error}") from error


class DirectoryCopy:
    """A copy of the list, kept up to date. Known workers stay while the directory is away, and while it is new."""

    def __init__(self, directory: RayDirectory, *, wait: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._directory = directory
        self._wait = wait
        self.version = NOTHING_KNOWN
        """The version of the last listing."""
        self.revision = 0
        """Counts the changes of `workers`."""
        self._former: set[str] = set()
        """Earlier starts of the directory."""
        self._unheard: dict[str, Announcement] = {}
        """Workers that an earlier start of the directory knew, but this one does not know yet."""
        self._workers: dict[str, Announcement] = {}
        self._changed = asyncio.Event()
        """Set at the next change, and replaced then."""
        self._complained = False

    @property
    def workers(self) -> Sequence[Announcement]:
        return tuple(self._workers.values())

    async def announce(self, announcement: Announcement) -> None:
        """Announces a worker, and takes the listing in the answer. Raises DirectoryError."""
        self.take(await self._directory.announce(announcement, self.version))

    def take(self, listing: Listing) -> None:
        """Takes a listing, unless a newer one came first: two questions may be under way at once."""
        if not self._is_news(listing.version):
            return
        if listing.version.epoch != self.version.epoch:
            self._former.add(self.version.epoch)
            self._unheard = self._workers
        self.version = listing.version
        listed, urls = {worker.id: worker for worker in listing.workers}, {worker.url for worker in listing.workers}
        unheard = {} if listing.settled else self._unheard
        self._unheard = {id: one for id, one in unheard.items() if id not in listed and one.url not in urls}
        workers = self._unheard | listed
        if workers != self._workers:
            self._workers = workers
            self.revision += 1
            self._changed.set()
            self._changed = asyncio.Event()

    async def change(self, since: int) -> None:
        """Returns when a worker has come, gone or changed after the revision `since`."""
        while self.revision == since:
            await self._changed.wait()

    async def follow(self) -> None:
        """Asks for changes until it is cancelled."""
        while True:
            try:
                listing = await self._directory.changed(self.version)
            except DirectoryError as error:
                if not self._complained:
                    logger.warning("the list of workers stays as it was: %s", error.message)
                self._complained = True
            else:
                self._complained = False
                self.take(listing)
                if listing.version.epoch == self.version.epoch:
                    continue
            await self._wait(RETRY_S)  # a directory that is ending answers at once, again and again

    def _is_news(self, version: DirectoryVersion) -> bool:
        if version.epoch == self.version.epoch:
            return version.number > self.version.number
        return version.epoch not in self._former


class ListedWorkers:
    """The workers of some roles as a `WorkerList`: each from when it is ready until it leaves."""

    def __init__(self, following: DirectoryCopy, roles: Collection[Role], *, repeat_s: float = REPEAT_S) -> None:
        self._following = following
        self._roles = roles
        self._repeat_s = repeat_s
        self._said = -1
        """The revision that `next` returned last. The first call returns at once if there was a change before it."""

    @property
    def named(self) -> Sequence[NamedWorker]:
        return [
            NamedWorker(worker.url, worker.role, EngineKind.MOTET)
            for worker in self._following.workers
            if worker.role in self._roles and worker.stage is WorkerStage.READY
        ]

    async def next(self) -> Sequence[NamedWorker]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._repeat_s):
                await self._following.change(self._said)
        self._said = self._following.revision
        return self.named

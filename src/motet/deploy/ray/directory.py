"""The directory on Ray: a list of workers. Each worker announces itself, and followers of the list get every change.

1. a worker announces itself when it starts and every few seconds; it is removed after `EXPIRY_S` without announcements
2. a listing has a version. A follower that knows another version gets the listing at once; a follower that knows this
   version waits for a change
3. a directory that was restarted does not know all workers at first: for `EXPIRY_S`, its listings are not `settled`,
   and a worker that is missing in them can still be running
4. a withdrawn worker is not listed again: an announcement that arrives after the withdrawal was sent before it
5. time during which the directory's machine was suspended does not count towards `EXPIRY_S`
6. messages stay short: changes within `GATHER_S` are sent together, the answer to an announcement has the workers only
   if the listing is new, and a decode worker names the prefill workers it has connected to only while they are
   `CONNECTING`

    Directory           the list
    DirectoryReplica    the replica with the list; its messages are bytes, encoded with msgspec
    RayDirectory        calls this replica from other replicas
    DirectoryCopy       a copy of the list in another replica, kept up to date
    ListedWorkers       provides the copy to a gateway

Nothing here imports Ray, engines or servers, so that the directory's replica starts quickly: until it runs, workers
cannot find each other."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from motet.engine_info import EngineKind
from motet.errors import DirectoryError
from motet.ids import new_request_id
from motet.settings.named_worker import NamedWorker
from motet.transfer.ticket import TransferAddress
from motet.types import Role

logger = logging.getLogger(__name__)

ANNOUNCE_S = 2.0
"""Time between two announcements of a worker that has not changed."""
EXPIRY_S = 10.0
GATHER_S = 0.1
WITHDRAWN_S = 60.0
"""Time for which a withdrawn worker is remembered: longer than the delivery of an announcement can take."""
RETRY_S = 0.5
REPEAT_S = 1.0
"""Time after which an unchanged list is returned again. A gateway then retries to add a worker that it could not add
while an earlier worker at the same URL was still leaving."""
CALL_TIMEOUT_S = 3.0
"""Time limit of a call; short, so that a worker whose announcement was lost sends another one before it expires."""
WAIT_S = 30.0
"""Maximum time for which a call waits for a change in the directory."""

Handle = Any
"""A handle of a Serve deployment: `handle.method.remote(...)` returns an awaitable."""


class WorkerStage(StrEnum):
    """The stage of a worker's life."""

    CONNECTING = "connecting"
    """The worker is being connected to the workers with which it exchanges KV."""
    READY = "ready"
    LEAVING = "leaving"
    """The worker finishes its groups."""


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's report about itself."""

    id: str
    """Identifier of this start of the worker's replica."""
    url: str
    role: Role
    stage: WorkerStage
    transfer: TransferAddress | None = None
    """Address at which other engines can fetch KV from the worker's engine; None if there is none."""
    connected: tuple[str, ...] = ()
    """Engine ids of the prefill workers in the stage `CONNECTING` to which this worker has connected, or tried to."""


class DirectoryVersion(msgspec.Struct, frozen=True):
    """The version of a listing: an id of the directory's start, and the number of changes since then."""

    epoch: str = ""
    number: int = 0


NOTHING_KNOWN = DirectoryVersion()


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The list of workers at one time."""

    version: DirectoryVersion
    settled: bool
    """True if the list is complete: all workers have had the time to announce themselves to this directory."""
    workers: tuple[Announcement, ...] = ()
    """Empty in an answer to a follower that already has this version."""


class Directory:
    """The list, used in one event loop."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, expiry_s: float = EXPIRY_S, gather_s: float = GATHER_S
    ) -> None:
        self._clock = clock
        self._expiry_s = expiry_s
        self._gather_s = gather_s
        self._settles_s = clock() + expiry_s
        self._checked_s = clock()
        """Time of the last check for expired workers."""
        self._version = DirectoryVersion(new_request_id("directory"))
        self._workers: dict[str, Announcement] = {}
        self._announced_s: dict[str, float] = {}
        """Times of the last announcements, by worker id."""
        self._withdrawn_s: dict[str, float] = {}
        self._settled = False
        self._changed = asyncio.Event()
        """Set at the next change, and then replaced."""

    def announce(self, announcement: Announcement, known: DirectoryVersion = NOTHING_KNOWN) -> Listing:
        """Returns the listing, without its workers if the caller knows this version."""
        self._expire()
        if announcement.id not in self._withdrawn_s:
            self._announced_s[announcement.id] = self._clock()
            if _is_news(announcement, self._workers.get(announcement.id)):
                self._add(announcement)
            else:
                self._workers[announcement.id] = announcement
        listing = self.listing()
        return msgspec.structs.replace(listing, workers=()) if listing.version == known else listing

    def withdraw(self, id: str) -> None:
        self._withdrawn_s[id] = self._clock()
        self._remove(id)

    def listing(self) -> Listing:
        self._expire()
        return Listing(version=self._version, settled=self._settled, workers=tuple(self._workers.values()))

    async def changed(self, version: DirectoryVersion, *, timeout_s: float) -> Listing:
        """Waits for a listing of another version, at most for `timeout_s`, and returns the current listing."""
        deadline_s = self._clock() + timeout_s
        while (listing := self.listing()).version == version and (left_s := deadline_s - self._clock()) > 0:
            try:
                async with asyncio.timeout(min(left_s, self._expiry_s / 4)):  # `listing` removes expired workers
                    await self._changed.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(self._gather_s)
        return listing

    def _add(self, announcement: Announcement) -> None:
        """Adds a worker. An earlier worker at its URL has ended, even if it did not withdraw."""
        for other in [other for other in self._workers.values() if other.url == announcement.url]:
            if other.id != announcement.id:
                self._remove(other.id)
        self._workers[announcement.id] = announcement
        self._change()

    def _remove(self, id: str) -> None:
        self._announced_s.pop(id, None)
        if self._workers.pop(id, None) is not None:
            self._change()

    def _expire(self) -> None:
        """Removes workers that do not announce themselves any more. The time since the last check counts as at most
        half of `EXPIRY_S`: in a longer time, the directory itself did not run."""
        now_s = self._clock()
        suspended_s = now_s - self._checked_s - self._expiry_s / 2
        self._checked_s = now_s
        if suspended_s > 0:
            self._settles_s += suspended_s
            self._announced_s = {id: announced_s + suspended_s for id, announced_s in self._announced_s.items()}
        for id in [id for id, announced_s in self._announced_s.items() if now_s - announced_s > self._expiry_s]:
            self._remove(id)
        for id in [id for id, withdrawn_s in self._withdrawn_s.items() if now_s - withdrawn_s > WITHDRAWN_S]:
            del self._withdrawn_s[id]
        if not self._settled and now_s > self._settles_s:
            self._settled = True
            self._change()

    def _change(self) -> None:
        self._version = DirectoryVersion(self._version.epoch, self._version.number + 1)
        self._changed.set()
        self._changed = asyncio.Event()


def _is_news(announcement: Announcement, previous: Announcement | None) -> bool:
    """Returns True if the announcement changes the list for followers. Fewer `connected` workers do not."""
    if previous is None or not set(announcement.connected) <= set(previous.connected):
        return True
    return msgspec.structs.replace(announcement, connected=()) != msgspec.structs.replace(previous, connected=())


class DirectoryReplica:
    """The replica that holds the directory, called by `RayDirectory`."""

    def __init__(self) -> None:
        self._directory = Directory()

    async def announce(self, announcement: bytes, known: bytes) -> bytes:
        worker = msgspec.msgpack.decode(announcement, type=Announcement)
        version = msgspec.msgpack.decode(known, type=DirectoryVersion)
        return msgspec.msgpack.encode(self._directory.announce(worker, version))

    async def withdraw(self, id: str) -> None:
        self._directory.withdraw(id)

    async def changed(self, version: bytes, timeout_s: float) -> bytes:
        known = msgspec.msgpack.decode(version, type=DirectoryVersion)
        return msgspec.msgpack.encode(await self._directory.changed(known, timeout_s=timeout_s))


async def call_replica(call: Callable[[], Any], failure: str) -> Any:
    """Returns the result of a call to a replica. Raises DirectoryError with the text `failure` for any error of Ray."""
    try:
        return await call()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise DirectoryError(f"{failure}: it ended before it answered") from error  # Ray cancelled the call
    except Exception as error:
        raise DirectoryError(f"{failure}: {error}") from error


class RayDirectory:
    """Calls the directory's replica through a handle. Each method raises `DirectoryError` if the call fails."""

    def __init__(self, handle: Handle, *, timeout_s: float = CALL_TIMEOUT_S, wait_s: float = WAIT_S) -> None:
        self._handle = handle
        self._timeout_s = timeout_s
        self._wait_s = wait_s

    async def announce(self, announcement: Announcement, known: DirectoryVersion) -> Listing:
        """Announces a worker. The returned listing has workers only if its version is not `known`."""
        worker, version = msgspec.msgpack.encode(announcement), msgspec.msgpack.encode(known)
        return _listing(await self._call(lambda: self._handle.announce.remote(worker, version)))

    async def withdraw(self, id: str) -> None:
        await self._call(lambda: self._handle.withdraw.remote(id))

    async def changed(self, version: DirectoryVersion) -> Listing:
        """Waits for a listing of another version, at most for `wait_s`, and returns the current listing."""
        known, wait_s = msgspec.msgpack.encode(version), self._wait_s
        return _listing(await self._call(lambda: self._handle.changed.remote(known, wait_s), extra_s=wait_s))

    async def _call(self, call: Callable[[], Any], *, extra_s: float = 0.0) -> Any:
        timeout_s = self._timeout_s + extra_s
        try:
            async with asyncio.timeout(timeout_s):
                return await call_replica(call, "the directory of workers cannot be reached")
        except TimeoutError as error:
            raise DirectoryError(f"the directory of workers did not answer within {timeout_s:g} s") from error


def _listing(encoded: bytes) -> Listing:
    try:
        return msgspec.msgpack.decode(encoded, type=Listing)
    except msgspec.DecodeError as error:
        raise DirectoryError(f"the directory of workers has another version: {error}") from error


class DirectoryCopy:
    """A copy of the list, kept up to date. It keeps its workers while the directory is unavailable or not settled."""

    def __init__(self, directory: RayDirectory, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._directory = directory
        self._sleep = sleep
        self.version = NOTHING_KNOWN
        """The version of the last listing."""
        self.revision = 0
        """Number of changes of `workers`."""
        self._past_epochs: set[str] = set()
        """Ids of earlier starts of the directory."""
        self._unconfirmed: dict[str, Announcement] = {}
        """Workers that only an earlier start of the directory has listed."""
        self._workers: dict[str, Announcement] = {}
        self._changed = asyncio.Event()
        """Set at the next change, and then replaced."""
        self._failed = False
        """True if the last call failed: only the first failure in a row is logged."""

    @property
    def workers(self) -> Sequence[Announcement]:
        return tuple(self._workers.values())

    async def announce(self, announcement: Announcement) -> None:
        """Announces a worker, and applies the listing in the answer. Raises DirectoryError."""
        self.apply(await self._directory.announce(announcement, self.version))

    def apply(self, listing: Listing) -> None:
        """Applies a listing, unless a newer one was applied first: two calls can run at the same time."""
        if not self._is_newer(listing.version):
            return
        if listing.version.epoch != self.version.epoch:
            self._past_epochs.add(self.version.epoch)
            self._unconfirmed = self._workers
        self.version = listing.version
        listed, urls = {worker.id: worker for worker in listing.workers}, {worker.url for worker in listing.workers}
        unconfirmed = {} if listing.settled else self._unconfirmed
        self._unconfirmed = {
            id: worker for id, worker in unconfirmed.items() if id not in listed and worker.url not in urls
        }
        workers = self._unconfirmed | listed
        if workers != self._workers:
            self._workers = workers
            self.revision += 1
            self._changed.set()
            self._changed = asyncio.Event()

    async def change(self, since: int) -> None:
        """Waits until a worker has joined, left or changed after the revision `since`."""
        while self.revision == since:
            await self._changed.wait()

    async def follow(self) -> None:
        """Applies every change until it is cancelled."""
        while True:
            try:
                listing = await self._directory.changed(self.version)
            except DirectoryError as error:
                if not self._failed:
                    logger.warning("the list of workers stays as it was: %s", error.message)
                self._failed = True
            else:
                self._failed = False
                self.apply(listing)
                if listing.version.epoch == self.version.epoch:
                    continue
            await self._sleep(RETRY_S)  # an earlier directory that is shutting down answers every call at once

    def _is_newer(self, version: DirectoryVersion) -> bool:
        if version.epoch == self.version.epoch:
            return version.number > self.version.number
        return version.epoch not in self._past_epochs


class ListedWorkers:
    """The `WorkerList` of the ready workers with some roles."""

    def __init__(self, copy: DirectoryCopy, roles: Collection[Role], *, repeat_s: float = REPEAT_S) -> None:
        self._copy = copy
        self._roles = roles
        self._repeat_s = repeat_s
        self._returned = -1
        """Revision of the last list that `next` returned; -1 before the first call, which returns at once."""

    @property
    def named(self) -> Sequence[NamedWorker]:
        return [
            NamedWorker(worker.url, worker.role, EngineKind.MOTET)
            for worker in self._copy.workers
            if worker.role in self._roles and worker.stage is WorkerStage.READY
        ]

    async def next(self) -> Sequence[NamedWorker]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._repeat_s):
                await self._copy.change(self._returned)
        self._returned = self._copy.revision
        return self.named

"""Who is there: workers announce themselves, and whoever wants to know is told when that changes. Knows nothing of Ray.

1. a worker announces itself at its start and every few seconds; one that is not heard of for `EXPIRY_S` is forgotten
2. a listing has a version; who has an old one gets the new one at once, who has the newest one waits for a change
3. a directory that was itself started again has not heard of all yet: until `EXPIRY_S` have passed its listings are not
   `settled`, and who is missing in them may be there all the same
4. who has withdrawn does not come back: what is heard of it later was on its way
5. a directory that did not get to listen itself, on a machine that was asleep, holds that against nobody
6. what everybody is told stays short: changes within `GATHER_S` are told together, an announcement is answered with
   a listing only if there is a new one, and whom a worker has met is said while somebody waits for it
"""

import asyncio
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

import msgspec

from motet.ids import new_request_id
from motet.transfer.ticket import TransferAddress
from motet.types import Role

ANNOUNCE_S = 2.0
"""Between two announcements of a worker that has nothing new to say."""
EXPIRY_S = 10.0
GATHER_S = 0.1
WITHDRAWN_S = 60.0
"""How long it is remembered who has withdrawn: longer than an announcement can be on its way."""


class Stage(StrEnum):
    """How far a worker has come."""

    MEETING = "meeting"
    """Its engine runs; it gets to know those it exchanges KV with."""
    READY = "ready"
    LEAVING = "leaving"
    """It ends what it has."""


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself."""

    id: str
    """Of this start of its replica."""
    url: str
    """Of its own HTTP server."""
    role: Role
    stage: Stage
    transfer: TransferAddress | None = None
    """Where its engine hands over KV, if it does."""
    met: tuple[str, ...] = ()
    """Engine ids of those prefill workers that wait to be met, and that it can fetch from or has given up on."""


class Version(msgspec.Struct, frozen=True):
    """Of a listing."""

    epoch: str = ""
    """Which start of the directory it is of."""
    number: int = 0
    """One more at each change."""


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """Who is there."""

    version: Version
    settled: bool
    workers: tuple[Announcement, ...] = ()
    """Left out in an answer to who has this version already."""


class DirectoryClient(Protocol):
    """A directory elsewhere. Each raises `DirectoryError` if it cannot be asked."""

    async def announce(self, announcement: Announcement, known: Version) -> Listing:
        """Also tells who is there, if that is news to who knows the listing `known`."""
        ...

    async def withdraw(self, id: str) -> None: ...

    async def changed(self, version: Version) -> Listing:
        """A listing of another version, or the same one after a while."""
        ...


NOTHING_KNOWN = Version()


class Directory:
    """The book itself; in one event loop."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        expiry_s: float = EXPIRY_S,
        gather_s: float = GATHER_S,
    ) -> None:
        self._clock = clock
        self._expiry_s = expiry_s
        self._gather_s = gather_s
        self._settles_s = clock() + expiry_s
        self._looked_s = clock()
        self._version = Version(new_request_id("directory"))
        self._workers: dict[str, Announcement] = {}
        self._heard_s: dict[str, float] = {}
        self._withdrawn_s: dict[str, float] = {}
        self._settled = False
        self._changed = asyncio.Event()
        """Of the next change; replaced at each."""

    def announce(self, announcement: Announcement, known: Version = NOTHING_KNOWN) -> Listing:
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

    async def changed(self, version: Version, *, timeout_s: float) -> Listing:
        """A listing that is not of this version; the same one when the time is up."""
        deadline_s = self._clock() + timeout_s
        while (listing := self.listing()).version == version and (left_s := deadline_s - self._clock()) > 0:
            try:
                async with asyncio.timeout(min(left_s, self._expiry_s / 4)):  # whoever is silent is missed by looking
                    await self._changed.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(self._gather_s)
        return listing

    def _enter(self, announcement: Announcement) -> None:
        """Who listened at its address before is gone, whether that was noticed or not."""
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
        """Who is silent is forgotten. Calls come often: if half the time of a silence has passed between two, they were
        not let in, and what is longer does not count."""
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
        self._version = Version(self._version.epoch, self._version.number + 1)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _is_news(announcement: Announcement, former: Announcement | None) -> bool:
    """To anybody: that fewer wait to be met is none."""
    if former is None or not set(announcement.met) <= set(former.met):
        return True
    return msgspec.structs.replace(announcement, met=()) != msgspec.structs.replace(former, met=())

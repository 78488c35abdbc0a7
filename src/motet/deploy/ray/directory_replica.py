"""The replica that keeps the directory. Apart from the others, for it needs nothing of what they import: it is there
sooner, and until it is nobody hears of anybody new."""

import msgspec

from motet.deploy.ray.directory import Announcement, Directory, Listing, Version


class DirectoryReplica:
    """Takes and gives bytes in our own encoding."""

    def __init__(self) -> None:
        self._directory = Directory()

    async def announce(self, announcement: bytes, known: bytes) -> bytes:
        said = msgspec.msgpack.decode(announcement, type=Announcement)
        version = msgspec.msgpack.decode(known, type=Version)
        return _bytes(self._directory.announce(said, version))

    async def withdraw(self, id: str) -> None:
        self._directory.withdraw(id)

    async def changed(self, version: bytes, timeout_s: float) -> bytes:
        known = msgspec.msgpack.decode(version, type=Version)
        return _bytes(await self._directory.changed(known, timeout_s=timeout_s))


def _bytes(listing: Listing) -> bytes:
    return msgspec.msgpack.encode(listing)

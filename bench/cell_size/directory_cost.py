"""Measures the directory of a cell on Ray Serve for different numbers of workers: Motet's own code, without Ray.

Every worker announces itself every few seconds. The answer is a listing of all workers only if the listing has changed.
A decode worker's announcement names the prefill workers that wait for a connection; while a cell starts, these can be
all of them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from motet.deploy.ray.directory import ANNOUNCE_S, Announcement, Directory, WorkerStage
from motet.transfer.ticket import TransferAddress
from motet.types import Role

TURNS = 20


@dataclass(frozen=True)
class DirectoryCost:
    decode: int
    prefill: int
    announce_us: float
    """Time of one announcement in the directory's process, without the encoding of the answer."""
    listing_bytes: int
    """Size of a listing in msgpack after all decode workers have connected to all prefill workers."""
    starting_bytes: int
    """Size of a listing while every prefill worker waits, and every decode worker has connected to all of them."""
    bytes_per_s: float
    """Rate of answers to announcements while nothing changes."""


def directory_cost(decode: int, prefill: int) -> DirectoryCost:
    directory = Directory()
    announcements = _announcements(decode, prefill, ())
    for announcement in announcements:
        directory.announce(announcement)
    known = directory.listing().version
    started = time.perf_counter()
    for turn in range(TURNS):
        answer = directory.announce(announcements[turn % len(announcements)], known)
    announce_us = (time.perf_counter() - started) / TURNS * 1e6
    connected = tuple(f"engine-{number:032x}" for number in range(prefill))
    return DirectoryCost(
        decode,
        prefill,
        announce_us,
        listing_bytes=_bytes_of(announcements),
        starting_bytes=_bytes_of(_announcements(decode, prefill, connected)),
        bytes_per_s=len(msgspec.msgpack.encode(answer)) * len(announcements) / ANNOUNCE_S,
    )


def _announcements(decode: int, prefill: int, connected: tuple[str, ...]) -> list[Announcement]:
    return [
        *(_announcement(number, Role.PREFILL, ()) for number in range(prefill)),
        *(_announcement(number, Role.DECODE, connected) for number in range(prefill, prefill + decode)),
    ]


def _bytes_of(announcements: Sequence[Announcement]) -> int:
    return sum(len(msgspec.msgpack.encode(announcement)) for announcement in announcements)


def _announcement(number: int, role: Role, connected: tuple[str, ...]) -> Announcement:
    return Announcement(
        id=f"replica-{number:032x}",
        url=f"http://10.0.{number // 256}.{number % 256}:8000",
        role=role,
        stage=WorkerStage.READY,
        transfer=TransferAddress(f"engine-{number:032x}", "10.0.0.1", 20_000),
        connected=connected,
    )

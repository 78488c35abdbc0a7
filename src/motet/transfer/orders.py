"""The messages between an engine core and its transfer thread. Nothing here blocks the engine: it leaves orders, and
collects news between two steps.

    engine core ── order ──► TransferThread ──► Transport (NIXL)
                ◄── news ───                ◄─► side channel of the other workers

This module imports nothing heavy.
"""

from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from motet.errors import MotetError
from motet.transfer.ticket import Ticket, TransferAddress


class FailureKind(StrEnum):
    """Why a pull failed; a label of the metric."""

    UNREACHABLE = "unreachable"
    """The side channel did not answer."""
    RESTARTED = "restarted"
    """Another start of the worker answers at that address."""
    REFUSED = "refused"
    """Cluster keys or KV layouts differ, or a ticket or message cannot be followed."""
    WEIGHTS = "weights"
    """The ticket is for KV of other weights."""
    PEER_LOST = "peer-lost"
    """The connection broke during the read."""
    TIMEOUT = "timeout"
    LEASE_ENDED = "lease-ended"
    """The data was read, but the lease of this ticket was not held, or no longer: the data is not used."""
    STALE = "stale"
    """The data was read, but a block had another owner by then: the data is not used."""
    CLOSED = "closed"


class TransferError(MotetError):
    """A transport or a peer failed."""

    def __init__(self, message: str, kind: FailureKind) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class KeepAlive:
    """Order: keep the lease of this ticket alive, until a `PullOrder` or a `ReleaseTicket`. A group here holds it."""

    ticket: Ticket


@dataclass(frozen=True)
class PullOrder:
    """Order: fetch blocks of a trunk. Ends in one PullLanded, or in one PullFailed, which one PullSettled follows
    unless it says `settled`."""

    number: int
    ticket: Ticket
    pairs: tuple[tuple[int, int, int], ...]
    """(remote block, its generation, local block)."""
    label: str
    """Names the group in log lines."""


@dataclass(frozen=True)
class AbandonPull:
    """Order: nobody wants this pull any more, tell the lease. If no PullLanded or PullFailed was delivered before,
    exactly one PullSettled follows; a PullLanded or PullFailed that was on its way may come instead, and is valid."""

    number: int


@dataclass(frozen=True)
class ReleaseTicket:
    """Order: a group here does not use this ticket, tell the lease if its owner can be reached."""

    ticket: Ticket


@dataclass(frozen=True)
class MeetWorker:
    """Order: connect to another worker before it is needed. Ends in one Met."""

    number: int
    address: TransferAddress


@dataclass(frozen=True)
class LeasesHeld:
    """Order: this many leases are held here. While there is one, the thread serves readers every millisecond."""

    num_leases: int


@dataclass(frozen=True)
class Withdraw:
    """Order: make the KV memory unknown to the network, so that it can be given back to the system. `done` is True
    then, and False if reads that may write into it do not end."""

    done: Future[bool]


@dataclass(frozen=True)
class AdvertiseMemory:
    """Order: make the KV memory known again."""

    done: Future[None]


Order = KeepAlive | PullOrder | AbandonPull | ReleaseTicket | MeetWorker | LeasesHeld | Withdraw | AdvertiseMemory


@dataclass(frozen=True)
class PullLanded:
    """News: the blocks are here and match the ticket; the lease has been told."""

    number: int
    num_bytes: int
    num_descriptors: int
    seconds: float
    """Seconds from the order to the verified data."""
    post_seconds: float
    """Seconds of these that were spent posting reads."""


@dataclass(frozen=True)
class PullFailed:
    """News: the blocks do not have the right content. Unless `settled`, the transfer may still write into them, and
    they must not be used for anything until `PullSettled` comes."""

    number: int
    kind: FailureKind
    message: str
    settled: bool


@dataclass(frozen=True)
class PullSettled:
    """News: nothing writes into the blocks of a failed or abandoned pull any more."""

    number: int


class ReaderDone(msgspec.Struct, frozen=True, tag="Release"):
    """News, and a reader's message to the owner of a lease: it has its data, or does not want it any more."""

    lease_id: int
    reader: str


class ReaderWaits(msgspec.Struct, frozen=True, tag="Waits"):
    """News, and a reader's message to the owner of a lease: it is alive and has not read yet."""

    lease_id: int


@dataclass(frozen=True)
class Met:
    """News: the answer to `MeetWorker`; `error` is None when the two are connected."""

    number: int
    error: TransferError | None


News = PullLanded | PullFailed | PullSettled | ReaderDone | ReaderWaits | Met

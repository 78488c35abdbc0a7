"""The messages between an engine core and its transfer thread. The core never waits: it puts orders into a mailbox, and
collects events between two steps.

    engine core ── order ──► TransferThread ──► Transport (NIXL)
                ◄── event ──                ◄─► side channels of the other workers

A pull is *settled* once no more bytes can arrive in its destination blocks. Until then these blocks must not be used
for anything else, even if the pull has failed. This module imports nothing heavy."""

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
    """The worker at that address has restarted since the ticket was made."""
    REFUSED = "refused"
    """Cluster keys or KV layouts differ, or a ticket or a message is invalid."""
    WEIGHTS = "weights"
    """The ticket is for KV of other weights."""
    PEER_LOST = "peer-lost"
    """The connection broke during the read."""
    TIMEOUT = "timeout"
    LEASE_ENDED = "lease-ended"
    """The data was read, but the lease was not held at that time. The data is not used."""
    STALE = "stale"
    """The data was read, but a block had been reused before. The data is not used."""
    CLOSED = "closed"


class TransferError(MotetError):
    """A transport or a peer failed."""

    def __init__(self, message: str, kind: FailureKind) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class KeepAlive:
    """Order: send heartbeats for the lease of this ticket, until a `PullOrder` or a `ReleaseTicket` for it. A group of
    this engine holds the ticket."""

    ticket: Ticket


@dataclass(frozen=True)
class PullOrder:
    """Order: fetch blocks of a trunk. Exactly one PullLanded or PullFailed follows. After a PullFailed that is not
    settled, one PullSettled follows."""

    number: int
    ticket: Ticket
    pairs: tuple[tuple[int, int, int], ...]
    """(remote block, its generation, local block)."""
    label: str
    """Name of the group in log lines."""


@dataclass(frozen=True)
class AbandonPull:
    """Order: stop a pull whose result is no longer needed, and release its lease. If no PullLanded or PullFailed was
    delivered before, exactly one PullSettled follows, or a valid PullLanded or PullFailed that was on its way."""

    number: int


@dataclass(frozen=True)
class ReleaseTicket:
    """Order: release the lease of a ticket that no group of this engine uses, if its owner can be reached."""

    ticket: Ticket


@dataclass(frozen=True)
class ConnectWorker:
    """Order: connect to another worker before the connection is needed. Exactly one ConnectResult follows."""

    number: int
    address: TransferAddress


@dataclass(frozen=True)
class LeasesHeld:
    """Order: this worker now holds `num_leases` leases. While it holds any, the thread polls the transport every
    millisecond, so that readers can read."""

    num_leases: int


@dataclass(frozen=True)
class DeregisterMemory:
    """Order: remove the KV memory from the network's registrations, so that its pages can be returned to the operating
    system. `done` then becomes True, or False if reads that can write into the memory do not end in time."""

    done: Future[bool]


@dataclass(frozen=True)
class RegisterMemory:
    """Order: register the KV memory again."""

    done: Future[None]


ReaderOrder = KeepAlive | PullOrder | AbandonPull | ReleaseTicket | ConnectWorker
"""Orders about trunks of other workers."""
OwnerOrder = LeasesHeld | DeregisterMemory | RegisterMemory
"""Orders about this worker's own memory."""
Order = ReaderOrder | OwnerOrder


@dataclass(frozen=True)
class PullLanded:
    """Event: the blocks are here and match the ticket, and the lease was acknowledged."""

    number: int
    num_bytes: int
    num_descriptors: int
    seconds: float
    """Seconds from the order to the verified data."""
    post_seconds: float
    """Part of `seconds` that was spent posting reads."""


@dataclass(frozen=True)
class PullFailed:
    """Event: the blocks do not have the right content. Unless `settled` is True, bytes can still arrive in them, and
    they must not be used for anything until `PullSettled` comes."""

    number: int
    kind: FailureKind
    message: str
    settled: bool


@dataclass(frozen=True)
class PullSettled:
    """Event: no more bytes can arrive in the blocks of a failed or abandoned pull."""

    number: int


class ReaderDone(msgspec.Struct, frozen=True, tag="Release"):
    """Event, and a reader's message to the owner of a lease: this reader has its data, or does not need it."""

    lease_id: int
    reader: str


class ReaderHeartbeat(msgspec.Struct, frozen=True, tag="Waits"):
    """Event, and a reader's message to the owner of a lease: this reader still needs the lease."""

    lease_id: int


@dataclass(frozen=True)
class ConnectResult:
    """Event: the result of `ConnectWorker`. `error` is None if the two workers are connected."""

    number: int
    error: TransferError | None


TransferEvent = PullLanded | PullFailed | PullSettled | ReaderDone | ReaderHeartbeat | ConnectResult

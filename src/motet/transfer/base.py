"""The seams of KV transfer: `Transport` moves bytes, `Transfers` is what an engine core asks for.

    engine core ── orders ──► Transfers (a thread of its own) ──► Transport (NIXL, or memory of this process)
                ◄── news ───                                  ◄─► side channel of the other workers

Nothing here blocks the engine: orders are left, news is collected between two steps.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from motet.errors import MotetError
from motet.transfer.layout import Memory, Run
from motet.transfer.ticket import Ticket, TransferAddress


class FailureKind(StrEnum):
    """Why a pull brought nothing; a label of the metric."""

    UNREACHABLE = "unreachable"
    """The side channel did not answer."""
    RESTARTED = "restarted"
    """Another start of the worker answers at that address."""
    REFUSED = "refused"
    """Cluster key or KV layout differ."""
    PEER_LOST = "peer-lost"
    """The connection broke during the read."""
    TIMEOUT = "timeout"
    LEASE_ENDED = "lease-ended"
    """Read, but no lease of this ticket was held, or no longer: the data is not used."""
    STALE = "stale"
    """Read, but a block had been given to someone else: the data is not used."""
    CLOSED = "closed"


class TransferError(MotetError):
    """A transport or a peer failed."""

    def __init__(self, message: str, kind: FailureKind) -> None:
        super().__init__(message)
        self.kind = kind


class ReadState(StrEnum):
    RUNNING = "running"
    """The destination may still be written to."""
    DONE = "done"
    FAILED = "failed"


class Read(Protocol):
    """One posted read."""

    num_bytes: int
    num_descriptors: int

    def poll(self) -> ReadState:
        """Drives it on, and says where it stands; never raises. DONE and FAILED are final: nothing writes any more."""
        ...

    def close(self) -> None:
        """Forgets a read that is final."""
        ...


class Transport(Protocol):
    """Moves blocks between the registered memories of two workers. All methods belong to one thread, none blocks."""

    def describe(self) -> bytes:
        """What a peer needs for `connect`."""
        ...

    def connect(self, description: bytes, memory: Memory) -> str:
        """Makes a peer known; its name, which `read` and `notify` take. TransferError if that cannot be."""
        ...

    def disconnect(self, peer: str) -> None:
        """No more reads are posted; those that run go on until they are final."""
        ...

    def read_blocks(self, peer: str, runs: list[Run]) -> Read:
        """Posts the read of KV blocks. TransferError (PEER_LOST) if it cannot be posted; `connect` may mend that.
        TransferError (REFUSED) for blocks that do not exist."""
        ...

    def read_proof(self, peer: str, entries: list[int]) -> tuple[Read, list[int]]:
        """Posts the read of entries of the peer's proof; the list is filled when the read is DONE."""
        ...

    def notify(self, peer: str, message: bytes) -> None:
        """Sends a message if that can be: never raises, and one to a peer that is gone is lost. Before the first read
        from a peer has ended, it goes only while this side polls."""
        ...

    def poll(self) -> list[bytes]:
        """Drives what others want of this side and the reads of this one, and returns notifications that have come."""
        ...

    def close(self) -> None:
        """Ends everything: afterwards nothing writes into this side's memory, whatever was running. May wait half a
        second for that. May be called twice."""
        ...


@dataclass(frozen=True)
class PullOrder:
    """Fetch blocks of a trunk."""

    number: int
    """Names the pull in news."""
    ticket: Ticket
    pairs: tuple[tuple[int, int, int], ...]
    """(remote block, its generation, local block)."""
    label: str
    """For log lines."""


@dataclass(frozen=True)
class Landed:
    """The blocks are here and are what the ticket said; the lease has been told."""

    number: int
    num_bytes: int
    num_descriptors: int
    seconds: float
    """From the order to the verified data."""
    post_seconds: float
    """Of them, those spent posting reads."""


@dataclass(frozen=True)
class Failed:
    """The blocks are not what they should be. Unless `settled`, the transfer may still write into them, and they must
    not be used for anything until `Settled` comes."""

    number: int
    kind: FailureKind
    message: str
    settled: bool


@dataclass(frozen=True)
class Settled:
    """Nothing writes any more into the blocks of a pull that failed or was abandoned."""

    number: int


@dataclass(frozen=True)
class ReaderDone:
    """A reader of one of our leases has its data, or wants it no more."""

    lease_id: int
    reader: str


@dataclass(frozen=True)
class ReaderWaits:
    """A reader of one of our leases is alive and has not read yet."""

    lease_id: int


@dataclass(frozen=True)
class Met:
    """Answer to `meet`: `error` is None when the two are connected."""

    number: int
    error: TransferError | None


News = Landed | Failed | Settled | ReaderDone | ReaderWaits | Met


class Transfers(Protocol):
    """An engine's side of all transfers. Every method returns at once."""

    @property
    def address(self) -> TransferAddress: ...

    def sealed(self, ticket: Ticket) -> Ticket:
        """A ticket of ours as others will believe it."""
        ...

    def believes(self, ticket: Ticket) -> bool:
        """Whether a ticket is what a worker of this cluster made, as far as that can be told."""
        ...

    def expect(self, ticket: Ticket) -> None:
        """A group of ours holds this ticket: keep its lease alive until `pull`, or `release`."""
        ...

    def pull(self, order: PullOrder) -> None:
        """Ends in exactly one Landed, or one Failed (followed by one Settled unless it says settled)."""
        ...

    def abandon(self, number: int) -> None:
        """Nobody wants this pull any more: tells the lease. If no Landed or Failed was delivered before, exactly one
        Settled follows; a Landed or Failed under way may come in its place, and counts as it stands."""
        ...

    def release(self, ticket: Ticket) -> None:
        """This reader does without: tells the lease, if its owner can be reached."""
        ...

    def meet(self, number: int, address: TransferAddress) -> None:
        """Connects to another worker before it is needed; ends in one Met."""
        ...

    def holding(self, leases: int) -> None:
        """How many leases we hold: with any, readers are attended to every millisecond."""
        ...

    def fileno(self) -> int | None:
        """A file descriptor that is readable while there is news; None if there never is any."""
        ...

    def news(self) -> list[News]: ...

    def close(self) -> None: ...

"""The transport's connection to one peer, and the reads over it.

1. A pull posts a read, and polls it until it is final.
2. If the pull's time is over first, it marks the read as overdue. Bytes of an overdue read can still arrive.
3. The pull closes the read. A read that is not final yet stays open here, and is closed as soon as it is final.

A transport that disconnects from a peer does not stop what the peer is doing, so the connection lasts until all reads
over it are closed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from motet.transfer.orders import ReaderDone
from motet.transfer.transport import BlockRun, PostedRead, ReadState, RegisteredMemory, Transport


@dataclass(eq=False)
class PeerConnection:
    """Owns the reads from one peer."""

    transport: Transport
    name: str
    """The transport's name for the peer."""
    memory: RegisteredMemory
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.num_reads = 0
        """Number of reads that are not closed."""
        self.last_closed_s = self.clock()
        """Time at which a read was last closed; before the first read, the time of the connection."""
        self._closing: list[PostedRead] = []
        """Reads to close as soon as they are final."""
        self._overdue: list[PostedRead] = []

    @property
    def has_overdue_read(self) -> bool:
        """True if an overdue read is not final yet. A new read would have to wait for it."""
        return bool(self._overdue)

    def read_blocks(self, runs: list[BlockRun]) -> PostedRead:
        """Posts a read, which the caller must `close_read`. Raises TransferError."""
        read = self.transport.read_blocks(self.name, runs)
        self.num_reads += 1
        return read

    def read_proof(self, blocks: list[int], lease_slot: int | None = None) -> tuple[PostedRead, list[int]]:
        """Posts a read of the proof's entries for `blocks` and then for `lease_slot`, if given. The list has their
        values when the read is done. The caller must `close_read` the read. Raises TransferError."""
        slots = [] if lease_slot is None else [self.memory.num_blocks + lease_slot]
        read, values = self.transport.read_proof(self.name, [*blocks, *slots])
        self.num_reads += 1
        return read, values

    def close_read(self, read: PostedRead) -> None:
        """Closes a read, now or as soon as it is final."""
        if read.poll() is ReadState.RUNNING:
            self._closing.append(read)
        else:
            self._close(read)

    def mark_overdue(self, read: PostedRead) -> None:
        """Marks a read whose time is over. The caller must still close it."""
        self._overdue.append(read)

    def close_final_reads(self) -> None:
        """Closes the reads that were to be closed and have become final."""
        for read in [read for read in self._closing if read.poll() is not ReadState.RUNNING]:
            self._closing.remove(read)
            self._close(read)

    def acknowledge(self, lease_id: int, reader: str) -> None:
        """Sends the owner of a lease the message that its data has been read and verified."""
        self.transport.notify(self.name, msgspec.msgpack.encode(ReaderDone(lease_id, reader)))

    def disconnect(self) -> None:
        self.transport.disconnect(self.name)

    def _close(self, read: PostedRead) -> None:
        read.close()
        self.num_reads -= 1
        self._overdue = [overdue for overdue in self._overdue if overdue is not read]
        self.last_closed_s = self.clock()

"""One pull: the fetch of a trunk's blocks, from the order to the last byte that can arrive.

    CONNECTING ──► READING ──► PROVING ──► OVER     landed or disproved; timed out or abandoned: no bytes can arrive in
       │              │                             the blocks any more
       │              └──► SETTLING ─────► OVER     timed out or abandoned: bytes can arrive until the read is final
       └─────────────────────────────────► OVER     nothing was posted: timed out, abandoned, invalid ticket, or
                                                    the peer is lost or has an overdue read

1. CONNECTING: waits until the peer is connected, then posts the read of the blocks.
2. READING: when the blocks have arrived, posts the read of the proof. It is read after the data, so a generation that
   equals the ticket's shows that no byte of the block had been overwritten when the data was read.
3. PROVING: compares the proof with the ticket, and acknowledges the lease.
4. SETTLING: the pull has failed and was reported, but its read is not final.

Until the pull has landed or failed, it sends heartbeats for its lease.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from motet.transfer.orders import FailureKind, PullFailed, PullLanded, PullOrder, PullSettled, TransferError
from motet.transfer.peer import Peer
from motet.transfer.ticket import Ticket
from motet.transfer.transport import PostedRead, ReadState, RegisteredMemory, merged

HEARTBEAT_EVERY_S = 1.0
"""Interval in seconds of a pull's heartbeats: short, because the owner of the lease polls only while it has readers."""

PullEvent = PullLanded | PullFailed | PullSettled


class PullStage(Enum):
    CONNECTING = "connecting"
    READING = "reading"
    PROVING = "proving"
    SETTLING = "settling"
    OVER = "over"


MOVES = {
    PullStage.CONNECTING: {PullStage.READING, PullStage.OVER},
    PullStage.READING: {PullStage.PROVING, PullStage.SETTLING, PullStage.OVER},
    PullStage.PROVING: {PullStage.OVER},
    PullStage.SETTLING: {PullStage.OVER},
    PullStage.OVER: set(),
}


@dataclass(eq=False, kw_only=True)
class Pull:
    """A pull in progress. Its owner calls `advance` until it is over."""

    order: PullOrder
    peer: Peer
    clock: Callable[[], float]
    reader: str
    """Name under which the lease counts this reader."""
    ordered_s: float
    timeout_s: float
    """Time in seconds from the order after which the pull fails."""
    _stage: PullStage = field(init=False, default=PullStage.CONNECTING)
    _open_read: PostedRead | None = field(init=False, default=None)
    """The read that must become final next."""
    _size: tuple[int, int] = field(init=False, default=(0, 0))
    """Numbers of bytes and of descriptors of the read of the blocks."""
    _proof_values: list[int] = field(init=False, default_factory=list)
    """Values from the peer's proof: the generations of the blocks, then the entry of the lease's slot. Empty until the
    read of the proof is done."""
    _post_seconds: float = field(init=False, default=0.0)
    _next_heartbeat_s: float = field(init=False, default=-math.inf)

    @property
    def over(self) -> bool:
        return self._stage is PullStage.OVER

    @property
    def reported(self) -> bool:
        """True once the pull's PullLanded or PullFailed was returned, or is not needed any more."""
        return self._stage in (PullStage.SETTLING, PullStage.OVER)

    def advance(self) -> PullEvent | None:
        """Advances the pull as far as possible. Returns an event if it has landed, failed or settled."""
        if self.clock() >= self._next_heartbeat_s and self._stage is not PullStage.SETTLING:
            self._next_heartbeat_s = self.clock() + HEARTBEAT_EVERY_S
            self.peer.channel.send_heartbeat(self.order.ticket.lease_id)
        try:
            event = self._advance()
        except TransferError as error:  # a read could not be posted
            event = self._fail(error.kind, error.message)
        if event is None and self.clock() >= self.ordered_s + self.timeout_s:
            return self._time_out()
        return event

    def abandon(self) -> PullEvent | None:
        """Ends a pull whose result is no longer needed."""
        if self.reported:
            return None
        failed = self._stop(FailureKind.CLOSED, "the pull was abandoned")
        return PullSettled(self.order.number) if failed.settled else None

    def close(self) -> PullEvent | None:
        """Ends the pull because this worker is stopping."""
        return None if self.reported else self._stop(FailureKind.CLOSED, "this worker is stopping")

    def _advance(self) -> PullEvent | None:
        """Starts reading once the peer is connected, then continues after each read that is final."""
        event = self._start() if self._stage is PullStage.CONNECTING else None
        while self._open_read is not None and (state := self._open_read.poll()) is not ReadState.RUNNING:
            event = self._continue(self._open_read, broken=state is ReadState.FAILED)
        return event

    def _start(self) -> PullEvent | None:
        if (error := self.peer.error) is not None:
            return self._fail(error.kind, error.message)
        if (connection := self.peer.connection) is None:
            return None
        if connection.overdue:  # after a link was cut, a connection can hang for as long as the cut lasted
            return self._stop(FailureKind.TIMEOUT, f"an earlier read from {self.peer} has not ended")
        if problem := _out_of_range(self.order.ticket, connection.memory):
            return self._fail(FailureKind.REFUSED, problem)
        started_s = self.clock()
        self._open_read = self.peer.read_blocks(merged((remote, local) for remote, _, local in self.order.pairs))
        self._post_seconds += self.clock() - started_s
        self._size = self._open_read.num_bytes, self._open_read.num_descriptors
        self._move(PullStage.READING)
        return None

    def _continue(self, read: PostedRead, *, broken: bool) -> PullEvent | None:
        message = f"the connection to {self.peer} broke"
        if self._stage is PullStage.SETTLING:
            if broken:
                self.peer.mark_lost(message, FailureKind.PEER_LOST)
            self._finish()
            return PullSettled(self.order.number)
        if broken:
            self._release()  # the worker itself can still be there
            self.peer.mark_lost(message, FailureKind.PEER_LOST)
            return self._fail(FailureKind.PEER_LOST, message)
        if self._stage is PullStage.PROVING:
            return self._compare_proof()
        started_s = self.clock()
        blocks, lease_slot = [remote for remote, _, _ in self.order.pairs], self.order.ticket.lease_slot
        self._open_read, self._proof_values = self.peer.read_proof(blocks, lease_slot)
        self._post_seconds += self.clock() - started_s
        self.peer.close_read(read)  # after the proof was posted: a lost peer stays connected while reads are open
        self._move(PullStage.PROVING)
        return None

    def _compare_proof(self) -> PullEvent:
        *generations, digest = self._proof_values
        ticket = self.order.ticket
        if digest != ticket.digest:
            message = f"the lease of the ticket was not held at {self.peer} when the data was read"
            return self._fail(FailureKind.LEASE_ENDED, message)
        if generations != [generation for _, generation, _ in self.order.pairs]:
            self._release()
            return self._fail(FailureKind.STALE, f"blocks at {self.peer} were reused before the data was read")
        self.peer.acknowledge(ticket.lease_id, self.reader)
        self._finish()
        num_bytes, num_descriptors = self._size
        seconds = self.clock() - self.ordered_s
        return PullLanded(self.order.number, num_bytes, num_descriptors, seconds, self._post_seconds)

    def _time_out(self) -> PullFailed | None:
        if self._stage is PullStage.SETTLING:
            return None
        if self._stage is PullStage.CONNECTING:
            return self._stop(FailureKind.UNREACHABLE, f"{self.peer} does not answer")
        if self._open_read is not None:
            self.peer.mark_overdue(self._open_read)
        return self._stop(FailureKind.TIMEOUT, f"reading from {self.peer} took longer than {self.timeout_s:g} s")

    def _stop(self, kind: FailureKind, message: str) -> PullFailed:
        """Ends the pull in any stage, and releases the lease."""
        self._release()
        if self._stage is not PullStage.READING:
            return self._fail(kind, message)
        self._move(PullStage.SETTLING)
        return PullFailed(self.order.number, kind, message, settled=False)

    def _fail(self, kind: FailureKind, message: str) -> PullFailed:
        """Ends a pull when no more bytes can arrive in its blocks."""
        self._finish()
        return PullFailed(self.order.number, kind, message, settled=True)

    def _release(self) -> None:
        self.peer.channel.release(self.order.ticket.lease_id, self.reader)

    def _finish(self) -> None:
        self._move(PullStage.OVER)
        if self._open_read is not None:
            self.peer.close_read(self._open_read)
            self._open_read = None

    def _move(self, stage: PullStage) -> None:
        if stage not in MOVES[self._stage]:
            raise AssertionError(f"a pull cannot move from {self._stage.value} to {stage.value}")
        self._stage = stage


def _out_of_range(ticket: Ticket, memory: RegisteredMemory) -> str | None:
    """Returns an error if the ticket, which a client can have changed, names memory that the peer does not have."""
    blocks = [block for block in ticket.remote_block_ids if not 0 <= block < memory.num_blocks]
    if blocks:
        return f"the ticket names block {blocks[0]}, but the worker has {memory.num_blocks} blocks"
    num_slots = memory.proof_entries - memory.num_blocks
    if not 0 <= ticket.lease_slot < num_slots:
        return f"the ticket names lease slot {ticket.lease_slot}, but the worker has {num_slots} slots"
    return None

"""One pull, from the order to the last byte that may be written.

    MEETING ──► READING ──► PROVING ──► OVER        landed, or refuted by the proof
       │           │           └──────► OVER        deadline, abandoned: nothing writes into the blocks any more
       │           └──► SETTLING ─────► OVER        deadline, abandoned: the transfer may still write
       └──────────────────────────────► OVER        nothing was posted yet, or an earlier read from that peer is late

The proof is read after the data: a generation that is still the ticket's then shows that no byte of the block had been
overwritten when the data was read.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from motet.transfer.orders import FailureKind, News, PullFailed, PullLanded, PullOrder, PullSettled, TransferError
from motet.transfer.peer import Peer
from motet.transfer.ticket import Ticket
from motet.transfer.transport import PostedRead, ReadState, RegisteredMemory, merged

WAITS_EVERY_S = 1.0
"""Seconds between two signs of life for the lease during a pull: its owner polls only while it knows of readers."""


class PullStage(Enum):
    MEETING = "meeting"
    READING = "reading"
    PROVING = "proving"
    SETTLING = "settling"
    OVER = "over"


MOVES = {
    PullStage.MEETING: {PullStage.READING, PullStage.OVER},
    PullStage.READING: {PullStage.PROVING, PullStage.SETTLING, PullStage.OVER},
    PullStage.PROVING: {PullStage.OVER},
    PullStage.SETTLING: {PullStage.OVER},
    PullStage.OVER: set(),
}


@dataclass(eq=False, kw_only=True)
class Pull:
    """A pull under way; its owner calls `advance` until it is over."""

    order: PullOrder
    peer: Peer
    clock: Callable[[], float]
    reader: str
    """The name by which the lease knows this reader."""
    ordered_s: float
    timeout_s: float
    """Seconds from the order after which the pull fails."""
    _stage: PullStage = field(init=False, default=PullStage.MEETING)
    _open: PostedRead | None = field(init=False, default=None)
    """The read that must become final next."""
    _entries: list[int] = field(init=False, default_factory=list)
    """Entries of the peer's proof: the generations of the blocks that are read, then the lease's slot."""
    _shown: list[int] = field(init=False, default_factory=list)
    """The values of these entries."""
    _num_bytes: int = field(init=False, default=0)
    _num_descriptors: int = field(init=False, default=0)
    _post_seconds: float = field(init=False, default=0.0)
    _next_sign_s: float = field(init=False, default=-math.inf)

    @property
    def over(self) -> bool:
        return self._stage is PullStage.OVER

    @property
    def told(self) -> bool:
        """True once its PullLanded or PullFailed has been returned, or may not come any more."""
        return self._stage in (PullStage.SETTLING, PullStage.OVER)

    def advance(self) -> News | None:
        """Looks at the pull once; returns news, if there are any."""
        if self.clock() >= self._next_sign_s and self._stage is not PullStage.SETTLING:
            self._next_sign_s = self.clock() + WAITS_EVERY_S
            self.peer.waits(self.order.ticket.lease_id)
        try:
            news = self._look()
        except TransferError as error:  # a read could not be posted
            news = self._fail(error.kind, error.message)
        if news is None and self.clock() >= self.ordered_s + self.timeout_s:
            return self._overdue()
        return news

    def abandon(self) -> News | None:
        """Ends a pull that nobody wants any more."""
        if self.told:
            return None
        failed = self._stop(FailureKind.CLOSED, "abandoned")
        return PullSettled(self.order.number) if failed.settled else None

    def close(self) -> News | None:
        """Ends the pull because this worker is stopping."""
        if self.told:
            return None
        return self._stop(FailureKind.CLOSED, "this worker stops")

    def _look(self) -> News | None:
        """Begins to read once the peer is met, then goes on from one final read to the next."""
        news = self._begin() if self._stage is PullStage.MEETING else None
        while self._open is not None and (state := self._open.poll()) is not ReadState.RUNNING:
            news = self._go_on(self._open, broken=state is ReadState.FAILED)
        return news

    def _begin(self) -> News | None:
        if (error := self.peer.error) is not None:
            return self._fail(error.kind, error.message)
        if (memory := self.peer.memory) is None:
            return None
        if self.peer.late:  # after a link was cut, a connection may stand still for as long as before
            return self._stop(FailureKind.TIMEOUT, f"an earlier read from {self.peer} has not ended")
        if problem := _outside(self.order.ticket, memory):
            return self._fail(FailureKind.REFUSED, problem)
        self._entries = [remote for remote, _, _ in self.order.pairs]
        self._entries.append(memory.num_blocks + self.order.ticket.lease_slot)
        began_s = self.clock()
        self._open = self.peer.read_blocks(merged((remote, local) for remote, _, local in self.order.pairs))
        self._post_seconds += self.clock() - began_s
        self._num_bytes, self._num_descriptors = self._open.num_bytes, self._open.num_descriptors
        self._move(PullStage.READING)
        return None

    def _go_on(self, read: PostedRead, *, broken: bool) -> News | None:
        """Goes on after a read that is final."""
        message = f"the connection to {self.peer} broke"
        if self._stage is PullStage.SETTLING:
            if broken:
                self.peer.lose(message, FailureKind.PEER_LOST)
            self._finish()
            return PullSettled(self.order.number)
        if broken:
            self.peer.release(self.order.ticket.lease_id, self.reader)  # maybe only the connection is gone
            self.peer.lose(message, FailureKind.PEER_LOST)
            return self._fail(FailureKind.PEER_LOST, message)
        if self._stage is PullStage.PROVING:
            return self._prove()
        began_s = self.clock()
        self._open, self._shown = self.peer.read_proof(self._entries)
        self._post_seconds += self.clock() - began_s
        self.peer.drop(read)  # after the proof was posted: a peer that is gone stays connected while reads are open
        self._move(PullStage.PROVING)
        return None

    def _prove(self) -> News:
        *generations, digest = self._shown
        ticket = self.order.ticket
        if digest != ticket.digest:
            message = f"{self.peer} held no lease of this ticket when the data was read"
            return self._fail(FailureKind.LEASE_ENDED, message)
        if generations != [generation for _, generation, _ in self.order.pairs]:
            self.peer.release(ticket.lease_id, self.reader)
            return self._fail(FailureKind.STALE, f"blocks at {self.peer} had another owner when the data was read")
        self.peer.acknowledge(ticket.lease_id, self.reader)
        self._finish()
        seconds = self.clock() - self.ordered_s
        return PullLanded(self.order.number, self._num_bytes, self._num_descriptors, seconds, self._post_seconds)

    def _overdue(self) -> PullFailed | None:
        if self._stage is PullStage.SETTLING:
            return None
        if self._stage is PullStage.MEETING:
            return self._stop(FailureKind.UNREACHABLE, f"{self.peer} does not answer")
        if self._open is not None:
            self.peer.give_up(self._open)
        return self._stop(FailureKind.TIMEOUT, f"{self.peer} took longer than {self.timeout_s:g} s")

    def _stop(self, kind: FailureKind, message: str) -> PullFailed:
        """Ends the pull from this side, in any stage, and tells the lease."""
        self.peer.release(self.order.ticket.lease_id, self.reader)
        if self._stage is not PullStage.READING:
            return self._fail(kind, message)
        self._move(PullStage.SETTLING)
        return PullFailed(self.order.number, kind, message, settled=False)

    def _fail(self, kind: FailureKind, message: str) -> PullFailed:
        """Ends a pull that writes nothing any more."""
        self._finish()
        return PullFailed(self.order.number, kind, message, settled=True)

    def _finish(self) -> None:
        self._move(PullStage.OVER)
        if self._open is not None:
            self.peer.drop(self._open)
            self._open = None

    def _move(self, stage: PullStage) -> None:
        if stage not in MOVES[self._stage]:
            raise AssertionError(f"a pull cannot go from {self._stage.value} to {stage.value}")
        self._stage = stage


def _outside(ticket: Ticket, memory: RegisteredMemory) -> str | None:
    """Returns what is wrong if the ticket, which a client may have changed, names memory that the peer lacks."""
    if wrong := [block for block in ticket.remote_block_ids if not 0 <= block < memory.num_blocks]:
        return f"the ticket names block {wrong[0]} of a worker that has {memory.num_blocks}"
    slots = memory.proof_entries - memory.num_blocks
    if not 0 <= ticket.lease_slot < slots:
        return f"the ticket names lease slot {ticket.lease_slot} of a worker that has {slots}"
    return None

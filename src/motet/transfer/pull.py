"""One pull, from the order to the last byte that may be written.

    MEETING ──► READING ──► PROVING ──► OVER        landed, or refuted by the proof
       │           │           └──────► OVER        deadline, abandoned: nothing writes into the blocks any more
       │           └──► SETTLING ─────► OVER        deadline, abandoned: the transfer may still write
       └──────────────────────────────► OVER        nothing was posted yet, or an earlier read from there is late

The proof is read after the data: a generation that is still the ticket's then shows that no byte of the block had been
overwritten when the data was read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from motet.transfer.base import (
    Failed,
    FailureKind,
    Landed,
    News,
    PullOrder,
    Read,
    ReadState,
    Settled,
    TransferError,
)
from motet.transfer.layout import Memory, merged
from motet.transfer.peer import Peer, PeerState
from motet.transfer.ticket import Ticket

WAITS_EVERY_S = 1.0
"""How often the lease hears of a pull under way; its owner polls for readers only while it knows of some."""


class Stage(Enum):
    MEETING = "meeting"
    READING = "reading"
    PROVING = "proving"
    SETTLING = "settling"
    OVER = "over"


MOVES = {
    Stage.MEETING: {Stage.READING, Stage.OVER},
    Stage.READING: {Stage.PROVING, Stage.SETTLING, Stage.OVER},
    Stage.PROVING: {Stage.OVER},
    Stage.SETTLING: {Stage.OVER},
    Stage.OVER: set(),
}


@dataclass(frozen=True)
class PullTerms:
    """How a pull is made."""

    reader: str
    """By which the lease knows who is done."""
    ordered_s: float
    timeout_s: float


class Pull:
    """Driven by `advance` until it is over."""

    def __init__(self, order: PullOrder, peer: Peer, terms: PullTerms, clock: Callable[[], float]) -> None:
        self.order = order
        self.peer = peer
        self._terms = terms
        self._clock = clock
        self._stage = Stage.MEETING
        self._open: Read | None = None
        self._shown: list[int] = []
        self._num_bytes = 0
        self._num_descriptors = 0
        self._post_seconds = 0.0
        self._next_sign_s = terms.ordered_s

    @property
    def over(self) -> bool:
        return self._stage is Stage.OVER

    def advance(self) -> News | None:
        """One look at it; the news, if that made any."""
        self._give_sign()
        try:
            news = self._look()
        except TransferError as error:  # a read could not be posted
            news = self._fail(error.kind, error.message)
        if news is None and self._clock() >= self._terms.ordered_s + self._terms.timeout_s:
            return self._overdue()
        return news

    def abandon(self) -> News | None:
        """Nobody wants it any more."""
        if self._stage in (Stage.SETTLING, Stage.OVER):
            return None  # has been told, or will be
        failed = self._stop(FailureKind.CLOSED, "abandoned")
        return Settled(self.order.number) if failed.settled else None

    def close(self) -> News | None:
        """Everything ends."""
        if self._stage in (Stage.SETTLING, Stage.OVER):
            return None
        return self._stop(FailureKind.CLOSED, "this worker stops")

    def _look(self) -> News | None:
        news = self._meeting() if self._stage is Stage.MEETING else None
        if self._stage is Stage.READING:
            news = self._reading()
        if self._stage is Stage.PROVING:
            news = self._proving()
        if self._stage is Stage.SETTLING:
            news = self._settling()
        return news

    def _meeting(self) -> News | None:
        error, memory = self.peer.error, self.peer.memory
        if self.peer.state is PeerState.GONE and error is not None:
            return self._fail(error.kind, error.message)
        if memory is None:
            return None
        if self.peer.late:  # after a link was cut, a connection may stand still for as long again
            return self._stop(FailureKind.TIMEOUT, f"{self.peer} still owes what was asked of it earlier")
        if problem := _outside(self.order.ticket, memory):
            return self._fail(FailureKind.REFUSED, problem)
        began_s = self._clock()
        self._open = self.peer.read_blocks(merged((remote, local) for remote, _, local in self.order.pairs))
        self._post_seconds += self._clock() - began_s
        self._num_bytes, self._num_descriptors = self._open.num_bytes, self._open.num_descriptors
        self._move(Stage.READING)
        return None

    def _reading(self) -> News | None:
        data, state = self._polled()
        if state is ReadState.RUNNING:
            return None
        if state is ReadState.FAILED:
            return self._lost()
        began_s = self._clock()
        self._open, self._shown = self.peer.read_proof(self._entries())
        self._post_seconds += self._clock() - began_s
        self.peer.drop(data)  # after the proof was posted: a peer that is GONE stays connected while reads are open
        self._move(Stage.PROVING)
        return None

    def _proving(self) -> News | None:
        _, state = self._polled()
        if state is ReadState.RUNNING:
            return None
        if state is ReadState.FAILED:
            return self._lost()
        *generations, digest = self._shown
        ticket = self.order.ticket
        if digest != ticket.digest:
            return self._fail(
                FailureKind.LEASE_ENDED, f"{self.peer} held no lease of this ticket when the data was read"
            )
        if generations != [generation for _, generation, _ in self.order.pairs]:
            self.peer.release(ticket.lease_id, self._terms.reader)
            return self._fail(FailureKind.STALE, f"blocks at {self.peer} had been given to someone else")
        self.peer.acknowledge(ticket.lease_id, self._terms.reader)
        self._finish()
        seconds = self._clock() - self._terms.ordered_s
        return Landed(self.order.number, self._num_bytes, self._num_descriptors, seconds, self._post_seconds)

    def _settling(self) -> News | None:
        _, state = self._polled()
        if state is ReadState.RUNNING:
            return None
        if state is ReadState.FAILED:
            self.peer.lose(f"the connection to {self.peer} broke", FailureKind.PEER_LOST)
        self._finish()
        return Settled(self.order.number)

    def _overdue(self) -> Failed | None:
        if self._stage is Stage.SETTLING:
            return None
        if self._stage is Stage.MEETING:
            return self._stop(FailureKind.UNREACHABLE, f"{self.peer} does not answer")
        if self._open is not None:
            self.peer.give_up(self._open)
        return self._stop(FailureKind.TIMEOUT, f"{self.peer} took longer than {self._terms.timeout_s:g} s")

    def _stop(self, kind: FailureKind, message: str) -> Failed:
        """Ends it from this side, whatever it is doing, and tells the lease."""
        self.peer.release(self.order.ticket.lease_id, self._terms.reader)
        if self._stage is not Stage.READING:
            return self._fail(kind, message)
        self._move(Stage.SETTLING)
        return Failed(self.order.number, kind, message, settled=False)

    def _lost(self) -> Failed:
        message = f"the connection to {self.peer} broke"
        self.peer.release(self.order.ticket.lease_id, self._terms.reader)  # perhaps only the connection is gone
        self.peer.lose(message, FailureKind.PEER_LOST)
        return self._fail(FailureKind.PEER_LOST, message)

    def _fail(self, kind: FailureKind, message: str) -> Failed:
        """Of a pull that writes nothing any more."""
        self._finish()
        return Failed(self.order.number, kind, message, settled=True)

    def _finish(self) -> None:
        self._move(Stage.OVER)
        if self._open is not None:
            self.peer.drop(self._open)
            self._open = None

    def _entries(self) -> list[int]:
        """Of the peer's proof: the generations of the blocks that are read, and the lease."""
        memory = self.peer.memory
        num_blocks = 0 if memory is None else memory.num_blocks
        return [*(remote for remote, _, _ in self.order.pairs), num_blocks + self.order.ticket.lease_slot]

    def _polled(self) -> tuple[Read, ReadState]:
        if self._open is None:
            raise AssertionError(f"a pull that is {self._stage.value} has no read open")
        return self._open, self._open.poll()

    def _give_sign(self) -> None:
        now_s = self._clock()
        if now_s < self._next_sign_s or self._stage is Stage.SETTLING:
            return
        self._next_sign_s = now_s + WAITS_EVERY_S
        self.peer.waits(self.order.ticket.lease_id)

    def _move(self, stage: Stage) -> None:
        if stage not in MOVES[self._stage]:
            raise AssertionError(f"a pull cannot go from {self._stage.value} to {stage.value}")
        self._stage = stage


def _outside(ticket: Ticket, memory: Memory) -> str | None:
    """What the ticket, which came through a client's hands, names and the peer does not have."""
    if wrong := [block for block in ticket.remote_block_ids if not 0 <= block < memory.num_blocks]:
        return f"the ticket names block {wrong[0]} of a worker that has {memory.num_blocks}"
    slots = memory.proof_entries - memory.num_blocks
    if not 0 <= ticket.lease_slot < slots:
        return f"the ticket names lease slot {ticket.lease_slot} of a worker that has {slots}"
    return None

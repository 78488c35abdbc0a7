"""Another worker, as a reader of its memory knows it.

    ASKING ── Welcome ──► MET ──► GONE      no answer, another start of it, refused, connection lost
       └─────────────────────────► GONE

A peer that is GONE stays connected until no read of it can write any more: a transport that forgets a peer does not
stop what the peer is doing. It never comes back; the next who wants the worker makes a new Peer.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from motet.transfer import channel
from motet.transfer.base import FailureKind, Read, ReadState, TransferError, Transport
from motet.transfer.channel import Answer, Attend, Hello, Question, Refused, Release, SomeoneElse, Waits, Welcome
from motet.transfer.layout import KVFacts, Memory, Run
from motet.transfer.ticket import TransferAddress

ATTEND_EVERY_S = 1.0
"""How often a worker is told that reads of it are open: it polls for readers only while it knows of some."""


class PeerState(Enum):
    ASKING = "asking"
    MET = "met"
    GONE = "gone"


class Channel(Protocol):
    """A line to the worker (`line.Line`)."""

    def say(self, question: Question, nonce: bytes) -> None: ...

    def answers(self) -> list[tuple[bytes, Answer]]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Caller:
    """Who asks, and how long for."""

    facts: KVFacts
    answer_s: float
    """Without an answer for so long a worker counts as unreachable."""
    clock: Callable[[], float] = time.monotonic


class Peer:
    """Owns the line to a worker, the transport's connection, and every read of it."""

    def __init__(self, address: TransferAddress, caller: Caller, transport: Transport, line: Channel) -> None:
        self.address = address
        self.state = PeerState.ASKING
        self.error: TransferError | None = None
        """Why it is GONE."""
        self.memory: Memory | None = None
        """Known once it was MET."""
        self.heard_s = caller.clock()
        """When it last answered, or a read of it ended."""
        self._caller = caller
        self._line = line
        self._transport = transport
        self._nonce = b""
        self._answer_due_s: float | None = None
        self._name: str | None = None
        self._wiring: Read | None = None
        self._dropped: list[Read] = []
        self._late: list[Read] = []
        self._reads = 0
        self._next_attend_s = 0.0
        self._closed = False

    def __str__(self) -> str:
        return f"the worker at {self.address.host}:{self.address.port}"

    @property
    def ready(self) -> bool:
        """Met, heard of since it was last asked, and once read from, which is what wires a connection."""
        return self.state is PeerState.MET and self._answer_due_s is None and self._wiring is None

    @property
    def late(self) -> bool:
        """Whether a read of it was given up and is not final yet: another one would wait behind it."""
        return bool(self._late)

    @property
    def busy(self) -> bool:
        """Whether it must be looked at every millisecond."""
        return not self._closed and (self._answer_due_s is not None or self._reads > 0)

    @property
    def closed(self) -> bool:
        """GONE, with nothing left that could write."""
        return self._closed

    def ask(self) -> None:
        """Says Hello; also to a peer that was met, to see whether it is still there."""
        self._nonce = channel.new_nonce()
        self._answer_due_s = self._caller.clock() + self._caller.answer_s
        self._line.say(Hello(self.address.engine_id, self._caller.facts), self._nonce)

    def advance(self) -> None:
        """Takes answers, finds out about silence, and closes reads that nobody wants."""
        if self._closed:
            return
        for nonce, answer in self._line.answers():
            if nonce == self._nonce and self.state is not PeerState.GONE:
                self._hear(answer)
        if self._answer_due_s is not None and self._caller.clock() >= self._answer_due_s:
            self.lose(f"{self} does not answer", FailureKind.UNREACHABLE)
        if self._reads and self._caller.clock() >= self._next_attend_s:
            self._next_attend_s = self._caller.clock() + ATTEND_EVERY_S
            self._say(Attend())
        self._look_at_wiring()
        for read in [read for read in self._dropped if read.poll() is not ReadState.RUNNING]:
            self._dropped.remove(read)
            self._close_read(read)

    def lose(self, message: str, kind: FailureKind) -> None:
        """It is GONE from now on; the first reason stays."""
        if self.state is PeerState.GONE:
            return
        self.state = PeerState.GONE
        self.error = TransferError(message, kind)
        self._answer_due_s = None
        self._close_if_over()

    def read_blocks(self, runs: list[Run]) -> Read:
        """Raises TransferError; the peer is GONE then. Every read must be dropped once."""
        try:
            read = self._transport.read_blocks(self._connected, runs)
        except TransferError as error:
            self.lose(error.message, error.kind)
            raise
        self._count_read()
        return read

    def read_proof(self, entries: list[int]) -> tuple[Read, list[int]]:
        """As `read_blocks`."""
        try:
            read, values = self._transport.read_proof(self._connected, entries)
        except TransferError as error:
            self.lose(error.message, error.kind)
            raise
        self._count_read()
        return read, values

    def drop(self, read: Read) -> None:
        """Nobody wants its outcome; it is kept until it is final."""
        if read.poll() is ReadState.RUNNING:
            self._dropped.append(read)
        else:
            self._close_read(read)

    def give_up(self, read: Read) -> None:
        """It took too long. It must be dropped all the same."""
        self._late.append(read)

    def acknowledge(self, lease_id: int, reader: str) -> None:
        """Tells the lease that its data was read and verified."""
        self._transport.notify(self._connected, channel.notification(Release(lease_id, reader)))

    def release(self, lease_id: int, reader: str) -> None:
        """Tells the lease that this reader wants nothing more, as far as it can be told."""
        self._say(Release(lease_id, reader))

    def waits(self, lease_id: int) -> None:
        self._say(Waits(lease_id))

    def close(self) -> None:
        """At the end of everything: reads that are still open are left as they are."""
        if not self._closed:
            self._closed = True
            self._line.close()
            if self._name is not None:
                self._transport.disconnect(self._name)

    @property
    def _connected(self) -> str:
        if self._name is None:
            raise TransferError(f"{self} was never met", FailureKind.UNREACHABLE)
        return self._name

    def _say(self, question: Question) -> None:
        if not self._closed:
            self._line.say(question, channel.new_nonce())

    def _hear(self, answer: Answer) -> None:
        match answer:
            case Welcome(engine_id) if engine_id == self.address.engine_id:
                self._answer_due_s = None
                self.heard_s = self._caller.clock()
                if self.state is PeerState.ASKING:
                    self._connect(answer)
            case Welcome() | SomeoneElse():
                self.lose(f"{self} was restarted", FailureKind.RESTARTED)
            case Refused(reason):
                self.lose(f"{self} refuses: {reason}", FailureKind.REFUSED)

    def _connect(self, welcome: Welcome) -> None:
        try:
            self._name = self._transport.connect(welcome.description, welcome.memory)
        except TransferError as error:
            self.lose(error.message, error.kind)
            return
        self.memory = welcome.memory
        self.state = PeerState.MET
        with contextlib.suppress(TransferError):  # GONE then
            self._wiring, _ = self.read_proof([0])

    def _look_at_wiring(self) -> None:
        if self._wiring is None or (state := self._wiring.poll()) is ReadState.RUNNING:
            return
        wiring, self._wiring = self._wiring, None
        if state is ReadState.FAILED:
            self.lose(f"the connection to {self} broke", FailureKind.PEER_LOST)
        self._close_read(wiring)

    def _count_read(self) -> None:
        if not self._reads:
            self._next_attend_s = self._caller.clock() + ATTEND_EVERY_S
        self._reads += 1

    def _close_read(self, read: Read) -> None:
        read.close()
        self._reads -= 1
        self._late = [late for late in self._late if late is not read]
        self.heard_s = self._caller.clock()
        self._close_if_over()

    def _close_if_over(self) -> None:
        if self.state is PeerState.GONE and not self._reads:
            self.close()

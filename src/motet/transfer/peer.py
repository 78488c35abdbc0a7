"""Another worker from which this one reads (`Peer`), and all of them (`Peers`).

    asking ── Welcome ──► met ──► gone      no answer, another start of it, refused, connection lost
       └─────────────────────────► gone

A peer that is gone stays connected until no read of it can write any more: a transport that forgets a peer does not
stop what the peer is doing. It never comes back; the next order that needs the worker makes a new Peer.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from motet.transfer.orders import FailureKind, ReaderDone, ReaderWaits, TransferError
from motet.transfer.side_channel import (
    ChannelReply,
    ChannelRequest,
    Hello,
    PollRequest,
    Refused,
    SideChannelClient,
    Welcome,
    WrongStart,
    new_nonce,
)
from motet.transfer.ticket import TransferAddress
from motet.transfer.transport import BlockRun, KVFacts, PostedRead, ReadState, RegisteredMemory, Transport

logger = logging.getLogger(__name__)

ATTEND_EVERY_S = 1.0
"""Seconds between two messages that reads are open: a worker polls for readers only while it knows of some."""
SILENT_S = 60.0
"""After this many seconds without an answer a worker may have gone for good. It is asked when the next one is met, so
where workers often end and come back at other ports, connections to those that have ended are few."""


@dataclass(frozen=True)
class ReaderTerms:
    """What a reader tells other workers about itself, and how long it waits for them."""

    facts: KVFacts
    answer_s: float
    """A worker that does not answer for this many seconds counts as unreachable."""
    clock: Callable[[], float]


@dataclass(eq=False)
class Peer:
    """Owns the dealer to a worker, the transport's connection, and every read of it."""

    address: TransferAddress
    terms: ReaderTerms
    transport: Transport
    dealer: SideChannelClient

    def __post_init__(self) -> None:
        self.error: TransferError | None = None
        """The reason why it is gone; None while it is not."""
        self.memory: RegisteredMemory | None = None
        """The worker's memory; None until it is met."""
        self.heard_s = self.terms.clock()
        """Time at which the worker last answered, or a read of it ended."""
        self._nonce = b""
        self._answer_due_s: float | None = None
        self._name = ""
        """The transport's name for it; empty until it is met."""
        self._wiring: PostedRead | None = None
        self._dropped: list[PostedRead] = []
        self._late: list[PostedRead] = []
        self._num_reads = 0
        self._next_attend_s = 0.0
        self.closed = False
        """True if the peer is gone, with nothing left that could write."""

    def __str__(self) -> str:
        return f"the worker at {self.address.host}:{self.address.port}"

    @property
    def ready(self) -> bool:
        """True if the worker was met, has answered the last question, and was read from, which sets up a connection."""
        met = self.memory is not None and self.error is None
        return met and self._answer_due_s is None and self._wiring is None

    @property
    def late(self) -> bool:
        """True if a read was given up and is not final yet: another one would have to wait for it."""
        return bool(self._late)

    @property
    def busy(self) -> bool:
        """True if the peer must be looked at every millisecond."""
        return not self.closed and (self._answer_due_s is not None or self._num_reads > 0)

    def ask(self) -> None:
        """Sends Hello, also to a worker that was met, to see if it is still there."""
        self._nonce = new_nonce()
        self._answer_due_s = self.terms.clock() + self.terms.answer_s
        self.dealer.send(Hello(self.address.engine_id, self.terms.facts), self._nonce)

    def advance(self) -> None:
        """Reads replies, notices silence, and closes reads that nobody wants."""
        if self.closed:
            return
        for nonce, reply in self.dealer.replies():
            if nonce == self._nonce and self.error is None:
                self._hear(reply)
        if self._answer_due_s is not None and self.terms.clock() >= self._answer_due_s:
            self.lose(f"{self} does not answer", FailureKind.UNREACHABLE)
        if self._num_reads and self.terms.clock() >= self._next_attend_s:
            self._next_attend_s = self.terms.clock() + ATTEND_EVERY_S
            self._send(PollRequest())
        self._look_at_wiring()
        for read in [read for read in self._dropped if read.poll() is not ReadState.RUNNING]:
            self._dropped.remove(read)
            self._close_read(read)

    def lose(self, message: str, kind: FailureKind) -> None:
        """Marks the peer as gone; the first reason stays."""
        if self.error is None:
            self.error = TransferError(message, kind)
            self._answer_due_s = None
            self._close_if_over()

    def read_blocks(self, runs: list[BlockRun]) -> PostedRead:
        """Posts a read, which must be dropped once. If it raises TransferError, the peer is gone."""
        with self._counted():
            return self.transport.read_blocks(self._name, runs)

    def read_proof(self, entries: list[int]) -> tuple[PostedRead, list[int]]:
        """Posts a read of proof entries, under the rules of `read_blocks`."""
        with self._counted():
            return self.transport.read_proof(self._name, entries)

    def drop(self, read: PostedRead) -> None:
        """Keeps a read whose result nobody wants any more until it is final."""
        if read.poll() is ReadState.RUNNING:
            self._dropped.append(read)
        else:
            self._close_read(read)

    def give_up(self, read: PostedRead) -> None:
        """Notes that a read took too long. It must still be dropped."""
        self._late.append(read)

    def acknowledge(self, lease_id: int, reader: str) -> None:
        """Tells the lease that its data has been read and verified."""
        self.transport.notify(self._name, msgspec.msgpack.encode(ReaderDone(lease_id, reader)))

    def release(self, lease_id: int, reader: str) -> None:
        """Tells the lease, if it can be reached, that this reader wants nothing more."""
        self._send(ReaderDone(lease_id, reader))

    def waits(self, lease_id: int) -> None:
        """Tells the lease that one of its readers is alive."""
        self._send(ReaderWaits(lease_id))

    def close(self) -> None:
        """Ends the connection, and leaves reads that are still open as they are."""
        if not self.closed:
            self.closed = True
            self.dealer.close()
            if self._name:
                self.transport.disconnect(self._name)

    def _send(self, request: ChannelRequest) -> None:
        if not self.closed:
            self.dealer.send(request, new_nonce())

    def _hear(self, reply: ChannelReply) -> None:
        match reply:
            case Welcome(engine_id) if engine_id == self.address.engine_id:
                self._answer_due_s = None
                self.heard_s = self.terms.clock()
                if self.memory is None:
                    self._connect(reply)
            case Welcome() | WrongStart():
                self.lose(f"{self} was restarted", FailureKind.RESTARTED)
            case Refused(reason):
                self.lose(f"{self} refuses: {reason}", FailureKind.REFUSED)

    def _connect(self, welcome: Welcome) -> None:
        try:
            self._name = self.transport.connect(welcome.description, welcome.memory)
        except TransferError as error:
            self.lose(error.message, error.kind)
            return
        self.memory = welcome.memory
        with contextlib.suppress(TransferError):  # the peer is gone then
            self._wiring, _ = self.read_proof([0])

    def _look_at_wiring(self) -> None:
        if self._wiring is None or (state := self._wiring.poll()) is ReadState.RUNNING:
            return
        wiring, self._wiring = self._wiring, None
        if state is ReadState.FAILED:
            self.lose(f"the connection to {self} broke", FailureKind.PEER_LOST)
        self._close_read(wiring)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Surrounds the code that posts a read."""
        try:
            yield
        except TransferError as error:
            self.lose(error.message, error.kind)
            raise
        if not self._num_reads:
            self._next_attend_s = self.terms.clock() + ATTEND_EVERY_S
        self._num_reads += 1

    def _close_read(self, read: PostedRead) -> None:
        read.close()
        self._num_reads -= 1
        self._late = [late for late in self._late if late is not read]
        self.heard_s = self.terms.clock()
        self._close_if_over()

    def _close_if_over(self) -> None:
        if self.error is not None and not self._num_reads:
            self.close()


@dataclass(eq=False)
class Peers:
    """The workers that this one reads from. Each start of a worker is a new `Peer`, made when it is first needed."""

    make_dealer: Callable[[TransferAddress], SideChannelClient]
    """Raises TransferError if it cannot be an address."""
    terms: ReaderTerms
    transport: Transport

    def __post_init__(self) -> None:
        self._peers: dict[TransferAddress, Peer] = {}
        self._leaving: list[Peer] = []
        """Peers that are gone, with reads that may still write."""

    @property
    def busy(self) -> bool:
        """True if any peer must be looked at every millisecond."""
        return any(peer.busy for peer in self._all())

    def at(self, address: TransferAddress) -> Peer:
        """Returns the peer at an address; a new one is asked at once. Raises TransferError for a bad address."""
        peer = self._peers.get(address)
        if peer is None or peer.error is not None:
            self._sort_out()
            peer = Peer(address, self.terms, self.transport, self.make_dealer(address))
            self._peers[address] = peer
            peer.ask()
        return peer

    def advance(self) -> None:
        for peer in self._all():
            was_met = peer.memory is not None
            try:
                peer.advance()
            except Exception as error:  # whatever a worker sends, only its own transfers end
                logger.exception("the messages of %s cannot be understood", peer)
                peer.lose(f"the messages of {peer} cannot be understood: {error!r}", FailureKind.REFUSED)
            if peer.memory is not None and not was_met and peer.error is None:
                self._look_after_others(peer)
        self._sort_out()

    def close(self) -> None:
        for peer in self._all():
            peer.close()

    def _all(self) -> list[Peer]:
        return [*self._peers.values(), *self._leaving]

    def _look_after_others(self, met: Peer) -> None:
        """Marks earlier starts of the worker just met as gone, and asks silent workers: some may have gone for good."""
        silent_since_s = self.terms.clock() - SILENT_S
        for peer in list(self._peers.values()):
            if peer is not met and (peer.address.host, peer.address.port) == (met.address.host, met.address.port):
                peer.lose(f"{peer} was restarted", FailureKind.RESTARTED)
            elif peer.ready and peer.heard_s <= silent_since_s:
                peer.ask()

    def _sort_out(self) -> None:
        """Takes peers that are gone out of the books, and forgets those that are closed."""
        for address, peer in list(self._peers.items()):
            if peer.error is not None:
                self._leaving.append(self._peers.pop(address))
        self._leaving = [peer for peer in self._leaving if not peer.closed]

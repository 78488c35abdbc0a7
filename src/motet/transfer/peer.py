"""Another worker from which this one reads (`Peer`), the reads from it (`PeerConnection`), and all peers (`Peers`).

    introducing ── Welcome ──► connected ──► lost ──► closed
         └─────────────────────────────────►

1. A new peer is sent a Hello. Its Welcome describes its memory, and the transport connects to it.
2. The first read, of one entry of the proof, sets up the connection. The peer is ready when this read is final.
3. A peer is lost when it does not answer, refuses, has restarted, or its connection breaks.
4. A lost peer stays connected until no read from it can write any more, and is then closed: a transport that
   disconnects does not stop what the peer is doing. The next order that needs the worker makes a new Peer.

A pull polls its read until the read is final, and then closes it. If a read is not final in time, it becomes overdue:
its bytes can still arrive, so it stays open here until it is final.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from motet.transfer.orders import FailureKind, ReaderDone, ReaderHeartbeat, TransferError
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

POLL_REQUEST_EVERY_S = 1.0
"""Interval in seconds of requests to poll while reads from a worker are open. A worker polls only for known readers."""
SILENCE_S = 60.0
"""Time in seconds without an answer after which a worker is sent a new Hello as soon as another worker is connected:
the silent worker can be gone for good. Where workers often end and return at other ports, this limits the number of
connections to workers that have ended."""


@dataclass(frozen=True)
class ReaderTerms:
    """The description that a reader sends to other workers, and the time limits for their answers."""

    facts: KVFacts
    answer_s: float
    """Time in seconds after which a worker that has not answered counts as unreachable."""
    clock: Callable[[], float]


@dataclass(eq=False)
class PeerChannel:
    """The messages to one process of another worker, and its answers to Hello. Owns the client of the side channel."""

    address: TransferAddress
    terms: ReaderTerms
    client: SideChannelClient

    def __post_init__(self) -> None:
        self.answered_s = self.terms.clock()
        """Time of the last Welcome; before the first one, the time at which this channel was made."""
        self._nonce = b""
        """Nonce of the last Hello."""
        self._answer_due_s: float | None = None
        """Deadline of the answer to the last Hello; None if no answer is awaited."""
        self._closed = False

    def __str__(self) -> str:
        return f"the worker at {self.address.host}:{self.address.port}"

    @property
    def awaits_answer(self) -> bool:
        return self._answer_due_s is not None

    @property
    def answer_is_overdue(self) -> bool:
        return self._answer_due_s is not None and self.terms.clock() >= self._answer_due_s

    def send_hello(self) -> None:
        """Sends Hello. A connected worker gets another Hello to find out if it is still there."""
        self._nonce = new_nonce()
        self._answer_due_s = self.terms.clock() + self.terms.answer_s
        self.client.send(Hello(self.address.engine_id, self.terms.facts), self._nonce)

    def answers(self) -> list[ChannelReply]:
        """Returns the replies to the last Hello. Replies to other messages are dropped."""
        return [reply for nonce, reply in self.client.replies() if nonce == self._nonce]

    def accept_welcome(self) -> None:
        self.stop_waiting()
        self.answered_s = self.terms.clock()

    def stop_waiting(self) -> None:
        self._answer_due_s = None

    def send(self, request: ChannelRequest) -> None:
        """Sends a message, unless the channel is closed. Does not wait for an answer."""
        if not self._closed:
            self.client.send(request, new_nonce())

    def send_heartbeat(self, lease_id: int) -> None:
        """Reports to the owner of a lease that a reader still needs the lease."""
        self.send(ReaderHeartbeat(lease_id))

    def release(self, lease_id: int, reader: str) -> None:
        """Reports to the owner of a lease, if it can be reached, that this reader does not need the lease."""
        self.send(ReaderDone(lease_id, reader))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.client.close()


@dataclass(eq=False)
class PeerConnection:
    """The transport's connection to a peer, and the reads over it that are not closed. Owned by the `Peer`."""

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
        self.overdue: list[PostedRead] = []
        """Reads whose time is over and that are not final yet. A new read would have to wait for them."""

    def close_read(self, read: PostedRead) -> None:
        self._closing.append(read)
        self.close_final_reads()

    def close_final_reads(self) -> None:
        """Closes the reads that were to be closed and have become final."""
        for read in [read for read in self._closing if read.poll() is not ReadState.RUNNING]:
            self._closing.remove(read)
            read.close()
            self.num_reads -= 1
            self.overdue = [overdue for overdue in self.overdue if overdue is not read]
            self.last_closed_s = self.clock()


@dataclass(eq=False)
class Peer:
    """One process of another worker: a restarted worker is another peer. Owns the side channel and the connection."""

    channel: PeerChannel
    transport: Transport

    def __post_init__(self) -> None:
        self.error: TransferError | None = None
        """Reason why the peer is lost; None while it is not."""
        self.connection: PeerConnection | None = None
        """The connection, once the worker's Welcome has arrived."""
        self.closed = False
        """True if the peer is lost and no read from it is open."""
        self._first_read: PostedRead | None = None
        """The read that sets up the connection, while it is open."""
        self._next_poll_request_s = 0.0

    def __str__(self) -> str:
        return str(self.channel)

    @property
    def ready(self) -> bool:
        """True if the worker has answered the last Hello, and the first read from it has set up a connection."""
        connected = self.connection is not None and self.error is None
        return connected and not self.channel.awaits_answer and self._first_read is None

    @property
    def busy(self) -> bool:
        """True if `advance` must be called every millisecond."""
        return not self.closed and (self.channel.awaits_answer or self._num_reads > 0)

    @property
    def last_active_s(self) -> float:
        """Time at which the worker last answered, or a read from it was last closed."""
        answered_s = self.channel.answered_s
        return answered_s if self.connection is None else max(answered_s, self.connection.last_closed_s)

    def advance(self) -> None:
        """Handles answers, detects silence, and closes reads that have become final."""
        if self.closed:
            return
        for reply in self.channel.answers():
            if self.error is None:
                self._handle(reply)
        if self.channel.answer_is_overdue:
            self.mark_lost(f"{self} does not answer", FailureKind.UNREACHABLE)
        now_s = self.channel.terms.clock()
        if self._num_reads and now_s >= self._next_poll_request_s:
            self._next_poll_request_s = now_s + POLL_REQUEST_EVERY_S
            self.channel.send(PollRequest())
        self._check_first_read()
        if self.connection is not None:
            self.connection.close_final_reads()
        self._close_if_over()

    def mark_lost(self, message: str, kind: FailureKind) -> None:
        """Marks the peer as lost. The first reason stays."""
        if self.error is None:
            self.error = TransferError(message, kind)
            self.channel.stop_waiting()
            self._close_if_over()

    def read_blocks(self, runs: list[BlockRun]) -> PostedRead:
        """Posts a read, which the caller must `close_read`. If it raises TransferError, the peer is lost."""
        with self._posting() as connection:
            return self.transport.read_blocks(connection.name, runs)

    def read_proof(self, blocks: list[int], lease_slot: int | None = None) -> tuple[PostedRead, list[int]]:
        """Posts a read of the proof's entries for `blocks` and, if given, for `lease_slot`; the list has them when the
        read is done. The caller must `close_read` the read. If it raises TransferError, the peer is lost."""
        with self._posting() as connection:
            slots = [] if lease_slot is None else [connection.memory.num_blocks + lease_slot]
            return self.transport.read_proof(connection.name, [*blocks, *slots])

    def close_read(self, read: PostedRead) -> None:
        """Closes a read, now or as soon as it is final."""
        self._connected().close_read(read)
        self._close_if_over()

    def mark_overdue(self, read: PostedRead) -> None:
        """Marks a read whose time is over. The caller must still close it."""
        self._connected().overdue.append(read)

    def acknowledge(self, lease_id: int, reader: str) -> None:
        """Reports to the owner of a lease that its data has been read and verified."""
        self.transport.notify(self._connected().name, msgspec.msgpack.encode(ReaderDone(lease_id, reader)))

    def close(self) -> None:
        """Ends the side channel and the connection. Does not close reads."""
        if not self.closed:
            self.closed = True
            self.channel.close()
            if self.connection is not None:
                self.transport.disconnect(self.connection.name)

    @property
    def _num_reads(self) -> int:
        return 0 if self.connection is None else self.connection.num_reads

    def _connected(self) -> PeerConnection:
        """Raises TransferError before the worker's Welcome has come."""
        if self.connection is None:
            raise TransferError(f"there is no connection to {self}", FailureKind.PEER_LOST)
        return self.connection

    def _handle(self, reply: ChannelReply) -> None:
        match reply:
            case Welcome(engine_id) if engine_id == self.channel.address.engine_id:
                self.channel.accept_welcome()
                if self.connection is None:
                    self._connect(reply)
            case Welcome() | WrongStart():
                self.mark_lost(f"{self} has restarted", FailureKind.RESTARTED)
            case Refused(reason):
                self.mark_lost(f"{self} refuses: {reason}", FailureKind.REFUSED)

    def _connect(self, welcome: Welcome) -> None:
        try:
            name = self.transport.connect(welcome.description, welcome.memory)
        except TransferError as error:
            self.mark_lost(error.message, error.kind)
            return
        self.connection = PeerConnection(name, welcome.memory, self.channel.terms.clock)
        with contextlib.suppress(TransferError):  # the peer is lost then
            self._first_read, _ = self.read_proof([0])

    def _check_first_read(self) -> None:
        if self._first_read is None or (state := self._first_read.poll()) is ReadState.RUNNING:
            return
        first_read, self._first_read = self._first_read, None
        if state is ReadState.FAILED:
            self.mark_lost(f"the connection to {self} broke", FailureKind.PEER_LOST)
        self.close_read(first_read)

    @contextlib.contextmanager
    def _posting(self) -> Iterator[PeerConnection]:
        """Surrounds the code that posts a read, and counts the read."""
        try:
            connection = self._connected()
            yield connection
        except TransferError as error:
            self.mark_lost(error.message, error.kind)
            raise
        connection.num_reads += 1
        if connection.num_reads == 1:
            self._next_poll_request_s = self.channel.terms.clock() + POLL_REQUEST_EVERY_S

    def _close_if_over(self) -> None:
        if self.error is not None and not self._num_reads:
            self.close()


@dataclass(eq=False)
class Peers:
    """The workers from which this one reads. Each start of a worker is a new `Peer`, made when it is first needed."""

    connect_side_channel: Callable[[TransferAddress], SideChannelClient]
    """Raises TransferError if the address is invalid."""
    terms: ReaderTerms
    transport: Transport

    def __post_init__(self) -> None:
        self._peers: dict[TransferAddress, Peer] = {}
        self._lost: list[Peer] = []
        """Lost peers with reads that are still open."""

    @property
    def busy(self) -> bool:
        return any(peer.busy for peer in self._all())

    def at(self, address: TransferAddress) -> Peer:
        """Returns the peer at an address; a new one is sent a Hello. Raises TransferError for an invalid address."""
        peer = self._peers.get(address)
        if peer is None or peer.error is not None:
            self._move_lost()
            channel = PeerChannel(address, self.terms, self.connect_side_channel(address))
            self._peers[address] = peer = Peer(channel, self.transport)
            channel.send_hello()
        return peer

    def advance(self) -> None:
        """Advances all peers. An unexpected error loses only the peer that caused it."""
        for peer in self._all():
            was_connected = peer.connection is not None
            try:
                peer.advance()
            except Exception as error:
                logger.exception("cannot handle the messages of %s", peer)
                peer.mark_lost(f"the messages of {peer} cannot be handled: {error!r}", FailureKind.REFUSED)
            if peer.connection is not None and not was_connected and peer.error is None:
                self._check_others(peer)
        self._move_lost()

    def close(self) -> None:
        for peer in self._all():
            peer.close()

    def _all(self) -> list[Peer]:
        return [*self._peers.values(), *self._lost]

    def _check_others(self, connected: Peer) -> None:
        """Marks earlier starts of a newly connected worker as lost, and sends Hello to silent workers."""
        silent_since_s = self.terms.clock() - SILENCE_S
        new = connected.channel.address
        for address, peer in list(self._peers.items()):
            if peer is not connected and (address.host, address.port) == (new.host, new.port):
                peer.mark_lost(f"{peer} has restarted", FailureKind.RESTARTED)
            elif peer.ready and peer.last_active_s <= silent_since_s:
                peer.channel.send_hello()

    def _move_lost(self) -> None:
        """Moves lost peers out of the table by address, and forgets closed ones."""
        for address, peer in list(self._peers.items()):
            if peer.error is not None:
                self._lost.append(self._peers.pop(address))
        self._lost = [peer for peer in self._lost if not peer.closed]

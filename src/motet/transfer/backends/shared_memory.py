"""Moves blocks between processes of one user on one machine, through memory that the two processes share.

    reader: ReadingConnection                          owner: ServingConnection

1     Open ────────────────────────────────────────────►   names a segment of the reader (`shared_segment`)
2            ◄──────────────────────────────────────────── Opened or Rejected
3     ReadRequest ─────────────────────────────────────►   pieces of the KV memory, or of the proof
4            ◄──────────────────────────────────────────── Piece: the next bytes are in the next slot
5     Taken ───────────────────────────────────────────►   the slot is free again
6     Notification ────────────────────────────────────►   the message of `notify`

The owner copies from its memory to a slot, and the reader copies from the slot to its memory. The KV memory itself is
private memory: it keeps its huge pages, and no other process can read or write it. The messages travel over TCP on
loopback. The connection ends with either process, even if it is killed, so a reader never waits for an owner that is
gone, and the system calls order the copies of the two processes on every kind of processor.

Both sides prove that they know the secret in the segment. Only processes of the same user can read it, so a process of
another user that connects to the port of a worker, or takes the port of a worker that is gone, can read and send
nothing. Each call of `poll` copies at most the slots of each connection, so it takes less than a millisecond or two.

A read is final as soon as its connection ends: the reader itself writes into its memory, so no bytes can arrive later.
"""

import contextlib
import socket
from array import array
from collections.abc import Iterator

import msgspec
import zmq

from motet.errors import StartupError
from motet.transfer.backends.shared_connection import (
    OWNER_FRAMES,
    READER_FRAMES,
    FrameSocket,
    Notification,
    ReadingConnection,
    ServingConnection,
    SharedMemoryRead,
)
from motet.transfer.backends.shared_segment import SharedSegment, remove_abandoned
from motet.transfer.orders import FailureKind, TransferError
from motet.transfer.ticket import TransportKind
from motet.transfer.transport import (
    ENTRY_BYTES,
    BlockRun,
    RegisteredMemory,
    block_spans,
    check_pieces,
    check_shapes,
    entry_spans,
)

LOOPBACK = "127.0.0.1"
BACKLOG = 128
CONNECT_TIMEOUT_S = 0.2
"""Time in seconds to connect to a port of this machine. The system accepts connections for a process that hangs."""
MAX_UNPROVED = 32
"""Maximum number of connections whose process has not proved to belong to this user; the oldest is closed."""


class Description(msgspec.Struct, frozen=True):
    """The contents of `SharedMemoryTransport.describe`."""

    name: str
    port: int


DESCRIPTIONS = msgspec.msgpack.Decoder(Description)


class SharedMemoryTransport:
    """The connections of one worker, as a reader and as an owner."""

    kind = TransportKind.SHARED_MEMORY

    def __init__(self, name: str, memory: RegisteredMemory, *, poller: zmq.Poller | None = None) -> None:
        """`name`: new each time a worker starts. `poller`: the sockets are registered with it, so that a thread that
        waits in its `poll` wakes when a peer has sent something. Raises StartupError."""
        if memory.device >= 0:
            raise StartupError("shared memory cannot move the KV of a GPU: install NIXL (pip install nixl-cu13)")
        self._memory = memory
        self._poller = zmq.Poller() if poller is None else poller
        self._reading: dict[str, ReadingConnection] = {}
        """Connections to owners by their names."""
        self._serving: list[ServingConnection] = []
        self._registered = True
        self._closed = False
        remove_abandoned()
        try:
            self._listening = socket.create_server((LOOPBACK, 0), backlog=BACKLOG)
        except OSError as error:
            raise StartupError(f"the shared-memory transport cannot listen on {LOOPBACK}: {error.strerror}") from error
        self._listening.setblocking(False)
        self._poller.register(self._listening, zmq.POLLIN)
        self._description = Description(name, self._listening.getsockname()[1])

    def describe(self) -> bytes:
        return msgspec.msgpack.encode(self._description)

    def connect(self, description: bytes, memory: RegisteredMemory) -> str:
        self._check_open()
        check_shapes(local=self._memory, remote=memory)
        try:
            owner = DESCRIPTIONS.decode(description)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TransferError(f"the worker's description is invalid: {error}", FailureKind.REFUSED) from error
        if owner.name == self._description.name:
            raise TransferError("this worker cannot read from itself", FailureKind.REFUSED)
        known = self._reading.get(owner.name)
        if known is None or known.broken:
            known = self._reading[owner.name] = self._connected(owner, memory)
        known.memory, known.leaving = memory, False
        return owner.name

    def disconnect(self, peer: str) -> None:
        if known := self._reading.get(peer):
            known.leaving = True
            self._remove_finished()

    def read_blocks(self, peer: str, runs: list[BlockRun]) -> SharedMemoryRead:
        known, pieces = self._known(peer), [(run.remote, run.count) for run in runs]
        check_pieces(pieces, known.memory.num_blocks, what="block")
        spans = block_spans(self._memory, [(run.local, run.count) for run in runs])
        return known.post(SharedMemoryRead(known, spans), pieces, of_proof=False)

    def read_proof(self, peer: str, entries: list[int]) -> tuple[SharedMemoryRead, list[int]]:
        known, pieces = self._known(peer), [(entry, 1) for entry in entries]
        check_pieces(pieces, known.memory.proof_entries, what="proof entry")
        buffer, values = array("q", bytes(ENTRY_BYTES * len(entries))), list[int]()
        spans = entry_spans(buffer.buffer_info()[0], [(0, len(entries))])
        read = SharedMemoryRead(known, spans, on_done=lambda: values.extend(buffer))
        return known.post(read, pieces, of_proof=True), values

    def notify(self, peer: str, message: bytes) -> None:
        with contextlib.suppress(TransferError):
            self._known(peer).send(Notification(message))

    def has_arrivals(self) -> bool:
        sockets = {self._listening.fileno(), *(connection.frames.fileno() for connection in self._connections())}
        return any(descriptor in sockets for descriptor, _ in self._poller.poll(0))

    def poll(self) -> list[bytes]:
        self._check_open()
        self._accept()
        for reading in self._reading.values():
            reading.advance()
        messages = [message for serving in self._serving for message in serving.advance(registered=self._registered)]
        self._remove_finished()
        return messages

    def deregister_blocks(self) -> bool:
        for reading in self._reading.values():
            reading.advance()
        if any(reading.num_running for reading in self._reading.values()):
            return False
        self._registered = False
        for serving in self._serving:
            serving.refuse_block_reads()
        return True

    def register_blocks(self) -> None:
        self._registered = True

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for connection in list(self._connections()):
            connection.close()
        self._poller.unregister(self._listening)
        self._listening.close()

    def _connections(self) -> Iterator[ReadingConnection | ServingConnection]:
        """Yields the connections that are not broken."""
        yield from (reading for reading in self._reading.values() if not reading.broken)
        yield from (serving for serving in self._serving if not serving.frames.closed)

    def _connected(self, owner: Description, memory: RegisteredMemory) -> ReadingConnection:
        lost = FailureKind.PEER_LOST
        try:
            segment = SharedSegment.create()
        except OSError as error:
            raise TransferError(str(error), lost) from error
        try:
            connection = socket.create_connection((LOOPBACK, owner.port), CONNECT_TIMEOUT_S)
        except (OSError, OverflowError) as error:
            segment.close()
            raise TransferError(f"{owner.name} cannot be reached on this machine: {error}", lost) from error
        frames = FrameSocket(connection, self._poller, decoder=OWNER_FRAMES)
        return ReadingConnection(owner.name, memory, frames, segment)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # no connection waits, or it has ended again
            for _ in range(MAX_UNPROVED):
                connection, _ = self._listening.accept()
                frames = FrameSocket(connection, self._poller, decoder=READER_FRAMES)
                self._serving.append(ServingConnection(self._description.name, self._memory, frames))
        unproved = [serving for serving in self._serving if serving.segment is None]
        for serving in unproved[:-MAX_UNPROVED]:
            serving.close()

    def _remove_finished(self) -> None:
        """Closes connections to leaving owners without running reads, and forgets closed connections of readers."""
        for name, reading in list(self._reading.items()):
            if reading.leaving and not reading.num_running:
                del self._reading[name]
                reading.close()
        self._serving = [serving for serving in self._serving if not serving.frames.closed]

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError("this worker's transport is closed", FailureKind.CLOSED)

    def _known(self, name: str) -> ReadingConnection:
        self._check_open()
        known = self._reading.get(name)
        if known is None or known.leaving or known.broken:
            raise TransferError(f"there is no connection to {name}", FailureKind.PEER_LOST)
        return known

"""The two ends of a connection over which a reader reads through shared memory. `shared_memory` has the life cycle.

A frame is its length in LENGTH_BYTES bytes, then a message in MessagePack. The ends copy between their own memory and
the slots of the segment, in the order of the frames: the system calls that carry a frame make the copy before it
visible to the other process on every kind of processor.
"""

import ctypes
import hashlib
import hmac
import logging
import secrets
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NoReturn, TypeVar

import msgspec
import zmq

from motet.transfer.backends.shared_segment import NUM_SLOTS, SLOT_BYTES, SharedSegment
from motet.transfer.orders import FailureKind, TransferError
from motet.transfer.transport import ReadState, RegisteredMemory, Spans, block_spans, proof_spans

RECEIVE_BYTES = 64 * 2**10
"""Maximum number of bytes that are received from a connection in one round."""
LENGTH_BYTES = 4
"""Size of a frame's length, little endian, before the frame."""
MAX_FRAME_BYTES = 4 * 2**20
"""Maximum size of a frame: a read of a million tokens fits."""
MAX_FIRST_FRAME_BYTES = 1024
"""Maximum size of the frame of a process that has not proved to belong to the same user."""
NONCE_BYTES = 16

logger = logging.getLogger(__name__)


class Open(msgspec.Struct, frozen=True, tag=True):
    """Requests to read through a segment."""

    owner: str
    """Name of the worker that the reader expects at this port."""
    segment: str
    nonce: bytes
    seal: bytes


class ReadRequest(msgspec.Struct, frozen=True, tag=True):
    number: int
    of_proof: bool
    """True for entries of the proof, False for blocks."""
    pieces: tuple[tuple[int, int], ...]
    """First block or entry, and number of blocks or entries."""


class Taken(msgspec.Struct, frozen=True, tag=True):
    """The reader has copied the content of the oldest slot in use."""


class Notification(msgspec.Struct, frozen=True, tag=True):
    body: bytes


class Opened(msgspec.Struct, frozen=True, tag=True):
    seal: bytes


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """The owner does not serve a reader; the connection ends."""

    reason: str


class Piece(msgspec.Struct, frozen=True, tag=True):
    """The next `num_bytes` bytes of a read are in the next slot."""

    number: int
    num_bytes: int


class ReadRefused(msgspec.Struct, frozen=True, tag=True):
    """A read ends without more bytes."""

    number: int
    reason: str


ReaderFrame = Open | ReadRequest | Taken | Notification
OwnerFrame = Opened | Rejected | Piece | ReadRefused
READER_FRAMES: "msgspec.msgpack.Decoder[ReaderFrame]" = msgspec.msgpack.Decoder(ReaderFrame)
OWNER_FRAMES: "msgspec.msgpack.Decoder[OwnerFrame]" = msgspec.msgpack.Decoder(OwnerFrame)
Frame = TypeVar("Frame")


class BrokenConnectionError(Exception):
    """The other process is gone, or has sent bytes that do not belong to this protocol."""


memmove = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)
"""`ctypes.memmove`, without releasing Python's lock: to get the lock back next to a busy thread takes 5 ms, a copy of a
slot 0.1 ms."""


class SpanCursor:
    """A position in the bytes of some spans, which are copied to or from slots in this order."""

    def __init__(self, spans: Spans) -> None:
        self._spans: deque[tuple[int, int]] = deque(map(tuple, spans.tolist()))
        self.num_left = int(spans[:, 1].sum())

    def copy_to(self, slot: int, num_bytes: int) -> None:
        """Copies the next `num_bytes` bytes to the address `slot`."""
        for address, offset, size in self._next(num_bytes):
            memmove(slot + offset, address, size)

    def copy_from(self, slot: int, num_bytes: int) -> None:
        """Copies `num_bytes` bytes from the address `slot`."""
        for address, offset, size in self._next(num_bytes):
            memmove(address, slot + offset, size)

    def _next(self, num_bytes: int) -> list[tuple[int, int, int]]:
        """Returns (address, offset in the slot, size) of the next bytes, and moves past them."""
        if not 0 < num_bytes <= self.num_left:
            raise BrokenConnectionError(f"{num_bytes} bytes arrived, and {self.num_left} were expected")
        self.num_left -= num_bytes
        parts, offset = [], 0
        while offset < num_bytes:
            address, length = self._spans.popleft()
            size = min(length, num_bytes - offset)
            parts.append((address, offset, size))
            if size < length:
                self._spans.appendleft((address + size, length - size))
            offset += size
        return parts


class FrameSocket(Generic[Frame]):
    """Sends and receives frames over a TCP connection without blocking. Owns the socket, and registers it with the
    poller. `send` never raises: `receive` reports a connection that is broken."""

    def __init__(
        self, connection: socket.socket, poller: zmq.Poller, *, decoder: "msgspec.msgpack.Decoder[Frame]"
    ) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.max_frame_bytes = MAX_FIRST_FRAME_BYTES
        self.closed = False
        self._socket = connection
        self._decoder = decoder
        self._poller = poller
        self._incoming, self._outgoing = bytearray(), bytearray()
        poller.register(connection, zmq.POLLIN)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frame: ReaderFrame | OwnerFrame) -> None:
        body = msgspec.msgpack.encode(frame)
        self._outgoing += len(body).to_bytes(LENGTH_BYTES, "little") + body
        self.flush()

    def flush(self) -> None:
        """Sends what the system takes now."""
        try:
            while self._outgoing and not self.closed:
                del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing.clear()  # the next `receive` finds the connection broken

    def receive(self) -> list[Frame]:
        """Returns the frames that have arrived. Raises BrokenConnectionError, but first returns the last frames."""
        if self.closed:
            raise BrokenConnectionError("the connection is closed")
        end: str | None = None
        try:
            received = self._socket.recv(RECEIVE_BYTES)
            self._incoming += received
            end = None if received else "the other process has ended the connection"
        except BlockingIOError:
            pass
        except OSError as error:
            end = str(error)
        frames = self._complete_frames()
        if end is not None and not frames:
            raise BrokenConnectionError(end)
        return frames

    def close(self) -> None:
        if not self.closed:
            self.flush()
            self.closed = True
            self._poller.unregister(self._socket)
            self._socket.close()

    def _complete_frames(self) -> list[Frame]:
        frames = []
        while len(self._incoming) >= LENGTH_BYTES:
            length = int.from_bytes(self._incoming[:LENGTH_BYTES], "little")
            if length > self.max_frame_bytes:
                raise BrokenConnectionError(f"a frame has {length} bytes")
            end = LENGTH_BYTES + length
            if len(self._incoming) < end:
                break
            try:
                frames.append(self._decoder.decode(bytes(self._incoming[LENGTH_BYTES:end])))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise BrokenConnectionError(f"a frame cannot be read: {error}") from error
            del self._incoming[:end]
        return frames


class SharedMemoryRead:
    """A read of blocks, or of entries of a proof into a separate buffer."""

    def __init__(
        self, connection: "ReadingConnection", spans: Spans, *, on_done: Callable[[], object] = lambda: None
    ) -> None:
        """`on_done`: called once, when all bytes have arrived."""
        self.num_bytes, self.num_descriptors = int(spans[:, 1].sum()), len(spans)
        self.state = ReadState.RUNNING
        self._connection = connection
        self._cursor = SpanCursor(spans)
        self._on_done = on_done

    def poll(self) -> ReadState:
        if self.state is ReadState.RUNNING:
            self._connection.advance()
        return self.state

    def close(self) -> None:
        if self.state is ReadState.RUNNING:
            raise RuntimeError("a running read cannot be closed: its bytes can still arrive")

    def take(self, slot: int, num_bytes: int) -> None:
        """Copies the next bytes out of a slot."""
        self._cursor.copy_from(slot, num_bytes)
        if not self._cursor.num_left:
            self._on_done()
            self.state = ReadState.DONE


@dataclass(eq=False)
class ReadingConnection:
    """The reader's end of a connection to an owner. Owns the segment. Broken for good once the connection ends."""

    owner: str
    """Name of the owner."""
    memory: RegisteredMemory
    """Memory of the owner."""
    frames: FrameSocket[OwnerFrame]
    segment: SharedSegment
    leaving: bool = False
    """True if the connection must be closed once all reads are final."""
    _nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    _is_open: bool = False
    _waiting: list[ReaderFrame] = field(default_factory=list)
    """Frames to send when the owner has proved that it belongs to the same user."""
    _reads: dict[int, SharedMemoryRead] = field(default_factory=dict)
    """Running reads by their numbers."""
    _num_posted: int = 0
    _num_taken: int = 0
    """Number of slots whose content was copied."""

    def __post_init__(self) -> None:
        seal = seal_of(self.segment, b"reader", nonce=self._nonce)
        self.frames.send(Open(self.owner, self.segment.name, self._nonce, seal))

    @property
    def broken(self) -> bool:
        return self.frames.closed

    @property
    def num_running(self) -> int:
        return len(self._reads)

    def post(self, read: SharedMemoryRead, pieces: Sequence[tuple[int, int]], *, of_proof: bool) -> SharedMemoryRead:
        self._num_posted += 1
        self._reads[self._num_posted] = read
        self.send(ReadRequest(self._num_posted, of_proof, tuple(pieces)))
        return read

    def send(self, frame: ReaderFrame) -> None:
        if self._is_open:
            self.frames.send(frame)
        else:
            self._waiting.append(frame)

    def advance(self) -> None:
        """Handles what the owner has sent. Never raises."""
        if self.broken:
            return
        try:
            self.frames.flush()
            for frame in self.frames.receive():
                self._handle(frame)
        except BrokenConnectionError as error:
            logger.debug("the connection to %s broke: %s", self.owner, error)
            self.close()

    def close(self) -> None:
        """Ends the connection; running reads fail."""
        self.frames.close()
        self.segment.close()
        for read in self._reads.values():
            read.state = ReadState.FAILED
        self._reads.clear()

    def _handle(self, frame: OwnerFrame) -> None:
        match frame:
            case Opened(seal) if hmac.compare_digest(seal, seal_of(self.segment, b"owner", nonce=self._nonce)):
                self.segment.unlink()
                self._is_open, self.frames.max_frame_bytes = True, MAX_FRAME_BYTES
                for waiting in self._waiting:
                    self.frames.send(waiting)
                self._waiting.clear()
            case Piece(number, num_bytes) if self._is_open and number in self._reads and num_bytes <= SLOT_BYTES:
                read = self._reads[number]
                read.take(self.segment.slot(self._num_taken), num_bytes)
                self._num_taken += 1
                self.frames.send(Taken())
                if read.state is ReadState.DONE:
                    del self._reads[number]
            case ReadRefused(number, reason) if self._is_open and number in self._reads:
                logger.debug("%s refuses a read: %s", self.owner, reason)
                self._reads.pop(number).state = ReadState.FAILED
            case Rejected(reason):
                raise BrokenConnectionError(f"it refuses: {reason}")
            case _:
                raise BrokenConnectionError(f"it sent a {type(frame).__name__} that was not expected")


@dataclass(eq=False)
class ServingConnection:
    """The owner's end of a connection from a reader. Owns its view of the segment."""

    name: str
    """Name of this worker."""
    memory: RegisteredMemory
    frames: FrameSocket[ReaderFrame]
    segment: SharedSegment | None = None
    """The reader's segment, once the reader has proved that it belongs to the same user."""
    _reads: deque[tuple[ReadRequest, SpanCursor]] = field(default_factory=deque)
    _num_filled: int = 0
    _num_free: int = NUM_SLOTS

    def advance(self, *, registered: bool) -> list[bytes]:
        """Handles what the reader has sent, fills the free slots, and returns the reader's messages. `registered`:
        False if blocks must not be read."""
        messages = []
        try:
            self.frames.flush()
            for frame in self.frames.receive():
                if isinstance(frame, Notification) and self.segment is not None:
                    messages.append(frame.body)
                else:
                    self._handle(frame, registered=registered)
            self._fill_slots()
        except BrokenConnectionError as error:
            logger.debug("the connection of a reader broke: %s", error)
            self.close()
        return messages

    def refuse_block_reads(self) -> None:
        """Ends the reads of blocks that are not complete."""
        for read in [read for read in self._reads if not read[0].of_proof]:
            self._reads.remove(read)
            self.frames.send(ReadRefused(read[0].number, "the memory is not registered any more"))

    def close(self) -> None:
        self.frames.close()
        if self.segment is not None:
            self.segment.close()
        self._reads.clear()

    def _handle(self, frame: ReaderFrame, *, registered: bool) -> None:
        match frame:
            case Open() if self.segment is None:
                self._open(frame)
            case ReadRequest(number, of_proof) if self.segment is not None:
                try:
                    if not (of_proof or registered):
                        raise TransferError("the memory is not registered", FailureKind.REFUSED)
                    spans = proof_spans if of_proof else block_spans
                    self._reads.append((frame, SpanCursor(spans(self.memory, frame.pieces))))
                except TransferError as error:
                    self.frames.send(ReadRefused(number, error.message))
            case Taken() if self._num_free < NUM_SLOTS:
                self._num_free += 1
            case _:
                raise BrokenConnectionError(f"it sent a {type(frame).__name__} that was not expected")

    def _open(self, request: Open) -> None:
        if request.owner != self.name:
            self._reject(f"this is {self.name}, not {request.owner}")
        try:
            segment = SharedSegment.attach(request.segment)
        except OSError as error:
            self._reject(str(error))
        if not hmac.compare_digest(request.seal, seal_of(segment, b"reader", nonce=request.nonce)):
            segment.close()
            self._reject("the seal is not made with the secret of the segment")
        self.segment = segment
        self.frames.max_frame_bytes = MAX_FRAME_BYTES
        self.frames.send(Opened(seal_of(segment, b"owner", nonce=request.nonce)))

    def _reject(self, reason: str) -> NoReturn:
        self.frames.send(Rejected(reason))
        raise BrokenConnectionError(reason)

    def _fill_slots(self) -> None:
        while self._reads and self._num_free and self.segment is not None:
            request, cursor = self._reads[0]
            num_bytes = min(SLOT_BYTES, cursor.num_left)
            cursor.copy_to(self.segment.slot(self._num_filled), num_bytes)
            self._num_filled += 1
            self._num_free -= 1
            self.frames.send(Piece(request.number, num_bytes))
            if not cursor.num_left:
                self._reads.popleft()


def seal_of(segment: SharedSegment, side: bytes, *, nonce: bytes) -> bytes:
    """Returns the proof that `side` knows the secret of a segment."""
    return hmac.digest(segment.secret, side + nonce, hashlib.sha256)

"""A transport between the workers of one process: it copies bytes and hands messages over. It keeps the rules of all
transports, and its network does on demand what a real one does by chance."""

import ctypes
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from motet.transfer.orders import FailureKind, TransferError
from motet.transfer.transport import (
    ENTRY_BYTES,
    BlockRun,
    ReadState,
    RegisteredMemory,
    Spans,
    block_spans,
    check_shapes,
    entry_spans,
    proof_spans,
)


@dataclass
class LocalPeer:
    """A worker as the others see it."""

    name: str
    memory: RegisteredMemory
    messages: list[bytes] = field(default_factory=list)
    stopped: bool = False
    gone: bool = False
    """True once the worker is dead or closed."""


class LocalNetwork:
    """The workers of this process that can reach each other. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """The lock is held while bytes are copied or a worker leaves, so nothing is copied from one that has left."""
        self._members: dict[str, LocalPeer] = {}
        self._to_lose = 0

    def join(self, name: str, memory: RegisteredMemory) -> "LocalTransport":
        """Makes the transport of a worker; `name` must be new at every start."""
        with self.lock:
            if name in self._members:
                raise ValueError(f"a worker {name} has joined before")
            self._members[name] = member = LocalPeer(name, memory)
        return LocalTransport(self, member)

    def stop(self, name: str) -> None:
        """Stops a worker as SIGSTOP does: reads from it stay RUNNING until `go_on`, and then still land."""
        self._members[name].stopped = True

    def go_on(self, name: str) -> None:
        self._members[name].stopped = False

    def cut(self, name: str) -> None:
        """Cuts a worker off, as if it had died: reads from it fail, and messages to it are lost."""
        with self.lock:
            self._members[name].gone = True

    def lose_messages(self, count: int) -> None:
        """Loses the next `count` messages."""
        with self.lock:
            self._to_lose += count

    def member(self, name: str) -> LocalPeer | None:
        return self._members.get(name)

    def send(self, to: str, message: bytes) -> None:
        with self.lock:
            lost = self._to_lose > 0
            self._to_lose -= lost
            if not lost:
                self._members[to].messages.append(message)

    def receive(self, member: LocalPeer) -> list[bytes]:
        """Returns the messages that have come for a member, and forgets them."""
        with self.lock:
            messages, member.messages = member.messages, []
        return messages


class LocalRead:
    """A read that copies its bytes when somebody polls."""

    def __init__(
        self, peer: LocalPeer, lock: threading.Lock, *, theirs: Spans, ours: Spans, landed: Callable[[], None]
    ) -> None:
        self.num_bytes = int(ours[:, 1].sum())
        self.num_descriptors = len(ours)
        self.closed = False
        self._peer = peer
        self._lock = lock
        self._moves = [
            (to, source, size) for (to, size), (source, _) in zip(ours.tolist(), theirs.tolist(), strict=True)
        ]
        self._landed = landed
        self._state = ReadState.RUNNING

    def poll(self) -> ReadState:
        with self._lock:
            if self._state is ReadState.RUNNING and self._peer.gone:
                self._state = ReadState.FAILED
            elif self._state is ReadState.RUNNING and not self._peer.stopped:
                for to, source, size in self._moves:
                    ctypes.memmove(to, source, size)
                self._landed()
                self._state = ReadState.DONE
        return self._state

    def close(self) -> None:
        if self._state is ReadState.RUNNING:
            raise RuntimeError("a read that still runs may still write: it cannot be closed")
        self.closed = True

    def cut(self) -> None:
        """Ends the read because its reader goes away."""
        if self._state is ReadState.RUNNING:
            self._state = ReadState.FAILED
        self.closed = True


class LocalTransport:
    """One worker's end of a `LocalNetwork`. `LocalNetwork.join` makes it."""

    def __init__(self, network: LocalNetwork, member: LocalPeer) -> None:
        self._network = network
        self._member = member
        self._peers: dict[str, LocalPeer] = {}
        self._reads: list[LocalRead] = []

    def describe(self) -> bytes:
        return self._member.name.encode()

    def connect(self, description: bytes, memory: RegisteredMemory) -> str:
        self._must_be_open()
        check_shapes(ours=self._member.memory, theirs=memory)
        peer = self._network.member(description.decode(errors="replace"))
        if peer is None or peer is self._member:
            raise TransferError(f"{description!r} describes nobody else here", FailureKind.REFUSED)
        self._peers[peer.name] = peer
        return peer.name

    def disconnect(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def read_blocks(self, peer: str, runs: list[BlockRun]) -> LocalRead:
        known = self._known(peer)
        theirs = block_spans(known.memory, [(run.remote, run.count) for run in runs])
        ours = block_spans(self._member.memory, [(run.local, run.count) for run in runs])
        return self._post(LocalRead(known, self._network.lock, theirs=theirs, ours=ours, landed=lambda: None))

    def read_proof(self, peer: str, entries: list[int]) -> tuple[LocalRead, list[int]]:
        known = self._known(peer)
        theirs = proof_spans(known.memory, [(entry, 1) for entry in entries])
        buffer = array("q", bytes(ENTRY_BYTES * len(entries)))
        ours = entry_spans(buffer.buffer_info()[0], [(position, 1) for position in range(len(entries))])
        values: list[int] = []
        landed = partial(values.extend, buffer)
        return self._post(LocalRead(known, self._network.lock, theirs=theirs, ours=ours, landed=landed)), values

    def notify(self, peer: str, message: bytes) -> None:
        if peer in self._peers and not self._member.gone:
            self._network.send(peer, message)

    def poll(self) -> list[bytes]:
        self._must_be_open()
        self._drive_reads()
        return self._network.receive(self._member)

    def withdraw(self) -> bool:
        self._drive_reads()
        return not self._reads

    def offer(self) -> None: ...

    def close(self) -> None:
        self._network.cut(self._member.name)
        for read in self._reads:
            read.cut()
        self._reads = []

    def _drive_reads(self) -> None:
        for read in self._reads:
            read.poll()
        self._reads = [read for read in self._reads if not read.closed]

    def _post(self, read: LocalRead) -> LocalRead:
        self._reads.append(read)
        return read

    def _known(self, name: str) -> LocalPeer:
        self._must_be_open()
        peer = self._peers.get(name)
        if peer is None or peer.gone:
            raise TransferError(f"there is no connection to {name}", FailureKind.PEER_LOST)
        return peer

    def _must_be_open(self) -> None:
        if self._member.gone:
            raise TransferError("this worker's transport is closed", FailureKind.CLOSED)

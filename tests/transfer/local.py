"""A transport between the workers of one process: it copies bytes and delivers messages. It fulfils the contract of
`Transport`, and its network can stop or disconnect workers and lose messages on demand."""

import ctypes
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from motet.transfer.orders import FailureKind, TransferError
from motet.transfer.ticket import TransportKind
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
    """A worker as other workers reach it."""

    name: str
    memory: RegisteredMemory
    messages: list[bytes] = field(default_factory=list)
    stopped: bool = False
    gone: bool = False
    """True once the worker is dead or closed."""


class LocalNetwork:
    """The workers of this process that can reach each other. All methods are thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held while bytes are copied or a worker leaves, so nothing is copied from a worker that has left."""
        self._members: dict[str, LocalPeer] = {}
        self._to_lose = 0

    def join(self, name: str, memory: RegisteredMemory) -> "LocalTransport":
        """Makes the transport of a worker. `name` must be new each time a worker starts."""
        with self.lock:
            if name in self._members:
                raise ValueError(f"a worker {name} has joined before")
            self._members[name] = member = LocalPeer(name, memory)
        return LocalTransport(self, member)

    def stop(self, name: str) -> None:
        """Stops a worker as SIGSTOP does: reads from it stay RUNNING until `resume`, and then still land."""
        self._members[name].stopped = True

    def resume(self, name: str) -> None:
        self._members[name].stopped = False

    def cut(self, name: str) -> None:
        """Disconnects a worker as if it had died: reads from it fail, and messages to it are lost."""
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
        """Returns the messages that have arrived for a member, and removes them."""
        with self.lock:
            messages, member.messages = member.messages, []
        return messages


class LocalRead:
    """A read that copies its bytes when it is polled."""

    def __init__(
        self, peer: LocalPeer, lock: threading.Lock, *, remote: Spans, local: Spans, on_done: Callable[[], None]
    ) -> None:
        self.num_bytes = int(local[:, 1].sum())
        self.num_descriptors = len(local)
        self.closed = False
        self._peer = peer
        self._lock = lock
        self._copies = [
            (to, source, size) for (to, size), (source, _) in zip(local.tolist(), remote.tolist(), strict=True)
        ]
        self._on_done = on_done
        self._state = ReadState.RUNNING

    def poll(self) -> ReadState:
        with self._lock:
            if self._state is ReadState.RUNNING and self._peer.gone:
                self._state = ReadState.FAILED
            elif self._state is ReadState.RUNNING and not self._peer.stopped:
                for to, source, size in self._copies:
                    ctypes.memmove(to, source, size)
                self._on_done()
                self._state = ReadState.DONE
        return self._state

    def close(self) -> None:
        if self._state is ReadState.RUNNING:
            raise RuntimeError("a running read cannot be closed: its bytes can still arrive")
        self.closed = True

    def abort(self) -> None:
        """Ends the read because its reader closes."""
        if self._state is ReadState.RUNNING:
            self._state = ReadState.FAILED
        self.closed = True


class LocalTransport:
    """One worker's end of a `LocalNetwork`. `LocalNetwork.join` makes it."""

    kind = TransportKind.NIXL

    def __init__(self, network: LocalNetwork, member: LocalPeer) -> None:
        self._network = network
        self._member = member
        self._peers: dict[str, LocalPeer] = {}
        self._reads: list[LocalRead] = []

    def describe(self) -> bytes:
        return self._member.name.encode()

    def connect(self, description: bytes, memory: RegisteredMemory) -> str:
        self._check_open()
        check_shapes(local=self._member.memory, remote=memory)
        peer = self._network.member(description.decode(errors="replace"))
        if peer is None or peer is self._member:
            raise TransferError(f"{description!r} describes no other worker", FailureKind.REFUSED)
        self._peers[peer.name] = peer
        return peer.name

    def disconnect(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def read_blocks(self, peer: str, runs: list[BlockRun]) -> LocalRead:
        known = self._known(peer)
        remote = block_spans(known.memory, [(run.remote, run.count) for run in runs])
        local = block_spans(self._member.memory, [(run.local, run.count) for run in runs])
        return self._post(LocalRead(known, self._network.lock, remote=remote, local=local, on_done=lambda: None))

    def read_proof(self, peer: str, entries: list[int]) -> tuple[LocalRead, list[int]]:
        known = self._known(peer)
        remote = proof_spans(known.memory, [(entry, 1) for entry in entries])
        buffer = array("q", bytes(ENTRY_BYTES * len(entries)))
        local = entry_spans(buffer.buffer_info()[0], [(position, 1) for position in range(len(entries))])
        values: list[int] = []
        on_done = partial(values.extend, buffer)
        return self._post(LocalRead(known, self._network.lock, remote=remote, local=local, on_done=on_done)), values

    def notify(self, peer: str, message: bytes) -> None:
        if peer in self._peers and not self._member.gone:
            self._network.send(peer, message)

    def has_arrivals(self) -> bool:
        return False

    def poll(self) -> list[bytes]:
        self._check_open()
        self._advance_reads()
        return self._network.receive(self._member)

    def deregister_blocks(self) -> bool:
        self._advance_reads()
        return not self._reads

    def register_blocks(self) -> None: ...

    def close(self) -> None:
        self._network.cut(self._member.name)
        for read in self._reads:
            read.abort()
        self._reads = []

    def _advance_reads(self) -> None:
        for read in self._reads:
            read.poll()
        self._reads = [read for read in self._reads if not read.closed]

    def _post(self, read: LocalRead) -> LocalRead:
        self._reads.append(read)
        return read

    def _known(self, name: str) -> LocalPeer:
        self._check_open()
        peer = self._peers.get(name)
        if peer is None or peer.gone:
            raise TransferError(f"there is no connection to {name}", FailureKind.PEER_LOST)
        return peer

    def _check_open(self) -> None:
        if self._member.gone:
            raise TransferError("this worker's transport is closed", FailureKind.CLOSED)

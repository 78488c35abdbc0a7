"""Workers without an engine, for tests of transports: KV memory with guards, one side of a connection, and every
transport."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import pytest
import zmq

from motet.transfer.backends.nixl import LOOPBACK, NixlTransport
from motet.transfer.backends.shared_memory import SharedMemoryTransport
from motet.transfer.orders import FailureKind, TransferError
from motet.transfer.proof import Proof
from motet.transfer.transport import PostedRead, ReadState, RegisteredMemory, Transport, merged
from tests.patience import PATIENCE_S
from tests.transfer.local import LocalNetwork

TCP = LOOPBACK | {"TLS": "tcp"}


class MakeTransport(Protocol):
    """Makes the transport of a worker."""

    def __call__(self, name: str, memory: RegisteredMemory, *, poller: zmq.Poller | None = None) -> Transport: ...


EVERY_TRANSPORT: dict[str, Callable[[], MakeTransport]] = {
    "local": lambda: without_poller(LocalNetwork().join),
    "shared memory": lambda: SharedMemoryTransport,
    "nixl": lambda: without_poller(partial(NixlTransport, ucx=LOOPBACK)),
    "nixl over tcp": lambda: without_poller(partial(NixlTransport, ucx=TCP)),
}
"""Functions that make a network of a transport, by the name of the transport."""


def without_poller(make: Callable[[str, RegisteredMemory], Transport]) -> MakeTransport:
    """Returns a function for a transport that does not wake its thread."""
    return lambda name, memory, *, poller=None: make(name, memory)


class KVMemory:
    """Regions of blocks filled with random bytes. Before and after each region is a guard of one block."""

    def __init__(self, *, num_regions: int = 3, num_blocks: int = 24, block_bytes: int = 96, seed: int = 0) -> None:
        self._all = np.empty((num_regions, num_blocks + 2, block_bytes), np.uint8)
        self.proof = Proof(num_blocks)
        self.fill(seed)
        self.memory = RegisteredMemory(
            regions=tuple(int(region[1:].ctypes.data) for region in self._all),
            region_block_bytes=block_bytes,
            num_blocks=num_blocks,
            proof=self.proof.address,
            proof_entries=self.proof.num_entries,
        )

    def fill(self, seed: int) -> None:
        words = self._all.view(np.uint64)
        words[:] = np.random.default_rng(seed).integers(0, 2**64, words.shape, np.uint64)

    @property
    def blocks(self) -> npt.NDArray[np.uint8]:
        """The memory without its guards, a view [num_regions, num_blocks, block_bytes]."""
        return self._all[:, 1:-1]

    def copy(self) -> npt.NDArray[np.uint8]:
        """Returns a copy of the memory, with the guards."""
        return self._all.copy()

    def expect(self, before: npt.NDArray[np.uint8], source: "KVMemory", pairs: Iterable[tuple[int, int]]) -> None:
        """Checks that only the local blocks of these (remote, local) pairs have changed, to the content of `source`."""
        expected = before.copy()
        for remote, local in pairs:
            expected[:, 1 + local] = source.blocks[:, remote]
        assert np.array_equal(self._all.view(np.uint64), expected.view(np.uint64))  # 50 times as fast as `np.testing`


class Side:
    """A worker with its transport and the messages that it has received."""

    def __init__(self, transport: Transport, kv: KVMemory) -> None:
        self.transport = transport
        self.kv = kv
        self.inbox: list[bytes] = []

    def connect(self, other: Self) -> str:
        return self.transport.connect(other.transport.describe(), other.kv.memory)

    def read(self, peer: str, pairs: Sequence[tuple[int, int]]) -> PostedRead:
        return self.transport.read_blocks(peer, merged(pairs))

    def poll(self) -> None:
        self.inbox += self.transport.poll()


def poll_until(done: Callable[[], bool], *sides: Side) -> None:
    """Polls as transfer threads do, until `done` returns True."""
    end_s = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < end_s, "the condition has not become true in time"
        for side in sides:
            side.poll()


def finish(read: PostedRead, *sides: Side) -> ReadState:
    """Waits for a read to end, and closes it."""
    poll_until(lambda: read.poll() is not ReadState.RUNNING, *sides)
    state = read.poll()
    read.close()
    return state


def read_proof(side: Side, peer: str, entries: list[int], *sides: Side) -> list[int]:
    read, values = side.transport.read_proof(peer, entries)
    assert finish(read, *sides) is ReadState.DONE
    return values


@contextmanager
def failing(kind: FailureKind) -> Iterator[None]:
    """Checks that the code inside raises a TransferError of this kind."""
    with pytest.raises(TransferError) as failed:
        yield
    assert failed.value.kind is kind

"""The seam under the transfers: a worker's memory as others see it, and the interface that moves blocks.

    Memory     region 0: [block 0][block 1]...   keys of layer 0      block b of region r lies at
               region 1: [block 0][block 1]...   keys of layer 1      regions[r] + b * region_block_bytes
               ...
               proof:    [entry 0][entry 1]...   8 bytes each, always in main memory

Block and entry numbers come from tickets, so numbers outside of the memory are refused here.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from motet.transfer.orders import FailureKind, TransferError

MAX_UNSIGNED = 2**63 - 1
Unsigned = Annotated[int, msgspec.Meta(ge=0, le=MAX_UNSIGNED)]

Spans = npt.NDArray[np.uint64]
"""[num_spans, 2]: address and length in bytes."""

ENTRY_BYTES = 8


class KVFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that must be equal on two workers so that one can use the other's KV."""

    model_digest: str
    """Digest of the saved configuration and weights."""
    quantization: str = "none"
    """Rounded weights are another model: otherwise a choice would depend on the worker that computed its prompt."""
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    version: int = 1

    def differences(self, other: "KVFacts") -> list[str]:
        """Lists the differences, such as `dtype is bfloat16 here and float32 there`; empty if there are none."""
        ours, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        return [f"{name} is {ours[name]} here and {theirs[name]} there" for name in ours if ours[name] != theirs[name]]


class RegisteredMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The registered memory of a worker. The types refuse impossible numbers from another worker."""

    regions: tuple[Unsigned, ...]
    """Address of block 0 of each region: the keys of every layer, then the values."""
    region_block_bytes: Unsigned
    num_blocks: Unsigned
    device: Annotated[int, msgspec.Meta(ge=-1, le=MAX_UNSIGNED)] = -1
    """-1: main memory; k: CUDA device k."""
    proof: Unsigned
    """Address of the proof (see `proof`), in main memory."""
    proof_entries: Unsigned


class BlockRun(msgspec.Struct, frozen=True, array_like=True):
    """`count` blocks of the peer, from `remote` on, go to as many blocks of ours, from `local` on."""

    remote: int
    local: int
    count: int


def merged(pairs: Iterable[tuple[int, int]]) -> list[BlockRun]:
    """Joins (remote, local) blocks into runs: blocks that are neighbours on both sides become one run."""
    runs: list[BlockRun] = []
    for remote, local in sorted(pairs):
        if runs and remote == runs[-1].remote + runs[-1].count and local == runs[-1].local + runs[-1].count:
            runs[-1] = BlockRun(runs[-1].remote, runs[-1].local, runs[-1].count + 1)
        else:
            runs.append(BlockRun(remote, local, 1))
    return runs


class ReadState(StrEnum):
    RUNNING = "running"
    """It may still write to the destination."""
    DONE = "done"
    FAILED = "failed"


class PostedRead(Protocol):
    """One read that was posted."""

    num_bytes: int
    num_descriptors: int

    def poll(self) -> ReadState:
        """Drives the read on; never raises. After DONE and FAILED, which are final, nothing writes any more."""
        ...

    def close(self) -> None:
        """Forgets a read that is final."""
        ...


class Transport(Protocol):
    """Moves blocks between the registered memories of two workers. All methods belong to one thread, none blocks."""

    def describe(self) -> bytes:
        """Returns what a peer needs for `connect`."""
        ...

    def connect(self, description: bytes, memory: RegisteredMemory) -> str:
        """Adds a peer; returns the name that other methods take. Raises TransferError if it cannot."""
        ...

    def disconnect(self, peer: str) -> None:
        """Posts no more reads from the peer; those that run go on until they are final."""
        ...

    def read_blocks(self, peer: str, runs: list[BlockRun]) -> PostedRead:
        """Posts the read of KV blocks. Raises TransferError: PEER_LOST, which `connect` may repair, or REFUSED."""
        ...

    def read_proof(self, peer: str, entries: list[int]) -> tuple[PostedRead, list[int]]:
        """Posts the read of entries of the peer's proof; the list is filled when the read is DONE."""
        ...

    def notify(self, peer: str, message: bytes) -> None:
        """Sends a message, if possible. Never raises; a message to a peer that is gone is lost. Before the first read
        from a peer has ended, it is sent only while this side polls."""
        ...

    def poll(self) -> list[bytes]:
        """Drives the reads of both sides, and returns notifications that have come."""
        ...

    def withdraw(self) -> bool:
        """Makes this side's blocks unknown to the network, whose cards keep their pages; nobody must read them then.
        Does nothing and returns False while a read of ours runs."""
        ...

    def offer(self) -> None:
        """Makes blocks that were withdrawn known again; `describe` returns something new. Peers that were connected
        read them as before, or lose the connection at their next read. Raises StartupError."""
        ...

    def close(self) -> None:
        """Ends everything: afterwards nothing writes into this side's memory. May wait half a second for that. May be
        called twice."""
        ...


def check_shapes(*, ours: RegisteredMemory, theirs: RegisteredMemory) -> None:
    """Raises TransferError unless both sides have the same number of regions and the same bytes in a block."""
    here, there = ((len(memory.regions), memory.region_block_bytes) for memory in (ours, theirs))
    if here != there:
        raise TransferError(f"(regions, bytes of a block) are {here} here and {there} there", FailureKind.REFUSED)


def block_spans(memory: RegisteredMemory, pieces: Sequence[tuple[int, int]]) -> Spans:
    """Returns the spans of (first block, number of blocks) in every region, region by region."""
    blocks = _inside(pieces, memory.num_blocks, what="block")
    spans = np.empty((len(memory.regions), len(blocks), 2), np.uint64)
    spans[:, :, 0] = np.array(memory.regions, np.uint64)[:, None] + blocks[:, 0] * memory.region_block_bytes
    spans[:, :, 1] = blocks[:, 1] * memory.region_block_bytes
    return spans.reshape(-1, 2)


def proof_spans(memory: RegisteredMemory, pieces: Sequence[tuple[int, int]]) -> Spans:
    """Returns the spans of (first entry, number of entries) in a worker's proof."""
    return entry_spans(memory.proof, _inside(pieces, memory.proof_entries, what="proof entry"))


def entry_spans(address: int, pieces: npt.ArrayLike) -> Spans:
    """Returns the spans of (first entry, number of entries) in a row of entries that begins at `address`."""
    spans = np.array(pieces, np.uint64) * ENTRY_BYTES  # [num_spans, 2]
    spans[:, 0] += np.uint64(address)
    return spans


def _inside(pieces: Sequence[tuple[int, int]], limit: int, *, what: str) -> Spans:
    """Returns the pieces as numbers. Raises TransferError if there are none, or one is empty or not within 0..limit."""
    if not pieces:
        raise TransferError(f"no {what} was requested", FailureKind.REFUSED)
    for first, count in pieces:
        if first < 0 or count < 1 or first + count > limit:
            raise TransferError(
                f"{what} {first} and the {count - 1} after it do not exist: there are {limit}", FailureKind.REFUSED
            )
    return np.array(pieces, np.uint64).reshape(-1, 2)

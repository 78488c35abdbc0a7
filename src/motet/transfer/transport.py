"""The interface to the library that moves blocks, and the layout of a worker's registered memory.

    RegisteredMemory   region 0: [block 0][block 1]...   keys of layer 0      address of block b of region r:
                       region 1: [block 0][block 1]...   keys of layer 1      regions[r] + b * region_block_bytes
                       ...
                       proof:    [entry 0][entry 1]...   8 bytes each, always in main memory

Block and entry numbers come from tickets, which a client can have changed, so numbers outside the memory are refused.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from motet.transfer.orders import FailureKind, TransferError
from motet.transfer.ticket import TransportKind

MAX_UNSIGNED = 2**63 - 1
Unsigned = Annotated[int, msgspec.Meta(ge=0, le=MAX_UNSIGNED)]

Spans = npt.NDArray[np.uint64]
"""[num_spans, 2]: address and length in bytes."""

ENTRY_BYTES = 8


class KVFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that must be equal on two workers so that one can use the KV of the other."""

    model_digest: str
    """Digest of the saved configuration and weights."""
    quantization: str = "none"
    """Quantised weights count as another model: otherwise the tokens would depend on where the prompt was computed."""
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    transport: TransportKind = TransportKind.NIXL
    version: int = 1

    def differences(self, other: "KVFacts") -> list[str]:
        """Returns the differences as texts, such as `dtype is bfloat16 here and float32 there`."""
        here, there = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        return [f"{name} is {here[name]} here and {there[name]} there" for name in here if here[name] != there[name]]


class RegisteredMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The registered memory of a worker. The types reject impossible numbers from another worker."""

    regions: tuple[Unsigned, ...]
    """Address of block 0 of each region: the keys of every layer, then the values of every layer."""
    region_block_bytes: Unsigned
    num_blocks: Unsigned
    device: Annotated[int, msgspec.Meta(ge=-1, le=MAX_UNSIGNED)] = -1
    """-1: main memory; k: CUDA device k."""
    proof: Unsigned
    """Address of the proof (module `proof`), in main memory."""
    proof_entries: Unsigned


class BlockRun(msgspec.Struct, frozen=True, array_like=True):
    """A copy of `count` blocks: the peer's blocks `remote`, `remote + 1`, ... to the local `local`, `local + 1`, ..."""

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
    """Bytes can still arrive in the destination."""
    DONE = "done"
    """Final: all bytes have arrived."""
    FAILED = "failed"
    """Final: no more bytes can arrive."""


class PostedRead(Protocol):
    """A read that was posted."""

    num_bytes: int
    num_descriptors: int

    def poll(self) -> ReadState:
        """Advances the read, and returns its state. Never raises."""
        ...

    def close(self) -> None:
        """Frees the resources of a read that is final."""
        ...


class Transport(Protocol):
    """Moves blocks between the registered memories of two workers. One thread calls it. Only `close` can block."""

    @property
    def kind(self) -> TransportKind: ...

    def describe(self) -> bytes:
        """Returns the description that a peer needs for `connect`."""
        ...

    def connect(self, description: bytes, memory: RegisteredMemory) -> str:
        """Adds a peer, and returns the name that other methods take. Raises TransferError if it cannot."""
        ...

    def disconnect(self, peer: str) -> None:
        """Ends the connection to a peer. No more reads from it can be posted; running ones continue to their end."""
        ...

    def read_blocks(self, peer: str, runs: list[BlockRun]) -> PostedRead:
        """Posts a read of KV blocks. Raises TransferError: PEER_LOST, after which `connect` can succeed, or REFUSED."""
        ...

    def read_proof(self, peer: str, entries: list[int]) -> tuple[PostedRead, list[int]]:
        """Posts a read of entries of the peer's proof. The returned list is filled when the read is DONE."""
        ...

    def notify(self, peer: str, message: bytes) -> None:
        """Sends a message, if possible. Never raises: a message to a peer that is gone is lost. Until the first read
        from a peer has ended, messages to it are sent only while this side polls."""
        ...

    def has_arrivals(self) -> bool:
        """Returns True if a peer has sent something, so that `poll` must be called even if this side expects nothing.
        A transport that does not wake its thread returns False."""
        ...

    def poll(self) -> list[bytes]:
        """Advances the reads of both sides, and returns the messages that peers have sent with `notify`."""
        ...

    def deregister_blocks(self) -> bool:
        """Deregisters the blocks of this side, because network cards pin the pages of registered memory. No peer must
        read them afterwards. Does nothing and returns False while a read into the blocks runs."""
        ...

    def register_blocks(self) -> None:
        """Registers the blocks of this side again; `describe` then returns a new description. Peers that were connected
        can read as before, or lose the connection at their next read. Raises StartupError."""
        ...

    def close(self) -> None:
        """Ends all connections, for which it can wait half a second. Afterwards no bytes can arrive in this side's
        memory. A second call changes nothing."""
        ...


def check_shapes(*, local: RegisteredMemory, remote: RegisteredMemory) -> None:
    """Raises TransferError unless both memories have the same number of regions and the same block size."""
    here, there = ((len(memory.regions), memory.region_block_bytes) for memory in (local, remote))
    if here != there:
        raise TransferError(f"(regions, bytes per block) are {here} here and {there} there", FailureKind.REFUSED)


def block_spans(memory: RegisteredMemory, pieces: Sequence[tuple[int, int]]) -> Spans:
    """Returns the spans of pieces (first block, number of blocks) in every region, region by region."""
    check_pieces(pieces, memory.num_blocks, what="block")
    blocks = np.array(pieces, np.uint64).reshape(-1, 2)
    spans = np.empty((len(memory.regions), len(blocks), 2), np.uint64)
    spans[:, :, 0] = np.array(memory.regions, np.uint64)[:, None] + blocks[:, 0] * memory.region_block_bytes
    spans[:, :, 1] = blocks[:, 1] * memory.region_block_bytes
    return spans.reshape(-1, 2)


def proof_spans(memory: RegisteredMemory, pieces: Sequence[tuple[int, int]]) -> Spans:
    """Returns the spans of (first entry, number of entries) in a worker's proof."""
    check_pieces(pieces, memory.proof_entries, what="proof entry")
    return entry_spans(memory.proof, pieces)


def entry_spans(address: int, pieces: npt.ArrayLike) -> Spans:
    """Returns the spans of (first entry, number of entries) in an array of entries that starts at `address`."""
    spans = np.array(pieces, np.uint64) * ENTRY_BYTES  # [num_spans, 2]
    spans[:, 0] += np.uint64(address)
    return spans


def check_pieces(pieces: Sequence[tuple[int, int]], limit: int, *, what: str) -> None:
    """Raises TransferError if there are no pieces (first, count), or if a piece is empty or not within 0..limit."""
    if not pieces:
        raise TransferError(f"no {what} was requested", FailureKind.REFUSED)
    for first, count in pieces:
        if first < 0 or count < 1 or first + count > limit:
            why = f"a read of {count} from {what} {first} on is impossible: there are {limit}"
            raise TransferError(why, FailureKind.REFUSED)

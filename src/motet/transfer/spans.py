"""Where blocks and proof entries lie in memory. Numbers come from tickets, so those outside of it are refused here."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from motet.transfer.base import FailureKind, TransferError
from motet.transfer.layout import Memory

Spans = npt.NDArray[np.uint64]
"""[num_spans, 2]: address and length in bytes."""

ENTRY_BYTES = 8


def check_shapes(*, ours: Memory, theirs: Memory) -> None:
    """Blocks can be read only into blocks of as many regions and bytes."""
    here, there = ((len(memory.regions), memory.region_block_bytes) for memory in (ours, theirs))
    if here != there:
        raise TransferError(f"(regions, bytes of a block) are {here} here and {there} there", FailureKind.REFUSED)


def block_spans(memory: Memory, pieces: Sequence[tuple[int, int]]) -> Spans:
    """Of (first block, number of blocks) in every region, region by region."""
    blocks = _inside(pieces, memory.num_blocks, "block")
    spans = np.empty((len(memory.regions), len(blocks), 2), np.uint64)
    spans[:, :, 0] = np.array(memory.regions, np.uint64)[:, None] + blocks[:, 0] * memory.region_block_bytes
    spans[:, :, 1] = blocks[:, 1] * memory.region_block_bytes
    return spans.reshape(-1, 2)


def proof_spans(memory: Memory, pieces: Sequence[tuple[int, int]]) -> Spans:
    """Of (first entry, number of entries)."""
    return entry_spans(memory.proof, _inside(pieces, memory.proof_entries, "proof entry"))


def entry_spans(address: int, pieces: npt.ArrayLike) -> Spans:
    """Of (first entry, number of entries) in a row of entries that begins at `address`."""
    spans = np.array(pieces, np.uint64) * ENTRY_BYTES  # [num_spans, 2]
    spans[:, 0] += np.uint64(address)
    return spans


def _inside(pieces: Sequence[tuple[int, int]], limit: int, what: str) -> Spans:
    """The pieces as numbers, if there are any, all within 0..limit and none empty."""
    if not pieces:
        raise TransferError(f"no {what} is asked for", FailureKind.REFUSED)
    for first, count in pieces:
        if first < 0 or count < 1 or first + count > limit:
            raise TransferError(
                f"{what} {first} and the {count - 1} after it do not exist: there are {limit}", FailureKind.REFUSED
            )
    return np.array(pieces, np.uint64).reshape(-1, 2)

"""What attention reads in one step, as numbers: which rows of the flat batch see which keys.

    flat batch    | tail rows of group A | tail rows of group B | prompt rows of C | prompt rows of D | padding |

    prompt rows   see their own prompt up to themselves                                          PromptRead
    tail rows     see the whole prompt of their group, once for all siblings: the trunk          TrunkRead
                  and the tokens of their own choice up to themselves: the tail                  TailRead
                  the parts are merged by log-sum-exp

    trunk         | stretch 0 | stretch 1 | stretch 2, with all that is left |                      StretchRead

The split is the same for every sequence, whether it has siblings or not, and every length that an operator sees follows
from a row's own position (`padded_keys`) or from its prompt (the trunk, which is cut at fixed places), never from other
rows. That is why a choice gets the same bits alone, in a group, in chunks, and after a resume. Which stretches are read
together for groups whose prompts begin alike, `trees` says.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int32]

Table = Sequence[int]
"""The block table of a group or a choice itself; a copy for every step would cost too much. It may change once the
step is settled, so whoever needs it longer copies it."""

STRETCH = 256
"""Number of keys in a stretch of a trunk; every block size divides it. The last one has all that is left: a stretch of
few keys would cost more than it is worth."""
MOST_STRETCHES = 32
"""A trunk has at most so many, however long it is: each is a part of every row in memory until these are merged."""


def num_stretches(num_keys: int) -> int:
    """Returns into how many stretches a trunk is cut."""
    return min(max(1, num_keys // STRETCH), MOST_STRETCHES)


@dataclass(frozen=True, eq=False)
class PromptRead:
    """Rows [begin, end) of the batch are positions first_position.. of a prompt; keys 0..num_keys-1 of its table."""

    begin: int
    end: int
    first_position: int
    num_keys: int
    table: Table

    def seen(self, window: int | None, *, siblings: int, device: torch.device) -> torch.Tensor:
        """Returns which keys the rows see under a window, each row once a sibling, [1, 1, rows * siblings, keys]."""
        positions = torch.arange(self.begin, self.end, device=device).sub_(self.begin - self.first_position)
        return _seen(positions[None], self.num_keys, window=window, siblings=siblings)


@dataclass(frozen=True, eq=False)
class TrunkRead:
    """Rows [begin, end) of the batch see all `num_keys` positions of a trunk."""

    begin: int
    end: int
    positions: tuple[int, ...]
    num_keys: int
    table: Table


@dataclass(frozen=True, eq=False)
class StretchRead:
    """Rows [begin, end) of the batch see the same stretches of their trunks, which are read as one batch."""

    begin: int
    end: int
    positions: tuple[int, ...]
    first: int
    """Number of the first stretch."""
    num_keys: int
    """Number of keys in each stretch."""
    tables: tuple[Table, ...]
    """The blocks of each stretch."""

    def seen(self, window: int | None, *, siblings: int, device: torch.device) -> torch.Tensor | None:
        """As for a prompt, [stretches, 1, rows * siblings, keys]; None where every row sees all keys."""
        if window is None or max(self.positions) - self.first * STRETCH < window:
            return None
        first_keys = (self.first + torch.arange(len(self.tables), device=device)[:, None]) * STRETCH
        positions = torch.tensor(self.positions, device=device) - first_keys  # counted like the keys of each stretch
        return _seen(positions, self.num_keys, window=window, siblings=siblings)


@dataclass(frozen=True, eq=False)
class TailRead:
    """Several pieces of choices that have equally many rows and equally long padded tails, read as one batch."""

    rows: tuple[int, ...]
    """Rows of the batch, piece after piece, `rows_per_piece` each."""
    rows_per_piece: int
    first_offsets: tuple[int, ...]
    """Offset in the tail of each piece's first row; that row sees keys 0..offset."""
    num_keys: int
    tables: tuple[Table, ...]

    def seen(self, window: int | None, *, siblings: int, device: torch.device) -> torch.Tensor:
        """As for a prompt, [pieces, 1, rows * siblings, keys]; positions are offsets in the tail on both sides."""
        offsets = torch.tensor(self.first_offsets, device=device)[:, None]
        offsets = offsets + torch.arange(self.rows_per_piece, device=device)
        return _seen(offsets, self.num_keys, window=window, siblings=siblings)


def _seen(positions: torch.Tensor, num_keys: int, *, window: int | None, siblings: int) -> torch.Tensor:
    """A query at one of `positions` [tables, rows] sees the keys up to itself, at most `window` in all."""
    own = positions.repeat_interleave(siblings, dim=1)[:, None, :, None]
    keys = torch.arange(num_keys, device=positions.device)
    return keys <= own if window is None else (keys <= own) & (keys > own - window)


@dataclass(frozen=True)
class AttentionPlan:
    """All reads of a step; rows [0, num_tail_rows) are tail rows."""

    num_tail_rows: int
    prompts: tuple[PromptRead, ...]
    trunks: tuple[TrunkRead, ...]
    tails: tuple[TailRead, ...]


def padded_keys(num_keys: int) -> int:
    """Keys that a row with `num_keys` visible keys is computed over; the rest is masked. With these lengths the CPU's
    flash attention gives a row the same bits whatever rows are beside it (measured, and tested)."""
    step = 64 if num_keys <= 192 else 512
    return -(-num_keys // step) * step


def pieces(begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Cuts positions [begin, end) where `padded_keys` changes: (begin, end, padded keys)."""
    while begin < end:
        keys = padded_keys(begin + 1)
        stop = min(end, keys)
        yield begin, stop, keys
        begin = stop


class TailReads:
    """Collects pieces of tails; those of one shape become one read."""

    def __init__(self) -> None:
        self._shapes: defaultdict[tuple[int, int], list[tuple[int, int, Table]]] = defaultdict(list)

    def add(self, row: int, offset: int, *, count: int, num_keys: int, table: Table) -> None:
        """Rows [row, row + count) of the batch are offsets `offset`.. of a tail, computed over `num_keys` keys."""
        self._shapes[num_keys, count].append((row, offset, table))

    def finished(self) -> tuple[TailRead, ...]:
        """One read a shape, those with few keys first."""
        reads = []
        for (num_keys, count), same in sorted(self._shapes.items(), key=itemgetter(0)):
            first_rows, offsets, tables = zip(*same, strict=True)
            rows = tuple(row + i for row in first_rows for i in range(count))
            reads.append(TailRead(rows, count, offsets, num_keys, tables))
        return tuple(reads)


def ints(numbers: Sequence[int]) -> Ints:
    return np.frombuffer(array("i", numbers), np.int32) if numbers else np.empty(0, np.int32)

"""The attention plan of a step: which rows of the flat batch see which keys.

    flat batch    | tail rows of group A | tail rows of group B | prompt rows of C | prompt rows of D | padding |

    prompt rows   see their prompt up to their own position                                      PromptRead
    tail rows     see the complete prompt of their group, read once for all choices: the trunk   TrunkRead
                  and the output tokens of their choice up to their own position: the tail       TailRead
                  the parts are merged by log-sum-exp

    trunk         | stretch 0 | stretch 1 | stretch 2, with all remaining keys |                    StretchRead

The split is the same for every sequence, in any group. Every length that an operator sees depends only on a row's own
position (`padded_keys`) or on its prompt (the trunk is cut at fixed positions), and never on other rows. A choice
therefore gets the same bits alone, in a group, in chunks, and after a resume. `trees` decides which stretches are read
together for groups whose prompts have a common prefix.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int32]

Table = Sequence[int]
"""The block table of a group or a choice. It is not a copy, because a copy in every step would take too long. It can
change as soon as the step is done; code that needs it after the step must copy it."""

STRETCH = 256
"""Number of keys in a stretch of a trunk; every block size divides it. The last stretch also has the remaining keys,
because a separate stretch of few keys would take longer."""
MAX_STRETCHES = 32
"""Maximum number of stretches of a trunk of any length. Each stretch is one part of every row, and all parts are in
memory until they are merged."""


def num_stretches(num_keys: int) -> int:
    return min(max(1, num_keys // STRETCH), MAX_STRETCHES)


@dataclass(frozen=True, eq=False)
class PromptRead:
    """Rows [begin, end) of the batch are consecutive positions of a prompt, from `first_position` on. They see keys of
    [0, num_keys) of its table, each row up to its own position."""

    begin: int
    end: int
    first_position: int
    num_keys: int
    table: Table

    def visible(self, window: int | None, *, heads_per_kv_head: int, device: torch.device) -> Tensor:
        """Returns the mask of visible keys within a window, [1, 1, rows * heads_per_kv_head, keys] bool: each row is
        repeated for every query head that shares a key head."""
        positions = torch.arange(self.begin, self.end, device=device).sub_(self.begin - self.first_position)
        return _visible(positions[None], self.num_keys, window=window, heads_per_kv_head=heads_per_kv_head)


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
    """Index of the first stretch in the trunk."""
    num_keys: int
    """Number of keys in each stretch."""
    tables: tuple[Table, ...]

    def visible(self, window: int | None, *, heads_per_kv_head: int, device: torch.device) -> Tensor | None:
        """Returns the mask of visible keys, [stretches, 1, rows * heads_per_kv_head, keys] bool; None if all are."""
        if window is None or max(self.positions) - self.first * STRETCH < window:
            return None
        first_keys = (self.first + torch.arange(len(self.tables), device=device)[:, None]) * STRETCH
        relative = torch.tensor(self.positions, device=device) - first_keys
        return _visible(relative, self.num_keys, window=window, heads_per_kv_head=heads_per_kv_head)


@dataclass(frozen=True, eq=False)
class TailRead:
    """Pieces of several tails with the same number of rows and the same padded number of keys, read as one batch."""

    rows: tuple[int, ...]
    """Rows of the batch, `rows_per_piece` for each piece, concatenated."""
    rows_per_piece: int
    first_offsets: tuple[int, ...]
    """Offset of each piece's first row in its tail. This row sees keys [0, offset]."""
    num_keys: int
    tables: tuple[Table, ...]

    def visible(self, window: int | None, *, heads_per_kv_head: int, device: torch.device) -> Tensor:
        """Returns the mask of visible keys, [pieces, 1, rows * heads_per_kv_head, keys] bool. Positions of queries and
        keys are both offsets in the tail."""
        offsets = torch.tensor(self.first_offsets, device=device)[:, None]
        offsets = offsets + torch.arange(self.rows_per_piece, device=device)
        return _visible(offsets, self.num_keys, window=window, heads_per_kv_head=heads_per_kv_head)


def _visible(positions: Tensor, num_keys: int, *, window: int | None, heads_per_kv_head: int) -> Tensor:
    """Returns a mask [tables, 1, rows * heads_per_kv_head, num_keys] bool. A query at one of `positions` [tables, rows]
    sees the keys up to its own position, and at most `window` keys."""
    own = positions.repeat_interleave(heads_per_kv_head, dim=1)[:, None, :, None]
    keys = torch.arange(num_keys, device=positions.device)
    return keys <= own if window is None else (keys <= own) & (keys > own - window)


@dataclass(frozen=True)
class AttentionPlan:
    """All reads of a step. Rows [0, num_tail_rows) are tail rows."""

    num_tail_rows: int
    prompts: tuple[PromptRead, ...]
    trunks: tuple[TrunkRead, ...]
    tails: tuple[TailRead, ...]


def padded_keys(num_keys: int) -> int:
    """Returns the number of keys over which a row with `num_keys` visible keys is computed; the additional keys are
    masked. With these lengths, torch's flash attention for the CPU gives a row the same bits with any other rows in the
    batch (measured, and tested)."""
    step = 64 if num_keys <= 192 else 512
    return -(-num_keys // step) * step


def pieces(begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Cuts positions [begin, end) where `padded_keys` changes. Yields (begin, end, padded keys)."""
    while begin < end:
        keys = padded_keys(begin + 1)
        stop = min(end, keys)
        yield begin, stop, keys
        begin = stop


class TailReads:
    """Collects pieces of tails. Pieces of equal shape become one read."""

    def __init__(self) -> None:
        self._shapes: defaultdict[tuple[int, int], list[tuple[int, int, Table]]] = defaultdict(list)

    def add(self, row: int, offset: int, *, count: int, num_keys: int, table: Table) -> None:
        """Adds batch rows [row, row + count): offsets [offset, offset + count) of a tail, over `num_keys` keys."""
        self._shapes[num_keys, count].append((row, offset, table))

    def finished(self) -> tuple[TailRead, ...]:
        """Returns one read for each shape, by ascending number of keys."""
        reads = []
        for (num_keys, count), same in sorted(self._shapes.items(), key=itemgetter(0)):
            first_rows, offsets, tables = zip(*same, strict=True)
            rows = tuple(row + i for row in first_rows for i in range(count))
            reads.append(TailRead(rows, count, offsets, num_keys, tables))
        return tuple(reads)


def ints(numbers: Sequence[int]) -> Ints:
    """Returns the numbers as an array [len(numbers)] int32."""
    return np.frombuffer(array("i", numbers), np.int32) if numbers else np.empty(0, np.int32)

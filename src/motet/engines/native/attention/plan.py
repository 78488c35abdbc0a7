"""What attention reads in one step, as numbers: which rows of the flat batch see which keys.

    flat batch    | tail rows of group A | tail rows of group B | prompt rows of C | prompt rows of D | padding |

    prompt rows   see their own prompt up to themselves                                          PromptRead
    tail rows     see the whole prompt of their group, once for all siblings: the trunk          TrunkRead
                  and the tokens of their own choice up to themselves: the tail                  TailRead
                  the two parts are merged by log-sum-exp

The split is the same for every sequence, whether it has siblings or not, and every length that an operator sees follows
from a row's own position (`padded_keys`) or from its prompt (the trunk), never from its company. That is why a choice
comes out bit for bit the same alone, in a group, in chunks, and after a resume.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

Table = Sequence[int]
"""A block table: that of a group or a choice itself, not a copy, which would cost a step a pass over all that is known.
It holds until the step is settled; who needs it longer copies it."""


@dataclass(frozen=True, eq=False)
class PromptRead:
    """Rows [begin, end) of the batch are positions first_position.. of a prompt; keys 0..num_keys-1 of its table."""

    begin: int
    end: int
    first_position: int
    num_keys: int
    table: Table


@dataclass(frozen=True, eq=False)
class TrunkRead:
    """Rows [begin, end) of the batch see all `num_keys` positions of a trunk."""

    begin: int
    end: int
    positions: tuple[int, ...]
    num_keys: int
    table: Table


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


@dataclass(frozen=True)
class AttentionPlan:
    """All reads of a step; rows [0, num_tail_rows) are tail rows."""

    num_tail_rows: int
    prompts: tuple[PromptRead, ...]
    trunks: tuple[TrunkRead, ...]
    tails: tuple[TailRead, ...]


def padded_keys(num_keys: int) -> int:
    """Keys that a row with `num_keys` visible keys is computed over; the rest is masked. With these lengths the CPU's
    flash attention gives a row the same bits whatever stands beside it (measured; `tests` hold it)."""
    step = 64 if num_keys <= 192 else 512
    return -(-num_keys // step) * step


def pieces(begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Cuts positions [begin, end) where `padded_keys` changes: (begin, end, padded keys)."""
    while begin < end:
        keys = padded_keys(begin + 1)
        stop = min(end, keys)
        yield begin, stop, keys
        begin = stop


@dataclass(frozen=True)
class _Pieces:
    """Of one shape."""

    first_rows: list[int] = field(default_factory=list)
    first_offsets: list[int] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


class TailReads:
    """Collects pieces of tails; those of one shape become one read."""

    def __init__(self) -> None:
        self._shapes: dict[tuple[int, int], _Pieces] = {}

    def add(self, row: int, offset: int, count: int, num_keys: int, table: Table) -> None:
        """Rows [row, row + count) of the batch are offsets `offset`.. of a tail, computed over `num_keys` keys."""
        shape = num_keys, count
        if (same := self._shapes.get(shape)) is None:
            same = self._shapes[shape] = _Pieces()
        same.first_rows.append(row)
        same.first_offsets.append(offset)
        same.tables.append(table)

    def finished(self) -> tuple[TailRead, ...]:
        """One read a shape, those with few keys first."""
        return tuple(
            TailRead(
                rows=tuple(row + i for row in same.first_rows for i in range(count)),
                rows_per_piece=count,
                first_offsets=tuple(same.first_offsets),
                num_keys=num_keys,
                tables=tuple(same.tables),
            )
            for (num_keys, count), same in sorted(self._shapes.items(), key=itemgetter(0))
        )

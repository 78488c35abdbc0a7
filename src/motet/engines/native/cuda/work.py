"""Cuts a step's attention into items of equal form for the kernels. Pure functions of numbers.

    read    rows of the batch against one block table: a prompt against itself, a choice against its tail, groups
            against the common blocks of their trunks, or one group against the rest of its trunk (`attention.trees`)
    tile    as many rows of a read as fit, times the query heads that share a key head
    item    a tile and a span of its keys: one program per key head

A tile is narrow (the tail of a choice, the trunk of few rows) or wide. Few tiles with many keys would leave most of the
device idle, so their keys are cut into spans until there are enough items to keep the device busy. A row that is read
in several spans has one part per span, and the parts are merged. Tiles of a prompt whose keys are in one span are
final: they write their output without a merge.

    parts     | row 0: spans of its trunk, spans of its tail | row 1 | ...
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from motet.engines.native.attention.attention_plan import Ints, PromptRead, Table, TrunkRead, ints
from motet.engines.native.attention.trees import MAX_BRANCH_LEVELS, SharingGain, branches, keys_saved
from motet.engines.native.step.inputs import StepInputs

NARROW, WIDE = 16, 64
"""Query rows x heads of a tile: the minimum that a matrix unit can use, and a number that keeps it busy. In float32,
for which there is no exact matrix unit, all tiles are narrow, because a wide tile would not fit into the registers."""
MIN_SPAN = 256
"""Minimum number of keys in a span. Merging shorter spans takes longer than they save."""
KEY_MULTIPLE = 64
"""The number of keys in a span is a multiple of this number, which the kernels process at a time."""
NO_SLOT = -1
"""Slot of rows that pad the batch; their keys and values are not stored."""
ALIGN = 4
"""Sections start at multiples of this number of integers (16 bytes). Triton compiles again for other alignments."""

T = TypeVar("T")


class Item(NamedTuple):
    """Work of one program. In memory, an item is ITEM_INTS integers."""

    first_row: int
    num_rows: int
    first_position: int
    """Position of the table's first key: 0, or the length of the trunk before a tail."""
    table: int
    """Index of the table's first block in `Sections.tables`."""
    begin: int
    end: int
    """The program reads keys [begin, end) of the table, except keys after a row's position."""
    part: int
    """Index of the part that it computes among the parts of each of its rows."""
    unused: int = 0


ITEM_INTS = len(Item._fields)


class Sections(NamedTuple, Generic[T]):
    """The sections of one int32 array with all integers of a step, which needs only one copy to the device. T is their
    content, their length, or a view on the device.

        | token ids | positions | slots | logit rows | first part | narrow | wide | final | tables |

    A graph is replayed over the same memory, so the lengths of its sections are fixed, and unused entries are filled so
    that they have no effect: a row that pads the batch is token 0 at position 0, is not stored and sees no keys; an
    item that pads a list has no rows. The tables are last, because only their used part is copied."""

    token_ids: T  # [rows]
    positions: T  # [rows]
    slots: T  # [rows]: slot of each row's key and value, or NO_SLOT
    logit_rows: T  # [num_logits]: rows whose logits are requested
    first_part: T  # [rows + 1]: row r has the parts [first_part[r], first_part[r + 1])
    narrow: T  # [items, ITEM_INTS]: items of narrow tiles
    wide: T  # [items, ITEM_INTS]: items of wide tiles whose output is merged
    final: T  # [items, ITEM_INTS]: items of wide tiles whose output needs no merge
    tables: T  # block tables, concatenated


@dataclass(frozen=True)
class Geometry:
    """Sizes of the model and the device that determine how work is cut."""

    num_heads: int
    num_kv_heads: int
    multiprocessors: int
    block_size: int
    widest: int = WIDE
    share_trunks: bool = True
    """False only to measure the effect of sharing: each row then reads its trunk separately."""

    @property
    def heads_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def narrow(self) -> int:
        """Rows x heads of a narrow tile: a power of two that is at least the number of query heads per key head."""
        return max(NARROW, 1 << (self.heads_per_kv_head - 1).bit_length())

    @property
    def wide(self) -> int:
        """Rows x heads of a wide tile."""
        return max(self.widest, self.narrow)

    @property
    def sharing_gain(self) -> SharingGain:
        return SharingGain(self.wide // self.heads_per_kv_head, MIN_SPAN)

    @property
    def spare(self) -> int:
        """Number of items beyond one per tile that keep the device busy, with two programs per multiprocessor."""
        return -(-2 * self.multiprocessors // self.num_kv_heads)


class _Tile(NamedTuple):
    """Rows against one table: a complete read before `_tiles` cuts it, then a part of it."""

    first_row: int
    num_rows: int
    first_position: int
    table: Table
    num_keys: int
    """End of the keys that the last row sees: the tile reads keys [first_key, num_keys) of the table."""
    first_key: int = 0
    causal: bool = True
    """True if each row sees one more key than the previous row, False if all rows see the same keys."""
    alone: bool = False
    """True if there are no other reads for these rows."""
    narrow: bool = False

    @property
    def length(self) -> int:
        return self.num_keys - self.first_key

    def span(self, fair: float) -> int:
        """Returns the number of keys in each of the tile's equal spans, as close to `fair` as possible. All tiles
        together then have at most `spare` more items than tiles."""
        spans = max(1, round(self.length / fair))
        return -(-self.length // (spans * KEY_MULTIPLE)) * KEY_MULTIPLE


@dataclass(frozen=True)
class StepWork:
    """All inputs of a step for the device."""

    ints: Sections[Ints]
    trunk_tokens_saved: int
    """See `ModelRunner`."""


def plan_work(inputs: StepInputs, geometry: Geometry) -> StepWork:
    """Cuts the attention of a step into items. Rows that pad the batch have none."""
    reads, joined = _trunk_reads(inputs.attention.trunks, geometry)
    reads += [*_tail_reads(inputs), *_prompt_reads(inputs.attention.prompts)]
    tiles = [tile for read in reads for tile in _tiles(read, geometry)]
    return StepWork(_laid_out(inputs, tiles, spare=geometry.spare), joined)


def _laid_out(inputs: StepInputs, tiles: Sequence[_Tile], *, spare: int) -> Sections[Ints]:
    """Returns all integers of a step. Trunks come before tails, and a branch comes before its child branches. All rows
    of a tile therefore have the same number of previous parts, and the parts of a row are in order of position."""
    num_keys = {small: sum(tile.length for tile in tiles if tile.narrow is small) for small in (True, False)}
    # Number of keys per span if all spans were equal and just kept the device busy.
    fair = {small: max(MIN_SPAN, keys / spare) for small, keys in num_keys.items()}
    rows = len(inputs.slots)
    num_parts = [0] * rows
    narrow: list[Item] = []
    wide: list[Item] = []
    final: list[Item] = []
    blocks: list[int] = []
    begins: dict[int, int] = {}  # each table is included once
    for tile in tiles:
        span = tile.span(fair[tile.narrow])
        if (table := begins.get(id(tile.table))) is None:
            table = begins[id(tile.table)] = len(blocks)
            blocks += tile.table
        if tile.alone and not tile.narrow and span >= tile.num_keys:
            final.append(Item(tile.first_row, tile.num_rows, tile.first_position, table, 0, tile.num_keys, part=0))
            continue
        for begin in range(tile.first_key, tile.num_keys, span):  # each span is one more part of all rows of the tile
            end, part = min(begin + span, tile.num_keys), num_parts[tile.first_row]
            item = Item(tile.first_row, tile.num_rows, tile.first_position, table, begin, end, part)
            (narrow if tile.narrow else wide).append(item)
            for row in range(tile.first_row, tile.first_row + tile.num_rows):
                num_parts[row] += 1
    first_part = np.zeros(rows + 1, np.int32)
    np.cumsum(num_parts, out=first_part[1:])
    return Sections(
        token_ids=ints(inputs.token_ids[:rows]),
        positions=ints(inputs.positions[:rows]),
        slots=ints(inputs.slots),
        logit_rows=ints(inputs.logit_rows[: inputs.num_logits]),
        first_part=first_part,
        narrow=_array(narrow),
        wide=_array(wide),
        final=_array(final),
        tables=ints(blocks),
    )


def _array(items: Sequence[Item]) -> Ints:
    return np.array(items, np.int32).reshape(-1, ITEM_INTS)


def _trunk_reads(trunks: Sequence[TrunkRead], geometry: Geometry) -> tuple[list[_Tile], int]:
    """Returns the reads of trunks, and the number of keys that are not read because a branch shares them."""
    if not geometry.share_trunks:
        alone = [(row, trunk) for trunk in trunks for row in range(trunk.begin, trunk.end)]
        return [_Tile(row, 1, 0, trunk.table, trunk.num_keys, causal=False) for row, trunk in alone], 0
    tree = branches(trunks, block_size=geometry.block_size, gain=geometry.sharing_gain)
    reads = [
        _Tile(at.begin, at.end - at.begin, 0, at.trunks[0].table, at.end_key, at.begin_key, causal=False) for at in tree
    ]
    return reads, keys_saved(tree)


def _tail_reads(inputs: StepInputs) -> Iterator[_Tile]:
    for tail in inputs.attention.tails:
        count = tail.rows_per_piece
        for row, offset, table in zip(tail.rows[::count], tail.first_offsets, tail.tables, strict=True):
            yield _Tile(row, count, inputs.positions[row] - offset, table, offset + count)


def _prompt_reads(prompts: Sequence[PromptRead]) -> list[_Tile]:
    """Joins consecutive pieces of a prompt into one read, because only the CPU needs separate pieces."""
    reads: list[_Tile] = []
    for piece in prompts:
        rows, last = piece.end - piece.begin, reads[-1] if reads else None
        if last is None or last.table is not piece.table or last.num_keys != piece.first_position:
            reads.append(_Tile(piece.begin, rows, 0, piece.table, piece.first_position + rows, alone=True))
        else:
            reads[-1] = last._replace(num_rows=last.num_rows + rows, num_keys=last.num_keys + rows)
    return reads


def _tiles(read: _Tile, geometry: Geometry) -> Iterator[_Tile]:
    narrow = read.num_rows * geometry.heads_per_kv_head <= geometry.narrow
    max_rows = (geometry.narrow if narrow else geometry.wide) // geometry.heads_per_kv_head
    for first in range(0, read.num_rows, max_rows):
        rows = min(max_rows, read.num_rows - first)
        keys = read.num_keys - (read.num_rows - first - rows if read.causal else 0)
        yield read._replace(first_row=read.first_row + first, num_rows=rows, num_keys=keys, narrow=narrow)


def buckets(max_rows: int) -> list[int]:
    """Returns the numbers of rows for which graphs are made: 1, 2, 4, 8, 16, 24, 32, ... to the first >= `max_rows`."""
    found = [1]
    while found[-1] < max_rows:
        found.append(found[-1] + min(found[-1], 8))
    return found


def bucket_lengths(rows: int, geometry: Geometry, *, tables: int) -> Sections[int]:
    """Returns section lengths with capacity for every step with up to `rows` rows, one token of a choice each, in any
    groups.

    Each row has a tail, which is a narrow tile. A trunk has narrow tiles if few rows share it, in the worst case one
    per row. Otherwise it has wide tiles, and the last tile of a group can be nearly empty. The same holds for each
    level of branches, each of which is shared by at least two rows. Long keys add up to `spare` items of each kind."""
    few, many = geometry.narrow // geometry.heads_per_kv_head, geometry.wide // geometry.heads_per_kv_head
    narrow = 2 * rows + MAX_BRANCH_LEVELS * (rows // 2) + geometry.spare
    wide = (1 + MAX_BRANCH_LEVELS) * (rows // many + rows // (few + 1)) + geometry.spare
    return Sections(rows, rows, rows, rows, rows + 1, narrow, wide, 0, tables)


def max_parts(lengths: Sections[int], geometry: Geometry) -> int:
    """Returns the maximum number of parts of all rows of a step with these lengths: one for each branch, the rest of
    the trunk and the tail, and the parts that `spare` items add to the rows of their tiles."""
    few, many = geometry.narrow // geometry.heads_per_kv_head, geometry.wide // geometry.heads_per_kv_head
    return lengths.slots * (MAX_BRANCH_LEVELS + 2) + geometry.spare * (few + many)


def places(lengths: Sections[int]) -> Sections[slice]:
    """Returns the slices of sections of these lengths in the array, which ends with the tables."""
    sizes = (*lengths[:5], *(ITEM_INTS * items for items in lengths[5:8]), lengths.tables)
    begins = accumulate((-(-size // ALIGN) * ALIGN for size in sizes), initial=0)
    return Sections(*(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=False)))


def fill(step: Sections[Ints], lengths: Sections[int]) -> Ints:
    """Returns the array for a step whose sections fit into these lengths, up to the end of the step's tables."""
    at = places(lengths)
    out = np.zeros(at.tables.start + len(step.tables), np.int32)
    out[at.slots] = NO_SLOT
    out[at.first_part] = step.first_part[-1]
    for where, numbers in zip(at, step, strict=True):
        out[where.start : where.start + numbers.size] = numbers.ravel()
    return out

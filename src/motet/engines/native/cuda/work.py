"""Cuts a step's attention into pieces of equal make for the kernels. Numbers in, numbers out.

    read    rows of the batch against one table: a prompt against itself, a choice against its tail, groups against what
            their trunks have in common, or one against the rest of its trunk (`attention.trees`)
    tile    as many rows of a read as fit, times the query heads that share a key head
    item    a tile and a span of its keys: one program a key head

A tile is narrow (a choice's own tail, the trunk of few rows) or wide. Few tiles with many keys would leave most of
the device idle, so their keys are cut into spans, about as many in all as keep it busy. A row that is read in several
spans has that many parts, which are merged. A row of a prompt whose keys are in one piece has its output at once: it is
whole.

    parts     | row 0: spans of its trunk, spans of its tail | row 1 | ...
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from motet.engines.native.attention.attention_plan import Ints, PromptRead, Table, TrunkRead, ints
from motet.engines.native.attention.trees import MAX_BRANCH_LEVELS, SharingGain, branches, keys_joined
from motet.engines.native.step.inputs import StepInputs

NARROW, WIDE = 16, 64
"""Query rows x heads of a tile: the least that a matrix unit can use, and a number that keeps it busy. In float32,
which has no exact matrix unit, all tiles are narrow: a wide tile would not fit the registers."""
LEAST_SPAN = 256
"""Least number of keys in a span; merging shorter ones costs more than they save."""
KEY_MULTIPLE = 64
"""A span is a multiple of the keys a kernel takes at a time."""
NOWHERE = -1
"""The slot of a row that pads the batch."""
ALIGN = 4
"""Sections begin at multiples of 16 bytes: for other pointers kernels would be compiled again."""

T = TypeVar("T")


class Item(NamedTuple):
    """The work of one program; ITEM_INTS integers in memory."""

    first_row: int
    num_rows: int
    shift: int
    """The position at which this table begins: 0, or the length of the trunk before a tail."""
    table: int
    """The place at which its table begins among all of the step."""
    begin: int
    end: int
    """The program reads keys [begin, end) of the table, except those that a row's position hides."""
    part: int
    """The number of the part that it makes of each of its rows."""
    unused: int = 0


ITEM_INTS = len(Item._fields)


class Sections(NamedTuple, Generic[T]):
    """The sections of one array that holds all integers of a step, so that one copy brings them to the device: their
    numbers, their lengths, or views of them on the device.

        | token ids | positions | slots | logit rows | first part | narrow | wide | whole | tables |

    A graph is replayed over the same memory, so the lengths of its sections are fixed, and what a step leaves free is
    filled so that it does no harm. A row that pads the batch is token 0 at position 0, is stored nowhere and sees
    nothing; an item that pads a list has no rows. The tables come last because only as much is copied as is used.
    """

    token_ids: T
    """[rows]"""
    positions: T
    slots: T
    logit_rows: T
    """[logits]"""
    first_part: T
    """[rows + 1]: row r has the parts [first_part[r], first_part[r + 1])."""
    narrow: T
    """[items, ITEM_INTS]"""
    wide: T
    whole: T
    """Wide items whose output needs no merging."""
    tables: T
    """Block tables, one behind the other."""


@dataclass(frozen=True)
class Geometry:
    """The figures of model and device that decide how work is cut."""

    num_heads: int
    num_kv_heads: int
    multiprocessors: int
    block_size: int
    widest: int = WIDE
    share_trunks: bool = True
    """False only to measure what sharing saves: then each row reads the trunk by itself."""

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def narrow(self) -> int:
        """Rows x heads of a narrow tile: a power of two that holds all siblings of a row."""
        return max(NARROW, 1 << (self.heads_per_kv_head - 1).bit_length())

    @property
    def wide(self) -> int:
        return max(self.widest, self.narrow)

    @property
    def sharing_gain(self) -> SharingGain:
        return SharingGain(self.wide // self.heads_per_kv_head, LEAST_SPAN)

    @property
    def spare(self) -> int:
        """Items beyond one a tile that make the device busy, two programs a multiprocessor."""
        return -(-2 * self.multiprocessors // self.num_kv_heads)


class _Tile(NamedTuple):
    """Rows against one table: a whole read, until `_tiles` cuts it."""

    first_row: int
    num_rows: int
    shift: int
    table: Table
    num_keys: int
    """Number of keys of the table before the end of what its last row sees."""
    first_key: int = 0
    """The first key that it reads."""
    causal: bool = True
    """True if each row sees one key more than the one before it; else all see the same."""
    alone: bool = False
    """True if nothing else is read for these rows."""
    narrow: bool = False

    @property
    def length(self) -> int:
        """Number of keys that it reads."""
        return self.num_keys - self.first_key

    def span(self, fair: float) -> int:
        """Returns the number of keys of each of its equal spans, as near to the fair length as possible. So all tiles
        together have at most `spare` items more than there are tiles."""
        spans = max(1, round(self.length / fair))
        return -(-self.length // (spans * KEY_MULTIPLE)) * KEY_MULTIPLE


@dataclass(frozen=True)
class StepWork:
    """All that the device needs to know of a step."""

    ints: Sections[Ints]
    trunk_tokens_joined: int
    """See `ModelRunner`."""


def plan_work(inputs: StepInputs, geometry: Geometry) -> StepWork:
    """Cuts the work of a step. Rows that pad the batch take no part in its attention."""
    reads, joined = _trunk_reads(inputs.attention.trunks, geometry)
    reads += [*_tail_reads(inputs), *_prompt_reads(inputs.attention.prompts)]
    tiles = [tile for read in reads for tile in _tiles(read, geometry)]
    return StepWork(_laid_out(inputs, tiles, spare=geometry.spare), joined)


def _laid_out(inputs: StepInputs, tiles: Sequence[_Tile], *, spare: int) -> Sections[Ints]:
    """Returns all integers of a step. Trunks come before tails, and branches before those that grow from them: so all
    rows of a tile have equally many parts before it, and a row's parts are in order of position."""
    num_keys = {small: sum(tile.length for tile in tiles if tile.narrow is small) for small in (True, False)}
    # The keys of a span if all of them were equal and the device just busy.
    fair = {small: max(LEAST_SPAN, keys / spare) for small, keys in num_keys.items()}
    rows = len(inputs.slots)
    num_parts = [0] * rows
    narrow: list[Item] = []
    wide: list[Item] = []
    whole: list[Item] = []
    blocks: list[int] = []
    begins: dict[int, int] = {}  # each table stands there once
    for tile in tiles:
        span = tile.span(fair[tile.narrow])
        if (table := begins.get(id(tile.table))) is None:
            table = begins[id(tile.table)] = len(blocks)
            blocks += tile.table
        if tile.alone and not tile.narrow and span >= tile.num_keys:
            whole.append(Item(tile.first_row, tile.num_rows, tile.shift, table, 0, tile.num_keys, part=0))
            continue
        for begin in range(tile.first_key, tile.num_keys, span):  # each span is another part of all rows of the tile
            end, part = min(begin + span, tile.num_keys), num_parts[tile.first_row]
            item = Item(tile.first_row, tile.num_rows, tile.shift, table, begin, end, part)
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
        whole=_array(whole),
        tables=ints(blocks),
    )


def _array(items: Sequence[Item]) -> Ints:
    return np.array(items, np.int32).reshape(-1, ITEM_INTS)


def _trunk_reads(trunks: Sequence[TrunkRead], geometry: Geometry) -> tuple[list[_Tile], int]:
    """Returns the reads of trunks, and how many of their keys were joined."""
    if not geometry.share_trunks:
        alone = [(row, trunk) for trunk in trunks for row in range(trunk.begin, trunk.end)]
        return [_Tile(row, 1, 0, trunk.table, trunk.num_keys, causal=False) for row, trunk in alone], 0
    tree = branches(trunks, block_size=geometry.block_size, gain=geometry.sharing_gain)
    reads = [
        _Tile(one.begin, one.end - one.begin, 0, one.trunks[0].table, one.end_key, one.begin_key, causal=False)
        for one in tree
    ]
    return reads, keys_joined(tree)


def _tail_reads(inputs: StepInputs) -> Iterator[_Tile]:
    for tail in inputs.attention.tails:
        count = tail.rows_per_piece
        for row, offset, table in zip(tail.rows[::count], tail.first_offsets, tail.tables, strict=True):
            yield _Tile(row, count, inputs.positions[row] - offset, table, offset + count)


def _prompt_reads(prompts: Sequence[PromptRead]) -> list[_Tile]:
    """Joins pieces that follow each other into one read: only the CPU needs them cut."""
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
    most_rows = (geometry.narrow if narrow else geometry.wide) // geometry.heads_per_kv_head
    for first in range(0, read.num_rows, most_rows):
        rows = min(most_rows, read.num_rows - first)
        keys = read.num_keys - (read.num_rows - first - rows if read.causal else 0)
        yield read._replace(first_row=read.first_row + first, num_rows=rows, num_keys=keys, narrow=narrow)


def buckets(most: int) -> list[int]:
    """Returns the rows for which graphs are made: 1, 2, 4, 8, 16, 24, 32, ... up to the first that holds `most`."""
    found = [1]
    while found[-1] < most:
        found.append(found[-1] + min(found[-1], 8))
    return found


def bucket_lengths(rows: int, geometry: Geometry, *, tables: int) -> Sections[int]:
    """Returns room for every step of `rows` rows at most, one token of a choice each, whatever groups they form.

    Each row has a tail, which is a narrow tile. A trunk is narrow tiles if few rows share it, at worst one a row; else
    wide ones, of which a group's last may be nearly empty. So it is on each level of branches, which at least two rows
    share. `spare` more of each come of long keys.
    """
    few, many = geometry.narrow // geometry.heads_per_kv_head, geometry.wide // geometry.heads_per_kv_head
    narrow = 2 * rows + MAX_BRANCH_LEVELS * (rows // 2) + geometry.spare
    wide = (1 + MAX_BRANCH_LEVELS) * (rows // many + rows // (few + 1)) + geometry.spare
    return Sections(rows, rows, rows, rows, rows + 1, narrow, wide, 0, tables)


def most_parts(lengths: Sections[int], geometry: Geometry) -> int:
    """Returns the most parts that all rows of a step of these lengths have: one for each branch, the rest of the trunk,
    the tail, and what `spare` items add to the rows of their tiles."""
    few, many = geometry.narrow // geometry.heads_per_kv_head, geometry.wide // geometry.heads_per_kv_head
    return lengths.slots * (MAX_BRANCH_LEVELS + 2) + geometry.spare * (few + many)


def places(lengths: Sections[int]) -> Sections[slice]:
    """Returns where sections of these lengths lie in the array, which ends as its tables do."""
    sizes = (*lengths[:5], *(ITEM_INTS * items for items in lengths[5:8]), lengths.tables)
    begins = accumulate((-(-size // ALIGN) * ALIGN for size in sizes), initial=0)
    return Sections(*(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=False)))


def fill(step: Sections[Ints], lengths: Sections[int]) -> Ints:
    """Returns the array with a step whose sections fit into these lengths, up to the last of the step's tables."""
    at = places(lengths)
    out = np.zeros(at.tables.start + len(step.tables), np.int32)
    out[at.slots] = NOWHERE
    out[at.first_part] = step.first_part[-1]
    for where, numbers in zip(at, step, strict=True):
        out[where.start : where.start + numbers.size] = numbers.ravel()
    return out

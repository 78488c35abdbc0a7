"""Cuts a step's attention into pieces of equal make for the kernels. Numbers in, numbers out.

    read    rows of the batch against one table: a prompt against itself, a group against its trunk, a choice against
            its tail
    tile    as many rows of a read as fit, times the query heads that share a key head
    item    a tile and a span of its keys: one program a key head

A tile is narrow (a choice's own tail, the trunk of few siblings) or wide. Few tiles with many keys would leave most of
the device idle, so their keys are cut into spans, about as many in all as keep it busy. A row that is read in several
spans has that many parts, which are merged. A row of a prompt whose keys are in one piece has its output at once: it is
whole.

    parts     | row 0: spans of its trunk, spans of its tail | row 1 | ...
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from motet.engines.native.attention.plan import PromptRead, Table
from motet.engines.native.inputs import StepInputs

Ints = npt.NDArray[np.int32]
NARROW, WIDE = 16, 64
"""Query rows x heads of a tile: the least a matrix unit takes, and what keeps one busy. In float32, which has no matrix
unit that is exact, narrow ones do for everything: a wide tile would not fit the registers."""
LEAST_SPAN = 256
"""Keys; shorter ones cost more to merge than they save."""
KEY_MULTIPLE = 64
"""A span is a multiple of the keys a kernel takes at a time."""


class Item(NamedTuple):
    """What one program does; ITEM_INTS integers in memory."""

    first_row: int
    num_rows: int
    shift: int
    """What a row's position is counted from in this table: 0, or the length of the trunk before a tail."""
    table: int
    """Where its table begins among all of the step."""
    begin: int
    end: int
    """Keys [begin, end) of the table, those of them that a row's position does not hide."""
    part: int
    """Which of its rows' parts it makes."""
    unused: int = 0


@dataclass(frozen=True)
class Geometry:
    """What of model and device decides how work is cut."""

    num_heads: int
    num_kv_heads: int
    multiprocessors: int
    widest: int = WIDE
    share_trunks: bool = True
    """Off only to measure what it saves: then each row reads the trunk by itself."""

    @property
    def siblings(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def narrow(self) -> int:
        """Rows x heads of a narrow tile: a power of two that holds all siblings of a row."""
        return max(NARROW, 1 << (self.siblings - 1).bit_length())

    @property
    def wide(self) -> int:
        return max(self.widest, self.narrow)

    @property
    def spare(self) -> int:
        """Items beyond one a tile that make the device busy, two programs a multiprocessor."""
        return -(-2 * self.multiprocessors // self.num_kv_heads)


@dataclass(frozen=True)
class Work:
    """A step's attention, ready for the kernels."""

    narrow: Ints
    """[items, ITEM_INTS]"""
    wide: Ints
    whole: Ints
    """Wide items whose output needs no merging."""
    tables: Ints
    """Block tables, one behind the other."""
    first_part: Ints
    """[rows + 1]: row r has the parts [first_part[r], first_part[r + 1])."""


@dataclass(frozen=True)
class _Read:
    first_row: int
    num_rows: int
    shift: int
    table: Table
    num_keys: int
    """That its last row sees."""
    causal: bool = True
    """Each row sees one key more than the one before it; else all see the same."""
    alone: bool = False
    """Nothing else is read for these rows."""


@dataclass(frozen=True)
class _Tile:
    read: _Read
    first_row: int
    num_rows: int
    num_keys: int
    narrow: bool

    def span(self, fair: float) -> int:
        """Keys of each of its spans: as near to the fair length as equal ones get. So all tiles together have at most
        `spare` items more than there are tiles."""
        spans = max(1, round(self.num_keys / fair))
        return -(-self.num_keys // (spans * KEY_MULTIPLE)) * KEY_MULTIPLE


class _Tables:
    """The step's block tables one behind the other, each once."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self._begins: dict[int, int] = {}

    def begin_of(self, table: Table) -> int:
        if (begin := self._begins.get(id(table))) is None:
            begin = self._begins[id(table)] = len(self.blocks)
            self.blocks += table
        return begin


def plan_work(inputs: StepInputs, geometry: Geometry) -> Work:
    """The attention of a step; rows that pad the batch take no part in it."""
    tiles = [tile for read in _reads(inputs, share_trunks=geometry.share_trunks) for tile in _tiles(read, geometry)]
    fair = {small: _fair_span([tile for tile in tiles if tile.narrow is small], geometry) for small in (True, False)}
    tables, counts = _Tables(), [0] * len(inputs.slots)
    narrow: list[Item] = []
    wide: list[Item] = []
    whole: list[Item] = []
    for tile in tiles:  # trunks before tails: all rows of a trunk's tile have then equally many parts before it
        span = tile.span(fair[tile.narrow])
        if tile.read.alone and not tile.narrow and span >= tile.num_keys:
            whole.append(_item(tile, tables, range(tile.num_keys), part=0))
        else:
            (narrow if tile.narrow else wide).extend(_items(tile, span, tables, counts))
    first_part = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=first_part[1:])
    return Work(_array(narrow), _array(wide), _array(whole), np.array(tables.blocks, np.int32), first_part)


def _reads(inputs: StepInputs, *, share_trunks: bool) -> Iterator[_Read]:
    """Trunks come before tails, so that a row's parts are in order of position."""
    plan = inputs.attention
    for trunk in plan.trunks:
        rows = trunk.end - trunk.begin
        each = rows if share_trunks else 1
        for row in range(trunk.begin, trunk.end, each):
            yield _Read(row, each, 0, trunk.table, trunk.num_keys, causal=False)
    for tail in plan.tails:
        count = tail.rows_per_piece
        for row, offset, table in zip(tail.rows[::count], tail.first_offsets, tail.tables, strict=True):
            yield _Read(row, count, inputs.positions[row] - offset, table, offset + count)
    yield from _prompt_reads(plan.prompts)


def _prompt_reads(prompts: Sequence[PromptRead]) -> Iterator[_Read]:
    """Pieces that go on where the last one ended are one read: where they are cut matters to the CPU alone."""
    for index, prompt in enumerate(prompts):
        before = prompts[index - 1] if index else None
        if before is None or not _goes_on(before, prompt):
            first = prompt
        after = prompts[index + 1] if index + 1 < len(prompts) else None
        if after is None or not _goes_on(prompt, after):
            rows = prompt.end - first.begin
            yield _Read(first.begin, rows, 0, first.table, first.first_position + rows, alone=True)


def _goes_on(before: PromptRead, after: PromptRead) -> bool:
    end = before.first_position + before.end - before.begin
    return after.table is before.table and after.begin == before.end and after.first_position == end


def _tiles(read: _Read, geometry: Geometry) -> Iterator[_Tile]:
    narrow = read.num_rows * geometry.siblings <= geometry.narrow
    most_rows = (geometry.narrow if narrow else geometry.wide) // geometry.siblings
    for first in range(0, read.num_rows, most_rows):
        last = min(first + most_rows, read.num_rows)
        hidden = read.num_rows - last if read.causal else 0
        yield _Tile(read, read.first_row + first, last - first, read.num_keys - hidden, narrow)


def _fair_span(tiles: Sequence[_Tile], geometry: Geometry) -> float:
    """Keys of a span if all of them were equal and the device just busy."""
    return max(LEAST_SPAN, sum(tile.num_keys for tile in tiles) / geometry.spare)


def _items(tile: _Tile, span: int, tables: _Tables, counts: list[int]) -> Iterator[Item]:
    """One item a span, each another part of every row of the tile."""
    for begin in range(0, tile.num_keys, span):
        keys = range(begin, min(begin + span, tile.num_keys))
        yield _item(tile, tables, keys, part=counts[tile.first_row])
        for row in range(tile.first_row, tile.first_row + tile.num_rows):
            counts[row] += 1


def _item(tile: _Tile, tables: _Tables, keys: range, *, part: int) -> Item:
    read = tile.read
    table = tables.begin_of(read.table)
    return Item(tile.first_row, tile.num_rows, read.shift, table, keys.start, keys.stop, part)


def _array(items: Sequence[Item]) -> Ints:
    return np.array(items, np.int32).reshape(-1, len(Item._fields))

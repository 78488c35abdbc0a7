"""What a step reads, as the arrays of numbers the kernels take: spans of rows, their pieces, their block tables."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from motet.engines.native.attention.plan import AttentionPlan
from motet.engines.native.cpu import library as c

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Reads:
    """Flat arrays of the structs in `csrc/model.h`."""

    spans: Ints
    pieces: Ints
    tables: Ints


def ints(numbers: Sequence[int]) -> Ints:
    return np.frombuffer(array("i", numbers), np.int32) if numbers else np.empty(0, np.int32)


def reads_of(plan: AttentionPlan) -> Reads:
    """A span for every group's choices, and one for every piece of a prompt."""
    spans: list[int] = []
    pieces: list[int] = []
    tables: list[int] = []

    def place(table: Sequence[int]) -> int:
        begin = len(tables)
        tables.extend(table)
        return begin

    tails = sorted(
        (read.rows[i * read.rows_per_piece], read.rows_per_piece, read.first_offsets[i], place(table))
        for read in plan.tails
        for i, table in enumerate(read.tables)
    )
    at = 0
    for trunk in plan.trunks:
        first_piece = at
        while at < len(tails) and tails[at][0] < trunk.end:
            row, count, offset, table = tails[at]
            pieces += (row, row + count, offset, table)
            at += 1
        spans += (trunk.begin, trunk.end, first_piece, at, trunk.num_keys, place(trunk.table))
    for prompt in plan.prompts:
        at = len(pieces) // c.PIECE_INTS
        pieces += (prompt.begin, prompt.end, prompt.first_position, place(prompt.table))
        spans += (prompt.begin, prompt.end, at, at + 1, 0, 0)
    return Reads(ints(spans), ints(pieces), ints(tables))

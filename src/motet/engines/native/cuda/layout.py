"""All integers of a step in one array, so that one copy brings them to the device.

    | token ids | positions | slots | logit rows | first part | narrow | wide | whole | tables |

How long each section is follows from `Sizes` alone, and a graph replayed over the same memory needs just that: the
sizes of its bucket are fixed, and what a step leaves free is filled so that it does no harm. A row that pads the batch
is token 0 at position 0, is stored nowhere and sees nothing; an item that pads a list has no rows. The tables come last
because only as much is copied as is used.
"""

from dataclasses import dataclass, fields

from motet.engines.native.cuda.work import Geometry, Ints, Item, Work
from motet.engines.native.inputs import StepInputs

ALIGN = 4
"""Sections begin at multiples of 16 bytes: kernels are compiled anew for pointers that do not."""
NOWHERE = -1
"""The slot of a row that pads the batch."""
SMALL_BUCKETS = (1, 2, 4, 8)
BUCKET_STEP = 8


@dataclass(frozen=True)
class Sizes:
    """How many of each there is room for."""

    rows: int
    logits: int
    narrow: int
    wide: int
    whole: int
    tables: int
    """Block ids."""

    def holds(self, other: "Sizes") -> bool:
        return all(getattr(self, field.name) >= getattr(other, field.name) for field in fields(self))

    @property
    def ints(self) -> int:
        """Length of the whole array."""
        return self.sections().tables.stop

    def sections(self) -> "Sections":
        item = len(Item._fields)
        lengths = (
            *(self.rows, self.rows, self.rows, self.logits, self.rows + 1),
            *(self.narrow * item, self.wide * item, self.whole * item, self.tables),
        )
        begins = [0]
        for length in lengths:
            begins.append(begins[-1] + -(-length // ALIGN) * ALIGN)
        return Sections(*(range(begin, begin + length) for begin, length in zip(begins, lengths, strict=False)))


@dataclass(frozen=True)
class Sections:
    """Where each section lies."""

    token_ids: range
    positions: range
    slots: range
    logit_rows: range
    first_part: range
    narrow: range
    wide: range
    whole: range
    tables: range


def sizes_of(inputs: StepInputs, work: Work) -> Sizes:
    """What a step needs."""
    return Sizes(
        rows=len(inputs.slots),
        logits=inputs.num_logits,
        narrow=len(work.narrow),
        wide=len(work.wide),
        whole=len(work.whole),
        tables=len(work.tables),
    )


def buckets(most: int) -> list[int]:
    """Numbers of rows a graph is made for: 1, 2, 4, 8, 16, 24, 32, ... up to the first that holds `most`."""
    found = [rows for rows in SMALL_BUCKETS if rows < most]
    if most <= SMALL_BUCKETS[-1]:
        return [*found, min(rows for rows in SMALL_BUCKETS if rows >= most)]
    return [*found, *range(2 * BUCKET_STEP, most + BUCKET_STEP, BUCKET_STEP)]


def bucket_sizes(rows: int, geometry: Geometry, *, tables: int) -> Sizes:
    """Room for every step of `rows` rows at most, one token of a choice each, whatever groups they form.

    Each row has a tail, which is a narrow tile. A trunk is narrow tiles if few rows share it, at worst one a row; else
    wide ones, of which a group's last may be nearly empty. `spare` more of each come of long keys (see `work`).
    """
    few, many = geometry.narrow // geometry.siblings, geometry.wide // geometry.siblings
    return Sizes(
        rows=rows,
        logits=rows,
        narrow=2 * rows + geometry.spare,
        wide=rows // many + rows // (few + 1) + geometry.spare,
        whole=0,
        tables=tables,
    )


def most_parts(sizes: Sizes, geometry: Geometry) -> int:
    """Of all rows of a step of these sizes."""
    few, many = geometry.narrow // geometry.siblings, geometry.wide // geometry.siblings
    return sizes.narrow * few + sizes.wide * many


def blank(out: Ints, sizes: Sizes) -> int:
    """Writes a step without rows, so one that does nothing; returns how much of the array must be copied."""
    slots = sizes.sections().slots
    out[: sizes.ints] = 0
    out[slots.start : slots.stop] = NOWHERE
    return sizes.ints


def fill(out: Ints, inputs: StepInputs, work: Work, sizes: Sizes) -> int:
    """Writes a step into an array of at least `sizes.ints`; returns how much of it must be copied."""
    rows, at = len(inputs.slots), sizes.sections()
    for where, numbers, count, padding in (
        (at.token_ids, inputs.token_ids, rows, 0),
        (at.positions, inputs.positions, rows, 0),
        (at.slots, inputs.slots, rows, NOWHERE),
        (at.logit_rows, inputs.logit_rows, inputs.num_logits, 0),
        (at.first_part, work.first_part, rows + 1, work.first_part[-1]),
        (at.narrow, work.narrow.ravel(), work.narrow.size, 0),
        (at.wide, work.wide.ravel(), work.wide.size, 0),
        (at.whole, work.whole.ravel(), work.whole.size, 0),
    ):
        section = out[where.start : where.stop]
        section[:count] = numbers[:count]
        section[count:] = padding
    end = at.tables.start + len(work.tables)
    out[at.tables.start : end] = work.tables
    return end

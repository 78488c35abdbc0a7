"""Turns a step plan into the flat batch that the model runs.

    rows        | tails, group by group | trunk chunks | padding to a multiple of 4 |

Rows are padded because, on the CPU, matrix products with fewer than 4 rows or an odd number of rows have other bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

import msgspec

from motet.engines.native.adapters.low_rank import AdapterRows, ServedAdapter
from motet.engines.native.attention.attention_plan import (
    AttentionPlan,
    PromptRead,
    Table,
    TailReads,
    TrunkRead,
    padded_keys,
    pieces,
)
from motet.engines.native.step.sequence import ChoiceSequence, Group
from motet.engines.native.step.step_plan import Draft, StepPlan, TailChunk, TrunkChunk

ROW_MULTIPLE = 4
_ORIGIN = attrgetter("sequence.group.trunk.origin")


class NonFiniteRowsError(Exception):
    """Rows of the batch became NaN or infinity, so the KV that the step stored for them is unusable."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(f"rows {list(rows)} of a step are not finite")
        self.rows = rows


class NextToken(msgspec.Struct, frozen=True):
    """A token to sample: the token of `sequence` at `position`, from the logits row `row`."""

    sequence: ChoiceSequence
    row: int
    position: int
    """Position counted from the start of the prompt."""
    draft: Draft | None = None
    """The draft before the token, if any. The token is used only if this draft and all earlier ones are accepted."""


@dataclass(frozen=True)
class PromptRows:
    """Logits rows [begin, end) of a scored group, for its prompt positions from `position` on. The row of a position
    gives the score of the token after it, so there is no row for the last prompt position. Can be empty."""

    group: Group
    begin: int
    end: int
    position: int


@dataclass(frozen=True)
class StepInputs:
    """The flat batch of a step. Lists have one entry for each row; the runner converts them to tensors."""

    token_ids: list[int]
    """Padded with token 0."""
    positions: list[int]
    """Positions from the start of the prompt. Padded with position 0."""
    slots: list[int]
    """Slot in KV memory (`kv.storage`) of each row's key and value. Not padded."""
    logit_rows: list[int]
    """Rows of the batch that need logits. Padded with row 0."""
    num_logits: int
    """Number of `logit_rows` without padding."""
    next_tokens: list[NextToken]
    prompt_rows: list[PromptRows]
    attention: AttentionPlan
    adapters: tuple[AdapterRows, ...] = ()
    """The rows that are computed with adapters, in order."""


def build_inputs(plan: StepPlan, block_size: int) -> StepInputs:
    builder = _BatchBuilder(block_size)
    for _, chunks in groupby(plan.tails, key=_ORIGIN):
        builder.add_tails(list(chunks))
    num_tail_rows = len(builder.token_ids)
    for trunk in plan.trunks:
        builder.add_trunk(trunk)
    num_tokens = len(builder.token_ids)
    padding = [0] * (-num_tokens % ROW_MULTIPLE)
    return StepInputs(
        token_ids=builder.token_ids + padding,
        positions=builder.positions + padding,
        slots=builder.slots,
        logit_rows=builder.logit_rows + [0] * (-len(builder.logit_rows) % ROW_MULTIPLE),
        num_logits=len(builder.logit_rows),
        next_tokens=builder.next_tokens,
        prompt_rows=builder.prompt_rows,
        attention=AttentionPlan(num_tail_rows, tuple(builder.prompts), tuple(builder.trunks), builder.tails.finished()),
        adapters=tuple(builder.adapters),
    )


@dataclass
class _BatchBuilder:
    block_size: int
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)
    next_tokens: list[NextToken] = field(default_factory=list)
    prompt_rows: list[PromptRows] = field(default_factory=list)
    prompts: list[PromptRead] = field(default_factory=list)
    trunks: list[TrunkRead] = field(default_factory=list)
    tails: TailReads = field(default_factory=TailReads)
    adapters: list[AdapterRows] = field(default_factory=list)

    def add_tails(self, chunks: Sequence[TailChunk]) -> None:
        """Adds all rows of the sequences that share one trunk, and one read of the trunk for all of them."""
        group = chunks[0].sequence.group
        first_row, trunk_tokens = len(self.token_ids), len(group.prompt)
        for chunk in chunks:
            sequence, end = chunk.sequence, chunk.end
            if chunk.num_rows == 1:
                self._add_token(sequence, chunk.begin, trunk_tokens=trunk_tokens)
            else:
                self._add_several(chunk, trunk_tokens)
            if end == len(sequence.output_tokens):
                row = len(self.token_ids) - 1 - len(chunk.drafts)
                for offset, draft in enumerate((None, *chunk.drafts)):
                    position = trunk_tokens + end + offset
                    self.next_tokens.append(NextToken(sequence, len(self.logit_rows), position, draft))
                    self.logit_rows.append(row + offset)
        if group.trunk.adapter is not None:
            self._add_adapter(group.trunk.adapter, first_row)
        positions = tuple(self.positions[first_row:])
        self.trunks.append(TrunkRead(first_row, len(self.token_ids), positions, trunk_tokens, group.trunk.blocks))

    def add_trunk(self, chunk: TrunkChunk) -> None:
        """Adds a chunk of a prompt. Attention reads it in pieces of rows with the same padded number of keys."""
        group, row, blocks = chunk.group, len(self.token_ids), chunk.group.trunk.blocks
        self._add_rows(group.prompt[chunk.begin : chunk.end], chunk.begin, base=0, table=blocks)
        if group.trunk.adapter is not None:
            self._add_adapter(group.trunk.adapter, row)
        if chunk.begin == group.trunk.recomputed:
            # Other groups read the block with the KV of this token. The KV computed in this step is stored in the first
            # slot of a tail, where the first output token overwrites it.
            self.slots[row] = group.fresh[0].blocks[0] * self.block_size
        self.prompts += [
            PromptRead(row + first - chunk.begin, row + last - chunk.begin, first, keys, blocks)
            for first, last, keys in pieces(chunk.begin, chunk.end)
        ]
        position = len(group.prompt)
        if group.is_scored:
            first, last = max(chunk.begin, group.first_scored_row), min(chunk.end, position - 1)
            first_logit = len(self.logit_rows)
            self.logit_rows += range(row + first - chunk.begin, row + last - chunk.begin)
            self.prompt_rows.append(PromptRows(group, first_logit, len(self.logit_rows), first))
        if chunk.end == position and (fresh := group.fresh):
            logit = len(self.logit_rows)
            self.logit_rows.append(len(self.token_ids) - 1)
            self.next_tokens += [NextToken(sequence, logit, position) for sequence in fresh]

    def _add_adapter(self, adapter: ServedAdapter, begin: int) -> None:
        """Records that all rows from `begin` on use an adapter."""
        if self.adapters and self.adapters[-1].adapter is adapter and self.adapters[-1].end == begin:
            begin = self.adapters.pop().begin
        self.adapters.append(AdapterRows(begin, len(self.token_ids), adapter))

    def _add_token(self, sequence: ChoiceSequence, offset: int, *, trunk_tokens: int) -> None:
        """Adds one token of a sequence: the fast path, because most steps compute one token of each sequence."""
        size, table = self.block_size, sequence.blocks
        self.tails.add(len(self.token_ids), offset, count=1, num_keys=padded_keys(offset + 1), table=table)
        self.token_ids.append(sequence.output_tokens[offset])
        self.positions.append(trunk_tokens + offset)
        self.slots.append(table[offset // size] * size + offset % size)

    def _add_several(self, chunk: TailChunk, trunk_tokens: int) -> None:
        """Adds several tokens of a sequence, in pieces of rows with the same padded number of keys."""
        sequence, row = chunk.sequence, len(self.token_ids) - chunk.begin
        for first, last, keys in pieces(chunk.begin, chunk.begin + chunk.num_rows):
            self.tails.add(row + first, first, count=last - first, num_keys=keys, table=sequence.blocks)
        token_ids = (*sequence.output_tokens[chunk.begin : chunk.end], *(draft.token_id for draft in chunk.drafts))
        self._add_rows(token_ids, chunk.begin, base=trunk_tokens, table=sequence.blocks)

    def _add_rows(self, token_ids: Sequence[int], offset: int, *, base: int, table: Table) -> None:
        """Adds tokens at the offsets from `offset` on of a table that starts at position `base`."""
        end = offset + len(token_ids)
        self.token_ids += token_ids
        self.positions += range(base + offset, base + end)
        for slots in _slots(table, offset, end=end, size=self.block_size):
            self.slots += slots


def _slots(table: Table, begin: int, *, end: int, size: int) -> Iterator[range]:
    """Yields the slots of offsets [begin, end) of a table, block by block."""
    while begin < end:
        stop = min(end, begin - begin % size + size)
        first = table[begin // size] * size + begin % size
        yield range(first, first + stop - begin)
        begin = stop

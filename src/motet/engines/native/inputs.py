"""Turns a step plan into the flat batch the model is run on.

    rows        | tails, group by group | trunk chunks | padding to a multiple of 4 |

Rows are padded because matrix products with fewer rows than 4, or an uneven number, give other bits on the CPU.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import groupby

from motet.engines.native.attention.plan import (
    AttentionPlan,
    PromptRead,
    TailPiece,
    TrunkRead,
    batch_tails,
    pieces,
)
from motet.engines.native.plan import StepPlan, TailChunk, TrunkChunk
from motet.engines.native.sequence import Group, Sequence

ROW_MULTIPLE = 4


class SickRowsError(Exception):
    """Rows of the batch came out as NaN or infinity, so what the step stored for them means nothing."""

    def __init__(self, rows: SequenceOf[int]) -> None:
        super().__init__(f"rows {list(rows)} of a step are not finite")
        self.rows = rows


@dataclass(frozen=True)
class Draw:
    """The next token of `sequence`, at `position`, comes from logits row `row`."""

    sequence: Sequence
    row: int
    position: int


@dataclass(frozen=True)
class PromptRows:
    """Logits rows [begin, end) are those of prompt positions `position`.. of a group that wants prompt logprobs."""

    group: Group
    begin: int
    end: int
    position: int


@dataclass(frozen=True)
class StepInputs:
    """Lists, one entry a row; tensors are made by the runner."""

    token_ids: list[int]
    """Padded with token 0."""
    positions: list[int]
    """Padded with position 0."""
    slots: list[int]
    """Where KV goes; not padded."""
    logit_rows: list[int]
    """Rows of the batch whose logits are wanted; padded with row 0."""
    draws: list[Draw]
    prompt_rows: list[PromptRows]
    attention: AttentionPlan


def build_inputs(plan: StepPlan, block_size: int) -> StepInputs:
    """The flat batch of a step."""
    builder = _Builder(block_size)
    for group, chunks in groupby(plan.tails, key=lambda chunk: chunk.sequence.group):
        builder.add_tails(group, list(chunks))
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
        draws=builder.draws,
        prompt_rows=builder.prompt_rows,
        attention=AttentionPlan(
            num_tail_rows, tuple(builder.prompts), tuple(builder.trunks), batch_tails(builder.tail_pieces)
        ),
    )


@dataclass
class _Builder:
    block_size: int
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    prompt_rows: list[PromptRows] = field(default_factory=list)
    prompts: list[PromptRead] = field(default_factory=list)
    trunks: list[TrunkRead] = field(default_factory=list)
    tail_pieces: list[TailPiece] = field(default_factory=list)

    def add_tails(self, group: Group, chunks: list[TailChunk]) -> None:
        """All rows of one group's choices, and one read of its trunk for them."""
        begin = len(self.token_ids)
        trunk_tokens = len(group.prompt)
        for chunk in chunks:
            sequence, row = chunk.sequence, len(self.token_ids)
            self._add_rows(sequence.written[chunk.begin : chunk.end], chunk.begin, trunk_tokens, sequence.blocks)
            self.tail_pieces += [
                TailPiece(row + first - chunk.begin, first, last, keys, tuple(sequence.blocks))
                for first, last, keys in pieces(chunk.begin, chunk.end)
            ]
            if chunk.draws:
                self._draw(sequence, len(self.token_ids) - 1, trunk_tokens + chunk.end)
        end = len(self.token_ids)
        positions = tuple(self.positions[begin:end])
        self.trunks.append(TrunkRead(begin, end, positions, trunk_tokens, tuple(group.blocks)))

    def add_trunk(self, chunk: TrunkChunk) -> None:
        """A piece of a prompt, cut where the padded number of keys changes."""
        group, row = chunk.group, len(self.token_ids)
        self._add_rows(group.prompt[chunk.begin : chunk.end], chunk.begin, 0, group.blocks)
        table = tuple(group.blocks)
        self.prompts += [
            PromptRead(row + first - chunk.begin, row + last - chunk.begin, first, keys, table)
            for first, last, keys in pieces(chunk.begin, chunk.end)
        ]
        if group.request.sampling.prompt_logprobs is not None and not group.reported:
            first_logit = len(self.logit_rows)
            self.logit_rows += range(row, row + chunk.end - chunk.begin)
            self.prompt_rows.append(PromptRows(group, first_logit, len(self.logit_rows), chunk.begin))
        if chunk.draws:
            self.logit_rows.append(len(self.token_ids) - 1)
            first_token = len(group.prompt)
            self.draws += [Draw(sequence, len(self.logit_rows) - 1, first_token) for sequence in group.fresh]

    def _add_rows(self, token_ids: SequenceOf[int], offset: int, base: int, table: list[int]) -> None:
        """Tokens at offsets `offset`.. of a table that begins at position `base`."""
        size = self.block_size
        offsets = range(offset, offset + len(token_ids))
        self.token_ids += token_ids
        self.positions += range(base + offset, base + offset + len(token_ids))
        self.slots += [table[o // size] * size + o % size for o in offsets]

    def _draw(self, sequence: Sequence, row: int, position: int) -> None:
        self.logit_rows.append(row)
        self.draws.append(Draw(sequence, len(self.logit_rows) - 1, position))

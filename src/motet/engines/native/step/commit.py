"""Draws the next token of every choice that has a row of logits, and settles the step: counts the computed tokens,
appends the new ones, frees the blocks of ended choices, and makes a delta for every group that got tokens."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import msgspec
import torch

from motet.block_names import block_names
from motet.engines.native.kv.pool import BlockPool
from motet.engines.native.sample.lanes import Sampled, SampleRow
from motet.engines.native.sample.sampler import Sampler
from motet.engines.native.sample.top_logprobs import prompt_logprobs
from motet.engines.native.step.inputs import Draw, PromptRows
from motet.engines.native.step.scheduler import Scheduler
from motet.engines.native.step.sequence import ChoiceSequence, Group
from motet.engines.native.step.step_plan import StepPlan
from motet.errors import EngineError, GrammarError, MotetError
from motet.kv_events.changes import Stored
from motet.metrics.stats import EngineStats
from motet.types import ChoiceDelta, Finish, FinishReason, GroupDelta, PromptReport, TokenLogprob

_DRAFT = attrgetter("draft")
NONSENSE = "the model gave numbers that are not finite"


class DrawnToken(msgspec.Struct, frozen=True, gc=False):
    """The next token of one sequence."""

    sequence: ChoiceSequence
    sampled: Sampled
    more: tuple[Sampled, ...] = ()
    """The tokens after it, if drafts were right."""


def draw_tokens(sampler: Sampler, draws: Sequence[Draw], *, logits: torch.Tensor) -> list[DrawnToken]:
    """Returns the next tokens of the sequences in `draws`, in their order."""
    rows = [
        SampleRow(draw.row, draw.sequence.sampling if draw.draft is None else draw.draft.state, draw.position)
        for draw in draws
    ]
    sampled = sampler.sample(logits, rows)
    if any(map(_DRAFT, draws)):
        return without_wrong(draws, sampled)
    return [DrawnToken(draw.sequence, one) for draw, one in zip(draws, sampled, strict=True)]


def without_wrong(draws: Iterable[Draw], sampled: Iterable[Sampled]) -> list[DrawnToken]:
    """Leaves out what was drawn behind a draft that was not drawn itself, and what could not be drawn behind one: the
    next step will say why."""
    drawn: list[DrawnToken] = []
    last: Sampled | None = None  # what was drawn before, as long as drafts are right
    for draw, one in zip(draws, sampled, strict=True):
        if draw.draft is None:
            drawn.append(DrawnToken(draw.sequence, one))
            last = one
        elif last is not None and last.token_id == draw.draft.token_id and one.finite:
            drawn[-1] = DrawnToken(draw.sequence, drawn[-1].sampled, (*drawn[-1].more, one))
            last = one
        else:
            last = None
    return drawn


def failures_of(drawn: Iterable[DrawnToken]) -> dict[Group, MotetError]:
    """Returns the groups for which no token could be drawn, with the cause: their grammar, or the model's numbers."""
    failures: dict[Group, MotetError] = {}
    for one in drawn:
        if not one.sampled.finite:
            index, why = one.sequence.indices[0], one.sequence.sampling.failure
            error = GrammarError(f"choice {index}: {why}") if why else EngineError(NONSENSE)
            failures.setdefault(one.sequence.group, error)
    return failures


def score_prompt(rows: PromptRows, logits: torch.Tensor) -> None:
    """Adds to the group the log-probabilities of the tokens that follow the rows' positions; the first has none."""
    group, count = rows.group, rows.group.request.sampling.prompt_logprobs
    if rows.position == 0:
        group.prompt_logprobs = [None]
    targets = group.prompt[rows.position + 1 : rows.position + 1 + rows.end - rows.begin]
    group.prompt_logprobs += prompt_logprobs(logits[rows.begin : rows.begin + len(targets)], targets, k=count or 0)


@dataclass(eq=False, kw_only=True)
class Commit:
    """Knows the rules that end a choice. An engine has one."""

    scheduler: Scheduler
    counters: EngineStats
    eos_token_ids: frozenset[int]
    max_model_len: int
    answers: "AnswerCache | None" = None

    def advance(self, plan: StepPlan, *, trunk_tokens_joined: int = 0) -> None:
        """Counts the step's tokens as computed: their KV is stored. `trunk_tokens_joined`: see `ModelRunner`."""
        counters = self.counters
        counters.steps += 1
        for trunk in plan.trunks:
            trunk.group.computed = trunk.end
            counters.prefill_tokens += trunk.end - trunk.begin
            if trunk.group.request.ticket is not None:
                counters.recomputed_tokens += trunk.end - trunk.begin
            self.scheduler.publish(trunk.group)
        counters.trunk_tokens_read -= trunk_tokens_joined
        last = None
        for tail in plan.tails:
            sequence = tail.sequence
            sequence.computed = tail.end
            first_new = len(sequence.output_tokens) - sequence.new
            if tail.begin < first_new:
                counters.replayed_tokens += min(tail.end, first_new) - tail.begin
            group = sequence.group
            prompt_tokens = len(group.prompt)
            counters.draft_tokens += len(tail.drafts)
            counters.trunk_tokens_unshared += prompt_tokens
            if group.trunk != last:  # all that share a trunk are neighbours
                counters.trunk_tokens_read += prompt_tokens
                last = group.trunk

    def write(self, drawn: Iterable[DrawnToken]) -> list[GroupDelta]:
        """Appends the drawn tokens to their sequences; returns one delta a group."""
        by_group: dict[Group, list[ChoiceDelta]] = {}
        for one in drawn:
            by_group.setdefault(one.sequence.group, []).extend(self._write_one(one))
        return [
            GroupDelta(group.request.request_id, tuple(choices), _report(group)) for group, choices in by_group.items()
        ]

    def end(self, sequence: ChoiceSequence) -> None:
        """Frees a sequence that has finished or was stopped; the prefix cache may keep its answer for later prompts."""
        if self.answers is not None:
            self.answers.keep(sequence)
        self.scheduler.finish(sequence)

    def _write_one(self, drawn: DrawnToken) -> list[ChoiceDelta]:
        sequence, sampled = drawn.sequence, drawn.sampled
        finish = self._append(sequence, sampled.token_id)
        token_ids: tuple[int, ...] = (sampled.token_id,)
        logprobs: tuple[TokenLogprob, ...] | None = None if sampled.logprob is None else (sampled.logprob,)
        for one in drawn.more:
            if finish:
                break
            sequence.computed += 1  # it was a draft's row that stored the KV of the token before
            finish = self._append(sequence, one.token_id)
            token_ids += (one.token_id,)
            if logprobs is not None and one.logprob is not None:
                logprobs += (one.logprob,)
        self.counters.accepted_tokens += len(token_ids) - 1
        sequence.new = 1
        if sequence.sampling.matcher is not None and not finish:
            forced, finish = self._append_forced(sequence)
            token_ids += forced
            sequence.new += len(forced)
        deltas = [ChoiceDelta(index, token_ids, logprobs, finish) for index in sequence.indices]
        if finish:
            self.end(sequence)
        return deltas

    def _append(self, sequence: ChoiceSequence, token_id: int) -> Finish | None:
        sequence.output_tokens.append(token_id)
        sequence.sampling.append(token_id)
        self.counters.generated_tokens += len(sequence.indices)
        return self.finish_of(sequence)

    def _append_forced(self, sequence: ChoiceSequence) -> tuple[tuple[int, ...], Finish | None]:
        """Appends the tokens that must come next, up to one that ends the choice."""
        appended, finish = [], None
        while finish is None and (forced := sequence.sampling.forced()):
            for token_id in forced:
                appended.append(token_id)
                self.counters.forced_tokens += len(sequence.indices)
                finish = self._append(sequence, token_id)
                if finish or sequence.sampling.failure:
                    break
        return tuple(appended), finish

    def finish_of(self, sequence: ChoiceSequence) -> Finish | None:
        """Returns how the last token ends its choice, if it does. Stop strings are text: they end a choice from
        outside.

        End-of-sequence and stop tokens cannot be drawn before `min_tokens`. A choice with a grammar and `ignore_eos`
        draws end-of-sequence only if the grammar allows nothing else. So neither needs a check here.
        """
        sampling, written = sequence.group.request.sampling, sequence.output_tokens
        if sequence.sampling.complete:
            return Finish(FinishReason.STOP)
        if written[-1] in self.eos_token_ids and (not sampling.ignore_eos or sampling.grammar is not None):
            return Finish(FinishReason.STOP)
        if written[-1] in sampling.stop_token_ids:
            return Finish(FinishReason.STOP, written[-1])
        num_tokens = len(sequence.group.prompt) + len(written)
        if len(written) >= sampling.max_tokens or num_tokens >= self.max_model_len:
            return Finish(FinishReason.LENGTH)
        return None


def _report(group: Group) -> PromptReport | None:
    """Returns the report on a group's prompt, for its first delta."""
    if group.reported:
        return None
    group.reported = True
    scored = group.request.sampling.prompt_logprobs is not None
    return PromptReport(group.cached_tokens or 0, tuple(group.prompt_logprobs) if scored else None, group.pulled)


@dataclass(eq=False)
class AnswerCache:
    """Lets answers into the prefix cache, for conversations in which the last answer is part of the next prompt.

    An answer's KV is copied into other blocks, with the borders of prompt blocks, and these are published. A tail
    always starts in a fresh block, wherever its trunk ends, so its own blocks cannot be shared:

        trunk  [p p p p][p p . .]            cut as a prompt  [p p p p][p p w w][w w w .]
        tail             [w w w w][w . . .]

    Off by default: the KV of an answer was computed as trunk and tail, and its bits differ from the KV that the same
    tokens get as a prompt, so a choice may then depend on earlier requests.
    """

    pool: BlockPool
    block_size: int
    copy: Callable[[list[int], list[int]], None]
    """Copies the KV of slots, source to target, in all layers."""
    weights: str = ""
    """Names the weights in the names of blocks."""

    def keep(self, sequence: ChoiceSequence) -> None:
        """Publishes the answer of a sequence that still holds its blocks. Does nothing if too few blocks are free."""
        group, size = sequence.group, self.block_size
        known = (*group.prompt, *sequence.output_tokens[: sequence.computed])
        names = block_names(known, size, salt=group.request.cache_salt, weights=self.weights)
        first = max(len(group.prompt) // size, len(self.pool.find(names)))
        if first >= len(names) or len(names) - first > self.pool.num_free:
            return
        blocks = self.pool.take(len(names) - first)
        self.copy(
            [self._slot(sequence, position) for position in range(first * size, len(names) * size)],
            [block * size + offset for block in blocks for offset in range(size)],
        )
        parent = names[first - 1] if first else None
        tokens = known[first * size : len(names) * size]
        self.pool.publish(blocks, Stored(tuple(names[first:]), parent, tokens, bool(group.request.cache_salt)))
        self.pool.release(blocks)

    def _slot(self, sequence: ChoiceSequence, position: int) -> int:
        group, size = sequence.group, self.block_size
        offset = position - len(group.prompt)
        table, offset = (group.blocks, position) if offset < 0 else (sequence.blocks, offset)
        return table[offset // size] * size + offset % size

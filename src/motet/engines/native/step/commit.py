"""Samples the next tokens of a step, and applies its results: counts computed tokens, appends new tokens, frees the
blocks of ended choices, and makes a delta for every group with new tokens."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec
import torch

from motet.block_names import block_names
from motet.engines.native.kv.pool import BlockPool
from motet.engines.native.sample.lanes import Sampled, SampleRow
from motet.engines.native.sample.sampler import Sampler
from motet.engines.native.scheduling.scheduler import Scheduler
from motet.engines.native.step.inputs import NextToken, PromptRows
from motet.engines.native.step.sequence import ChoiceSequence, Group
from motet.engines.native.step.step_plan import StepPlan, TailChunk
from motet.errors import EngineError, GrammarError, MotetError
from motet.kv_events.changes import Stored
from motet.metrics.stats import STEP_TOKENS, EngineStats
from motet.types import ChoiceDelta, Finish, FinishReason, GroupDelta, TokenLogprob

_DRAFT = attrgetter("draft")
_ENCODER = msgspec.msgpack.Encoder()
NO_SCORE = _ENCODER.encode(None)
"""The score of the first token of a prompt."""
NON_FINITE = "the model computed numbers that are not finite"


class NewTokens(msgspec.Struct, frozen=True, gc=False):
    """The tokens that a step sampled for one sequence."""

    sequence: ChoiceSequence
    sampled: Sampled
    more: tuple[Sampled, ...] = ()
    """The tokens after accepted drafts."""


def sample_tokens(sampler: Sampler, next_tokens: Sequence[NextToken], *, logits: torch.Tensor) -> list[NewTokens]:
    """Samples `next_tokens` from logits [rows, vocab_size], and returns the new tokens of each sequence, in order."""
    rows = [
        SampleRow(entry.row, entry.sequence.sampling if entry.draft is None else entry.draft.state, entry.position)
        for entry in next_tokens
    ]
    sampled = sampler.sample(logits, rows)
    if any(map(_DRAFT, next_tokens)):
        return without_rejected(next_tokens, sampled)
    return [NewTokens(entry.sequence, token) for entry, token in zip(next_tokens, sampled, strict=True)]


def without_rejected(next_tokens: Iterable[NextToken], sampled: Iterable[Sampled]) -> list[NewTokens]:
    """Drops the tokens that were sampled after a rejected draft, and samples that failed after an accepted draft; the
    next step reports that failure."""
    new: list[NewTokens] = []
    last: Sampled | None = None  # the previous token while drafts are accepted; None after a rejected draft
    for entry, token in zip(next_tokens, sampled, strict=True):
        if entry.draft is None:
            new.append(NewTokens(entry.sequence, token))
            last = token
        elif last is not None and last.token_id == entry.draft.token_id and token.finite:
            new[-1] = NewTokens(entry.sequence, new[-1].sampled, (*new[-1].more, token))
            last = token
        else:
            last = None
    return new


def failures_of(new: Iterable[NewTokens]) -> dict[Group, MotetError]:
    """Returns the groups for which no token could be sampled, with the cause: their grammar, or the model's numbers."""
    failures: dict[Group, MotetError] = {}
    for tokens in new:
        if not tokens.sampled.finite:
            index, why = tokens.sequence.indices[0], tokens.sequence.sampling.failure
            error = GrammarError(f"choice {index}: {why}") if why else EngineError(NON_FINITE)
            failures.setdefault(tokens.sequence.group, error)
    return failures


@dataclass(eq=False, kw_only=True)
class Commit:
    """Applies the results of the steps of an engine, and decides when a choice ends."""

    scheduler: Scheduler
    counters: EngineStats
    eos_token_ids: frozenset[int]
    max_model_len: int
    answers: "AnswerCache | None" = None
    """Set with `--cache-answers`."""
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))
    """Number of steps in each bucket of the histogram of their tokens."""

    def advance(self, plan: StepPlan, *, trunk_tokens_saved: int = 0) -> None:
        """Counts the tokens of a step as computed: their KV is stored. `trunk_tokens_saved`: see `ModelRunner`."""
        self.counters.steps += 1
        self.counters.step_tokens_sum += (num_tokens := plan.num_tokens)
        self.steps_by_tokens[bisect_left(STEP_TOKENS, num_tokens)] += 1
        for chunk in plan.trunks:
            group, num_tokens = chunk.group, chunk.end - chunk.begin
            group.trunk.num_computed = chunk.end
            self.counters.prefill_tokens += num_tokens
            if group.request.ticket is not None:
                self.counters.recomputed_tokens += num_tokens
            self.scheduler.publish(group)
        self.counters.trunk_tokens_read -= trunk_tokens_saved
        self._advance_tails(plan.tails)

    def score_prompt(self, rows: PromptRows, logits: torch.Tensor, *, sampler: Sampler) -> None:
        """Adds the scores of the prompt tokens after the positions of `rows` to the group's facts, and caches the
        scores of complete blocks. The first prompt token has no score. `logits`: [rows of the step, vocab_size]."""
        group, needs, start = rows.group, rows.group.facts.needs, rows.group.facts.scored_from
        if needs is None:
            return
        if rows.position == start == 0:
            group.facts.scores = [NO_SCORE]
        known = group.facts.scores
        first, size = start + len(known), self.scheduler.limits.block_size
        targets = group.prompt[rows.position + 1 : rows.position + 1 + rows.end - rows.begin]
        scored = logits[rows.begin : rows.end]
        if targets:
            known += map(_ENCODER.encode, sampler.score(scored, targets, k=needs.num_top, named=needs.named))
        if group.trunk.key is None:  # the cache was cleared: these names can belong to other weights now
            return
        names = group.trunk.names[: (start + len(known)) // size]
        for block in range(first // size, len(names)):
            scores = known[block * size - start : (block + 1) * size - start]
            self.scheduler.pool.store_scores(names[block], scores, needs=needs)

    def _advance_tails(self, tails: Iterable[TailChunk]) -> None:
        counters, prompt_tokens = self.counters, 0
        group: Group | None = None
        origin: tuple[int, int] | None = None
        for tail in tails:
            sequence = tail.sequence
            sequence.num_computed = tail.end
            first_new = len(sequence.output_tokens) - sequence.num_new
            if tail.begin < first_new:
                counters.replayed_tokens += min(tail.end, first_new) - tail.begin
            if sequence.group is not group:
                group, prompt_tokens = sequence.group, len(sequence.group.prompt)
                if group.trunk.origin != origin:  # tails of one trunk are adjacent: the trunk was read once for them
                    origin = group.trunk.origin
                    counters.trunk_tokens_read += prompt_tokens
            counters.trunk_tokens_unshared += prompt_tokens
            counters.draft_tokens += len(tail.drafts)

    def append(self, new: Iterable[NewTokens]) -> list[GroupDelta]:
        """Appends the new tokens to their sequences. Returns one delta for each group."""
        by_group: dict[Group, list[ChoiceDelta]] = {}
        for tokens in new:
            by_group.setdefault(tokens.sequence.group, []).extend(self._append_all(tokens))
        return [
            GroupDelta(group.request.request_id, tuple(choices), group.facts.take_report())
            for group, choices in by_group.items()
        ]

    def end(self, sequence: ChoiceSequence) -> None:
        """Frees a sequence that has finished or was stopped. Stores its answer if there is an `AnswerCache`."""
        if self.answers is not None:
            self.answers.store(sequence)
        self.scheduler.finish(sequence)

    def _append_all(self, new: NewTokens) -> list[ChoiceDelta]:
        """Appends sampled and forced tokens up to the end of the choice. Returns a delta for each choice."""
        sequence, sampled = new.sequence, new.sampled
        finish = self._append(sequence, sampled.token_id)
        token_ids: tuple[int, ...] = (sampled.token_id,)
        logprobs: tuple[TokenLogprob, ...] | None = None if sampled.logprob is None else (sampled.logprob,)
        for token in new.more:
            if finish:
                break
            sequence.num_computed += 1  # the step has stored the KV of the accepted draft
            finish = self._append(sequence, token.token_id)
            token_ids += (token.token_id,)
            if logprobs is not None and token.logprob is not None:
                logprobs += (token.logprob,)
        self.counters.accepted_tokens += len(token_ids) - 1
        sequence.num_new = 1
        if sequence.sampling.matcher is not None and not finish:
            forced, finish = self._append_forced(sequence)
            token_ids += forced
            sequence.num_new += len(forced)
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
        """Appends the tokens that the grammar forces, up to a token that ends the choice."""
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
        """Returns the reason why the choice ends with its last token; None if it continues. Stop strings are text: the
        API process finds them, and then stops the choice.

        End-of-sequence and stop tokens cannot be sampled before `min_tokens`. A choice with a grammar and `ignore_eos`
        samples end-of-sequence only if the grammar allows nothing else. Neither needs a check here. Where a grammar
        allows only stop tokens before its end, they are text and do not end the choice."""
        sampling, output_tokens = sequence.group.request.sampling, sequence.output_tokens
        if sequence.sampling.complete:
            return Finish(FinishReason.STOP)
        if output_tokens[-1] in self.eos_token_ids and (not sampling.ignore_eos or sampling.grammar is not None):
            return Finish(FinishReason.STOP)
        if output_tokens[-1] in sampling.stop_token_ids and not sequence.sampling.within_form:
            return Finish(FinishReason.STOP, output_tokens[-1])
        num_tokens = len(sequence.group.prompt) + len(output_tokens)
        if len(output_tokens) >= sampling.max_tokens or num_tokens >= self.max_model_len:
            return Finish(FinishReason.LENGTH)
        return None


@dataclass(eq=False)
class AnswerCache:
    """Adds answers to the prefix cache, for conversations in which the last answer is part of the next prompt.

    The KV of an answer is copied into other blocks, which are aligned like the blocks of a prompt, and these blocks are
    published. The blocks of the tail itself cannot be shared, because a tail starts in a new block wherever its trunk
    ends (p: prompt token, o: output token):

        trunk  [p p p p][p p . .]            aligned like a prompt  [p p p p][p p o o][o o o .]
        tail             [o o o o][o . . .]

    Off by default: the KV of an answer was computed as trunk and tail, and its bits differ from the KV of the same
    tokens in a prompt. With this cache, the tokens of a choice can depend on earlier requests."""

    pool: BlockPool
    block_size: int
    copy: Callable[[list[int], list[int]], None]
    """Copies the KV of slots, from a source to a target list, in all layers."""
    weights: str = ""
    """Identifies the weights in block names."""

    def store(self, sequence: ChoiceSequence) -> None:
        """Publishes the answer of a sequence that still holds its blocks. Does nothing if too few blocks are free."""
        group, size = sequence.group, self.block_size
        tokens = (*group.prompt, *sequence.output_tokens[: sequence.num_computed])
        salt, adapter = group.request.cache_salt, group.trunk.adapter_digest
        names = block_names(tokens, size, salt=salt, adapter=adapter, weights=self.weights)
        first = max(len(group.prompt) // size, len(self.pool.find(names)))
        if first >= len(names) or len(names) - first > self.pool.num_free:
            return
        blocks = self.pool.take(len(names) - first)
        self.copy(
            [self._slot(sequence, position) for position in range(first * size, len(names) * size)],
            [block * size + offset for block in blocks for offset in range(size)],
        )
        parent = names[first - 1] if first else None
        stored = tokens[first * size : len(names) * size]
        self.pool.publish(blocks, Stored(tuple(names[first:]), parent, stored, bool(salt or adapter)))
        self.pool.release(blocks)

    def _slot(self, sequence: ChoiceSequence, position: int) -> int:
        """Returns the slot of a position, counted from the start of the prompt."""
        group, size = sequence.group, self.block_size
        offset = position - len(group.prompt)
        table, offset = (group.trunk.blocks, position) if offset < 0 else (sequence.blocks, offset)
        return table[offset // size] * size + offset % size

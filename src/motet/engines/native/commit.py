"""Settles a step: what was computed is computed, what was drawn is written, what is done is freed; says what is new."""

from collections.abc import Iterable

import msgspec

from motet.engines.native.answers import AnswerCache
from motet.engines.native.counters import Counters
from motet.engines.native.finish import finish_of
from motet.engines.native.plan import StepPlan
from motet.engines.native.sample.sampler import Sampled
from motet.engines.native.scheduler import Scheduler
from motet.engines.native.sequence import Group, Sequence
from motet.types import ChoiceDelta, Finish, FinishReason, GroupDelta, PromptReport


class Drawn(msgspec.Struct, frozen=True, gc=False):
    """The next token of one sequence."""

    sequence: Sequence
    sampled: Sampled


class Commit:
    """Knows the rules that end a choice; one for the engine's life."""

    def __init__(
        self,
        scheduler: Scheduler,
        counters: Counters,
        *,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        answers: AnswerCache | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._counters = counters
        self._eos = eos_token_ids
        self._max_model_len = max_model_len
        self._answers = answers

    def advance(self, plan: StepPlan) -> None:
        """The KV of the step's tokens is stored."""
        self._counters.steps += 1
        for trunk in plan.trunks:
            trunk.group.computed = trunk.end
            self._counters.prefill_tokens += trunk.end - trunk.begin
            if trunk.group.request.ticket is not None:
                self._counters.recomputed_tokens += trunk.end - trunk.begin
            self._scheduler.publish(trunk.group)
        self._advance_tails(plan)

    def write(self, drawn: Iterable[Drawn]) -> list[GroupDelta]:
        """Writes the drawn tokens; one delta a group."""
        by_group: dict[Group, list[ChoiceDelta]] = {}
        for one in drawn:
            by_group.setdefault(one.sequence.group, []).extend(self._write_one(one))
        return [
            GroupDelta(group.request.request_id, tuple(choices), self._report(group))
            for group, choices in by_group.items()
        ]

    def end(self, sequence: Sequence) -> None:
        """Frees a sequence that has finished, or was stopped from outside; its answer may be kept for later prompts."""
        if self._answers is not None:
            self._answers.keep(sequence)
        self._scheduler.finish(sequence)

    def _write_one(self, drawn: Drawn) -> list[ChoiceDelta]:
        sequence, sampled = drawn.sequence, drawn.sampled
        sequence.written.append(sampled.token_id)
        sequence.sampling.append(sampled.token_id)
        self._counters.generated_tokens += len(sequence.indices)
        finish = self._finish(sequence, sampled.token_id)
        logprobs = None if sampled.logprob is None else (sampled.logprob,)
        deltas = [ChoiceDelta(index, (sampled.token_id,), logprobs, finish) for index in sequence.indices]
        if finish:
            self.end(sequence)
        return deltas

    def _finish(self, sequence: Sequence, token_id: int) -> Finish | None:
        if sequence.sampling.complete:
            return Finish(FinishReason.STOP)
        return finish_of(
            token_id,
            num_written=len(sequence.written),
            num_total=len(sequence.group.prompt) + len(sequence.written),
            sampling=sequence.group.request.sampling,
            eos=self._eos,
            max_model_len=self._max_model_len,
        )

    def _report(self, group: Group) -> PromptReport | None:
        if group.reported:
            return None
        group.reported = True
        wanted = group.request.sampling.prompt_logprobs is not None
        return PromptReport(group.cached_tokens or 0, tuple(group.prompt_logprobs) if wanted else None)

    def _advance_tails(self, plan: StepPlan) -> None:
        counters, last = self._counters, None
        for tail in plan.tails:
            sequence = tail.sequence
            sequence.computed = tail.end
            counters.replayed_tokens += tail.end - tail.begin - tail.draws
            group = sequence.group
            prompt_tokens = len(group.prompt)
            counters.trunk_tokens_unshared += prompt_tokens
            if group is not last:  # siblings stand side by side
                counters.trunk_tokens_read += prompt_tokens
                last = group

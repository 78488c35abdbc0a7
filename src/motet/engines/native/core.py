"""The engine without its process: submit groups, take steps. Synchronous, single-threaded, nothing hidden.

submit ─► scheduler ─► plan ─► inputs ─► runner ─► logits ─► sampler ─► commit ─► deltas
             ▲                                                             │
             └──────────────── blocks, computed and written counts ────────┘
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from typing import Protocol

import torch

from motet.engines.native.answers import AnswerCache
from motet.engines.native.commit import Commit, Drawn
from motet.engines.native.counters import Counters
from motet.engines.native.fits import check_fits
from motet.engines.native.groups import GroupMaker
from motet.engines.native.handover import Handover, HandoverTerms
from motet.engines.native.inputs import PromptRows, SickRowsError, StepInputs, build_inputs
from motet.engines.native.kv.pool import BlockPool
from motet.engines.native.plan import StepPlan
from motet.engines.native.sample.logprobs import prompt_logprobs
from motet.engines.native.sample.sampler import Sampler, SampleRow
from motet.engines.native.scheduler import Scheduler, SchedulerLimits
from motet.engines.native.sequence import Group, SequenceState
from motet.engines.native.step_result import StepResult
from motet.errors import EngineError, GrammarError, MotetError, RequestError
from motet.grammar.compiled import Grammars, Matcher
from motet.ids import RequestId
from motet.transfer.base import Transfers
from motet.transfer.none import NoTransfers
from motet.transfer.proof import Proof
from motet.transfer.ticket import Ticket
from motet.types import EngineInfo, EngineStats, GenerateRequest, GroupDelta

NONSENSE = "the model gave numbers that are not finite"


class ModelRunner(Protocol):
    """What the core needs of a runner."""

    @property
    def device(self) -> torch.device: ...

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Logits [rows wanted, vocab_size], until the next run. A GPU may still be at work on them."""
        ...

    def verify(self) -> None:
        """SickRowsError if a row of the last run came to nothing. Called once its tokens are here: it costs no wait."""
        ...

    def copy_slots(self, source: list[int], target: list[int]) -> None: ...

    def settle(self) -> None:
        """Returns once all that was run is in memory, and nothing of it reads or writes any more."""
        ...


@dataclass(frozen=True)
class CoreOptions:
    max_num_batched_tokens: int
    prefix_cache: bool
    cache_answers: bool
    lease_s: float = 60.0
    grammars: Grammars | None = None
    """None: groups with a grammar are refused."""


class EngineCore:
    """Owns the scheduler, the pool, the runner and the sampler."""

    def __init__(
        self,
        info: EngineInfo,
        runner: ModelRunner,
        options: CoreOptions,
        *,
        proof: Proof | None = None,
        transfers: Transfers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`transfers`, with the `proof` that readers of our memory see: for an engine that hands KV over."""
        self.info = info
        self.counters = Counters()
        self.grammars = options.grammars
        self._runner = runner
        self._maker = GroupMaker(info, prefix_cache=options.prefix_cache, grammars=options.grammars)
        self._groups: dict[RequestId, Group] = {}
        self._arrivals = 0
        self._pool = BlockPool(info.num_blocks, proof)
        self._handover = Handover(
            transfers or NoTransfers(),
            self._pool,
            self.counters,
            HandoverTerms(info.block_size, options.lease_s, clock),
            settle=runner.settle,
        )
        limits = SchedulerLimits(
            info.block_size, info.bytes_per_block, info.max_num_seqs, options.max_num_batched_tokens
        )
        self._scheduler = Scheduler(self._pool, limits, self.counters, self._handover)
        self._sampler = Sampler(info.vocab_size, runner.device)
        self._commit = Commit(
            self._scheduler,
            self.counters,
            eos_token_ids=frozenset(info.eos_token_ids),
            max_model_len=info.max_model_len,
            answers=AnswerCache(self._pool, info.block_size, runner.copy_slots) if options.cache_answers else None,
        )

    @property
    def busy(self) -> bool:
        return bool(self._groups)

    @property
    def transfers(self) -> Transfers:
        return self._handover.transfers

    @property
    def wake_s(self) -> float | None:
        """When the engine must take a step although nothing is asked of it, by its clock."""
        return self._handover.wake_s

    def submit(self, request: GenerateRequest, matchers: Mapping[int, Matcher] | None = None) -> None:
        """Queues a group. RequestError if it can never run here; then its ticket is given back. `matchers`: where each
        choice begins in the group's grammar, by its index; without them the grammar is compiled here."""
        try:
            self._check_free(request.request_id)
            group = self._maker.to_write(request, self._arrivals, matchers)
            check_fits(group, self.info, self._scheduler.blocks_at_admission(group))
            self._handover.expect(group)
        except RequestError:
            if request.ticket is not None:
                self.release(request.ticket)
            raise
        self._enqueue(group)

    def prefill(self, request: GenerateRequest, *, readers: int = 1) -> None:
        """Queues a prompt to be computed for others: ends in a ticket. RequestError if it can never run here."""
        self._handover.check_open()
        self._check_free(request.request_id)
        group = self._maker.to_hand_over(request, self._arrivals, readers)
        check_fits(group, self.info, self._scheduler.blocks_at_admission(group))
        self._enqueue(group)

    def abort(self, request_id: RequestId) -> None:
        """Frees a group at once, or the lease that came of it. Unknown ids are ignored: it may just have ended."""
        if group := self._groups.pop(request_id, None):
            self._scheduler.remove(group)
        else:
            self._handover.release_request(request_id)

    def release(self, ticket: Ticket) -> None:
        """Ends the lease of a ticket, whoever granted it."""
        self._handover.release(ticket)

    def stop_choice(self, request_id: RequestId, index: int) -> None:
        """Ends one choice; unknown ones are ignored."""
        group = self._groups.get(request_id)
        sequence = None if group is None else group.answered_by.pop(index, None)
        if group is None or sequence is None or sequence.state is SequenceState.FINISHED:
            return
        sequence.indices.remove(index)
        if not sequence.indices:
            self._commit.end(sequence)
        if not group.sequences:
            del self._groups[request_id]

    def step(self) -> StepResult:
        """Takes in the news, then one forward pass over everything scheduled, if anything is."""
        arrivals = self._handover.take_news()
        for group in arrivals.landed:
            self._scheduler.publish(group)
        for group in arrivals.failed:
            self._scheduler.suspend(group)
        plan = self._scheduler.plan()
        deltas, failures = self._run(plan) if plan else ([], {})
        tickets = self._hand_over()
        return StepResult(deltas, failures, tickets, self._pool.take_changes(), arrivals.met, ran=bool(plan))

    def _run(self, plan: StepPlan) -> tuple[list[GroupDelta], dict[RequestId, MotetError]]:
        inputs = build_inputs(plan, self.info.block_size)
        try:
            logits = self._runner.run(inputs)
            drawn = self._draw(inputs, logits)
            self._runner.verify()
        except SickRowsError as error:
            # Nothing is settled, so nothing of theirs is published; the other groups run the same step again.
            return [], self._fail(dict.fromkeys(plan.groups_of(error.rows), EngineError(NONSENSE)))
        self._commit.advance(plan)
        for rows in inputs.prompt_rows:
            _note(rows, logits[rows.begin : rows.end])
        broken = _broken(drawn)
        failures = self._fail(broken)
        deltas = self._commit.write(one for one in drawn if one.sequence.group not in broken)
        for delta in deltas:
            if not self._groups[delta.request_id].sequences:
                del self._groups[delta.request_id]
        return deltas, failures

    def _hand_over(self) -> dict[RequestId, Ticket]:
        """Tickets for the groups whose prompts are prefilled."""
        done = [group for group in self._scheduler.running if group.readers and not group.trunk_pending]
        tickets = {}
        for group in done:
            if self._handover.has_room:
                blocks = self._scheduler.hand_over(group)
                request_id = group.request.request_id
                tickets[request_id] = self._handover.grant(group, blocks)
                del self._groups[request_id]
        return tickets

    def stats(self) -> EngineStats:
        running, waiting = self._scheduler.running, list(self._scheduler.waiting)
        choices = Counter[SequenceState]()
        for sequence in (s for group in (*running, *waiting) for s in group.sequences):
            choices[sequence.state] += len(sequence.indices)
        return EngineStats(
            groups_running=len(running),
            groups_waiting=len(waiting),
            choices_running=choices[SequenceState.RUNNING],
            choices_waiting=choices[SequenceState.WAITING],
            blocks_total=self._pool.num_blocks,
            blocks_used=self._pool.num_held,
            blocks_cached=self._pool.num_idle,
            leases=len(self._handover.leases),
            oldest_lease_s=self._handover.oldest_lease_s,
            pulls_open=self._handover.pulls_open,
            blocks_pulling=self._handover.blocks_pulling,
            transfer_seconds=self._handover.figures.counts,
            transfer_seconds_sum=self._handover.figures.seconds_sum,
            **asdict(self.counters),
        )

    def check(self) -> None:
        """Raises `AssertionError` if anything is held that no group accounts for."""
        self._handover.leases.check()
        self._scheduler.check(self._handover.tables())
        known = {*self._scheduler.running, *self._scheduler.waiting}
        if known != set(self._groups.values()):
            raise AssertionError("the scheduler and the core know different groups")

    def _check_free(self, request_id: RequestId) -> None:
        if request_id in self._groups:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")

    def _enqueue(self, group: Group) -> None:
        self._arrivals += 1
        self._groups[group.request.request_id] = group
        self._scheduler.add(group)

    def _draw(self, inputs: StepInputs, logits: torch.Tensor) -> list[Drawn]:
        rows = [SampleRow(draw.row, draw.sequence.sampling, draw.position) for draw in inputs.draws]
        sampled = self._sampler.sample(logits, rows)
        return [Drawn(draw.sequence, one) for draw, one in zip(inputs.draws, sampled, strict=True)]

    def _fail(self, why: Mapping[Group, MotetError]) -> dict[RequestId, MotetError]:
        """Ends groups that cannot go on."""
        for group in why:
            self.abort(group.request.request_id)
        return {group.request.request_id: error for group, error in why.items()}


def _broken(drawn: SequenceOf[Drawn]) -> dict[Group, MotetError]:
    """Groups for which nothing could be drawn, and why: a grammar that became too much work is the client's own."""
    broken: dict[Group, MotetError] = {}
    for one in drawn:
        if not one.sampled.finite:
            index, failure = one.sequence.indices[0], one.sequence.sampling.failure
            error = GrammarError(f"choice {index}: {failure}") if failure else EngineError(NONSENSE)
            broken.setdefault(one.sequence.group, error)
    return broken


def _note(rows: PromptRows, logits: torch.Tensor) -> None:
    """Log-probabilities of the prompt tokens that follow the rows' positions; the first token of a prompt has none."""
    group, count = rows.group, rows.group.request.sampling.prompt_logprobs
    if rows.position == 0:
        group.prompt_logprobs = [None]
    targets = group.prompt[rows.position + 1 : rows.position + 1 + len(logits)]
    group.prompt_logprobs += prompt_logprobs(logits[: len(targets)], targets, count or 0)

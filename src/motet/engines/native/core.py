"""The engine without its process: submit groups, take steps. It is synchronous and has a single thread.

submit ─► scheduler ─► plan ─► inputs ─► runner ─► logits ─► sampler ─► commit ─► deltas
             ▲                                                             │
             └──────────────── blocks, computed and output tokens ─────────┘
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from motet.engines.native.handover import Handover
from motet.engines.native.kv.pool import BlockPool
from motet.engines.native.sample.sampler import Sampler
from motet.engines.native.step.commit import NONSENSE, AnswerCache, Commit, draw_tokens, failures_of, score_prompt
from motet.engines.native.step.drafts import Drafter, History
from motet.engines.native.step.inputs import NonFiniteRowsError, build_inputs
from motet.engines.native.step.run import ModelRunner
from motet.engines.native.step.scheduler import Scheduler, SchedulerLimits, check_fits
from motet.engines.native.step.sequence import Group, GroupMaker, SequenceState
from motet.engines.native.step.step_plan import StepPlan
from motet.errors import EngineError, MotetError, RequestError
from motet.grammar.compiled_grammar import Grammars, Matcher
from motet.ids import RequestId
from motet.kv_events.changes import BlockChange
from motet.metrics.stats import EngineStats
from motet.transfer.orders import Met
from motet.transfer.proof import Proof
from motet.transfer.ticket import Ticket
from motet.types import EngineInfo, GenerateRequest, GroupDelta

if TYPE_CHECKING:  # an engine that keeps its KV to itself needs no ZeroMQ for it
    from motet.transfer.thread import TransferThread

_DRAFTS = attrgetter("drafts")


@dataclass(frozen=True)
class CoreOptions:
    max_num_batched_tokens: int
    prefix_cache: bool
    cache_answers: bool
    lease_s: float = 60.0
    grammars: Grammars | None = None
    """None: groups with a grammar are refused."""
    draft_tokens: int = 0
    """Most draft tokens of a choice in a step."""
    draft_from_history: int = 0
    """Tokens of earlier answers that are kept as drafts."""
    max_kept_blocks: int | None = None
    """Most blocks of trunks that are kept; None: as many as there are."""


@dataclass(frozen=True)
class StepResult:
    """The results of one step of the engine, which go to the API process as one message."""

    deltas: list[GroupDelta]
    failures: dict[RequestId, MotetError]
    tickets: dict[RequestId, Ticket] = field(default_factory=dict)
    blocks: list[BlockChange] = field(default_factory=list)
    """The blocks that the prefix cache can find from now on, and those it cannot find any more, in order."""
    met: list[Met] = field(default_factory=list)
    ran: bool = True
    """False if nothing was computed: the next step must wait for a command or news of a transfer."""


class EngineCore:
    """Owns the scheduler, the pool, the runner and the sampler."""

    def __init__(
        self,
        info: EngineInfo,
        runner: ModelRunner,
        *,
        options: CoreOptions,
        proof: Proof | None = None,
        transfers: "TransferThread | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """An engine that hands KV over has `transfers`, and the `proof` that readers of its memory see."""
        self.info = info
        self.counters = EngineStats()
        self.grammars = options.grammars
        self.transfers = transfers
        """None for an engine that keeps its KV to itself."""
        self._runner = runner
        self._maker = GroupMaker(info, prefix_cache=options.prefix_cache, grammars=options.grammars)
        self._groups: dict[RequestId, Group] = {}
        self._arrivals = 0
        self.held = False
        """True while nothing is computed: groups keep what they have, and transfers go on."""
        self._pool = BlockPool(info.num_blocks, proof)
        self._handover = Handover(
            transfers=transfers,
            pool=self._pool,
            counters=self.counters,
            block_size=info.block_size,
            lease_s=options.lease_s,
            clock=clock,
            settle=runner.settle,
        )
        limits = SchedulerLimits(
            info.block_size,
            info.bytes_per_block,
            info.max_num_seqs,
            options.max_num_batched_tokens,
            options.max_kept_blocks,
        )
        history = History(options.draft_from_history) if options.draft_from_history else None
        drafter = Drafter(options.draft_tokens, info.max_model_len, history)
        self._scheduler = Scheduler(self._pool, limits, self.counters, self._handover, drafter)
        self._sampler = Sampler(info.vocab_size, runner.device)
        self._commit = Commit(
            scheduler=self._scheduler,
            counters=self.counters,
            eos_token_ids=frozenset(info.eos_token_ids),
            max_model_len=info.max_model_len,
            answers=AnswerCache(self._pool, info.block_size, runner.copy_slots) if options.cache_answers else None,
        )

    @property
    def busy(self) -> bool:
        return bool(self._groups)

    @property
    def wake_s(self) -> float | None:
        """The time, by the engine's clock, at which it must take a step even without a command."""
        ends = self._handover.wake_s, self._scheduler.kept.next_end_s
        return min((end for end in ends if end is not None), default=None)

    def submit(self, request: GenerateRequest, matchers: Mapping[int, Matcher] | None = None) -> None:
        """Queues a group. Raises RequestError if it can never run here, and gives its ticket back. `matchers`:
        one for each choice, by its index; without them the grammar is compiled here."""
        try:
            self._check_free(request.request_id)
            group = self._maker.to_write(request, self._arrivals, matchers=matchers)
            check_fits(group, self.info, blocks_at_admission=self._scheduler.blocks_at_admission(group))
            self._handover.expect(group)
        except Exception:
            if request.ticket is not None:
                self.release(request.ticket)
            raise
        self._enqueue(group)

    def prefill(self, request: GenerateRequest, *, readers: int = 1) -> None:
        """Queues a prompt to be computed for others; it ends in a ticket. Raises RequestError if it can never run."""
        self._handover.check_open()
        self._check_free(request.request_id)
        group = self._maker.to_hand_over(request, self._arrivals, readers=readers)
        check_fits(group, self.info, blocks_at_admission=self._scheduler.blocks_at_admission(group))
        self._enqueue(group)

    def update(self, info: EngineInfo, apply: Callable[[], None]) -> None:
        """Puts new weights in the place of the old ones, between two steps. All groups go on after what they have
        written, and all their KV is computed anew: no block of the old weights can be found, and no ticket is used that
        is for them. `info`: the facts from now on. `apply` must not fail."""
        self._runner.settle()
        self._scheduler.suspend_all()
        apply()
        self.info = info
        self._pool.forget()
        self._maker.weights = self._handover.weights = info.block_weights
        if self._commit.answers is not None:
            self._commit.answers.weights = info.block_weights
        for group in self._groups.values():
            self._maker.rename(group)

    def forget_prefixes(self, *, anew: bool) -> None:
        """Lets no group find what the prefix cache has now. Groups under way keep their KV, or compute it `anew`."""
        if anew:
            self._runner.settle()
            self._scheduler.suspend_all()
        self._scheduler.forget_prefixes()

    def forget_kv(self) -> None:
        """Takes all KV from groups, readers and the prefix cache: what the memory holds means nothing any more. Groups
        go on by computing it anew, and readers find their leases ended."""
        self.forget_prefixes(anew=True)
        self._handover.end_leases()

    def abort(self, request_id: RequestId) -> None:
        """Frees a group at once, or its lease if it was prefilled. Unknown ids are ignored: it may just have ended."""
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
        """Books news of transfers, then makes one forward pass over everything scheduled, if anything is."""
        arrivals = self._handover.take_news()
        self._scheduler.kept.end_late()
        for group in arrivals.landed:
            self._scheduler.publish(group)
        for group in arrivals.failed:
            self._scheduler.suspend(group)
        plan = StepPlan() if self.held else self._scheduler.plan()
        deltas, failures = self._run(plan) if plan else ([], {})
        tickets = {} if self.held else self._hand_over()
        return StepResult(deltas, failures, tickets, self._pool.take_changes(), arrivals.met, ran=bool(plan))

    def _run(self, plan: StepPlan) -> tuple[list[GroupDelta], dict[RequestId, MotetError]]:
        """Inputs, run, draw, commit: see `step`."""
        inputs = build_inputs(plan, self.info.block_size)
        try:
            logits = self._runner.run(inputs)
            drawn = draw_tokens(self._sampler, inputs.draws, logits=logits)
            self._runner.verify()
        except NonFiniteRowsError as error:
            # Nothing is settled, so none of their blocks are published; the other groups run the same step again.
            if broken := plan.groups_of(error.rows):
                return [], self._fail(dict.fromkeys(broken, EngineError(NONSENSE)))
            # Only drafts were not finite, which may be wrong.
            self._scheduler.drafter.learn(plan.tails, dict.fromkeys((chunk.sequence for chunk in plan.tails), 0))
            return self._run(plan.without_drafts())
        self._commit.advance(plan, trunk_tokens_joined=self._runner.trunk_tokens_joined)
        for rows in inputs.prompt_rows:
            score_prompt(rows, logits)
        if drafted := [*filter(_DRAFTS, plan.tails)]:
            self._scheduler.drafter.learn(drafted, {one.sequence: len(one.more) for one in drawn})
        failed = failures_of(drawn)
        failures = self._fail(failed)
        deltas = self._commit.write(one for one in drawn if one.sequence.group not in failed)
        for delta in deltas:
            if not self._groups[delta.request_id].sequences:
                del self._groups[delta.request_id]
        return deltas, failures

    def _hand_over(self) -> dict[RequestId, Ticket]:
        """Returns tickets for the groups whose prompts are prefilled."""
        done = [one for one in self._scheduler.running if one.readers and one.computed == one.trunk_tokens]
        tickets = {}
        for group in done:
            if self._pool.proof.has_room:
                blocks = self._scheduler.hand_over(group)
                request_id = group.request.request_id
                tickets[request_id] = self._handover.grant(group, blocks)
                del self._groups[request_id]
        return tickets

    def stats(self) -> EngineStats:
        running, waiting = self._scheduler.running, self._scheduler.queued
        choices, kept = Counter[SequenceState](), self._scheduler.kept
        blocks_kept = kept.num_blocks
        for sequence in (s for group in (*running, *waiting) for s in group.sequences):
            choices[sequence.state] += len(sequence.indices)
        stats = replace(
            self.counters,
            transfer_failures=dict(self.counters.transfer_failures),
            groups_running=len(running),
            groups_waiting=len(waiting),
            choices_running=choices[SequenceState.RUNNING],
            choices_waiting=choices[SequenceState.WAITING],
            blocks_total=self._pool.num_blocks,
            blocks_used=self._pool.num_held - blocks_kept,
            blocks_cached=self._pool.num_idle,
            blocks_kept=blocks_kept,
            trunks_kept=len(kept),
        )
        self._handover.tell_gauges(stats)
        return stats

    def check(self) -> None:
        """Raises `AssertionError` if a block is held that belongs to no group."""
        self._handover.leases.check()
        self._scheduler.check(self._handover.tables())
        if {*self._scheduler.running, *self._scheduler.queued} != set(self._groups.values()):
            raise AssertionError("the scheduler and the core know different groups")

    def _check_free(self, request_id: RequestId) -> None:
        if request_id in self._groups:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")

    def _enqueue(self, group: Group) -> None:
        self._arrivals += 1
        self._groups[group.request.request_id] = group
        self._scheduler.add(group)

    def _fail(self, errors: Mapping[Group, MotetError]) -> dict[RequestId, MotetError]:
        """Ends groups that cannot go on."""
        for group in errors:
            self.abort(group.request.request_id)
        return {group.request.request_id: error for group, error in errors.items()}

"""The engine without its process: groups are submitted, and steps are taken. It is synchronous and has one thread.

submit ─► scheduler ─► plan ─► inputs ─► runner ─► logits ─► sampler ─► commit ─► deltas
             ▲                                                             │
             └──────────────── blocks, computed and output tokens ─────────┘
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter

from motet.engine_info import EngineInfo
from motet.engines.native.adapters.adapter_changes import AdapterChanges
from motet.engines.native.adapters.low_rank import ServedAdapter
from motet.engines.native.kv.pool import BlockPool
from motet.engines.native.sample.sampler import Sampler
from motet.engines.native.scheduling.group_admission import SchedulerLimits, check_fits
from motet.engines.native.scheduling.scheduler import Scheduler
from motet.engines.native.step.commit import NON_FINITE, AnswerCache, Commit, failures_of, sample_tokens
from motet.engines.native.step.drafts import Drafter, History
from motet.engines.native.step.handover import Handover
from motet.engines.native.step.inputs import NonFiniteRowsError, build_inputs
from motet.engines.native.step.run import ModelRunner
from motet.engines.native.step.sequence import Group, GroupMaker, SequenceState
from motet.engines.native.step.step_plan import StepPlan
from motet.errors import EngineError, MotetError, RequestError
from motet.grammar.compiled_grammar import Grammars, Matcher
from motet.ids import RequestId
from motet.kv_events.changes import BlockChange
from motet.metrics.stats import EngineStats
from motet.transfer.orders import ConnectResult
from motet.transfer.proof import Proof
from motet.transfer.thread import TransferThread
from motet.transfer.ticket import Ticket
from motet.types import GenerateRequest, GroupDelta

_DRAFTS = attrgetter("drafts")


@dataclass(frozen=True, kw_only=True)
class CoreOptions:
    """The settings of an engine core. Their defaults are in `settings.engine_config`."""

    max_num_batched_tokens: int
    prefix_cache: bool
    cache_answers: bool
    lease_s: float
    grammars: Grammars | None = None
    """Compiles grammars; None for an engine that refuses groups with a grammar."""
    draft_tokens: int = 0
    """Maximum number of draft tokens of a choice in a step."""
    draft_from_history: int = 0
    """Maximum number of tokens of earlier answers that are stored as drafts."""
    max_kept_blocks: int | None = None
    """Maximum number of blocks of all kept trunks; None means half of the engine's blocks."""
    adapters: tuple[ServedAdapter, ...] = ()
    """The adapters with which the engine starts."""


@dataclass(frozen=True)
class StepResult:
    """The results of one step, which are sent to the API process as one message."""

    deltas: list[GroupDelta]
    failures: dict[RequestId, MotetError]
    """Groups that ended with an error in this step."""
    tickets: dict[RequestId, Ticket] = field(default_factory=dict)
    """Tickets of the groups whose prompts were prefilled for other workers."""
    blocks: list[BlockChange] = field(default_factory=list)
    """Blocks that were added to the prefix cache and removed from it, in order."""
    connected: list[ConnectResult] = field(default_factory=list)
    ran: bool = True
    """False if nothing was computed: the next step must wait for a command or for a result of a transfer."""


class EngineCore:
    """Owns the groups, the scheduler, the block pool, the runner and the sampler."""

    def __init__(
        self,
        info: EngineInfo,
        runner: ModelRunner,
        *,
        options: CoreOptions,
        proof: Proof | None = None,
        transfers: TransferThread | None = None,
        on_take: Callable[[int], None] = lambda end: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`transfers`, `proof`: for an engine that transfers KV. The proof is in the memory that other workers read.
        `on_take`: see `BlockPool`."""
        self.counters = EngineStats()
        self.transfers = transfers
        """Thread that transfers KV from and to other workers; None for an engine that does not transfer KV."""
        self.held = False
        """True while nothing is computed. Groups keep their blocks and tokens, and transfers continue."""
        self._runner = runner
        self.maker = GroupMaker(info, prefix_cache=options.prefix_cache, grammars=options.grammars)
        self._groups: dict[RequestId, Group] = {}
        self._pool = BlockPool(info.num_blocks, proof, on_take=on_take)
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
            block_size=info.block_size,
            bytes_per_block=info.bytes_per_block,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_kept_blocks=info.num_blocks // 2 if options.max_kept_blocks is None else options.max_kept_blocks,
        )
        history = History(options.draft_from_history) if options.draft_from_history else None
        drafter = Drafter(options.draft_tokens, info.max_model_len, history=history)
        self._scheduler = Scheduler(
            self._pool, limits, counters=self.counters, handover=self._handover, drafter=drafter
        )
        self.adapters = AdapterChanges(self._groups, maker=self.maker, scheduler=self._scheduler, settle=runner.settle)
        for adapter in options.adapters:
            self.adapters.load(adapter, in_place=False)
        self._sampler = Sampler(info.vocab_size, runner.device)
        self._commit = Commit(
            scheduler=self._scheduler,
            counters=self.counters,
            eos_token_ids=frozenset(info.eos_token_ids),
            max_model_len=info.max_model_len,
            answers=AnswerCache(self._pool, info.block_size, runner.copy_slots) if options.cache_answers else None,
        )

    @property
    def info(self) -> EngineInfo:
        """The facts of the engine with the weights and adapters that serve."""
        return self.maker.info

    @property
    def busy(self) -> bool:
        return bool(self._groups)

    @property
    def wake_s(self) -> float | None:
        """Time, by the engine's clock, at which a step must be taken even without a command."""
        ends = self._handover.wake_s, self._scheduler.kept.next_expiry_s
        return min((end for end in ends if end is not None), default=None)

    def submit(self, request: GenerateRequest, matchers: Mapping[int, Matcher] | None = None) -> None:
        """Queues a group. Raises RequestError, and releases the group's ticket, if the group can never run on this
        engine. `matchers`: one for each choice, by its index; if None, this method compiles the grammar."""
        try:
            self._check_unused(request.request_id)
            group = self.maker.make(request, matchers=matchers)
            check_fits(group, self.info)
            self._handover.accept_ticket(group)
        except Exception:
            if request.ticket is not None:
                self.release(request.ticket)
            raise
        self._enqueue(group)

    def prefill(self, request: GenerateRequest, *, readers: int = 1) -> None:
        """Queues a prompt that is prefilled for `readers` decode workers. The result is a ticket. Raises RequestError
        if the prompt can never run on this engine."""
        self._handover.require_transfers()
        self._check_unused(request.request_id)
        group = self.maker.make_prefill(request, readers=readers)
        check_fits(group, self.info)
        self._enqueue(group)

    def update(self, info: EngineInfo, apply: Callable[[], None]) -> None:
        """Replaces the weights between two steps. `apply`: writes the new weights; must not fail. `info`: the facts of
        the engine with the new weights. All groups continue after their output tokens, and all their KV is computed
        again. Blocks of the old weights are removed from the prefix cache, and tickets for old weights are not used."""
        self._runner.settle()
        self._scheduler.suspend_all()
        apply()
        self._pool.forget()
        self.maker.info = info
        if self._commit.answers is not None:
            self._commit.answers.weights = info.block_weights
        for group in self._groups.values():
            self.maker.rename_blocks(group, group.trunk.adapter)

    def forget_prefixes(self, *, recompute: bool) -> None:
        """Empties the prefix cache. Running groups keep their KV, or compute it again if `recompute`."""
        if recompute:
            self._runner.settle()
            self._scheduler.suspend_all()
        self._scheduler.forget_prefixes()

    def forget_kv(self) -> None:
        """Takes all KV from groups, readers and the prefix cache, because the content of the memory is lost. Groups
        compute their KV again, and readers find their leases ended."""
        self.forget_prefixes(recompute=True)
        self._handover.end_leases()

    def abort(self, request_id: RequestId) -> None:
        """Frees a group at once, or its lease if it was prefilled. Ignores unknown ids of groups that have ended."""
        if group := self._groups.pop(request_id, None):
            self._scheduler.remove(group)
        else:
            self._handover.release_request(request_id)

    def release(self, ticket: Ticket) -> None:
        self._handover.release(ticket)

    def stop_choice(self, request_id: RequestId, index: int) -> None:
        """Ends one choice. Unknown choices are ignored."""
        group = self._groups.get(request_id)
        sequence = None if group is None else group.sequence_of.pop(index, None)
        if group is None or sequence is None or sequence.state is SequenceState.FINISHED:
            return
        sequence.indices.remove(index)
        if not sequence.indices:
            self._commit.end(sequence)
        if not group.sequences:
            del self._groups[request_id]

    def step(self) -> StepResult:
        """Applies the results of transfers, and then makes a forward pass over what is scheduled, if anything."""
        results = self._handover.take_results()
        self._scheduler.kept.release_expired()
        for group in results.landed:
            self._scheduler.publish(group)
        for group in results.failed:
            self._scheduler.preemption.suspend(group)
        plan = StepPlan() if self.held else self._scheduler.plan()
        start_s = self._handover.clock()
        deltas, failures = self._run(plan) if plan else ([], {})
        if plan:
            self._scheduler.timing.record(plan.cost, self._handover.clock() - start_s)
        tickets = {} if self.held else self._hand_over()
        return StepResult(deltas, failures, tickets, self._pool.take_changes(), results.connected, ran=bool(plan))

    def _run(self, plan: StepPlan) -> tuple[list[GroupDelta], dict[RequestId, MotetError]]:
        inputs = build_inputs(plan, self.info.block_size)
        try:
            logits = self._runner.run(inputs)
            new = sample_tokens(self._sampler, inputs.next_tokens, logits=logits)
            self._runner.verify()
        except NonFiniteRowsError as error:
            # Nothing is committed, so no block of these groups is published. The other groups run the same step again.
            if broken := plan.groups_of(error.rows):
                return [], self._fail(dict.fromkeys(broken, EngineError(NON_FINITE)))
            # Only rows of drafts were not finite, and these drafts can be wrong.
            self._scheduler.drafter.update_rates(plan.tails, dict.fromkeys((chunk.sequence for chunk in plan.tails), 0))
            return self._run(plan.without_drafts())
        self._commit.advance(plan, trunk_tokens_saved=self._runner.trunk_tokens_saved)
        for rows in inputs.prompt_rows:
            self._commit.score_prompt(rows, logits, sampler=self._sampler)
        if drafted := [*filter(_DRAFTS, plan.tails)]:
            self._scheduler.drafter.update_rates(drafted, {tokens.sequence: len(tokens.more) for tokens in new})
        failed = failures_of(new)
        failures = self._fail(failed)
        deltas = self._commit.append(tokens for tokens in new if tokens.sequence.group not in failed)
        for delta in deltas:
            if not self._groups[delta.request_id].sequences:
                del self._groups[delta.request_id]
        return deltas, failures

    def _hand_over(self) -> dict[RequestId, Ticket]:
        groups = self._scheduler.running.groups
        tickets = {}
        for group in [group for group in groups if group.readers and group.trunk.complete]:
            if self._pool.proof.has_free_slot:
                blocks = self._scheduler.hand_over(group)
                request_id = group.request.request_id
                tickets[request_id] = self._handover.grant(group, blocks)
                del self._groups[request_id]
        return tickets

    def stats(self) -> EngineStats:
        running, waiting = self._scheduler.running.groups, self._scheduler.waiting.all()
        choices, kept = Counter[SequenceState](), self._scheduler.kept
        blocks_kept = kept.num_blocks
        for sequence in (s for group in (*running, *waiting) for s in group.sequences):
            choices[sequence.state] += len(sequence.indices)
        stats = replace(
            self.counters,
            transfer_failures=dict(self.counters.transfer_failures),
            step_tokens=tuple(self._commit.steps_by_tokens),
            groups_running=len(running),
            groups_waiting=len(waiting),
            choices_running=choices[SequenceState.RUNNING],
            choices_waiting=choices[SequenceState.WAITING],
            blocks_total=self._pool.num_blocks,
            blocks_used=self._pool.num_held - blocks_kept,
            blocks_cached=self._pool.num_idle,
            blocks_kept=blocks_kept,
            trunks_kept=len(kept),
            score_bytes=self._pool.scores.num_bytes,
        )
        self._handover.set_gauges(stats)
        return stats

    def check(self) -> None:
        """Raises AssertionError if a block is held that belongs to no group, lease, pull or kept trunk."""
        self._handover.leases.check()
        self._scheduler.check(self._handover.tables())
        if {*self._scheduler.running.groups, *self._scheduler.waiting.all()} != set(self._groups.values()):
            raise AssertionError("the scheduler and the core know different groups")

    def _check_unused(self, request_id: RequestId) -> None:
        if request_id in self._groups:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")

    def _enqueue(self, group: Group) -> None:
        self._groups[group.request.request_id] = group
        self._scheduler.add(group)

    def _fail(self, errors: Mapping[Group, MotetError]) -> dict[RequestId, MotetError]:
        """Ends groups that cannot continue. Returns their errors by request id."""
        for group in errors:
            self.abort(group.request.request_id)
        return {group.request.request_id: error for group, error in errors.items()}

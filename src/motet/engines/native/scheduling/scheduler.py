"""Decides what the next step computes. Works on block ids and counts: without tensors, and without a clock except in
`keeping` and `clients`.

One rule: computed tokens catch up with known tokens (see `sequence`), within a budget of tokens for each step and a
limit on its duration (`step_cost`), which is short while several clients are present.

    1. Preempted sequences that fit again get new blocks, the oldest sequence of each client first.
    2. Running choices get their new tokens. If there are not enough rows, or not enough time while several clients are
       present, choices take turns (`EngineClients.row_order`).
    3. Resumed choices replay their output tokens, prompts of running groups are computed, and new groups are admitted
       (`group_admission`), in fair order between clients (`work_order`). While a prompt of another client waits, a step
       contains no work of batches (`BACKGROUND_PRIORITY`).
    4. If no prompt is in the step and it has few choices, they get draft tokens (`drafts`).

If too few blocks are free, kept trunks are evicted. If that does not suffice in 2, the client that holds the most
blocks for its weight loses some (`running_groups`). If it does not suffice in 3, clients above their shares lose blocks
to a new group whose client is entitled to them; other groups wait.

The work is constant for each scheduled token, and for each client: the scheduler never iterates over output tokens, the
blocks of a table, or waiting groups and sequences.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from motet.engines.native.kv.pool import BlockPool, blocks_for
from motet.engines.native.scheduling.clients import EngineClients
from motet.engines.native.scheduling.group_admission import AdmissionResult, GroupAdmission, SchedulerLimits
from motet.engines.native.scheduling.keeping import KeptTrunks
from motet.engines.native.scheduling.plan_builder import PlanBuilder, max_scored_rows
from motet.engines.native.scheduling.queues import GroupQueue, queue_key
from motet.engines.native.scheduling.running_groups import Preemption, RunningGroups
from motet.engines.native.scheduling.sharing import Sharing
from motet.engines.native.scheduling.step_cost import StepTiming
from motet.engines.native.scheduling.work_order import WorkOrder
from motet.engines.native.step.drafts import Drafter
from motet.engines.native.step.handover import Handover
from motet.engines.native.step.sequence import ChoiceSequence, Group, SequenceState
from motet.engines.native.step.step_plan import StepPlan
from motet.metrics.stats import EngineStats
from motet.types import BACKGROUND_PRIORITY


class Scheduler:
    """Owns the waiting and the running groups, and frees their blocks."""

    def __init__(
        self, pool: BlockPool, limits: SchedulerLimits, *, counters: EngineStats, handover: Handover, drafter: Drafter
    ) -> None:
        self.pool = pool
        self.limits = limits
        self.handover = handover
        self.drafter = drafter
        self.sharing = Sharing()
        self.kept = KeptTrunks(
            pool, self.sharing, counters=counters, clock=handover.clock, max_blocks=limits.max_kept_blocks
        )
        self.waiting = GroupQueue(self.sharing)
        self.clients = EngineClients(pool.num_blocks, handover.clock)
        self.timing = StepTiming()
        self.running = RunningGroups(
            pool=pool,
            block_size=limits.block_size,
            sharing=self.sharing,
            kept=self.kept,
            waiting=self.waiting,
            clients=self.clients,
        )
        self.preemption = Preemption(running=self.running, counters=counters, handover=handover)
        self.admission = GroupAdmission(
            running=self.running, preemption=self.preemption, limits=limits, counters=counters, handover=handover
        )

    def add(self, group: Group) -> None:
        self.clients.add(group)
        self.waiting.ready.add(group)

    def plan(self) -> StepPlan:
        """Returns the plan of the next step, which is empty if there is nothing to compute."""
        plan = self._plan()
        # A plan is empty, although work was added, if that work lost its blocks to groups for which no time was left.
        # These groups run now; each attempt can admit a group of another client. Rows with expensive grammars that were
        # postponed run if there is no other work.
        attempts = sum(1 for _ in self.clients)
        grammars = self.timing.grammars
        while not plan and attempts and (plan.cost or self.running.num_preempted or grammars.clear_deficit()):
            plan = self._plan()
            attempts -= 1
        # Groups of batches can hold the blocks for which the prompts of other clients wait.
        return plan if plan or not self.clients.have_background else self._plan(defer_background=False)

    def _plan(self, *, defer_background: bool = True) -> StepPlan:
        self.preemption.restore()
        self.waiting.requeue(self.limits.max_num_seqs)
        contended = self.clients.is_contended()
        prompts = [group for group in self.running.groups if not group.trunk.complete and not group.is_fetching]
        sequences, replays = self._running_sequences()
        ready, has_prefills = self.waiting.ready, bool(prompts or replays or len(self.waiting.ready))
        have_background = self.clients.have_background
        is_urgent = has_prefills and not (have_background and not self._has_urgent_work(prompts, replays))
        defers = defer_background and is_urgent and have_background
        # A step without work of a batch is as long as if there were no batch.
        is_short = self.clients.several_in_foreground if defers else contended
        max_cost = self.timing.limit(contended=is_short) if self.clients.several_seen else math.inf
        builder = PlanBuilder(self.limits.max_num_batched_tokens, self.clients, max_cost=max_cost)
        lines = [sequence for sequence in sequences if sequence.group.in_background] if have_background else []
        if lines:
            sequences = [sequence for sequence in sequences if not sequence.group.in_background]
        self._add_tails(builder, sequences, contended=contended, has_prefills=is_urgent)
        if have_background and not defers:
            if builder.tails:
                builder.max_cost = min(builder.max_cost, self.timing.background_limit(builder.cost))
            self._add_tails(builder, lines, contended=contended, has_prefills=has_prefills)
        order = WorkOrder(self.clients, replays=replays, prompts=prompts, ready=ready, without_background=defers)
        self._add_in_order(builder, order)
        if contended:
            credit = self.timing.limit(contended=True)
            self.clients.advance(builder.unfinished, blocked=order.blocked, credit=credit)
            self.waiting.end_following(self.clients.delayed_followers())
        builder.drop_preempted()
        if not builder.trunks:
            self._add_drafts(builder)
        return builder.build()

    def _has_urgent_work(self, prompts: Iterable[Group], replays: Iterable[ChoiceSequence]) -> bool:
        """Returns True if a prompt or replay waits that is not of a batch. `prompts`: prompts of running groups."""
        waiting = self.waiting.ready.keys()
        is_urgent = any(priority < BACKGROUND_PRIORITY for priority, _ in waiting)
        groups = chain(prompts, (sequence.group for sequence in replays))
        return is_urgent or any(not group.in_background for group in groups)

    def _add_tails(
        self, builder: PlanBuilder, sequences: list[ChoiceSequence], *, contended: bool, has_prefills: bool
    ) -> None:
        """Adds the new tokens of running choices, in most steps one token each, for as many choices as there are rows.
        If clients contend for the engine, the cost is limited as well: to what is left, or to half of it if there are
        prompts or replays (`has_prefills`). `sequences`: running sequences that do not replay."""
        size, max_rows = self.limits.block_size, self.limits.max_num_seqs
        max_cost, left = math.inf, builder.max_cost - builder.cost
        if contended:
            max_cost = builder.cost + (left / 2 if has_prefills else left)
        if take_turns := contended or len(sequences) > max_rows:
            sequences = self.clients.row_order(sequences)
        sequences = self.timing.grammars.admitted(sequences, is_all_work=not (contended or has_prefills))
        for index, sequence in enumerate(sequences):
            if not builder.budget or len(builder.tails) == max_rows or (builder.tails and builder.cost >= max_cost):
                if contended:
                    builder.unfinished.update(queue_key(each.group) for each in sequences[index:])
                break
            fits = len(sequence.output_tokens) <= len(sequence.blocks) * size
            if sequence.state is SequenceState.RUNNING and (fits or self.preemption.grow(sequence)):
                builder.add_tail(sequence, in_order=not take_turns)
                if take_turns:
                    self.clients.use_of(sequence.group).last_ran = sequence.age

    def _running_sequences(self) -> tuple[list[ChoiceSequence], list[ChoiceSequence]]:
        """Returns the running sequences that do not replay, and the running sequences that do."""
        sequences: list[ChoiceSequence] = []
        replays: list[ChoiceSequence] = []
        for group in self.running.groups:
            if group.trunk.complete:
                for sequence in group.sequences:
                    if sequence.state is not SequenceState.RUNNING:
                        break  # the younger siblings do not run either
                    (replays if sequence.num_pending > sequence.num_new else sequences).append(sequence)
        return sequences, replays

    def _add_in_order(self, builder: PlanBuilder, order: WorkOrder) -> None:
        """Adds replays, chunks of prompts and new groups."""
        num_following, limits = 0, self.limits
        while not builder.is_full and (work := order.next()):
            if isinstance(work, ChoiceSequence):
                if work.state is SequenceState.RUNNING:  # it has blocks for all its tokens
                    builder.add_replay(work)
            elif work.admitted:
                self._add_trunk(work, builder)
            elif work in builder.groups:  # it has just lost its blocks, and its chunks name the former ones
                order.block(work)
            elif num_following >= limits.max_num_seqs and builder.cost:
                break
            else:
                match self.admission.admit(work):
                    case AdmissionResult.REFUSED:
                        order.block(work)
                    case AdmissionResult.FOLLOWS:
                        num_following += 1
                    case AdmissionResult.ADMITTED:
                        self.handover.start_pull(work)
                        self._add_trunk(work, builder)
        builder.unfinished.update(order.left())

    def _add_trunk(self, group: Group, builder: PlanBuilder) -> None:
        """Adds as much of a prompt as the limits allow. A group that has joined a trunk computes only the last token,
        for its logits. The key and value of this token are stored in the tail of a sequence without output tokens,
        whose first output token overwrites them."""
        trunk = group.trunk
        if trunk.num_computed == trunk.recomputed:
            fresh = group.fresh
            if not fresh:
                trunk.num_computed = trunk.num_tokens  # joined: no sequence needs the logits of the last token
            elif not fresh[0].blocks:
                return
        builder.add_trunk(group, max_scored=max_scored_rows(self.limits.max_num_batched_tokens))

    def _add_drafts(self, builder: PlanBuilder) -> None:
        """Adds draft tokens if every choice of the step samples a token. Drafts take no blocks that the running
        sequences could need in the next step."""
        drafter, tails = self.drafter, builder.tails
        sampling = [chunk.sequence for chunk in tails if chunk.end == len(chunk.sequence.output_tokens)]
        if len(sampling) < len(tails) or not drafter.start_step(sampling):
            return
        for index, sequence in enumerate(sampling):
            if drafts := drafter.drafts(sequence, num_choices=len(sampling)):
                num_tokens, size = len(sequence.output_tokens), self.limits.block_size
                missing = blocks_for(num_tokens + len(drafts), size) - len(sequence.blocks)
                if missing > 0 and self.pool.num_free >= missing + self.running.num_sequences:
                    self.running.extend_tail(sequence, missing)
                builder.add_drafts(index, drafts[: len(sequence.blocks) * size - num_tokens])

    def publish(self, group: Group) -> None:
        """Publishes newly complete blocks of a trunk in the prefix cache, and wakes the groups that wait for them."""
        trunk, size = group.trunk, self.limits.block_size
        published, complete = trunk.num_published, min(trunk.num_computed // size, len(trunk.names))
        if complete > published:
            self.pool.publish(trunk.blocks[published:complete], group.stored(published, complete, block_size=size))
            trunk.num_published = complete
        if trunk.complete:
            self.pool.num_gains += 1  # other groups can join the trunk now
        self.waiting.wake(self.sharing.advanced(group, published))

    def finish(self, sequence: ChoiceSequence) -> None:
        """Frees the tail of a sequence that has ended, and the trunk with the last sibling."""
        group = sequence.group
        if group.admitted:
            self.running.end(sequence)
        sequence.state = SequenceState.FINISHED
        if self.drafter.history is not None:
            self.drafter.history.store(sequence)
        self.running.free_tail(sequence)
        group.remove(sequence)
        if not group.sequences:
            shared = self.sharing.complete_trunk_of(group) if group.request.keep_s else None
            if shared is not None:
                self.kept.keep(shared, group.request.keep_s)
            self.remove(group)

    def remove(self, group: Group) -> None:
        """Frees all blocks of a group, whether it runs or waits."""
        self.handover.abandon(group)
        if group.admitted:
            self.running.leave(group)
        else:
            self.waiting.remove(group)
        for sequence in group.sequences:
            sequence.state = SequenceState.FINISHED
            self.running.free_tail(sequence)
        group.sequences.clear()
        self.pool.release(group.trunk.blocks)
        group.trunk.blocks, group.trunk.adapter, group.drafts = [], None, None
        self.clients.remove(group)

    def hand_over(self, group: Group) -> list[int]:
        """Ends a prefilled group without freeing its trunk. The caller must release the returned blocks."""
        self.running.leave(group)
        self.clients.remove(group)
        blocks, group.trunk.blocks = group.trunk.blocks, []
        group.trunk.adapter = None
        return blocks

    def suspend(self, groups: Iterable[Group]) -> None:
        """Takes all blocks of these groups, which wait again without their tickets."""
        for group in groups:
            if group.admitted:
                self.preemption.suspend(group)
            else:
                self.handover.abandon(group)

    def suspend_all(self) -> None:
        """Takes all blocks of all groups and of all kept trunks. The groups wait again."""
        self.suspend([*self.running.groups, *self.waiting.all()])
        self.kept.release_all()

    def forget_prefixes(self) -> None:
        """Removes all blocks from the prefix cache. The blocks of running groups are not published any more."""
        self.kept.release_all()
        self.waiting.wake(self.sharing.clear())
        for group in self.running.groups:
            group.trunk.num_published, group.trunk.key = len(group.trunk.names), None
        self.pool.forget()

    def check(self, others: Iterable[Sequence[int]] = ()) -> None:
        """Raises AssertionError unless the number of holders of each block is the number of tables that contain it:
        tables of groups, of kept trunks, and `others`."""
        self.pool.check()
        groups = self.running.groups
        tables = [group.trunk.blocks for group in groups]
        tables += [sequence.blocks for group in groups for sequence in group.sequences]
        tables += [list(table) for table in (*others, *self.kept.tables())]
        if (held := self.pool.holders()) != Counter(block for table in tables for block in table):
            raise AssertionError(f"the pool counts the holders {held} (block: holders), but the tables are {tables}")
        self.sharing.check(set(groups))
        self.kept.check()
        self.running.check()
        self.waiting.check()
        self.clients.check()

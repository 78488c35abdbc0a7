"""The groups that hold blocks, and preemption among them.

    group      waiting ── enter ──► running ── leave ──► ended, handed over, or waiting again (suspended)
    sequence   waiting ── start_tail ──► running ── preempt ──► waiting ── restore ──► running

A running group always holds its trunk. Its sequences hold their tails, the older siblings before the younger ones.
"""

from bisect import bisect_left
from dataclasses import dataclass

from motet.engines.native.kv.pool import BlockPool, blocks_for
from motet.engines.native.scheduling.clients import EngineClients
from motet.engines.native.scheduling.keeping import KeptTrunks
from motet.engines.native.scheduling.queues import AgeOrdered, GroupQueue
from motet.engines.native.scheduling.sharing import SharedTrunk, Sharing
from motet.engines.native.step.handover import Handover
from motet.engines.native.step.sequence import ChoiceSequence, Group, SequenceState
from motet.metrics.stats import EngineStats


@dataclass(eq=False, kw_only=True)
class RunningGroups:
    """The groups that hold blocks. Owned by the scheduler. Takes and frees tails; callers take and free trunks."""

    pool: BlockPool
    block_size: int
    sharing: Sharing
    kept: KeptTrunks
    waiting: GroupQueue
    clients: EngineClients

    def __post_init__(self) -> None:
        self.groups = AgeOrdered[Group]()
        self.num_preempted = 0
        """Number of sequences of running groups that wait for their tail blocks."""
        self.num_sequences = 0
        """Number of sequences of running groups, including preempted ones."""

    @property
    def is_idle(self) -> bool:
        """True if no sequence runs and no prompt is computed or fetched."""
        return self.num_sequences == self.num_preempted and all(group.trunk.complete for group in self.groups)

    def enter(self, group: Group) -> None:
        """Starts a group that holds its trunk's blocks. Its sequences start in order while blocks are free for their
        tails; the remaining sequences start as preempted."""
        group.admitted = True
        self.groups.add(group)
        self.sharing.entered(group, block_size=self.block_size)
        use = self.clients.use_of(group)
        use.trunk_blocks.update(group.trunk.blocks)
        use.num_sequences += len(group.sequences)
        self.num_sequences += len(group.sequences)
        fits = True
        for sequence in group.sequences:
            fits = fits and self.num_tail_blocks(sequence) <= self.pool.num_free
            if fits:
                self.start_tail(sequence)
            else:
                self._add_preempted(sequence)

    def leave(self, group: Group) -> None:
        """Removes a group, which keeps its blocks."""
        group.admitted = False
        self.groups.remove(group)
        self.waiting.wake(self.sharing.left(group))
        self.kept.used_by(group)
        use = self.clients.use_of(group)
        for block in group.trunk.blocks:
            use.trunk_blocks[block] -= 1
            if not use.trunk_blocks[block]:
                del use.trunk_blocks[block]
        use.num_sequences -= len(group.sequences)
        self.num_sequences -= len(group.sequences)
        for sequence in group.sequences:
            if sequence.state is SequenceState.WAITING:
                self._remove_preempted(sequence)

    def start_tail(self, sequence: ChoiceSequence) -> None:
        """Takes the blocks that a sequence needs to start."""
        self.extend_tail(sequence, self.num_tail_blocks(sequence))
        sequence.state = SequenceState.RUNNING

    def restart(self, sequence: ChoiceSequence) -> None:
        """Starts a preempted sequence again."""
        self._remove_preempted(sequence)
        self.start_tail(sequence)

    def extend_tail(self, sequence: ChoiceSequence, num_blocks: int) -> None:
        """Takes blocks for a tail. A single block comes from the smallest free run, because trunks need long runs."""
        sequence.blocks += self.pool.take(num_blocks)
        self.clients.use_of(sequence.group).num_tail_blocks += num_blocks

    def preempt(self, sequence: ChoiceSequence) -> None:
        """Frees the tail of a sequence, which keeps its tokens and computes them again later."""
        self.free_tail(sequence)
        sequence.state = SequenceState.WAITING
        self._add_preempted(sequence)

    def end(self, sequence: ChoiceSequence) -> None:
        """Counts the end of a sequence. Its group still runs."""
        self.num_sequences -= 1
        self.clients.use_of(sequence.group).num_sequences -= 1
        if sequence.state is SequenceState.WAITING:
            self._remove_preempted(sequence)

    def free_tail(self, sequence: ChoiceSequence) -> None:
        self.clients.use_of(sequence.group).num_tail_blocks -= len(sequence.blocks)
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.num_computed = [], 0

    def num_tail_blocks(self, sequence: ChoiceSequence) -> int:
        """Returns the number of blocks that a sequence needs to start: for its output tokens, and at least one."""
        return max(1, blocks_for(len(sequence.output_tokens), self.block_size))

    def check(self) -> None:
        """Raises AssertionError unless the count and the preempted sequences match the running groups."""
        for group in self.groups:
            group.check()
            if not group.admitted:
                raise AssertionError("a group runs that is not admitted")
        sequences = [sequence for group in self.groups for sequence in group.sequences]
        waiting = [sequence for sequence in sequences if sequence.state is SequenceState.WAITING]
        if (len(sequences), len(waiting)) != (self.num_sequences, self.num_preempted):
            raise AssertionError(f"{len(sequences)} sequences run, {self.num_sequences} are counted")
        for use in self.clients:
            groups = [group for group in self.groups if self.clients.use_of(group) is use]
            own = [sequence for group in groups for sequence in group.sequences]
            if list(use.preempted) != [sequence for sequence in own if sequence.state is SequenceState.WAITING]:
                raise AssertionError("the preempted sequences are not the sequences that wait")
            blocks = {block for group in groups for block in group.trunk.blocks}
            held = len(own), sum(len(sequence.blocks) for sequence in own), blocks
            if held != (use.num_sequences, use.num_tail_blocks, set(use.trunk_blocks)):
                raise AssertionError(f"a client holds {held}, but {use} is counted")

    def _add_preempted(self, sequence: ChoiceSequence) -> None:
        self.clients.use_of(sequence.group).preempted.add(sequence)
        self.num_preempted += 1

    def _remove_preempted(self, sequence: ChoiceSequence) -> None:
        self.clients.use_of(sequence.group).preempted.remove(sequence)
        self.num_preempted -= 1


@dataclass(eq=False, kw_only=True)
class Preemption:
    """Takes blocks from running groups for others, and restarts them later. Owned by the scheduler.

    for a growing sequence     from the least urgent groups, and among these from the client that holds the most for its
                               weight, which can be the sequence's own client
    for a new group            if its client is entitled to the blocks, from clients above their shares: first their
                               leases for other workers, then their groups, except groups that are more urgent

    The youngest group of the client loses its tails, the youngest sibling first, and its trunk last. An older group
    never loses blocks to a younger group of the same client: a growing sequence loses its own tail instead. So one
    group can always continue: `build` checks that a trunk and a tail fit."""

    running: RunningGroups
    counters: EngineStats
    handover: Handover

    def grow(self, sequence: ChoiceSequence) -> bool:
        """Takes blocks for all tokens of a sequence. Returns False if it was itself preempted."""
        running = self.running
        missing = blocks_for(len(sequence.output_tokens), running.block_size) - len(sequence.blocks)
        while not running.kept.ensure_free(missing):
            if self._take_from(self._group_to_take_from(sequence)) is sequence:
                return False
        running.extend_tail(sequence, missing)
        return True

    def free_for(self, group: Group, num_blocks: int, *, num_shared: int, exempt: SharedTrunk | None) -> bool:
        """Frees `num_blocks` blocks for a waiting group that shares `num_shared` other blocks, if its client is
        entitled to all of them. Returns True if they are free. `exempt`: a kept trunk that is not evicted."""
        running, clients = self.running, self.running.clients
        use = clients.use_of(group)
        if not clients.within_share(use, more_blocks=num_shared + num_blocks):
            return False
        while not running.kept.ensure_free(num_blocks, exempt=exempt):
            if lease := clients.lease_to_release(self.handover.leases, exempt=group.request.client):
                self.handover.release(lease.ticket)  # a worker that reads it later computes the prompt
                continue
            above = [other for other in clients if other.num_groups and not clients.within_share(other)]
            victim = max(
                (one for one in running.groups if clients.use_of(one) in above and one.age[0] >= group.age[0]),
                key=lambda one: (one.age[0], clients.use_of(one).weighted_blocks, one.age),
                default=None,
            )
            if victim is None:
                return False
            self._take_from(victim)
        return True

    def may_take_free(self, group: Group, num_blocks: int) -> bool:
        """Returns True if a waiting group may take this number of free blocks: if its client is entitled to them, or if
        no other client below its share has preempted sequences."""
        running, clients = self.running, self.running.clients
        use = clients.use_of(group)
        return (
            not running.num_preempted
            or clients.within_share(use, more_blocks=num_blocks)
            or not any(
                len(other.preempted) and other.num_blocks < clients.entitled_blocks(other)
                for other in clients
                if other is not use
            )
        )

    def restore(self) -> None:
        """Starts preempted sequences again, the oldest of each client first, while a free block remains for every
        running sequence. Without these blocks, a sequence could be preempted again at once, and its replay would be
        wasted. If a sequence of a client within its share does not fit, clients that hold more for their weights wait
        too. If nothing runs because trunks fill the pool, the youngest groups are suspended for the first sequence."""
        running, clients = self.running, self.running.clients
        if not running.num_preempted:
            return
        waiting = {oldest: use for use in clients if (oldest := use.preempted.oldest()) is not None}
        order = sorted(waiting, key=lambda oldest: (oldest.age[0], waiting[oldest].weighted_blocks, oldest.age))
        for oldest in order:
            use = waiting[oldest]
            while sequence := use.preempted.oldest():
                num_tail, is_idle = running.num_tail_blocks(sequence), running.is_idle
                if not running.kept.ensure_free(num_tail + running.num_sequences - running.num_preempted):
                    if not is_idle:
                        if clients.within_share(use, more_blocks=num_tail):
                            return  # the next free blocks are for this client
                        break
                    self._take_trunks(sequence, num_tail)
                running.restart(sequence)

    def _take_trunks(self, sequence: ChoiceSequence, num_blocks: int) -> None:
        """Suspends the youngest groups until this number of blocks is free for a sequence of another group."""
        while not self.running.kept.ensure_free(num_blocks):
            self.suspend(max((g for g in self.running.groups if g is not sequence.group), key=lambda g: g.age))

    def _group_to_take_from(self, sequence: ChoiceSequence) -> Group:
        """Returns the group that loses blocks to a growing sequence. It is the sequence's own group only if another
        sequence can run then, or if no other group runs."""
        running, clients = self.running, self.running.clients
        others = [group for group in running.groups if group is not sequence.group]
        is_last = running.num_sequences - running.num_preempted == 1
        groups = others if is_last and others else running.groups
        return max(groups, key=lambda group: (group.age[0], clients.use_of(group).weighted_blocks, group.age))

    def _take_from(self, group: Group) -> ChoiceSequence | None:
        """Takes the youngest tail of a group and returns its sequence. A group without tails is suspended."""
        victim = youngest_holder(group)
        if victim is None:
            self.suspend(group)
        else:
            self.counters.preemptions += 1
            self.running.preempt(victim)
        return victim

    def suspend(self, group: Group) -> None:
        """Takes all blocks of a group, which waits again and keeps its output tokens."""
        running, trunk = self.running, group.trunk
        for sequence in group.sequences:
            if sequence.state is SequenceState.RUNNING:
                running.preempt(sequence)
        self.handover.abandon(group)
        running.leave(group)
        running.pool.release(trunk.blocks)
        trunk.blocks, trunk.num_computed, trunk.num_published = [], 0, 0
        trunk.joined, trunk.recomputed, trunk.origin = False, None, group.age
        running.waiting.ready.add(group)


def youngest_holder(group: Group) -> ChoiceSequence | None:
    """Returns the youngest sequence of a group that holds a tail; None if no sequence does."""
    # Siblings lose their tails youngest first and get them back oldest first, so sequences with a tail come first.
    holders = bisect_left(group.sequences, True, key=lambda sequence: not sequence.blocks)
    return group.sequences[holders - 1] if holders else None

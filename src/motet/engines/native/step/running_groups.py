"""The groups that hold blocks, and preemption among them.

    group      waiting ── enter ──► running ── leave ──► ended, handed over, or waiting again (suspended)
    sequence   waiting ── start_tail ──► running ── preempt ──► waiting ── restore ──► running

A running group always holds its trunk. Its sequences hold their tails, the older siblings before the younger ones.
"""

from bisect import bisect_left
from dataclasses import dataclass

from motet.engines.native.kv.pool import BlockPool, blocks_for
from motet.engines.native.step.handover import Handover
from motet.engines.native.step.keeping import KeptTrunks
from motet.engines.native.step.queues import AgeOrdered, GroupQueue
from motet.engines.native.step.sequence import ChoiceSequence, Group, SequenceState
from motet.engines.native.step.sharing import Sharing
from motet.metrics.stats import EngineStats


@dataclass(eq=False, kw_only=True)
class RunningGroups:
    """The groups that hold blocks. Owned by the scheduler. Takes and frees tails; callers take and free trunks."""

    pool: BlockPool
    block_size: int
    sharing: Sharing
    kept: KeptTrunks
    waiting: GroupQueue

    def __post_init__(self) -> None:
        self.groups = AgeOrdered[Group]()
        self.preempted = AgeOrdered[ChoiceSequence]()
        """Sequences of running groups that wait for their tail blocks."""
        self.num_sequences = 0
        """Number of sequences of running groups, including preempted ones."""

    def enter(self, group: Group) -> None:
        """Starts a group that holds its trunk's blocks. Its sequences start in order while blocks are free for their
        tails; the remaining sequences start as preempted."""
        group.admitted = True
        self.groups.add(group)
        self.sharing.entered(group, block_size=self.block_size)
        self.num_sequences += len(group.sequences)
        for sequence in group.sequences:
            if self.preempted or self.num_tail_blocks(sequence) > self.pool.num_free:
                self.preempted.add(sequence)
            else:
                self.start_tail(sequence)

    def leave(self, group: Group) -> None:
        """Removes a group, which keeps its blocks."""
        group.admitted = False
        self.groups.remove(group)
        self.waiting.wake(self.sharing.left(group))
        self.kept.used_by(group)
        self.num_sequences -= len(group.sequences)
        for sequence in group.sequences:
            if sequence.state is SequenceState.WAITING:
                self.preempted.remove(sequence)

    def start_tail(self, sequence: ChoiceSequence) -> None:
        """Takes the blocks that a sequence needs to start."""
        sequence.blocks = self.pool.take(self.num_tail_blocks(sequence))
        sequence.state = SequenceState.RUNNING

    def preempt(self, sequence: ChoiceSequence) -> None:
        """Frees the tail of a sequence, which keeps its tokens and computes them again later."""
        self.free_tail(sequence)
        sequence.state = SequenceState.WAITING
        self.preempted.add(sequence)

    def end(self, sequence: ChoiceSequence) -> None:
        """Counts the end of a sequence. Its group still runs."""
        self.num_sequences -= 1
        if sequence.state is SequenceState.WAITING:
            self.preempted.remove(sequence)

    def free_tail(self, sequence: ChoiceSequence) -> None:
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
        if len(sequences) != self.num_sequences:
            raise AssertionError(f"{len(sequences)} sequences run, {self.num_sequences} are counted")
        if list(self.preempted) != [s for s in sequences if s.state is SequenceState.WAITING]:
            raise AssertionError("the preempted sequences are not the sequences that wait")


@dataclass(eq=False, kw_only=True)
class Preemption:
    """Takes blocks from younger sequences for older ones, and restarts them later. Owned by the scheduler.

    The youngest group loses its tails first, the youngest sibling's tail before its other tails, and its trunk last.
    Groups older than the growing sequence never lose blocks: younger groups lose their trunks before that, and the
    growing sequence its own tail. So the oldest group always continues: `build` checks that a trunk and a tail fit."""

    running: RunningGroups
    counters: EngineStats
    handover: Handover

    def grow(self, sequence: ChoiceSequence) -> bool:
        """Takes blocks for all tokens of a sequence. Returns False if it is the youngest and was itself preempted."""
        running = self.running
        missing = blocks_for(len(sequence.output_tokens), running.block_size) - len(sequence.blocks)
        while not running.kept.ensure_free(missing):
            youngest = running.groups.youngest()
            if youngest is None:
                raise AssertionError("the growing sequence does not run")
            victim = youngest_holder(youngest)
            if victim is None:
                self.suspend(youngest)
                continue
            self.counters.preemptions += 1
            running.preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += running.pool.take(missing)  # one block: from the smallest run, as trunks need long runs
        return True

    def restore(self) -> None:
        """Starts preempted sequences again, the oldest first, while every running sequence could also take one more
        block. Otherwise a sequence could be preempted again at once, and its replay would be wasted."""
        running = self.running
        while sequence := running.preempted.oldest():
            num_growing = running.num_sequences - len(running.preempted)
            if not running.kept.ensure_free(running.num_tail_blocks(sequence) + num_growing):
                return
            running.preempted.remove(sequence)
            running.start_tail(sequence)

    def suspend(self, group: Group) -> None:
        """Takes all blocks of a group, which waits again. Its output tokens are kept."""
        running, trunk = self.running, group.trunk
        for sequence in group.sequences:
            if sequence.state is SequenceState.RUNNING:
                running.preempt(sequence)
        self.handover.abandon(group)
        running.leave(group)
        running.pool.release(trunk.blocks)
        trunk.blocks, trunk.num_computed, trunk.num_published = [], 0, 0
        trunk.joined, trunk.origin = False, group.age
        running.waiting.ready.add(group)


def youngest_holder(group: Group) -> ChoiceSequence | None:
    """Returns the youngest sequence of a group that holds a tail; None if no sequence does."""
    # Siblings lose their tails youngest first and get them back oldest first, so sequences with a tail come first.
    holders = bisect_left(group.sequences, True, key=lambda sequence: not sequence.blocks)
    return group.sequences[holders - 1] if holders else None

"""Decides what the next step computes. Pure: block ids and counts in, a plan out; no tensors, no clock.

One rule: what is computed catches up with what is known (see `sequence`), within a budget of tokens a step.

    1. preempted sequences that fit again get their blocks back, oldest first
    2. one token for every choice being written            (decode)
    3. what resumed choices have written before            (replay)
    4. prompts of admitted groups, in order of age         (prefill, in chunks)
    5. new groups, in order, all sequences of a group or none

Steps 2 and 3 may run out of blocks; then `preempt` says who gives some up. Step 5 never takes from anybody, and waits
while a preempted sequence waits.

A step costs constant work a scheduled token: nothing here passes over what is written, over the blocks of a table, or
over groups and sequences that wait.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from motet.engines.native.by_age import ByAge
from motet.engines.native.counters import Counters
from motet.engines.native.draft import Draft
from motet.engines.native.kv.pool import BlockPool
from motet.engines.native.plan import StepPlan
from motet.engines.native.preempt import TakeTrunk, choose_victim
from motet.engines.native.sequence import Group, Sequence, SequenceState, blocks_for


@dataclass(frozen=True)
class SchedulerLimits:
    block_size: int
    bytes_per_block: int
    max_num_seqs: int
    max_num_batched_tokens: int


class TrunkSource(Protocol):
    """Where a trunk may come from, other than from being computed."""

    def fetch(self, group: Group) -> None:
        """The group has its blocks: sets `group.pull` if what the prefix cache lacks is fetched."""
        ...

    def give_up(self, group: Group) -> None:
        """The group will not use its ticket, or is about to lose the blocks that are being fetched."""
        ...


class Scheduler:
    """Owns the queue of waiting groups, the running ones, and their blocks."""

    def __init__(self, pool: BlockPool, limits: SchedulerLimits, counters: Counters, source: TrunkSource) -> None:
        self.waiting = ByAge[Group]()
        self.running = ByAge[Group]()
        self._preempted = ByAge[Sequence]()
        """Sequences of running groups that wait for their tail blocks."""
        self._num_sequences = 0
        """Of running groups."""
        self._refused: tuple[Group, int] | None = None
        """Who was last refused for want of blocks, and the pool's `gains` then: until these rise, asking is in vain."""
        self._pool = pool
        self._limits = limits
        self._counters = counters
        self._source = source

    def add(self, group: Group) -> None:
        self.waiting.add(group)

    def blocks_at_admission(self, group: Group) -> int:
        """Blocks a fresh group needs to be admitted when nothing of it is cached: its trunk, and one for each tail."""
        return self._blocks(group.trunk_tokens) + len(group.sequences)

    def plan(self) -> StepPlan:
        """The next step; empty when there is nothing to do."""
        self._give_back()
        draft = Draft(self._limits.max_num_batched_tokens)
        self._schedule_tails(draft)
        for group in self.running:
            draft.add_trunk(group)
        while draft.budget and (first := self.waiting.oldest()) and self._admit(first):
            self._source.fetch(first)
            draft.add_trunk(first)
        return draft.plan()

    def finish(self, sequence: Sequence) -> None:
        """Frees the tail of a sequence that has ended, and with the last sibling the trunk."""
        group = sequence.group
        if group.admitted:
            self._num_sequences -= 1
            if sequence.state is SequenceState.WAITING:
                self._preempted.remove(sequence)
        sequence.state = SequenceState.FINISHED
        self._free_tail(sequence)
        group.drop(sequence)
        if not group.sequences:
            self.remove(group)

    def suspend(self, group: Group) -> None:
        """Takes all blocks of a group, which waits again; what it has written stays known."""
        for sequence in group.sequences:
            if sequence.state is SequenceState.RUNNING:
                self._put_back(sequence)
        self._suspend(group)

    def hand_over(self, group: Group) -> list[int]:
        """Ends a group without freeing its trunk: whoever asks holds those blocks now."""
        self._leave(group)
        blocks, group.blocks = group.blocks, []
        return blocks

    def remove(self, group: Group) -> None:
        """Frees all of a group, wherever it stands."""
        self._source.give_up(group)
        if group.admitted:
            self._leave(group)
        else:
            self.waiting.remove(group)
        for sequence in group.sequences:
            sequence.state = SequenceState.FINISHED
            self._free_tail(sequence)
        group.sequences.clear()
        self._pool.release(group.blocks)
        group.blocks = []

    def publish(self, group: Group) -> None:
        """Lets the prefix cache know the trunk's blocks that have become complete."""
        complete = min(group.computed // self._limits.block_size, len(group.names))
        if complete > group.published:
            blocks = group.blocks[group.published : complete]
            self._pool.publish(blocks, group.content(group.published, complete, self._limits.block_size))
            group.published = complete

    def check(self, others: Iterable[SequenceOf[int]] = ()) -> None:
        """Raises `AssertionError` unless the tables here and those of `others` hold each block exactly as often as the
        pool believes."""
        self._pool.check()
        tables = [g.blocks for g in self.running] + [s.blocks for g in self.running for s in g.sequences]
        tables += [list(table) for table in others]
        if (held := self._pool.holders()) != Counter(block for table in tables for block in table):
            raise AssertionError(f"held are {held} (block: holders), but the tables hold {tables}")
        for group in (*self.running, *self.waiting):
            group.check()
        sequences = [sequence for group in self.running for sequence in group.sequences]
        if len(sequences) != self._num_sequences:
            raise AssertionError(f"{len(sequences)} sequences run, {self._num_sequences} are counted")
        if list(self._preempted) != [s for s in sequences if s.state is SequenceState.WAITING]:
            raise AssertionError("the preempted sequences are not those that wait")
        if not all(group.admitted for group in self.running) or any(group.admitted for group in self.waiting):
            raise AssertionError("a group runs without being admitted, or waits though it was")

    def _schedule_tails(self, draft: Draft) -> None:
        """One token of every choice being written, then what others replay."""
        replays = []
        size = self._limits.block_size
        for group in self.running:  # whom blocks are taken from is younger: groups leave behind this one only
            if group.computed < group.trunk_tokens:
                continue
            for sequence in group.sequences:
                if sequence.state is not SequenceState.RUNNING:
                    break  # and so are its younger siblings
                if len(sequence.written) - sequence.computed > 1:
                    replays.append(sequence)
                elif draft.budget and (sequence.computed < len(sequence.blocks) * size or self._grow(sequence)):
                    draft.add_token(sequence)
        for sequence in replays:  # has blocks for all of it, unless they were taken meanwhile
            if draft.budget and sequence.state is SequenceState.RUNNING:
                draft.add_replay(sequence)

    def _grow(self, sequence: Sequence) -> bool:
        """Another block, if need be from a younger sequence; False if the youngest is this one, which then waits."""
        while not self._pool.num_free:
            youngest = self.running.youngest()
            if youngest is None:
                raise AssertionError("a sequence grows that does not run")
            victim = choose_victim(youngest)
            if isinstance(victim, TakeTrunk):
                self._suspend(victim.group)
                continue
            self._preempt(victim.sequence)
            if victim.sequence is sequence:
                return False
        sequence.blocks += self._pool.take(1)  # from the smallest run: long ones are for trunks
        return True

    def _give_back(self) -> None:
        """Blocks for preempted sequences, as long as every running one could take another block too: a sequence that
        came back only to be preempted at once would replay for nothing."""
        while sequence := self._preempted.oldest():
            num_running = self._num_sequences - len(self._preempted)
            if self._pool.num_free < self._tail_blocks(sequence) + num_running:
                return
            self._preempted.remove(sequence)
            self._start_tail(sequence)

    def _admit(self, group: Group) -> bool:
        """Trunk and tail blocks for all sequences, or nothing.

        What a suspended or resumed group has written may be more than all blocks together can hold. It gets in once
        nothing else runs, with as many tails as there is room for; the others are preempted from the start. Leases and
        pulls may hold blocks even then, and are waited for.
        """
        if self._num_sequences + len(group.sequences) > self._limits.max_num_seqs or self._preempted:
            return False
        if self._refused == (group, self._pool.gains):
            return False
        # The last prompt token is always run: its logits are what the first tokens are drawn from.
        usable = (len(group.prompt) - 1) // self._limits.block_size
        hits = self._pool.find(group.names[:usable]) if group.request.sampling.prompt_logprobs is None else []
        trunk = self._blocks(group.trunk_tokens) - len(hits)
        tails = [self._tail_blocks(sequence) for sequence in group.sequences]
        room = self._pool.num_free - self._pool.num_idle_among(hits)
        if trunk + sum(tails if self.running else tails[:1]) > room:
            self._refused = (group, self._pool.gains)
            return False
        self.waiting.remove(group)
        self._pool.share(hits)
        group.blocks = hits + self._pool.take(trunk, after=hits[-1] if hits else None)
        group.computed, group.published = len(hits) * self._limits.block_size, len(hits)
        self._enter(group)
        self._count_admission(group)
        return True

    def _enter(self, group: Group) -> None:
        """A group that has its trunk's blocks runs from now on; its sequences do as far as there is room."""
        group.admitted = True
        self.running.add(group)
        self._num_sequences += len(group.sequences)
        for sequence in group.sequences:
            if self._preempted or self._tail_blocks(sequence) > self._pool.num_free:
                self._preempted.add(sequence)
            else:
                self._start_tail(sequence)

    def _leave(self, group: Group) -> None:
        """It runs no more, whatever blocks it still has."""
        group.admitted = False
        self.running.remove(group)
        self._num_sequences -= len(group.sequences)
        for sequence in group.sequences:
            if sequence.state is SequenceState.WAITING:
                self._preempted.remove(sequence)

    def _count_admission(self, group: Group) -> None:
        if group.cached_tokens is not None:
            return  # admitted before, preempted whole since
        group.cached_tokens = group.computed
        counters, joined = self._counters, max(0, len(group.sequences) - 1)
        counters.prompt_tokens += len(group.prompt)
        counters.cached_tokens += group.computed
        counters.forks += joined
        counters.blocks_shared += joined * len(group.blocks)
        counters.bytes_saved += joined * len(group.blocks) * self._limits.bytes_per_block
        counters.greedy_choices_shared += sum(len(sequence.indices) - 1 for sequence in group.sequences)

    def _start_tail(self, sequence: Sequence) -> None:
        sequence.blocks = self._pool.take(self._tail_blocks(sequence))
        sequence.state = SequenceState.RUNNING

    def _preempt(self, sequence: Sequence) -> None:
        self._counters.preemptions += 1
        self._put_back(sequence)

    def _put_back(self, sequence: Sequence) -> None:
        self._free_tail(sequence)
        sequence.state = SequenceState.WAITING
        self._preempted.add(sequence)

    def _suspend(self, group: Group) -> None:
        """Takes the trunk of a group whose sequences hold nothing; what it has written stays known."""
        self._source.give_up(group)
        self._leave(group)
        self._pool.release(group.blocks)
        group.blocks, group.computed, group.published = [], 0, 0
        self.waiting.add(group)

    def _free_tail(self, sequence: Sequence) -> None:
        self._pool.release(sequence.blocks)
        sequence.blocks, sequence.computed = [], 0

    def _blocks(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self._limits.block_size)

    def _tail_blocks(self, sequence: Sequence) -> int:
        """What it needs to start: room for all it has written, one block at least."""
        return max(1, self._blocks(len(sequence.written)))

"""Decides what the next step computes. Pure: block ids and counts in, a plan out; no tensors, no clock.

One rule: what is computed catches up with what is known (see `sequence`), within a budget of tokens a step.

    1. preempted sequences that fit again get their blocks back, oldest first
    2. one token for every choice being written            (decode)
    3. what resumed choices have written before            (replay)
    4. prompts of admitted groups, in order of age         (prefill, in chunks)
    5. new groups, in order, all sequences of a group or none

Steps 2 and 3 may run out of blocks; then `preempt` says who gives some up. Step 5 never takes from anybody, and waits
while a preempted sequence waits.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from motet.engines.native.counters import Counters
from motet.engines.native.kv.pool import BlockPool
from motet.engines.native.plan import StepPlan, TailChunk, TrunkChunk
from motet.engines.native.preempt import TakeTail, choose_victim
from motet.engines.native.sequence import Group, Sequence, SequenceState, blocks_for
from motet.engines.native.waiting import WaitingGroups


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
        self.waiting = WaitingGroups()
        self.running: list[Group] = []
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
        self.running.sort(key=lambda group: group.age)
        self._give_back()
        draft = _Draft(self._limits.max_num_batched_tokens)
        ready = [s for group in self.running if not group.trunk_pending for s in group.sequences]
        for sequence in [s for s in ready if s.pending == 1] + [s for s in ready if s.pending > 1]:
            if sequence.state is SequenceState.RUNNING and draft.budget:
                self._schedule_tail(sequence, draft)
        for group in self.running:
            draft.add_trunk(group)
        while draft.budget and (group_or_none := self.waiting.first()) and self._admit(group_or_none):
            self._source.fetch(group_or_none)
            draft.add_trunk(group_or_none)
        return draft.finished(self.running)

    def finish(self, sequence: Sequence) -> None:
        """Frees the tail of a sequence that has ended, and with the last sibling the trunk."""
        sequence.state = SequenceState.FINISHED
        self._free_tail(sequence)
        group = sequence.group
        group.sequences.remove(sequence)
        if not group.sequences:
            self.remove(group)

    def suspend(self, group: Group) -> None:
        """Takes all blocks of a group, which waits again; what it has written stays known."""
        for sequence in group.sequences:
            self._put_back(sequence)
        self._suspend(group)

    def hand_over(self, group: Group) -> list[int]:
        """Ends a group without freeing its trunk: whoever asks holds those blocks now."""
        self.running.remove(group)
        blocks, group.blocks = group.blocks, []
        return blocks

    def remove(self, group: Group) -> None:
        """Frees all of a group, wherever it stands."""
        self._source.give_up(group)
        for sequence in group.sequences:
            sequence.state = SequenceState.FINISHED
            self._free_tail(sequence)
        group.sequences.clear()
        if group in self.running:
            self.running.remove(group)
            self._pool.release(group.blocks)
            group.blocks = []
        else:
            self.waiting.remove(group)

    def publish(self, group: Group) -> None:
        """Lets the prefix cache know the trunk's blocks that have become complete."""
        complete = min(group.computed // self._limits.block_size, len(group.names))
        for index in range(group.published, complete):
            self._pool.publish(group.blocks[index], group.names[index])
        group.published = max(group.published, complete)

    def check(self, others: Iterable[SequenceOf[int]] = ()) -> None:
        """Raises `AssertionError` unless the tables here and those of `others` hold each block exactly as often as the
        pool believes."""
        self._pool.check()
        tables = [g.blocks for g in self.running] + [s.blocks for g in self.running for s in g.sequences]
        tables += [list(table) for table in others]
        if (held := self._pool.holders()) != Counter(block for table in tables for block in table):
            raise AssertionError(f"held are {held} (block: holders), but the tables hold {tables}")
        for group in self.waiting:
            if (
                group.blocks
                or group.computed
                or group.published
                or any(s.blocks or s.computed for s in group.sequences)
            ):
                raise AssertionError(f"waiting group {group.request.request_id} holds blocks or counts on some")
        if any(not group.sequences and not group.readers for group in self.running):
            raise AssertionError("a group without sequences is still running")

    def _schedule_tail(self, sequence: Sequence, draft: "_Draft") -> None:
        count = min(sequence.pending, draft.budget)
        missing = self._blocks(sequence.computed + count) - len(sequence.blocks)
        while missing > self._pool.num_free:
            victim = choose_victim(self.running, sequence)
            if isinstance(victim, TakeTail):
                self._preempt(victim.sequence)
                if victim.sequence is sequence:
                    return
            else:
                self._suspend(victim.group)
        if missing > 0:
            sequence.blocks += self._pool.take(missing)  # from the smallest run: long ones are for trunks
        draft.add_tail(sequence, count)

    def _give_back(self) -> None:
        """Blocks for preempted sequences, as long as every running one could take another block too: a sequence that
        came back only to be preempted at once would replay for nothing."""
        running = self._sequences(SequenceState.RUNNING)
        for sequence in self._sequences(SequenceState.WAITING):
            if self._pool.num_free < self._tail_blocks(sequence) + len(running):
                return
            self._start_tail(sequence)
            running.append(sequence)

    def _admit(self, group: Group) -> bool:
        """Trunk and tail blocks for all sequences, or nothing.

        What a suspended or resumed group has written may be more than all blocks together can hold. It gets in once
        nothing else runs, with as many tails as there is room for; the others are preempted from the start. Leases and
        pulls may hold blocks even then, and are waited for.
        """
        running = sum(len(other.sequences) for other in self.running)
        if running + len(group.sequences) > self._limits.max_num_seqs:
            return False
        if self._sequences(SequenceState.WAITING):
            return False
        # The last prompt token is always run: its logits are what the first tokens are drawn from.
        usable = (len(group.prompt) - 1) // self._limits.block_size
        hits = self._pool.find(group.names[:usable]) if group.request.sampling.prompt_logprobs is None else []
        trunk = self._blocks(group.trunk_tokens) - len(hits)
        tails = [self._tail_blocks(sequence) for sequence in group.sequences]
        room = self._pool.num_free - self._pool.num_idle_among(hits)
        if trunk + sum(tails if self.running else tails[:1]) > room:
            return False
        self._pool.share(hits)
        group.blocks = hits + self._pool.take(trunk, after=hits[-1] if hits else None)
        group.computed, group.published = len(hits) * self._limits.block_size, len(hits)
        for sequence in group.sequences:
            if self._tail_blocks(sequence) > self._pool.num_free:
                break
            self._start_tail(sequence)
        self.waiting.remove(group)
        self.running.append(group)
        self._count_admission(group)
        return True

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

    def _suspend(self, group: Group) -> None:
        """Takes the trunk of a group whose sequences hold nothing; what it has written stays known."""
        self._source.give_up(group)
        self._pool.release(group.blocks)
        group.blocks, group.computed, group.published = [], 0, 0
        self.running.remove(group)
        self.waiting.add(group)

    def _free_tail(self, sequence: Sequence) -> None:
        self._pool.release(sequence.blocks)
        sequence.blocks, sequence.computed = [], 0

    def _sequences(self, state: SequenceState) -> list[Sequence]:
        """Of the running groups, oldest first."""
        return [s for group in self.running for s in group.sequences if s.state is state]

    def _blocks(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self._limits.block_size)

    def _tail_blocks(self, sequence: Sequence) -> int:
        """What it needs to start: room for all it has written, one block at least."""
        return max(1, self._blocks(len(sequence.written)))


class _Draft:
    """A step plan in the making."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._tails: dict[Sequence, TailChunk] = {}
        self._trunks: list[TrunkChunk] = []

    def add_tail(self, sequence: Sequence, count: int) -> None:
        self._tails[sequence] = TailChunk(sequence, sequence.computed, sequence.computed + count)
        self.budget -= count

    def add_trunk(self, group: Group) -> None:
        count = 0 if group.pull is not None else min(group.trunk_pending, self.budget)
        if count:
            self._trunks.append(TrunkChunk(group, group.computed, group.computed + count))
            self.budget -= count

    def finished(self, groups: Iterable[Group]) -> StepPlan:
        by_group = [self._tails[s] for group in groups for s in group.sequences if s in self._tails]
        return StepPlan(tuple(by_group), tuple(self._trunks))

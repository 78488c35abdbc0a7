"""Decides what the next step computes. Block ids and counts in, a plan out: no tensors, and no time but `keeping`'s.

One rule: computed tokens catch up with known tokens (see `sequence`), within a budget of tokens for each step.

    1. preempted sequences that fit again get their blocks back, oldest first
    2. the new tokens of every choice that is written      (decode)
    3. tokens that resumed choices have written before     (replay)
    4. prompts of admitted groups, in order of age         (prefill, in chunks)
    5. new groups, in order, all sequences of a group or none; those that need blocks which another group is computing
       wait for them, and let others pass (`sharing`)

Steps 2 and 3 may run out of blocks; then the youngest group gives some up: tail by tail, youngest sibling first, its
trunk last. Step 5 never takes from a group, and waits while a preempted sequence waits. Kept trunks give way to all.

The work is constant for each scheduled token: nothing here goes through written tokens, the blocks of a table, or
waiting groups and sequences.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from operator import attrgetter
from typing import Generic, TypeVar

from motet.engines.native.attention.attention_plan import STRETCH
from motet.engines.native.handover import Handover
from motet.engines.native.kv.pool import BlockPool
from motet.engines.native.step.drafts import Drafter
from motet.engines.native.step.keeping import KeptTrunks
from motet.engines.native.step.sequence import ChoiceSequence, Group, SequenceState, blocks_for
from motet.engines.native.step.sharing import SharedTrunk, Sharing
from motet.engines.native.step.step_plan import OpenPlan, StepPlan
from motet.errors import ContextLengthError, RequestError
from motet.metrics.stats import EngineStats
from motet.types import EngineInfo


@dataclass(frozen=True)
class SchedulerLimits:
    block_size: int
    bytes_per_block: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_kept_blocks: int | None = None


class AdmissionResult(Enum):
    ADMITTED = "admitted"
    FOLLOWS = "follows"
    """It waits for blocks that another group is computing."""
    REFUSED = "refused"
    """There is no room for it, nor for those behind it."""


@dataclass(eq=False)
class Scheduler:
    """Owns the queue of waiting groups, the running ones, and their blocks."""

    pool: BlockPool
    limits: SchedulerLimits
    counters: EngineStats
    handover: Handover
    drafter: Drafter

    def __post_init__(self) -> None:
        self.sharing = Sharing()
        self.waiting = AgeOrdered[Group]()
        """Groups that wait for room. `queued` are those that wait for another group too."""
        self._woken: dict[Group, None] = {}
        """Groups that need not follow any more, and go back to those that wait: some each step."""
        self.running = AgeOrdered[Group]()
        self._preempted = AgeOrdered[ChoiceSequence]()
        """Sequences of running groups that wait for their tail blocks."""
        most, clock = self.limits.max_kept_blocks, self.handover.clock
        self.kept = KeptTrunks(self.pool, self.sharing, counters=self.counters, clock=clock, max_blocks=most)
        self._num_sequences = 0
        self._refused: tuple[Group, int] | None = None
        """The last group for which blocks were missing, and the pool's `gains` then: until they rise, it cannot fit."""

    @property
    def queued(self) -> list[Group]:
        """All groups that do not run."""
        return [*self.waiting, *self._woken, *self.sharing.followers]

    def add(self, group: Group) -> None:
        self.waiting.add(group)

    def blocks_at_admission(self, group: Group) -> int:
        """Returns the number of blocks for a new group without cached ones: its trunk, and one for each tail."""
        return self._blocks(group.trunk_tokens) + len(group.sequences)

    def plan(self) -> StepPlan:
        """Returns the next step; it is empty when there is nothing to do."""
        self._give_back()
        for group in list(islice(self._woken, self.limits.max_num_seqs)):
            del self._woken[group]
            self.waiting.add(group)
        open_plan = OpenPlan(self.limits.max_num_batched_tokens)
        self._schedule_tails(open_plan)
        for group in self.running:
            self._schedule_trunk(group, open_plan)
        self._admit_waiting(open_plan)
        if not open_plan.trunks:
            self._add_drafts(open_plan)
        return open_plan.plan()

    def _add_drafts(self, open_plan: OpenPlan) -> None:
        """Adds draft tokens, if all choices of the step are being written. They take no blocks that running choices
        could need."""
        drafter, tails = self.drafter, open_plan.tails
        writing = [chunk.sequence for chunk in tails if chunk.end == len(chunk.sequence.output_tokens)]
        if len(writing) < len(tails) or not drafter.begin(writing):
            return
        for place, sequence in enumerate(writing):
            if drafts := drafter.drafts(sequence, choices=len(writing)):
                missing = self._blocks(len(sequence.output_tokens) + len(drafts)) - len(sequence.blocks)
                if missing > 0 and self.pool.num_free >= missing + self._num_sequences:
                    sequence.blocks += self.pool.take(missing)
                room = len(sequence.blocks) * self.limits.block_size - len(sequence.output_tokens)
                open_plan.add_drafts(place, drafts[:room])

    def _admit_waiting(self, open_plan: OpenPlan) -> None:
        """Admits new groups. In a step with other work no more begin to follow than could run: the rest is looked at in
        the next one."""
        follow, limits = 0, self.limits
        while open_plan.budget and (first := self.waiting.oldest()):
            if follow >= limits.max_num_seqs and open_plan.budget < limits.max_num_batched_tokens:
                break
            match self._admit(first):
                case AdmissionResult.REFUSED:
                    break
                case AdmissionResult.FOLLOWS:
                    follow += 1
                case AdmissionResult.ADMITTED:
                    self.handover.fetch(first)
                    self._schedule_trunk(first, open_plan)

    def finish(self, sequence: ChoiceSequence) -> None:
        """Frees the tail of a sequence that has ended, and with the last sibling the trunk."""
        group = sequence.group
        if group.admitted:
            self._num_sequences -= 1
            if sequence.state is SequenceState.WAITING:
                self._preempted.remove(sequence)
        sequence.state = SequenceState.FINISHED
        if self.drafter.history is not None:
            self.drafter.history.keep(sequence)
        self._free_tail(sequence)
        group.drop(sequence)
        if not group.sequences:
            self._keep(group)
            self.remove(group)

    def suspend(self, group: Group) -> None:
        """Takes all blocks of a group, which waits again; its written tokens stay known."""
        for sequence in group.sequences:
            if sequence.state is SequenceState.RUNNING:
                self._put_back(sequence)
        self._suspend(group)

    def suspend_all(self) -> None:
        """Takes all blocks of all groups."""
        for group in list(self.running):
            self.suspend(group)
        for group in self.queued:
            self.handover.give_up(group)
        self.kept.end_all()

    def forget_prefixes(self) -> None:
        """Takes the names of all blocks. Groups that run give none to theirs from now on, as they began before."""
        self.kept.end_all()
        self._wake(self.sharing.forget())
        for group in self.running:
            group.published = len(group.names)
        self.pool.forget()

    def hand_over(self, group: Group) -> list[int]:
        """Ends a group without freeing its trunk: the caller holds the blocks that are returned."""
        self._leave(group)
        blocks, group.blocks = group.blocks, []
        return blocks

    def remove(self, group: Group) -> None:
        """Frees all of a group, whether it runs or waits."""
        self.handover.give_up(group)
        if group.admitted:
            self._leave(group)
        elif group.leader is not None:
            self.sharing.remove(group)
        elif group in self._woken:
            del self._woken[group]
        else:
            self.waiting.remove(group)
        for sequence in group.sequences:
            sequence.state = SequenceState.FINISHED
            self._free_tail(sequence)
        group.sequences.clear()
        self.pool.release(group.blocks)
        group.blocks, group.drafts = [], None

    def publish(self, group: Group) -> None:
        """Publishes the trunk's blocks that have become complete in the prefix cache, and wakes who waits for them."""
        published, complete = group.published, min(group.computed // self.limits.block_size, len(group.names))
        if complete > published:
            content = group.content(published, complete, block_size=self.limits.block_size)
            self.pool.publish(group.blocks[published:complete], content)
            group.published = complete
        if group.computed == group.trunk_tokens:
            self.pool.gains += 1  # others may join it now
        self._wake(self.sharing.advanced(group, published))

    def check(self, others: Iterable[Sequence[int]] = ()) -> None:
        """Raises AssertionError unless these tables and `others` hold each block as often as the pool believes."""
        self.pool.check()
        tables = [g.blocks for g in self.running] + [s.blocks for g in self.running for s in g.sequences]
        tables += [list(table) for table in (*others, *self.kept.tables())]
        if (held := self.pool.holders()) != Counter(block for table in tables for block in table):
            raise AssertionError(f"held are {held} (block: holders), but the tables hold {tables}")
        self.sharing.check(set(self.running))
        self.kept.check()
        for group in (*self.running, *self.queued):
            group.check()
        sequences = [sequence for group in self.running for sequence in group.sequences]
        if len(sequences) != self._num_sequences:
            raise AssertionError(f"{len(sequences)} sequences run, {self._num_sequences} are counted")
        if list(self._preempted) != [s for s in sequences if s.state is SequenceState.WAITING]:
            raise AssertionError("the preempted sequences are not those that wait")
        if not all(group.admitted for group in self.running) or any(group.admitted for group in self.queued):
            raise AssertionError("a group runs without being admitted, or waits though it was")

    def _schedule_tails(self, open_plan: OpenPlan) -> None:
        """Adds the new tokens of every choice that is being written, nearly always one, then the replays of others."""
        replays = []
        size = self.limits.block_size
        for group in self.running:  # blocks are taken from younger groups, so only groups after this one leave
            if group.computed < group.trunk_tokens:
                continue
            for sequence in group.sequences:
                if sequence.state is not SequenceState.RUNNING:
                    break  # its younger siblings do not run either
                if len(sequence.output_tokens) - sequence.computed > sequence.new:
                    replays.append(sequence)
                elif open_plan.budget and (
                    len(sequence.output_tokens) <= len(sequence.blocks) * size or self._grow(sequence)
                ):
                    open_plan.add_new(sequence)
        for sequence in replays:  # each has blocks for all its tokens, unless they were taken meanwhile
            if open_plan.budget and sequence.state is SequenceState.RUNNING:
                open_plan.add_replay(sequence)

    def _grow(self, sequence: ChoiceSequence) -> bool:
        """Takes blocks for all its tokens, if necessary from younger sequences. Returns False if this one is the
        youngest: then it has given up its own blocks, and waits.

        Groups older than the growing one never lose blocks: every younger group has a trunk to lose, and the growing
        sequence its own tail. So the oldest always goes on; the start checks that its trunk and one tail fit.
        """
        missing = self._blocks(len(sequence.output_tokens)) - len(sequence.blocks)
        while not self.kept.make_room(missing):
            youngest = self.running.youngest()
            if youngest is None:
                raise AssertionError("a sequence grows that does not run")
            victim = youngest_holder(youngest)
            if victim is None:
                self._suspend(youngest)
                continue
            self.counters.preemptions += 1
            self._put_back(victim)
            if victim is sequence:
                return False
        sequence.blocks += self.pool.take(missing)  # one: from the smallest run, as long ones are for trunks
        return True

    def _give_back(self) -> None:
        """Gives preempted sequences their blocks back, as long as every running one could take another block too:
        otherwise a sequence could be preempted again at once, and would replay for nothing."""
        while sequence := self._preempted.oldest():
            wanted = self._tail_blocks(sequence) + self._num_sequences - len(self._preempted)
            if not self.kept.make_room(wanted):
                return
            self._preempted.remove(sequence)
            self._start_tail(sequence)

    def _schedule_trunk(self, group: Group, open_plan: OpenPlan) -> None:
        """Adds what the budget allows of a prompt. One that has joined a trunk needs only its last row, whose key and
        value a fresh tail takes up until it writes there itself."""
        if group.joined and group.computed < group.trunk_tokens:
            fresh = group.fresh
            if not fresh:
                group.computed = group.trunk_tokens
            elif not fresh[0].blocks:
                return
        open_plan.add_trunk(group)

    def _wake(self, followers: Iterable[Group]) -> None:
        self._woken.update(dict.fromkeys(followers))

    def _admit(self, group: Group) -> "AdmissionResult":
        """Takes trunk and tail blocks for all sequences, or nothing, or lets the group follow another one.

        A suspended or resumed group may have written more than all blocks together can hold. It is admitted once
        nothing else runs, with as many tails as there is room for; the others are preempted from the start. If leases
        and pulls hold blocks even then, it waits for them.
        """
        if self._num_sequences + len(group.sequences) > self.limits.max_num_seqs or self._preempted:
            return AdmissionResult.REFUSED
        if self._refused == (group, self.pool.gains):
            return AdmissionResult.REFUSED
        shared = self.sharing.trunk(group)
        ready = shared if shared is not None and shared.ready else None
        hits = self._hits(group) if ready is None else ready.blocks
        if ready is None and (leader := self._leader(group, shared, num_hits=len(hits))) is not None:
            self.waiting.remove(group)
            self.sharing.follow(group, leader, whole=shared is not None)
            return AdmissionResult.FOLLOWS
        trunk = self._blocks(group.trunk_tokens) - len(hits)
        tails = [self._tail_blocks(sequence) for sequence in group.sequences]
        self.pool.share(hits)
        if not self.kept.make_room(trunk + sum(tails if self.running else tails[:1]), besides=ready):
            self.pool.release(hits)
            self._refused = (group, self.pool.gains)
            return AdmissionResult.REFUSED
        self.waiting.remove(group)
        group.blocks = hits + self.pool.take(trunk, after=hits[-1] if hits else None)
        group.computed, group.published = len(hits) * self.limits.block_size, len(hits)
        group.path = tuple(group.blocks[:: STRETCH // self.limits.block_size])
        group.shares = ready is not None or group.computed >= STRETCH
        if ready is not None:
            self.handover.give_up(group)
            group.joined, group.trunk = True, ready.first.trunk
            group.computed, group.published = group.trunk_tokens - 1, len(group.names)
        self._enter(group)
        self._count_admission(group)
        return AdmissionResult.ADMITTED

    def _hits(self, group: Group) -> list[int]:
        """Returns the blocks of a prompt that the prefix cache has."""
        if group.request.sampling.prompt_logprobs is not None:
            return []
        return self.pool.find(group.names[: self._usable(group)])

    def _usable(self, group: Group) -> int:
        """Returns the most cached blocks that a group can use without joining a trunk: the last prompt token is always
        run, since the first tokens are drawn from its logits."""
        return (len(group.prompt) - 1) // self.limits.block_size

    def _leader(self, group: Group, shared: SharedTrunk | None, *, num_hits: int) -> Group | None:
        """Returns the running group that computes what this one would compute too."""
        if group.request.sampling.prompt_logprobs is not None:
            return None
        leader = self.sharing.leader(group, num_hits, usable=self._usable(group)) if shared is None else shared.first
        # One that is less urgent might wait for others that this one should not wait for.
        return leader if leader is not None and leader.request.priority <= group.request.priority else None

    def _enter(self, group: Group) -> None:
        """Starts a group that has its trunk's blocks, with as many of its sequences as there is room for."""
        group.admitted = True
        self.running.add(group)
        self.sharing.entered(group, block_size=self.limits.block_size)
        self._num_sequences += len(group.sequences)
        for sequence in group.sequences:
            if self._preempted or self._tail_blocks(sequence) > self.pool.num_free:
                self._preempted.add(sequence)
            else:
                self._start_tail(sequence)

    def _leave(self, group: Group) -> None:
        """Takes a group out of those that run; it keeps its blocks."""
        group.admitted = False
        self.running.remove(group)
        self._wake(self.sharing.left(group))
        self.kept.used_by(group)
        self._num_sequences -= len(group.sequences)
        for sequence in group.sequences:
            if sequence.state is SequenceState.WAITING:
                self._preempted.remove(sequence)

    def _keep(self, group: Group) -> None:
        """Keeps the trunk of a group that has ended, if its client wants that."""
        trunk = self.sharing.trunk(group) if group.request.keep_s else None
        if trunk is not None and trunk.ready:
            self.kept.keep(trunk, group.request.keep_s)

    def _count_admission(self, group: Group) -> None:
        if group.cached_tokens is not None:
            return  # it was admitted before, and lost all its blocks since
        group.cached_tokens = group.computed
        counters, joined = self.counters, max(0, len(group.sequences) - 1)
        counters.prompt_tokens += len(group.prompt)
        counters.cached_tokens += group.computed
        counters.forks += joined
        counters.blocks_shared += joined * len(group.blocks)
        counters.bytes_saved += joined * len(group.blocks) * self.limits.bytes_per_block
        counters.greedy_choices_shared += sum(len(sequence.indices) - 1 for sequence in group.sequences)

    def _start_tail(self, sequence: ChoiceSequence) -> None:
        sequence.blocks = self.pool.take(self._tail_blocks(sequence))
        sequence.state = SequenceState.RUNNING

    def _put_back(self, sequence: ChoiceSequence) -> None:
        self._free_tail(sequence)
        sequence.state = SequenceState.WAITING
        self._preempted.add(sequence)

    def _suspend(self, group: Group) -> None:
        """Takes the trunk of a group whose sequences hold nothing; the group waits again."""
        self.handover.give_up(group)
        self._leave(group)
        self.pool.release(group.blocks)
        group.blocks, group.computed, group.published = [], 0, 0
        group.joined, group.trunk = False, group.age
        self.waiting.add(group)

    def _free_tail(self, sequence: ChoiceSequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.computed = [], 0

    def _blocks(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.limits.block_size)

    def _tail_blocks(self, sequence: ChoiceSequence) -> int:
        """Returns the number of blocks for a sequence to start: room for its output tokens, at least one."""
        return max(1, self._blocks(len(sequence.output_tokens)))


T = TypeVar("T", Group, ChoiceSequence)
_AGE = attrgetter("age")


class AgeOrdered(Generic[T]):
    """Groups or sequences in order of age, oldest first: one that comes back gets its old place. A queue is served
    strictly in order, so that small groups do not starve a large one before them."""

    def __init__(self) -> None:
        self._items: list[T] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def add(self, item: T) -> None:
        insort(self._items, item, key=_AGE)

    def oldest(self) -> T | None:
        return self._items[0] if self._items else None

    def youngest(self) -> T | None:
        return self._items[-1] if self._items else None

    def remove(self, item: T) -> None:
        """Raises ValueError if it is not there."""
        index = bisect_left(self._items, item.age, key=_AGE)
        if index == len(self._items) or self._items[index] is not item:
            raise ValueError(f"nothing of age {item.age} is here")
        del self._items[index]


def youngest_holder(group: Group) -> ChoiceSequence | None:
    """Returns the youngest sequence of a group that holds a tail, if one does."""
    # Siblings lose their tails youngest first and get them back oldest first, so those with a tail come first.
    holders = bisect_left(group.sequences, True, key=lambda sequence: not sequence.blocks)
    return group.sequences[holders - 1] if holders else None


def check_fits(group: Group, info: EngineInfo, *, blocks_at_admission: int) -> None:
    """Raises RequestError, which names the field, if the engine's limits can never admit the group."""
    request = group.request
    longest = len(request.prompt) + max((len(start.output_tokens) for start in request.choices), default=0)
    shortest = 2 if group.readers else 1
    if len(request.prompt) < shortest or longest >= info.max_model_len:
        raise ContextLengthError(
            f"prompt and output tokens are {longest}; at least {shortest} of the prompt and at most "
            f"{info.max_model_len - 1} in all are possible",
            param="prompt",
        )
    if any(len(start.output_tokens) >= request.sampling.max_tokens for start in request.choices):
        raise RequestError("a choice has written its max_tokens already: there is nothing to resume", param="choices")
    if request.keep_s and group.trunk_key is None and not group.readers:
        why = "with 'prompt_logprobs', or where there is no prefix cache"
        raise RequestError(f"The prompt of 'keep_s' cannot be kept {why}.", param="keep_s")
    if len(group.sequences) > info.max_num_seqs:
        raise RequestError(
            f"n is {len(group.sequences)}; this engine runs at most {info.max_num_seqs} choices at once "
            "(--max-num-seqs)",
            param="n",
        )
    if blocks_at_admission > info.num_blocks:
        raise RequestError(
            f"the prompt and n = {len(group.sequences)} choices need {blocks_at_admission} KV blocks at once; this "
            f"engine has {info.num_blocks}: ask for a smaller n or raise --kv-cache-gb",
            param="n",
        )

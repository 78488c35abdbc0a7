"""Decides which waiting groups start.

blocks      A group is admitted if blocks are free for its trunk and the tails of all its sequences; if its client
            runs nothing else, one tail suffices. If its client is entitled to these blocks, other clients lose them
            (`running_groups`). A group waits for the preempted sequences of its own client, unless it is more urgent.
rows        A group is admitted if a row of a step is free, or if its client is entitled to rows for all its sequences.
            If there are more sequences than rows, sequences take turns.

A group does not compute blocks that exist or are being computed:

an equal prompt has been computed or is kept    the group joins its trunk
a running group computes leading blocks         the group follows: it waits for these blocks, and later groups can be
                                                admitted before it
leading blocks are in the prefix cache          the group shares them and computes the rest
"""

from dataclasses import dataclass
from enum import Enum

from motet.engine_info import EngineInfo
from motet.engines.native.attention.attention_plan import STRETCH
from motet.engines.native.kv.pool import blocks_for
from motet.engines.native.scheduling.running_groups import Preemption, RunningGroups
from motet.engines.native.scheduling.sharing import SharedTrunk, num_common
from motet.engines.native.scheduling.step_cost import prompt_cost
from motet.engines.native.step.handover import Handover
from motet.engines.native.step.sequence import Group
from motet.errors import ContextLengthError, RequestError
from motet.metrics.stats import EngineStats


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Limits of a step, and the sizes of blocks."""

    block_size: int
    bytes_per_block: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_kept_blocks: int | None = None


class AdmissionResult(Enum):
    ADMITTED = "admitted"
    FOLLOWS = "follows"
    """The group waits for blocks that a running group computes. The groups after it can be admitted."""
    REFUSED = "refused"
    """The group does not fit now. The groups after it wait as well."""


@dataclass(eq=False, kw_only=True)
class GroupAdmission:
    """Admits groups that are ready. Owned by the scheduler."""

    running: RunningGroups
    preemption: Preemption
    limits: SchedulerLimits
    counters: EngineStats
    handover: Handover

    def __post_init__(self) -> None:
        self.pool, self.sharing = self.running.pool, self.running.sharing

    def admit(self, group: Group) -> AdmissionResult:
        """Takes the blocks of a ready group and starts the group, or makes it follow another group, or does nothing.

        The output tokens of a suspended or resumed group can need more blocks than the engine has. Therefore, if
        nothing else of its client runs, a group is admitted with as many tails as fit, and its other sequences start as
        preempted. If even that is prevented by blocks of leases and pulls, the group waits for these blocks."""
        use = self.running.clients.use_of(group)
        oldest = use.preempted.oldest()
        waits_for_own = oldest is not None and oldest.group.age < group.age
        if waits_for_own or not self._has_rows(group) or use.refused == (group, self.pool.num_gains):
            return AdmissionResult.REFUSED
        shared = self.sharing.trunk_of(group)
        joined = shared if shared is not None and shared.complete and not group.is_scored else None
        hits = self._hits(group) if joined is None else joined.blocks
        if joined is None and (followed := self._group_to_follow(group, shared, num_hits=len(hits))) is not None:
            self.running.waiting.ready.remove(group)
            self.sharing.follow(group, followed, complete=shared is not None and not group.is_scored)
            if followed.request.client != group.request.client:
                cost = prompt_cost(len(hits) * self.limits.block_size, group.trunk.num_tokens)
                self.running.clients.follow(group, cost)
            return AdmissionResult.FOLLOWS
        if not self._take_trunk(group, hits, joined=joined):
            use.refused = group, self.pool.num_gains
            return AdmissionResult.REFUSED
        use.refused = None
        self.running.waiting.ready.remove(group)
        self.running.enter(group)
        self._count(group)
        return AdmissionResult.ADMITTED

    def _take_trunk(self, group: Group, hits: list[int], *, joined: SharedTrunk | None) -> bool:
        """Takes the blocks of a trunk: `hits`, which are the blocks of `joined` or blocks in the prefix cache, and free
        blocks for the rest. Returns False, and takes no blocks, if the trunk and the required tails do not fit."""
        trunk, block_size = group.trunk, self.limits.block_size
        num_missing = blocks_for(trunk.num_tokens, block_size) - len(hits)
        tails = [self.running.num_tail_blocks(sequence) for sequence in group.sequences]
        all_tails, first_tail = num_missing + sum(tails), num_missing + sum(tails[:1])
        minimum = all_tails if self.running.clients.use_of(group).trunk_blocks else first_tail
        self.pool.share(hits)
        fits = (
            self._ensure_free(group, needed, hits=hits, joined=joined) for needed in dict.fromkeys((all_tails, minimum))
        )
        if not any(fits):
            self.pool.release(hits)
            return False
        trunk.blocks = hits + self.pool.take(num_missing, after=hits[-1] if hits else None)
        trunk.num_computed, trunk.num_published = len(hits) * block_size, len(hits)
        trunk.path = tuple(trunk.blocks[:: STRETCH // block_size])
        trunk.shared = joined is not None or trunk.num_computed >= STRETCH
        if joined is not None:
            self.handover.abandon(group)
            trunk.joined, trunk.origin = True, joined.first.trunk.origin
            trunk.num_computed, trunk.num_published = trunk.num_tokens - 1, len(trunk.names)
            trunk.recomputed = trunk.num_computed
        elif group.is_scored and (needs := group.facts.needs) is not None:
            first = group.facts.scored_from // block_size
            group.facts.scores = [*self.pool.scores.read(trunk.names[first : len(hits)], needs)]
            if hits and trunk.num_computed >= group.facts.scored_from:
                trunk.num_computed = trunk.recomputed = trunk.num_computed - 1
        return True

    def _ensure_free(self, group: Group, needed: int, *, hits: list[int], joined: SharedTrunk | None) -> bool:
        """Returns True if this number of blocks is free for the group, if necessary after preemptions."""
        may_take = self.preemption.may_take_free(group, needed + len(hits))
        if may_take and self.running.kept.ensure_free(needed, exempt=joined):
            return True
        return self.preemption.free_for(group, needed, num_shared=len(hits), exempt=joined)

    def _has_rows(self, group: Group) -> bool:
        """Returns True if a row is free, if the client is entitled to rows for the group, or if the client runs nothing
        yet: sequences then take turns. A group that is only prefilled needs no row."""
        running, clients, max_rows = self.running, self.running.clients, self.limits.max_num_seqs
        use, count = clients.use_of(group), len(group.sequences)
        if not count or not use.num_sequences or running.num_sequences < max_rows:
            return True
        return use.num_sequences + count <= clients.share(use) * max_rows

    def _hits(self, group: Group) -> list[int]:
        """Returns the leading blocks of a prompt that are in the prefix cache and that the group can use.

        A scored group can use blocks whose scores are in the cache or not needed. If it needs the score of the first
        token after them, it also computes the token before that one, whose KV goes into the tail of a sequence without
        output tokens. A group in which a sequence has output tokens therefore uses no blocks."""
        names = group.trunk.names[: self._max_hits(group)]
        if group.is_scored and group.facts.needs is not None:
            if len(group.fresh) < len(group.sequences):
                return []
            first = group.facts.scored_from // self.limits.block_size
            names = names[: first + self.pool.scores.count(names[first:], group.facts.needs)]
        return self.pool.find(names)

    def _max_hits(self, group: Group) -> int:
        """Returns the maximum number of cached blocks that a group can use without joining a trunk. The last prompt
        token is always computed, for the logits from which the first output tokens are sampled."""
        return (len(group.prompt) - 1) // self.limits.block_size

    def _group_to_follow(self, group: Group, shared: SharedTrunk | None, *, num_hits: int) -> Group | None:
        """Returns the running group that is computing blocks which this group would compute as well, if any."""
        if not group.trunk.may_follow:
            return None
        if shared is None or group.is_scored:
            followed = self.sharing.group_computing(group, num_hits, max_hits=self._max_hits(group))
            if followed is not None and not self._computes_scores(followed, group, num_hits=num_hits):
                return None
        else:
            followed = shared.first
        # A less urgent group is not followed: groups that are less urgent than this one could delay it.
        return followed if followed is not None and followed.request.priority <= group.request.priority else None

    def _computes_scores(self, followed: Group, group: Group, *, num_hits: int) -> bool:
        """Returns True if `followed` computes the scores that `group` needs in the blocks for which it would wait."""
        if not group.is_scored:
            return True
        size = self.limits.block_size
        end = size * num_common(group.trunk.names, followed.trunk.names)
        return followed.scores_for(group, begin=size * num_hits, end=end)

    def _count(self, group: Group) -> None:
        """Counts the first admission of a group."""
        if group.facts.num_cached is not None:
            return  # a suspended group is admitted again
        trunk, counters, num_forks = group.trunk, self.counters, max(0, len(group.sequences) - 1)
        group.facts.num_cached = trunk.num_computed
        counters.prompt_tokens += len(group.prompt)
        counters.cached_tokens += trunk.num_computed
        counters.forks += num_forks
        counters.blocks_shared += num_forks * len(trunk.blocks)
        counters.bytes_saved += num_forks * len(trunk.blocks) * self.limits.bytes_per_block
        counters.greedy_choices_shared += sum(len(sequence.indices) - 1 for sequence in group.sequences)


def check_fits(group: Group, info: EngineInfo) -> None:
    """Raises RequestError, which names the field, if the engine's limits can never admit a group."""
    request = group.request
    longest = len(request.prompt) + max((len(start.output_tokens) for start in request.choices), default=0)
    shortest = 2 if group.readers else 1
    if len(request.prompt) < shortest or longest >= info.max_model_len:
        raise ContextLengthError(
            f"the prompt has {len(request.prompt)} tokens, {longest} with the output tokens of a choice; this engine "
            f"takes prompts of at least {shortest}, and at most {info.max_model_len - 1} in total",
            param="prompt",
        )
    if any(len(start.output_tokens) >= request.sampling.max_tokens for start in request.choices):
        raise RequestError("a choice already has max_tokens output tokens: it cannot be resumed", param="choices")
    if request.keep_s and group.trunk.key is None and not group.readers:
        raise RequestError("The prompt of 'keep_s' cannot be kept without a prefix cache.", param="keep_s")
    if len(group.sequences) > info.max_num_seqs:
        raise RequestError(
            f"n is {len(group.sequences)}; this engine runs at most {info.max_num_seqs} choices at once "
            "(--max-num-seqs)",
            param="n",
        )
    num_needed = blocks_for(group.trunk.num_tokens, info.block_size) + len(group.sequences)  # one for each tail
    if num_needed > info.num_blocks:
        raise RequestError(
            f"the prompt and n = {len(group.sequences)} choices need {num_needed} KV blocks at once; this "
            f"engine has {info.num_blocks}: request a smaller n or raise --kv-cache-gb",
            param="n",
        )

"""The cost of a group on each worker that could get it, and the facts that determine the cost.

The unit of cost is the time in which one prompt token is computed.

    cost = own + queued + load
    own      prompt tokens of the group that the worker would have to compute, times 1 + the worker's open choices / the
             group's choices: computing them delays the open choices too. So this is the time lost for each choice of
             the group. With a ticket: the tokens that the worker would pull. A pull delays no other choice
    queued   tokens of earlier prompts that the worker has not finished
    load     the additional duration of the group's first steps because of the worker's open choices: of HORIZON_STEPS
             steps, or fewer if the group's `max_tokens` is lower, as for prompts that are only scored

The load counts every choice, every block of the choices' tails, and every block of a trunk once, no matter how many
choices read it, as an engine's step does. The group's own choices cost the same everywhere, so they are left out.
"""

from dataclasses import dataclass

from motet.routing.workers.serving import WorkKind
from motet.routing.workers.worker_share import WorkerShare

PROMPT_TOKEN_MS = 0.32
"""Measured: 1340 prompt tokens in 430 ms (docs/log.md; 135M parameters, two cores, as for the figures below)."""
CHOICE_MS = 0.5
"""Measured: a step takes 8.2, 10.9, 22.8 and 76 ms with 1, 8, 32 and 128 choices of one prompt."""
BLOCK_TOKENS = 16
"""Block size of the next two figures. A block of another size counts in proportion to its tokens."""
TRUNK_BLOCK_MS = 0.046
"""Measured: a step takes 6.9 ms with a prompt of 1340 tokens, and 13.1 ms with one of 3500."""
TAIL_BLOCK_MS = 0.012
"""Measured: a step of 32 choices with 256 tokens each, against 64 tokens each."""
PULL_TOKEN_MS = 0.005
"""Measured: a pull of 1340 tokens takes 4 to 7 ms."""
HORIZON_STEPS = 48
"""Number of steps for which the present load is assumed to last. In `bench.router`, with 16 steps the load of workers
differs too much (at 70 % load), and with 256 prompts are computed too often (at 90 %; docs/log.md)."""
SESSION_SLACK = 256.0
"""A session stays on its last worker while that costs at most the lowest cost, plus the cost of the prompt, plus
this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupNeeds:
    """The resources that a group needs on a worker."""

    work: WorkKind
    choices: int
    prompt_tokens: int
    needs_prompt: bool
    """False if the group has a ticket: its prompt has been computed, and is fetched."""
    max_tokens: int = HORIZON_STEPS
    """Maximum number of output tokens of a choice, and so of steps in which it generates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A worker with the load that this router gave it, not with the load that it reports."""

    id: str
    cached_tokens: int
    """Tokens of this prompt whose KV the worker is known to have, or is computing for an open group."""
    queued_tokens: int
    """Tokens of earlier prompts that the worker has not finished."""
    open_choices: int
    trunk_blocks: int
    """KV blocks of the prompts of open groups. Each block counts once."""
    tail_blocks: int
    max_choices: int
    num_blocks: int
    block_size: int
    share: WorkerShare | None = None
    """Share of the group's client. None if any worker has free capacity, so that shares do not matter."""
    has_session: bool = False
    avoid: bool = False
    """True if the worker has just refused a group: it is chosen only if there is no other worker."""

    @property
    def held_blocks(self) -> int:
        return self.trunk_blocks + self.tail_blocks


def has_capacity(candidate: Candidate, needs: GroupNeeds) -> bool:
    """Returns True if the group could start on the worker at once. Cached blocks of its prompt are assumed to be shared
    with open groups. A prefill needs no capacity for choices, because it generates nothing."""
    return can_start(
        open_choices=candidate.open_choices,
        max_choices=candidate.max_choices,
        held_blocks=candidate.held_blocks,
        num_blocks=candidate.num_blocks,
        choices=needs.choices if needs.work is WorkKind.GENERATE else 0,
        prompt_blocks=_prompt_blocks(candidate, needs),
    )


def has_capacity_in_share(candidate: Candidate, needs: GroupNeeds) -> bool:
    """Returns True if the group could start because its client stays within its share of the worker."""
    return candidate.share is not None and can_start_in_share(
        candidate.share,
        max_choices=candidate.max_choices,
        num_blocks=candidate.num_blocks,
        choices=needs.choices,
        prompt_blocks=_prompt_blocks(candidate, needs),
    )


def has_partial_capacity(candidate: Candidate, needs: GroupNeeds) -> bool:
    """Returns True if at least one choice of the group could start on the worker at once."""
    return candidate.share is not None and can_start_partially(
        candidate.share,
        open_choices=candidate.open_choices,
        max_choices=candidate.max_choices,
        held_blocks=candidate.held_blocks,
        num_blocks=candidate.num_blocks,
        choices=needs.choices,
        prompt_blocks=_prompt_blocks(candidate, needs),
    )


def can_start(
    *, open_choices: int, max_choices: int, held_blocks: int, num_blocks: int, choices: int, prompt_blocks: int
) -> bool:
    """Returns True if the choices fit, and the blocks suffice for the trunk and for a tail block of each choice."""
    return open_choices + choices <= max_choices and held_blocks + prompt_blocks + choices <= num_blocks


def can_start_partially(
    share: WorkerShare,
    *,
    open_choices: int,
    max_choices: int,
    held_blocks: int,
    num_blocks: int,
    choices: int,
    prompt_blocks: int,
) -> bool:
    """Returns True if one choice can run, and the blocks suffice as in `can_start`: the other choices run when running
    choices end. An engine that does not divide itself between clients must have no other clients, because it would run
    these choices before later groups of other clients."""
    if not share.fair and share.part < 1.0:
        return False
    return open_choices < max_choices and held_blocks + prompt_blocks + choices <= num_blocks


def can_start_in_share(
    share: WorkerShare, *, max_choices: int, num_blocks: int, choices: int, prompt_blocks: int
) -> bool:
    """Returns True if the client stays within its share of the worker with the group. In an engine that divides itself
    between clients, a client without open choices can also start a group with more choices than its share."""
    if share.held_blocks + prompt_blocks + choices > share.part * num_blocks:
        return False
    return share.open_choices + choices <= share.part * max_choices or (share.fair and not share.open_choices)


def _prompt_blocks(candidate: Candidate, needs: GroupNeeds) -> int:
    return -(-(needs.prompt_tokens - candidate.cached_tokens) // candidate.block_size)


@dataclass(frozen=True, slots=True)
class CostWeights:
    """Costs of one choice, one block and one pulled token, in prompt tokens. The measured times differ between
    machines; their ratios differ less."""

    choice: float = HORIZON_STEPS * CHOICE_MS / PROMPT_TOKEN_MS
    trunk_block: float = HORIZON_STEPS * TRUNK_BLOCK_MS / PROMPT_TOKEN_MS
    tail_block: float = HORIZON_STEPS * TAIL_BLOCK_MS / PROMPT_TOKEN_MS
    pulled_token: float = PULL_TOKEN_MS / PROMPT_TOKEN_MS
    session_slack: float = SESSION_SLACK


WEIGHTS = CostWeights()


def prompt_cost(tokens: int, candidate: Candidate, *, needs: GroupNeeds, weights: CostWeights = WEIGHTS) -> float:
    """Returns the cost of computing, or of pulling, this number of tokens of the group's prompt on the worker."""
    if not needs.needs_prompt:
        return tokens * weights.pulled_token
    return tokens * (1.0 + candidate.open_choices / needs.choices)


def own_cost(candidate: Candidate, needs: GroupNeeds, *, weights: CostWeights = WEIGHTS) -> float:
    return prompt_cost(max(0, needs.prompt_tokens - candidate.cached_tokens), candidate, needs=needs, weights=weights)


def load_cost(candidate: Candidate, needs: GroupNeeds, *, weights: CostWeights) -> float:
    blocks = candidate.trunk_blocks * weights.trunk_block + candidate.tail_blocks * weights.tail_block
    load = candidate.open_choices * weights.choice + blocks * (candidate.block_size / BLOCK_TOKENS)
    return load * min(1.0, needs.max_tokens / HORIZON_STEPS)


def cost(candidate: Candidate, needs: GroupNeeds, *, weights: CostWeights = WEIGHTS) -> float:
    load = load_cost(candidate, needs, weights=weights)
    return own_cost(candidate, needs, weights=weights) + candidate.queued_tokens + load


def explained(candidate: Candidate, needs: GroupNeeds, *, weights: CostWeights = WEIGHTS) -> str:
    """Returns the cost and its parts as a line of text."""
    own, load = own_cost(candidate, needs, weights=weights), load_cost(candidate, needs, weights=weights)
    total = own + candidate.queued_tokens + load
    return f"{candidate.id} {total:.0f} (own {own:.0f}, queued {candidate.queued_tokens}, load {load:.0f})"

"""What it costs to put a group on a worker, in prompt-token equivalents: how many tokens could be computed in the time.

    cost = own + queued + load
    own      prompt tokens of the group that the worker would have to compute, times 1 + its open choices / the group's:
             while it computes them, the choices that are open there stand still too, and this is the time lost a
             choice of the group. With a ticket: those it would pull, which delays nobody else
    queued   prompt tokens that it was given before and has not answered for
    load     how much longer its steps are for what is being written there, over HORIZON_STEPS steps

The load counts every choice, every block of the choices' tails, and every block of a trunk once, however many choices
read it: that is what a step of the engine does. The group's own choices cost the same everywhere, so they are left out.
"""

from dataclasses import dataclass

from motet.routing.candidate import Candidate, Wanted

PROMPT_TOKEN_MS = 0.32
"""1340 prompt tokens in 430 ms (docs/log.md, as the three below: 135M parameters, two cores)."""
CHOICE_MS = 0.5
"""A choice in a step: 8.2, 10.9, 22.8 and 76 ms with 1, 8, 32 and 128 of them over one prompt."""
BLOCK_TOKENS = 16
"""Of the two below; a block of another size weighs by its tokens."""
TRUNK_BLOCK_MS = 0.046
"""16 trunk tokens in a step: 6.9 ms over a prompt of 1340 tokens, 13.1 over one of 3500."""
TAIL_BLOCK_MS = 0.012
"""16 tail tokens in a step: 32 choices with 256 tokens each against 64."""
PULL_TOKEN_MS = 0.005
"""A pull of 1340 tokens in 4 to 7 ms."""
HORIZON_STEPS = 48
"""For how many steps a group meets the load there is now. `bench.router`: with 16, workers are too unlike at 70 % load;
with 256, prompts are computed too often at 90 % (docs/log.md)."""
SESSION_SLACK = 256.0
"""By how much the worker that a session was on last may be dearer than the best, beside what it may have cached."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Prompt-token equivalents of one of each. On another machine all times differ, but their ratios less so."""

    choice: float = HORIZON_STEPS * CHOICE_MS / PROMPT_TOKEN_MS
    trunk_block: float = HORIZON_STEPS * TRUNK_BLOCK_MS / PROMPT_TOKEN_MS
    tail_block: float = HORIZON_STEPS * TAIL_BLOCK_MS / PROMPT_TOKEN_MS
    pulled_token: float = PULL_TOKEN_MS / PROMPT_TOKEN_MS
    session_slack: float = SESSION_SLACK


WEIGHTS = Weights()


def prompt_cost(tokens: int, candidate: Candidate, wanted: Wanted, weights: Weights = WEIGHTS) -> float:
    """Of computing, or pulling, so many tokens of the group's prompt there."""
    if not wanted.needs_prompt:
        return tokens * weights.pulled_token
    return tokens * (1.0 + candidate.open_choices / wanted.choices)


def own_cost(candidate: Candidate, wanted: Wanted, weights: Weights = WEIGHTS) -> float:
    return prompt_cost(max(0, wanted.prompt_tokens - candidate.cached_tokens), candidate, wanted, weights)


def load_cost(candidate: Candidate, weights: Weights) -> float:
    blocks = candidate.trunk_blocks * weights.trunk_block + candidate.tail_blocks * weights.tail_block
    return candidate.open_choices * weights.choice + blocks * (candidate.block_size / BLOCK_TOKENS)


def cost(candidate: Candidate, wanted: Wanted, weights: Weights = WEIGHTS) -> float:
    return own_cost(candidate, wanted, weights) + candidate.queued_tokens + load_cost(candidate, weights)


def explained(candidate: Candidate, wanted: Wanted, weights: Weights = WEIGHTS) -> str:
    """The cost and its parts, for a person."""
    own, load = own_cost(candidate, wanted, weights), load_cost(candidate, weights)
    total = own + candidate.queued_tokens + load
    return f"{candidate.id} {total:.0f} (own {own:.0f}, queued {candidate.queued_tokens}, load {load:.0f})"

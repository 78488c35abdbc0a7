"""What a choice of a worker is made from: the group that wants one, and the workers as far as they are known here."""

from dataclasses import dataclass
from enum import Enum, auto


class Work(Enum):
    """What a worker is wanted for."""

    PREFILL = auto()
    GENERATE = auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The group, as the choice sees it."""

    work: Work
    choices: int
    prompt_tokens: int
    needs_prompt: bool
    """False: it comes with a ticket, so the prompt has been computed and is fetched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A worker as the choice sees it: from the books of what it was given, not from what it says itself."""

    id: str
    cached_tokens: int
    """Of this prompt, as far as known."""
    queued_tokens: int
    """Prompt tokens that it was given and has not answered for yet."""
    open_choices: int
    """Being written, or to be written there."""
    trunk_blocks: int
    """KV blocks of open groups' prompts, once a group."""
    tail_blocks: int
    """KV blocks of what their choices have written."""
    max_choices: int
    """`EngineInfo.max_num_seqs`."""
    num_blocks: int
    block_size: int
    """In tokens."""
    has_session: bool = False
    """The session was here last."""
    avoid: bool = False
    """It refused a moment ago: taken only if nobody else is there."""

    @property
    def held_blocks(self) -> int:
        return self.trunk_blocks + self.tail_blocks


def has_room(candidate: Candidate, wanted: Wanted) -> bool:
    """Whether the group could begin there at once: its trunk and the first tail block of each choice, beside all that
    is open. Blocks of its prompt that are cached there are taken to be shared with open groups. A prefill writes
    nothing, so it needs no place among the choices."""
    own_tokens = wanted.prompt_tokens - candidate.cached_tokens
    blocks = candidate.held_blocks + -(-own_tokens // candidate.block_size)
    if wanted.work is Work.PREFILL:
        return blocks <= candidate.num_blocks
    choices = candidate.open_choices + wanted.choices
    return choices <= candidate.max_choices and blocks + wanted.choices <= candidate.num_blocks

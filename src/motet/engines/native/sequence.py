"""A group inside the engine: its trunk, and one sequence for each choice.

What is known and what is computed are two counts, and all work is the first catching up with the second:

    prompt   p0 p1 p2 ... p(P-1)        |  written   w0 w1 w2 ... w(k-1)
             └── trunk: group.computed ─┘            └─ tail: sequence.computed ─┘

A sequence whose tail has caught up has no logits of its own pending: the logits of the last token computed gave w(k-1).
Running w(k-1) gives w(k), and the trunk's last row gives w0 of every fresh sequence. A fresh choice, one resumed from a
migration and one resumed from a preemption differ only in how many tokens are written.
"""

from dataclasses import dataclass, field
from enum import Enum

from motet.engines.native.kv.prefix import BlockName
from motet.engines.native.sample.state import ChoiceSampling
from motet.transfer.ticket import Ticket
from motet.types import GenerateRequest, TokenLogprob


class SequenceState(Enum):
    WAITING = "waiting"
    """Has no tail blocks: its group waits, or it was preempted."""
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One choice, or all choices of a greedy group: equal prompts without chance have equal answers."""

    group: "Group"
    indices: list[int]
    """Numbers of the choices it answers; one that is stopped is taken out."""
    sampling: ChoiceSampling
    written: list[int]
    state: SequenceState = SequenceState.WAITING
    blocks: list[int] = field(default_factory=list)
    """Table of the tail: offset t lies in blocks[t // block_size]."""
    computed: int = 0
    """Tail tokens whose KV is stored."""
    rank: int = field(init=False)
    """Its place among its siblings, the same for life."""

    def __post_init__(self) -> None:
        self.rank = self.indices[0]

    @property
    def pending(self) -> int:
        """Written tokens to run before the next one can be drawn."""
        return len(self.written) - self.computed

    @property
    def age(self) -> tuple[int, int, int]:
        """Smaller is older; the older keeps its blocks when they run short."""
        return (*self.group.age, self.rank)


@dataclass(eq=False)
class Group:
    """One prompt and its sequences."""

    request: GenerateRequest
    arrival: int
    names: list[BlockName]
    """Names of the prompt's full blocks; empty when nothing is to be cached."""
    sequences: list[Sequence] = field(default_factory=list)
    """Unfinished ones only."""
    blocks: list[int] = field(default_factory=list)
    """Table of the trunk, shared by all sequences."""
    computed: int = 0
    """Prompt tokens whose KV is stored."""
    published: int = 0
    """Blocks of the trunk that the prefix cache knows."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache at the first admission."""
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    """Of the prompt tokens computed so far, when asked for."""
    reported: bool = False
    """Whether the client has the prompt report."""
    readers: int = 0
    """Decode workers that its prompt is prefilled for; 0: its choices are written here."""
    ticket: Ticket | None = None
    """Where the KV of its prompt can be fetched, until that is done or has failed."""
    pull: int | None = None
    """Number of the pull that is fetching it; until it ends, nothing of the group is computed."""

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.request.prompt

    @property
    def age(self) -> tuple[int, int]:
        return self.request.priority, self.arrival

    @property
    def trunk_tokens(self) -> int:
        """Prompt tokens whose KV is wanted here. The last one of a prefilled prompt is left to its readers: they need
        its logits, not its KV."""
        return len(self.prompt) - bool(self.readers)

    @property
    def trunk_pending(self) -> int:
        return self.trunk_tokens - self.computed

    @property
    def fresh(self) -> list[Sequence]:
        """Sequences that take their first token from the trunk's last row."""
        return [sequence for sequence in self.sequences if not sequence.written]


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)

"""A group inside the engine: its trunk, and one sequence for each choice.

What is known and what is computed are two counts, and all work is the first catching up with the second:

    prompt   p0 p1 p2 ... p(P-1)        |  written   w0 w1 w2 ... w(k-1)
             └── trunk: group.computed ─┘            └─ tail: sequence.computed ─┘

A sequence whose tail has caught up has no logits of its own pending: the logits of the last token computed gave w(k-1).
Running w(k-1) gives w(k), and the trunk's last row gives w0 of every fresh sequence. A fresh choice, one resumed from a
migration and one resumed from a preemption differ only in how many tokens are written.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter

from motet.block_names import BlockName
from motet.engines.native.sample.state import ChoiceSampling
from motet.kv_events.changes import Stored
from motet.transfer.ticket import Ticket
from motet.types import GenerateRequest, TokenLogprob

_RANK = attrgetter("rank")


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
    age: tuple[int, int, int] = field(init=False)
    """Smaller is older; the older keeps its blocks when they run short."""

    def __post_init__(self) -> None:
        self.rank = self.indices[0]
        self.age = (*self.group.age, self.rank)

    @property
    def pending(self) -> int:
        """Written tokens to run before the next one can be drawn."""
        return len(self.written) - self.computed


@dataclass(eq=False)
class Group:
    """One prompt and its sequences."""

    request: GenerateRequest
    arrival: int
    names: list[BlockName]
    """Names of the prompt's full blocks; empty when nothing is to be cached."""
    readers: int = 0
    """Decode workers that its prompt is prefilled for; 0: its choices are written here."""
    sequences: list[Sequence] = field(default_factory=list)
    """Unfinished ones only, in order of rank."""
    answered_by: dict[int, Sequence] = field(default_factory=dict)
    """Which sequence answers which choice; those that were stopped are taken out."""
    admitted: bool = False
    """Whether it holds blocks; else it waits."""
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
    ticket: Ticket | None = None
    """Where the KV of its prompt can be fetched, until that is done or has failed."""
    pull: int | None = None
    """Number of the pull that is fetching it; until it ends, nothing of the group is computed."""

    prompt: tuple[int, ...] = field(init=False)
    trunk_tokens: int = field(init=False)
    """Prompt tokens whose KV is wanted here. The last one of a prefilled prompt is left to its readers: they need
    its logits, not its KV."""
    age: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = self.request.prompt
        self.trunk_tokens = len(self.prompt) - bool(self.readers)
        self.age = self.request.priority, self.arrival

    @property
    def trunk_pending(self) -> int:
        return self.trunk_tokens - self.computed

    @property
    def fresh(self) -> list[Sequence]:
        """Sequences that take their first token from the trunk's last row."""
        return [sequence for sequence in self.sequences if not sequence.written]

    def content(self, begin: int, end: int, block_size: int) -> Stored:
        """Full blocks `begin` to `end` of the prompt, not included, as the prefix cache is told of them."""
        return Stored(
            tuple(self.names[begin:end]),
            self.names[begin - 1] if begin else None,
            self.prompt[begin * block_size : end * block_size],
            bool(self.request.cache_salt),
        )

    def drop(self, sequence: Sequence) -> None:
        """Takes out one that has ended."""
        del self.sequences[bisect_left(self.sequences, sequence.rank, key=_RANK)]

    def check(self) -> None:
        """Raises `AssertionError` unless siblings stand in order and the older ones have what the younger ones have,
        and a group that waits has nothing."""
        ranks = [sequence.rank for sequence in self.sequences]
        holding = [bool(sequence.blocks) for sequence in self.sequences]
        if holding != [sequence.state is SequenceState.RUNNING for sequence in self.sequences]:
            raise AssertionError(f"sequences of {self.request.request_id} run without blocks, or wait with some")
        if ranks != sorted(ranks) or holding != sorted(holding, reverse=True):
            raise AssertionError(f"a sequence of {self.request.request_id} waits for what a younger one holds")
        if self.admitted and not (self.sequences or self.readers):
            raise AssertionError(f"group {self.request.request_id} runs for nobody")
        if not self.admitted and (self.blocks or self.computed or self.published or any(holding)):
            raise AssertionError(f"group {self.request.request_id} waits, but holds blocks or counts on some")


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)

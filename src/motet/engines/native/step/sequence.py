"""A group inside the engine: its trunk, and one sequence for each choice.

Known tokens and computed tokens are two counts, and all work is to let the second catch up with the first:

    prompt   p0 p1 p2 ... p(P-1)        |  written   w0 w1 w2 ... w(k-1)
             └── trunk: group.computed ─┘            └─ tail: sequence.computed ─┘

A sequence with w(k-1) as its last token has computed all tokens before it: their logits gave w(k-1).
Running w(k-1) gives w(k), and the trunk's last row gives w0 of every fresh sequence. A fresh choice, one resumed from a
migration and one resumed from a preemption differ only in how many tokens are written. Tokens that a grammar leaves no
choice about are written without logits, right after a drawn one, and run with it.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING

from motet.block_names import BlockName, block_names
from motet.engines.native.compiling import matchers_of
from motet.engines.native.sample.state import ChoiceSampling, PromptTokens, TokenBias
from motet.grammar.compiled_grammar import Grammars, Matcher
from motet.kv_events.changes import Stored
from motet.transfer.ticket import Ticket
from motet.types import ChoiceStart, EngineInfo, GenerateRequest, PullReport, TokenLogprob

if TYPE_CHECKING:
    from motet.engines.native.step.drafts import GroupDrafts

_RANK = attrgetter("rank")

TrunkKey = tuple[BlockName | str, tuple[int, ...]]
"""Equal for groups with the same prompt: the name of its last full block, or its salt, and the tokens after that."""


class SequenceState(Enum):
    WAITING = "waiting"
    """It has no tail blocks, because its group waits or because it was preempted."""
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class ChoiceSequence:
    """One choice, or all choices of a greedy group, whose answers are equal."""

    group: "Group"
    indices: list[int]
    """Numbers of the choices it answers; one that is stopped is taken out."""
    sampling: ChoiceSampling
    output_tokens: list[int]
    state: SequenceState = SequenceState.WAITING
    blocks: list[int] = field(default_factory=list)
    """Table of the tail: offset t lies in blocks[t // block_size]."""
    computed: int = 0
    """Tail tokens whose KV is stored."""
    new: int = 1
    """Number of its last tokens that are new: the one that was drawn last, and those that had to follow it."""
    rank: int = field(init=False)
    """Its number among its siblings, which never changes."""
    age: tuple[int, int, int] = field(init=False)
    """Smaller is older; the older keeps its blocks when they run short."""

    def __post_init__(self) -> None:
        self.rank = self.indices[0]
        self.age = (*self.group.age, self.rank)

    @property
    def pending(self) -> int:
        """Number of output tokens to compute before the next one can be sampled."""
        return len(self.output_tokens) - self.computed


@dataclass(eq=False)
class Group:
    """One prompt and its sequences."""

    request: GenerateRequest
    arrival: int
    names: list[BlockName]
    """Names of the prompt's full blocks; empty if nothing should be cached."""
    readers: int = 0
    """Number of decode workers for which its prompt is prefilled; 0 if its choices are generated here."""
    sequences: list[ChoiceSequence] = field(default_factory=list)
    """Unfinished ones only, in order of rank."""
    answered_by: dict[int, ChoiceSequence] = field(default_factory=dict)
    """The sequence that answers each choice; those that were stopped are taken out."""
    admitted: bool = False
    """True if it holds blocks; else it waits."""
    blocks: list[int] = field(default_factory=list)
    """Table of the trunk, shared by all sequences."""
    computed: int = 0
    """Prompt tokens whose KV is stored."""
    published: int = 0
    """Blocks of the trunk that the prefix cache knows."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache at the first admission."""
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    """Log-probabilities of the prompt tokens computed so far, if the request has that field."""
    reported: bool = False
    """True once the client has the prompt report."""
    ticket: Ticket | None = None
    """The ticket with which its prompt's KV can be fetched, until that is done or has failed."""
    pull: int | None = None
    """Number of the pull that is fetching it; until it ends, nothing of the group is computed."""
    pulled: PullReport | None = None
    """The last pull that has ended."""
    trunk_key: TrunkKey | None = None
    """None if it shares its trunk with no other group."""
    joined: bool = False
    """True if its trunk is that of another group, which has computed it."""
    shares: bool = False
    """True if another group may have its trunk too, or stretches at its beginning."""
    path: tuple[int, ...] = ()
    """The first block of each stretch of its trunk. Sorted by this, trunks that begin alike are neighbours."""
    leader: "Group | None" = field(default=None, repr=False)
    """The running group for whose blocks it waits."""
    drafts: "GroupDrafts | None" = field(default=None, repr=False)
    """What draft tokens are guessed from, once there were any."""

    prompt: tuple[int, ...] = field(init=False)
    trunk_tokens: int = field(init=False)
    """Number of prompt tokens whose KV is needed: readers run the last one themselves, for its logits."""
    age: tuple[int, int] = field(init=False)
    trunk: tuple[int, int] = field(init=False)
    """The age of the group that has computed its trunk; equal for all that share it."""

    def __post_init__(self) -> None:
        self.prompt = self.request.prompt
        self.trunk_tokens = len(self.prompt) - bool(self.readers)
        self.age = self.trunk = self.request.priority, self.arrival

    @property
    def fresh(self) -> list[ChoiceSequence]:
        """Sequences that take their first token from the trunk's last row."""
        return [sequence for sequence in self.sequences if not sequence.output_tokens]

    def content(self, begin: int, end: int, *, block_size: int) -> Stored:
        """Returns full blocks [begin, end) of the prompt in the form that the prefix cache takes."""
        return Stored(
            tuple(self.names[begin:end]),
            self.names[begin - 1] if begin else None,
            self.prompt[begin * block_size : end * block_size],
            bool(self.request.cache_salt),
        )

    def drop(self, sequence: ChoiceSequence) -> None:
        """Removes a sequence that has ended."""
        del self.sequences[bisect_left(self.sequences, sequence.rank, key=_RANK)]

    def check(self) -> None:
        """Raises AssertionError unless siblings are in order, older ones come first, and waiting ones hold nothing."""
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


class GroupMaker:
    """Makes groups of requests: the sequences, and a matcher for each if the group has a grammar."""

    def __init__(self, info: EngineInfo, *, prefix_cache: bool, grammars: Grammars | None) -> None:
        self._eos_token_ids = tuple(token_id for token_id in info.eos_token_ids if token_id < info.vocab_size)
        """The end-of-sequence ids that can be drawn: the model has a logit for them."""
        self._block_size = info.block_size
        self.weights = info.block_weights
        """Names the weights in the names of blocks."""
        self._prefix_cache = prefix_cache
        self._grammars = grammars

    def to_write(self, request: GenerateRequest, arrival: int, *, matchers: Mapping[int, Matcher] | None) -> Group:
        """Returns a group whose choices are written here. Raises RequestError for a grammar that cannot be used."""
        if matchers is None:
            matchers = matchers_of(self._grammars, request)
        group = Group(request, arrival, self._names(request))
        group.trunk_key = self._trunk_key(group)
        prompt, bias = PromptTokens(request.prompt), TokenBias(request.sampling)
        sequences = []
        for starts in _shared_starts(request):
            sampling = ChoiceSampling(
                request.sampling,
                seed=starts[0].seed,
                prompt=prompt,
                eos_token_ids=self._eos_token_ids,
                written=starts[0].output_tokens,
                matcher=matchers.get(starts[0].index),
                bias=bias,
            )
            sequences.append(
                ChoiceSequence(group, [start.index for start in starts], sampling, list(starts[0].output_tokens))
            )
        group.sequences = sorted(sequences, key=lambda sequence: sequence.rank)
        group.answered_by = {index: sequence for sequence in sequences for index in sequence.indices}
        return group

    def to_hand_over(self, request: GenerateRequest, arrival: int, *, readers: int) -> Group:
        """Returns a group whose prompt is prefilled for others, who draw all its tokens."""
        return Group(request, arrival, self._names(request), readers)

    def rename(self, group: Group) -> None:
        """Gives the blocks of a group that holds none the names of the present weights."""
        group.names = self._names(group.request)
        group.trunk_key = self._trunk_key(group)

    def _trunk_key(self, group: Group) -> TrunkKey | None:
        """Prompts that are scored, or handed over, are computed for themselves."""
        if not self._prefix_cache or group.readers or group.request.sampling.prompt_logprobs is not None:
            return None
        last = group.names[-1] if group.names else group.request.cache_salt
        return last, tuple(group.prompt[len(group.names) * self._block_size :])

    def _names(self, request: GenerateRequest) -> list[BlockName]:
        if not self._prefix_cache:
            return []
        return block_names(request.prompt, self._block_size, salt=request.cache_salt, weights=self.weights)


def _shared_starts(request: GenerateRequest) -> list[list[ChoiceStart]]:
    """Returns lists of choices that must get equal answers: in a greedy group those that have written the same."""
    if not request.sampling.greedy:
        return [[start] for start in request.choices]
    by_written: dict[tuple[int, ...], list[ChoiceStart]] = {}
    for start in request.choices:
        by_written.setdefault(start.output_tokens, []).append(start)
    return list(by_written.values())

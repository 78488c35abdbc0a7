"""Groups and sequences inside the engine: a group has one trunk, and one sequence for each choice.

Tokens are first known and then computed: a token is computed once its KV is stored. All work of the engine makes the
number of computed tokens catch up with the number of known tokens:

    prompt   p0 p1 p2 ... p(P-1)              output tokens   o0 o1 o2 ... o(k-1)
             └─ group.trunk.num_computed ─┘                   └ sequence.num_computed ┘

A sequence whose last token is o(k-1) has computed all tokens before it: o(k-1) was sampled from their logits. Computing
o(k-1) gives the logits for o(k), and the last row of the trunk gives the logits for o0 of every fresh sequence. A fresh
choice, a choice resumed after a migration and a choice resumed after a preemption differ only in their number of output
tokens. Tokens that a grammar forces need no logits: they are appended directly after a sampled token, and are computed
together with it.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import count
from operator import attrgetter

from motet.block_names import BlockName, block_names, root_name
from motet.engine_info import EngineInfo, kv_weights
from motet.engines.native.adapters.loaded_adapters import LoadedAdapters
from motet.engines.native.adapters.low_rank import ServedAdapter
from motet.engines.native.compiling import matchers_of
from motet.engines.native.kv.block_scores import ScoreNeeds
from motet.engines.native.sample.state import ChoiceSampling, PromptTokens, TokenBias
from motet.engines.native.step.ngrams import GroupDrafts
from motet.grammar.compiled_grammar import Grammars, Matcher
from motet.kv_events.changes import Stored
from motet.transfer.ticket import Ticket
from motet.types import (
    BACKGROUND_PRIORITY,
    EncodedScore,
    GenerateRequest,
    PromptReport,
    PullReport,
    score_parts,
    starts_by_output,
)

_RANK = attrgetter("rank")

TrunkKey = tuple[BlockName, tuple[int, ...]]
"""Identifies a prompt: the name of its last full block (the name before the first block if it has none), and the tokens
after that block."""


class SequenceState(Enum):
    WAITING = "waiting"
    """The sequence has no tail blocks, because its group waits or because it was preempted."""
    RUNNING = "running"
    """The sequence has tail blocks."""
    FINISHED = "finished"


@dataclass(eq=False)
class ChoiceSequence:
    """One choice, or several choices of a greedy group whose answers are equal. The scheduler frees its blocks."""

    group: "Group"
    indices: list[int]
    """Indices of the choices whose tokens the sequence generates, without choices that were stopped."""
    sampling: ChoiceSampling
    output_tokens: list[int]
    state: SequenceState = SequenceState.WAITING
    blocks: list[int] = field(default_factory=list)
    """Block table of the tail: output token t is stored in blocks[t // block_size]."""
    num_computed: int = 0
    """Number of output tokens whose KV is stored."""
    num_new: int = 1
    """Number of output tokens that one step computes in normal decoding: the token that was sampled last, and the
    tokens that the grammar forced after that token. A sequence with more pending tokens replays."""
    rank: int = field(init=False)
    """Rank of the sequence among its siblings, the index of its first choice. It never changes."""
    age: tuple[int, int, int] = field(init=False)
    """Age for comparison: smaller is older. An older sequence keeps its blocks when blocks run short."""

    def __post_init__(self) -> None:
        self.rank = self.indices[0]
        self.age = (*self.group.age, self.rank)

    @property
    def num_pending(self) -> int:
        """Number of output tokens to compute before the next token can be sampled."""
        return len(self.output_tokens) - self.num_computed


@dataclass(eq=False, kw_only=True)
class GroupTrunk:
    """The trunk of one group. Groups with equal prompts can hold the same blocks (`sharing`)."""

    num_tokens: int
    """Number of prompt tokens whose KV is needed. Decode workers compute the last one themselves, for its logits."""
    names: list[BlockName]
    """Names of the prompt's full blocks; empty if the engine has no prefix cache."""
    origin: tuple[int, int]
    """Age of the group that computed the trunk. Groups that share a trunk have the same value."""
    adapter: ServedAdapter | None = None
    """The adapter of the group; None for the base model, and after the group's end."""
    adapter_digest: str = ""
    """Digest of the adapter in the names of blocks; empty for the base model."""
    weights: str = ""
    """Name of the weights, with the adapter, in tickets."""
    key: TrunkKey | None = None
    """Key for groups with the same prompt; None if the trunk is never shared."""
    blocks: list[int] = field(default_factory=list)
    """Block table: prompt token p is stored in blocks[p // block_size]. Every group with the trunk holds each block
    once, and the scheduler releases it when the group ends or is suspended."""
    num_computed: int = 0
    """Number of prompt tokens whose KV is stored."""
    num_published: int = 0
    """Number of leading blocks that are in the prefix cache."""
    joined: bool = False
    """True if another group computed the trunk."""
    recomputed: int | None = None
    """Position of a token that is computed only for its logits, because its KV is in a block that other groups hold."""
    shared: bool = False
    """True if other groups can hold the same blocks: all of them, or leading stretches."""
    may_follow: bool = True
    """False once the group has been delayed by following another group."""
    finish_tag: float = 0.0
    """Orders the prompts of one client and one priority, lowest first (`EngineClients.add`)."""
    path: tuple[int, ...] = ()
    """First block of each stretch. In the order of paths, trunks with common leading stretches are adjacent."""

    @property
    def complete(self) -> bool:
        return self.num_computed == self.num_tokens


@dataclass
class TrunkFetch:
    """A trunk that is expected from another worker: its ticket, and the pull if it has started."""

    ticket: Ticket
    pull: int | None = None
    """Number of the pull; None until the group has blocks for it."""


@dataclass
class PromptFacts:
    """What the first delta of a group reports about its prompt."""

    needs: ScoreNeeds | None
    """The scores of the prompt that are requested, if any."""
    scored_from: int = 0
    """Index of the first scored prompt token: the requested token or the first token of its block, because only scores
    of complete blocks are cached."""
    scores: list[EncodedScore] = field(default_factory=list)
    """Scores of the prompt tokens so far, from `scored_from` on."""
    num_cached: int | None = None
    """Number of prompt tokens found in the prefix cache at the first admission; None before it."""
    pull: PullReport | None = None
    """Report of the last pull that ended."""
    reported: bool = False

    def take_report(self) -> PromptReport | None:
        """Returns the report at the first call, and None at later calls."""
        if self.reported:
            return None
        self.reported = True
        parts = None if self.needs is None else tuple(score_parts(self.scores))
        self.scores = []
        scored_from = 0 if parts is None else self.scored_from
        return PromptReport(self.num_cached or 0, parts, self.pull, scored_from=scored_from)


class Group:
    """One prompt and its sequences."""

    def __init__(
        self, request: GenerateRequest, arrival: int, *, names: list[BlockName] | None = None, readers: int = 0
    ) -> None:
        """`names`: names of the prompt's full blocks, empty without a prefix cache. `readers`: number of decode workers
        for which the prompt is prefilled; 0 if this engine generates the choices."""
        self.request = request
        self.prompt = request.prompt
        self.readers = readers
        self.age = request.priority, arrival
        """Age for comparison: smaller is older."""
        self.sequences: list[ChoiceSequence] = []
        """Unfinished sequences, in order of rank."""
        self.sequence_of: dict[int, ChoiceSequence] = {}
        """The sequence of each choice, by the index of the choice, without choices that were stopped."""
        self.admitted = False
        """True while the group holds blocks; otherwise it waits."""
        self.followed: Group | None = None
        """The running group whose blocks this group waits for."""
        self.trunk = GroupTrunk(num_tokens=len(self.prompt) - bool(readers), names=names or [], origin=self.age)
        self.fetch: TrunkFetch | None = None
        """Set while the trunk is expected from another worker. None for all other groups."""
        self.facts = PromptFacts(ScoreNeeds.of(request.sampling))
        self.drafts: GroupDrafts | None = None
        """Set by the drafter in the group's first step with drafts."""

    @property
    def fresh(self) -> list[ChoiceSequence]:
        """Sequences without output tokens. Their first token is sampled from the logits of the last trunk row."""
        return [sequence for sequence in self.sequences if not sequence.output_tokens]

    @property
    def in_background(self) -> bool:
        """True for a line of a batch."""
        return self.request.priority == BACKGROUND_PRIORITY

    @property
    def is_scored(self) -> bool:
        """True while scores of the prompt are needed: until the first delta has reported them."""
        return self.facts.needs is not None and not self.facts.reported

    @property
    def first_scored_row(self) -> int:
        """The first prompt position whose logits are needed for scores of the prompt."""
        return max(0, self.facts.scored_from - 1)

    def scores_for(self, other: "Group", *, begin: int, end: int) -> bool:
        """Returns True if the scores that this group computes for the common tokens [begin, end) suffice for
        `other`."""
        begin = max(begin, other.facts.scored_from)
        if other.facts.needs is None or not other.is_scored or begin >= end:
            return True
        return (
            self.facts.needs is not None
            and self.is_scored
            and self.facts.scored_from <= begin
            and self.facts.needs.covers(other.facts.needs)
        )

    @property
    def is_fetching(self) -> bool:
        """True while a pull fetches the trunk; nothing of the group is computed until the pull has ended."""
        return self.fetch is not None and self.fetch.pull is not None

    def stored(self, begin: int, end: int, *, block_size: int) -> Stored:
        """Returns the change of the prefix cache that publishes full blocks [begin, end) of the prompt."""
        names = self.trunk.names
        return Stored(
            tuple(names[begin:end]),
            names[begin - 1] if begin else None,
            self.prompt[begin * block_size : end * block_size],
            bool(self.request.cache_salt or self.trunk.adapter_digest),
        )

    def remove(self, sequence: ChoiceSequence) -> None:
        del self.sequences[bisect_left(self.sequences, sequence.rank, key=_RANK)]

    def check(self) -> None:
        """Raises AssertionError unless siblings are in order, older siblings hold blocks before younger ones, and a
        waiting group holds nothing."""
        name, trunk = self.request.request_id, self.trunk
        ranks = [sequence.rank for sequence in self.sequences]
        holding = [bool(sequence.blocks) for sequence in self.sequences]
        if holding != [sequence.state is SequenceState.RUNNING for sequence in self.sequences]:
            raise AssertionError(f"sequences of {name} run without blocks, or wait with blocks")
        if ranks != sorted(ranks) or holding != sorted(holding, reverse=True):
            raise AssertionError(f"a sequence of {name} waits while a younger sibling holds blocks")
        if self.admitted and not (self.sequences or self.readers):
            raise AssertionError(f"group {name} runs, but has neither sequences nor readers")
        if not self.admitted and (trunk.blocks or trunk.num_computed or trunk.num_published or any(holding)):
            raise AssertionError(f"group {name} waits, but has blocks or computed tokens")


class GroupMaker:
    """Makes the group of each request, in order of arrival, with its sequences and their grammar matchers."""

    def __init__(self, info: EngineInfo, *, prefix_cache: bool, grammars: Grammars | None) -> None:
        self.grammars = grammars
        self.info = info
        """Facts of the engine with the weights that serve."""
        self.adapters = LoadedAdapters(info.model, max_adapters=info.max_adapters)
        self._eos_token_ids = tuple(token_id for token_id in info.eos_token_ids if token_id < info.vocab_size)
        """End-of-sequence tokens that can be sampled: the model has a logit for them."""
        self._block_size = info.block_size
        self._prefix_cache = prefix_cache
        self._arrivals = count()

    def make(self, request: GenerateRequest, *, matchers: Mapping[int, Matcher] | None) -> Group:
        """Returns a group whose choices this engine generates. Raises RequestError for a grammar that cannot be used.
        `matchers`: one for each choice, by its index; if None, this method compiles the grammar."""
        group = Group(request, next(self._arrivals))
        self.rename_blocks(group, self.adapters.of_model(request.model))
        group.facts.scored_from = self._scored_from(group)
        if matchers is None:
            matchers = matchers_of(self.grammars, request)
        prompt, bias = PromptTokens(request.prompt), TokenBias(request.sampling)
        sequences = []
        choices = request.choices
        for starts in starts_by_output(choices) if request.sampling.greedy else [[start] for start in choices]:
            sampling = ChoiceSampling(
                request.sampling,
                seed=starts[0].seed,
                prompt=prompt,
                eos_token_ids=self._eos_token_ids,
                output_tokens=starts[0].output_tokens,
                matcher=matchers.get(starts[0].index),
                bias=bias,
            )
            sequences.append(
                ChoiceSequence(group, [start.index for start in starts], sampling, list(starts[0].output_tokens))
            )
        group.sequences = sorted(sequences, key=_RANK)
        group.sequence_of = {index: sequence for sequence in sequences for index in sequence.indices}
        return group

    def make_prefill(self, request: GenerateRequest, *, readers: int) -> Group:
        """Returns a group whose prompt is prefilled for `readers` decode workers, which generate all its tokens."""
        group = Group(request, next(self._arrivals), readers=readers)
        self.rename_blocks(group, self.adapters.of_model(request.model))
        return group

    def rename_blocks(self, group: Group, adapter: ServedAdapter | None) -> None:
        """Names the prompt blocks of a group after the current weights and an adapter. The group must hold no
        blocks."""
        trunk, request, info = group.trunk, group.request, self.info
        trunk.adapter, trunk.adapter_digest = adapter, "" if adapter is None else adapter.info.digest
        trunk.weights = kv_weights(info, trunk.adapter_digest)
        if self._prefix_cache:
            names = partial(block_names, request.prompt, self._block_size, salt=request.cache_salt)
            trunk.names = names(adapter=trunk.adapter_digest, weights=info.block_weights)
        trunk.key = self._trunk_key(group)

    def _scored_from(self, group: Group) -> int:
        """Returns the index of the first prompt token that is scored."""
        first, size = group.request.scored_from, self._block_size
        return first // size * size if first // size < len(group.trunk.names) else min(first, len(group.prompt))

    def _trunk_key(self, group: Group) -> TrunkKey | None:
        """Returns None for trunks that are never shared: trunks that are prefilled for other workers."""
        if not self._prefix_cache or group.readers:
            return None
        trunk, weights = group.trunk, self.info.block_weights
        names = trunk.names
        last = names[-1] if names else root_name(group.request.cache_salt, trunk.adapter_digest, weights=weights)
        return last, tuple(group.prompt[len(names) * self._block_size :])

"""The scores of prompt tokens whose KV is in the prefix cache, so that a prompt with log-probabilities can share them.

A score depends on a token and all tokens before it, and so does the name of a block. So the scores of a block's own
tokens are kept under its name. A prompt whose first blocks are cached computes the last token of these blocks again,
because its logits give the score of the next token.

Scores are stored in the encoding in which they are sent, because decoding 8,000 tokens with 20 alternatives each would
delay a step by 40 to 100 ms. A block keeps scores for several needs, so that requests with other needs do not replace
them. Scores with more alternatives than a request needs are cut once, without decoding the alternatives (15 ms for the
same number of tokens), and kept as well. Otherwise 250 short continuations of one prompt would send 500 MB of
alternatives that were not requested. Scores are dropped with their block, or earlier if all scores together exceed
`MAX_BYTES`.
"""

import sys
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from operator import attrgetter

import msgspec

from motet.block_names import BlockName
from motet.types import EncodedScore, SamplingParams

MAX_BYTES = 256 * 2**20
"""Maximum size of all scores in memory."""
MAX_NEEDS = 32
"""Maximum number of needs for which a block keeps scores."""

_ENCODER = msgspec.msgpack.Encoder()
_NUM_TOP = attrgetter("num_top")


class ScoreNeeds(msgspec.Struct, frozen=True):
    """The log-probabilities that a request needs for each token of its prompt."""

    num_top: int
    """Number of most likely tokens at each position."""
    named: tuple[int, ...] = ()
    """Tokens whose log-probabilities are reported at each position."""

    @classmethod
    def of(cls, sampling: SamplingParams) -> "ScoreNeeds | None":
        """Returns None for requests without log-probabilities of the prompt. Scores always contain the most likely
        token, so that requests with and without it use the same scores."""
        if sampling.prompt_logprobs is None:
            return None
        return cls(max(1, sampling.prompt_logprobs), tuple(sampling.prompt_logprob_token_ids))

    def covers(self, other: "ScoreNeeds") -> bool:
        """Returns True if scores computed for these needs contain everything that `other` needs."""
        return self == other or (not self.named and not other.named and self.num_top > other.num_top)


class _Undecoded(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A score (`TokenLogprob`) whose members are not decoded."""

    token_id: msgspec.Raw
    logprob: msgspec.Raw
    rank: msgspec.Raw
    top: tuple[msgspec.Raw, ...] = ()


_DECODER = msgspec.msgpack.Decoder(_Undecoded | None)


def cut(score: EncodedScore, num_top: int) -> EncodedScore:
    """Returns a score with at most `num_top` alternatives."""
    decoded = _DECODER.decode(score)
    if decoded is None or len(decoded.top) <= num_top:
        return score
    return _ENCODER.encode(msgspec.structs.replace(decoded, top=decoded.top[:num_top]))


class _Entry(msgspec.Struct, frozen=True):
    scores: tuple[EncodedScore, ...]
    """One for each token of the block."""
    num_bytes: int


class BlockScores:
    """The scores of named blocks, by name and needs. The pool drops them with the blocks."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[BlockName, ScoreNeeds], _Entry] = OrderedDict()
        """The least recently used entry first."""
        self._needs_of: dict[BlockName, dict[ScoreNeeds, None]] = {}
        """The needs for which each block has scores, the oldest first."""

    def __len__(self) -> int:
        return len(self._entries)

    def count(self, names: Sequence[BlockName], needs: ScoreNeeds) -> int:
        """Returns how many of the leading blocks have scores that cover `needs`."""
        return next((number for number, name in enumerate(names) if self._source(name, needs) is None), len(names))

    def read(self, names: Iterable[BlockName], needs: ScoreNeeds) -> Iterator[EncodedScore]:
        """Yields the scores of all tokens of these blocks, which must have scores that cover `needs`. There are no more
        alternatives than needed."""
        for name, source, entry in [self._used(name, needs) for name in names]:
            if source == needs:
                yield from entry.scores
            else:
                scores = [cut(score, needs.num_top) for score in entry.scores]
                self.store(name, scores, needs=needs)
                yield from scores

    def store(self, name: BlockName, scores: Iterable[EncodedScore], *, needs: ScoreNeeds) -> None:
        """Keeps the scores of a block's tokens, unless it has scores for these needs already."""
        all_needs = self._needs_of.setdefault(name, {})
        if needs in all_needs:
            return
        if len(all_needs) >= MAX_NEEDS:
            self._drop_entry(name, next(iter(all_needs)))
        kept = tuple(scores)
        entry = self._entries[name, needs] = _Entry(kept, sum(map(sys.getsizeof, kept)))
        self._needs_of.setdefault(name, {})[needs] = None
        self.num_bytes += entry.num_bytes
        while self.num_bytes > self._max_bytes:
            self._drop_entry(*next(iter(self._entries)))

    def drop(self, name: BlockName) -> None:
        for needs in [*self._needs_of.get(name, ())]:
            self._drop_entry(name, needs)

    def clear(self) -> None:
        self._entries.clear()
        self._needs_of.clear()
        self.num_bytes = 0

    def check(self, names: Container[BlockName]) -> None:
        """Raises AssertionError unless all scores belong to blocks with these names, and their size is correct."""
        if not all(name in names for name, _ in self._entries):
            raise AssertionError("scores are kept for blocks that are not in the prefix cache")
        if {(name, needs) for name, found in self._needs_of.items() for needs in found} != self._entries.keys():
            raise AssertionError("the needs of blocks do not match their scores")
        if self.num_bytes != sum(entry.num_bytes for entry in self._entries.values()):
            raise AssertionError("the size of the scores is not their sum")

    def _source(self, name: BlockName, needs: ScoreNeeds) -> ScoreNeeds | None:
        """Returns the needs of the smallest scores of a block that cover `needs`; None if no scores do."""
        found = self._needs_of.get(name, {})
        if needs in found:
            return needs
        return min((each for each in found if each.covers(needs)), key=_NUM_TOP, default=None)

    def _used(self, name: BlockName, needs: ScoreNeeds) -> tuple[BlockName, ScoreNeeds, _Entry]:
        """Returns the smallest scores of a block that cover `needs`, and records their use."""
        source = self._source(name, needs)
        if source is None:
            raise KeyError(name)
        self._entries.move_to_end((name, source))
        return name, source, self._entries[name, source]

    def _drop_entry(self, name: BlockName, needs: ScoreNeeds) -> None:
        self.num_bytes -= self._entries.pop((name, needs)).num_bytes
        all_needs = self._needs_of[name]
        del all_needs[needs]
        if not all_needs:
            del self._needs_of[name]

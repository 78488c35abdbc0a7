"""The scores of prompt tokens whose KV is in the prefix cache, so that a prompt with log-probabilities can share them.

A score depends on a token and all tokens before it, and so does the name of a block. So the scores of a block's own
tokens are kept under its name. A prompt whose first blocks are known starts with the last token of these blocks again:
its logits give the score of the next token.

Scores are kept as they are sent, because decoding 8,000 tokens with 20 alternatives each would delay a step by 40 to
100 ms. They can have more alternatives than a request needs; the API process cuts them off. They are dropped with their
block, and earlier if all scores together exceed `MAX_BYTES`.
"""

import sys
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence

import msgspec

from motet.block_names import BlockName
from motet.types import EncodedScore, SamplingParams

MAX_BYTES = 256 * 2**20
"""Maximum size of all scores in memory."""


class ScoreNeeds(msgspec.Struct, frozen=True):
    """What a request needs to know about each token of its prompt."""

    num_top: int
    """Number of most likely tokens at each position."""
    named: tuple[int, ...] = ()
    """Tokens whose log-probabilities are reported at each position."""

    @classmethod
    def of(cls, sampling: SamplingParams) -> "ScoreNeeds | None":
        """Returns None for requests without log-probabilities of the prompt."""
        if sampling.prompt_logprobs is None:
            return None
        return cls(sampling.prompt_logprobs, tuple(sampling.prompt_logprob_token_ids))

    def covers(self, other: "ScoreNeeds") -> bool:
        """Returns True if scores computed for these needs contain everything that `other` needs."""
        return self == other or (not self.named and not other.named and self.num_top > other.num_top)


class _Entry(msgspec.Struct, frozen=True):
    needs: ScoreNeeds
    scores: tuple[EncodedScore, ...]
    """One for each token of the block."""
    num_bytes: int


class BlockScores:
    """The scores of named blocks, by name. The pool drops them with the blocks."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._entries: OrderedDict[BlockName, _Entry] = OrderedDict()
        """The least recently used entry first."""

    def __len__(self) -> int:
        return len(self._entries)

    def count(self, names: Sequence[BlockName], needs: ScoreNeeds) -> int:
        """Returns how many of the leading blocks have scores that cover `needs`."""
        for number, name in enumerate(names):
            entry = self._entries.get(name)
            if entry is None or not entry.needs.covers(needs):
                return number
        return len(names)

    def read(self, names: Iterable[BlockName]) -> Iterator[EncodedScore]:
        """Yields the scores of all tokens of these blocks, which must have them."""
        for name in names:
            self._entries.move_to_end(name)
            yield from self._entries[name].scores

    def store(self, name: BlockName, scores: Iterable[EncodedScore], *, needs: ScoreNeeds) -> None:
        """Keeps the scores of a block's tokens, unless it has scores that cover them already."""
        old = self._entries.get(name)
        if old is not None and old.needs.covers(needs):
            return
        self.drop(name)
        kept = tuple(scores)
        entry = self._entries[name] = _Entry(needs, kept, sum(map(sys.getsizeof, kept)))
        self.num_bytes += entry.num_bytes
        while self.num_bytes > self._max_bytes:
            self.drop(next(iter(self._entries)))

    def drop(self, name: BlockName) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes

    def clear(self) -> None:
        self._entries.clear()
        self.num_bytes = 0

    def check(self, names: Container[BlockName]) -> None:
        """Raises AssertionError unless all scores belong to blocks with these names, and their size is correct."""
        if not all(name in names for name in self._entries):
            raise AssertionError("scores are kept for blocks that are not in the prefix cache")
        if self.num_bytes != sum(entry.num_bytes for entry in self._entries.values()):
            raise AssertionError("the size of the scores is not their sum")

"""N-gram drafting, also called prompt lookup: finds an earlier occurrence of the last tokens of a choice in the prompt
or the answers of its group, and the token that followed there. `drafts` uses this token as a draft token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

NGRAM_SIZES = (4, 2, 1)
"""Lengths of the n-grams to look up, the most reliable length first."""
INITIAL_ACCEPTANCE = (0.6, 0.4, 0.2)
"""Assumed acceptance rates before any draft was verified, one for each of `NGRAM_SIZES`."""
ACCEPTANCE_WEIGHT = 0.08
"""Weight of the newest draft in the moving average of an acceptance rate."""
RECOVERY_WEIGHT = 0.01
"""Weight of the initial rate each time a draft is skipped as too unlikely, so that a group tries drafts again later."""
MAX_TOKENS_PER_STEP = 2**11
"""Maximum number of tokens to index in one step, which takes about 3 ms. A long prompt is indexed in several steps."""
_NOWHERE = (-1, 0)


class NgramIndex:
    """Finds the last occurrence of n-grams in several streams of tokens: a prompt and its answers."""

    def __init__(self, streams: Sequence[Sequence[int]]) -> None:
        """`streams`: they can grow. An occurrence in a later stream takes precedence."""
        self._streams = streams
        self._num_indexed = [0] * len(streams)
        """Number of indexed tokens of each stream."""
        self._occurrences: list[dict[tuple[int, ...], tuple[int, int]]] = [{} for _ in NGRAM_SIZES]
        """For each of `NGRAM_SIZES`: n-gram -> stream and position of the token after its last occurrence."""

    def catch_up(self, max_tokens: int = MAX_TOKENS_PER_STEP) -> None:
        """Indexes at most `max_tokens` of the tokens that were added since the last call, later streams first."""
        for number in range(len(self._streams) - 1, -1, -1):
            tokens, begin = self._streams[number], self._num_indexed[number]
            end = min(len(tokens), begin + max_tokens)
            for size, occurrences in zip(NGRAM_SIZES, self._occurrences, strict=True):
                for position in range(max(begin, size), end):
                    ngram = tuple(tokens[position - size : position])
                    if occurrences.get(ngram, _NOWHERE)[0] <= number:
                        occurrences[ngram] = number, position
            self._num_indexed[number] = end
            max_tokens -= end - begin

    def lookup(self, last: Sequence[int]) -> tuple[int, int] | None:
        """Returns the index in `NGRAM_SIZES` of the longest known n-gram at the end of `last`, and the token that
        followed its last occurrence; None if no n-gram is known."""
        for source, size in enumerate(NGRAM_SIZES):
            if (occurrence := self._occurrences[source].get(tuple(last[-size:]))) is not None:
                stream, position = occurrence
                return source, self._streams[stream][position]
        return None


@dataclass(eq=False)
class GroupDrafts:
    """The index for the drafts of one group, and the acceptance rates of these drafts."""

    index: NgramIndex
    acceptance: list[float] = field(default_factory=lambda: [*INITIAL_ACCEPTANCE])
    """Estimated probability that a draft is accepted, for each of `NGRAM_SIZES`."""

    def record_verified(self, source: int, *, accepted: bool) -> None:
        self.acceptance[source] += ACCEPTANCE_WEIGHT * (accepted - self.acceptance[source])

    def record_skipped(self, source: int) -> None:
        """Called when a draft was not made because it was too unlikely."""
        self.acceptance[source] += RECOVERY_WEIGHT * (INITIAL_ACCEPTANCE[source] - self.acceptance[source])

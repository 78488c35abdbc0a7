"""The probabilities of the answers to a question, from reads of the model's distribution.

An answer is a sequence of tokens. Each read is for one place, after the prompt and some tokens of an answer. It has the
log-probabilities of the tokens that answers have there:

    answers        yes: [5]     no: [6]     maybe: [7, 8]
    reads          () -> 5, 6, 7            (7,) -> 8

The sum of the log-probabilities of an answer's tokens is the logarithm of the probability that a reply starts with
these tokens. If another answer starts with them too, the end is read as well: the logarithm of the total
probability of the tokens that end a reply is added. So no reply counts for two answers.

    answers        1: [5]       10: [5, 6]
    reads          () -> 5      (5,) -> 6, end-of-sequence

The probabilities of the answers are then divided by their sum."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

MAX_READ_TOKENS = 16
"""Maximum number of tokens of the reads of one group: vLLM's servers report at most 19 named tokens. Groups with the
same prompt share it."""

Tokens = tuple[int, ...]
Known = Mapping[Tokens, Mapping[int, float]]
"""Place -> token -> log-probability."""


class Read(NamedTuple):
    """One place, and the tokens whose log-probabilities are read there."""

    place: Tokens
    """The tokens of answers before it."""
    token_ids: Tokens


class Distribution(NamedTuple):
    """The probabilities of the answers to one question."""

    probabilities: Sequence[float]
    """One for each answer; they add up to 1."""
    confidence: float
    """The probability of the most likely answer among all replies, not only the answers."""

    @property
    def best(self) -> int:
        """Number of the most likely answer."""
        return max(range(len(self.probabilities)), key=self.probabilities.__getitem__)

    @property
    def mean(self) -> float:
        """The expected number of the answer."""
        return math.fsum(number * probability for number, probability in enumerate(self.probabilities))


class AnswerReads:
    """The reads for the answers to one question."""

    def __init__(self, answers: Sequence[Tokens], *, ends: Tokens) -> None:
        """`answers`: different sequences with at least one token. `ends`: the tokens that end a reply."""
        self.answers = answers
        self._ends = ends
        self._next: dict[Tokens, dict[int, None]] = {}
        """Place -> the tokens to read there, in the order of the answers."""
        for tokens in answers:
            for place in range(len(tokens)):
                self._next.setdefault(tokens[:place], {})[tokens[place]] = None
        for tokens in self.unfinished:
            self._next[tokens] |= dict.fromkeys(ends)

    @property
    def num_places(self) -> int:
        """Number of places. A place needs at least one read."""
        return len(self._next)

    @property
    def unfinished(self) -> list[Tokens]:
        """The answers that are the beginning of another answer."""
        return [tokens for tokens in self.answers if tokens in self._next]

    def groups(self, *, max_reads: int) -> Iterator[list[Read]]:
        """Yields lists of at most `max_reads` reads that have at most `MAX_READ_TOKENS` different tokens together."""
        group, tokens = list[Read](), set[int]()
        for read in self._reads():
            if group and (len(group) == max_reads or len(tokens.union(read.token_ids)) > MAX_READ_TOKENS):
                yield group
                group, tokens = [], set()
            group.append(read)
            tokens.update(read.token_ids)
        yield group

    def _reads(self) -> Iterator[Read]:
        for place, found in self._next.items():
            token_ids = tuple(found)
            for start in range(0, len(token_ids), MAX_READ_TOKENS):
                yield Read(place, token_ids[start : start + MAX_READ_TOKENS])

    def distribution(self, known: Known) -> Distribution:
        """Returns the probabilities of the answers. `known`: the finite results of all reads."""
        logprobs = [math.fsum(self._terms(tokens, known)) for tokens in self.answers]
        highest = max(logprobs)
        weights = [math.exp(logprob - highest) for logprob in logprobs]
        total = math.fsum(weights)
        return Distribution([weight / total for weight in weights], min(1.0, math.exp(highest)))

    def _terms(self, tokens: Tokens, known: Known) -> Iterator[float]:
        for place, token in enumerate(tokens):
            yield known[tokens[:place]][token]
        if tokens in self._next:
            yield log_of_sum(known[tokens][token] for token in self._ends)


def log_of_sum(logarithms: Iterable[float]) -> float:
    """Returns the logarithm of the sum of numbers, from their logarithms. There is at least one."""
    given = [*logarithms]
    highest = max(given)
    return highest + math.log(math.fsum(math.exp(one - highest) for one in given))

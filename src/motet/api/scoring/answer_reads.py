"""The probabilities of the answers to a question, from reads of the model's next-token distribution.

An answer is a sequence of tokens. A read gives the log-probabilities of some next tokens after the prompt and a prefix
of an answer:

    answers        yes: [5]     no: [6]     maybe: [7, 8]
    reads          () -> 5, 6, 7            (7,) -> 8

The sum of the log-probabilities of an answer's tokens is the log-probability that a reply starts with these tokens. If
the answer is a prefix of another answer, the log-probability that the reply ends there, with any end-of-sequence token,
is added. Otherwise a reply could count for both answers.

    answers        1: [5]       10: [5, 6]
    reads          () -> 5      (5,) -> 6, end-of-sequence

The probabilities of the answers are then divided by their sum."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

MAX_READ_TOKENS = 16
"""Maximum number of different tokens in the reads of one group: vLLM reports at most 19 tokens by their ids. A question
with more tokens needs several groups, which share the KV of their prompt."""

Tokens = tuple[int, ...]
ReadLogprobs = Mapping[Tokens, Mapping[int, float]]
"""Prefix -> next token -> log-probability."""


class Read(NamedTuple):
    """A prefix of answers, and the next tokens whose log-probabilities are read after it."""

    prefix: Tokens
    token_ids: Tokens


class Distribution(NamedTuple):
    """The probabilities of the answers to one question."""

    probabilities: Sequence[float]
    """One for each answer; they add up to 1."""
    confidence: float
    """Probability of the most likely answer among all replies, before the division by the sum."""

    @property
    def best(self) -> int:
        """Index of the most likely answer."""
        return max(range(len(self.probabilities)), key=self.probabilities.__getitem__)

    @property
    def mean(self) -> float:
        """Expected value of the answer's index."""
        return math.fsum(index * probability for index, probability in enumerate(self.probabilities))


class AnswerReads:
    """The reads for the answers to one question."""

    def __init__(self, answers: Sequence[Tokens], *, end_token_ids: Tokens) -> None:
        """`answers`: different sequences of at least one token. `end_token_ids`: the tokens that end a reply."""
        self.answers = answers
        self._end_token_ids = end_token_ids
        self._next_tokens: dict[Tokens, dict[int, None]] = {}
        """Prefix -> the tokens to read after it, in the order of the answers."""
        for tokens in answers:
            for length in range(len(tokens)):
                self._next_tokens.setdefault(tokens[:length], {})[tokens[length]] = None
        for tokens in self.prefix_answers:
            self._next_tokens[tokens] |= dict.fromkeys(end_token_ids)

    @property
    def num_prefixes(self) -> int:
        """Number of different prefixes, each of which needs at least one read."""
        return len(self._next_tokens)

    @property
    def prefix_answers(self) -> list[Tokens]:
        """The answers that are a prefix of another answer."""
        return [tokens for tokens in self.answers if tokens in self._next_tokens]

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
        for prefix, next_tokens in self._next_tokens.items():
            token_ids = tuple(next_tokens)
            for start in range(0, len(token_ids), MAX_READ_TOKENS):
                yield Read(prefix, token_ids[start : start + MAX_READ_TOKENS])

    def distribution(self, logprobs: ReadLogprobs) -> Distribution:
        """Returns the probabilities of the answers. `logprobs`: the finite results of all reads."""
        answer_logprobs = [math.fsum(self._terms(tokens, logprobs)) for tokens in self.answers]
        highest = max(answer_logprobs)
        weights = [math.exp(logprob - highest) for logprob in answer_logprobs]
        total = math.fsum(weights)
        return Distribution([weight / total for weight in weights], min(1.0, math.exp(highest)))

    def _terms(self, tokens: Tokens, logprobs: ReadLogprobs) -> Iterator[float]:
        """Yields the log-probabilities whose sum is the log-probability of an answer."""
        for length, token in enumerate(tokens):
            yield logprobs[tokens[:length]][token]
        if tokens in self._next_tokens:
            yield logsumexp(logprobs[tokens][token] for token in self._end_token_ids)


def logsumexp(values: Iterable[float]) -> float:
    """Returns log(sum(exp(value))) of at least one value."""
    values = [*values]
    highest = max(values)
    return highest + math.log(math.fsum(math.exp(value - highest) for value in values))

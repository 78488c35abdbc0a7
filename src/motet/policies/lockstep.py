"""Puts the tokens of a group's choices into an order that depends on numbers of tokens, not on when they arrive.

A step of this module is one token of every running choice. It is returned when every running choice has its next token.
So decisions after a step are the same under any load, and however the engine bundles the tokens:

    engine    0: a b c . .      choice 1 was preempted      returned    a A | b B | c C
              1: A . . B C                                  step         1     2     3

A choice that starts later joins with its first token at the next step. Choices can be ahead of the slowest choice by
all their tokens, for example if the engine has no row for it. So the memory of the tokens that wait is counted.
"""

from collections import deque
from collections.abc import Iterable

from motet.ids import RequestId
from motet.types import ChoiceDelta, GroupDelta, PromptReport

WAITING_TOKEN_BYTES, WAITING_LOGPROB_BYTES = 130, 120
"""Approximate memory of a token that waits, and of each of its log-probabilities."""


class Lockstep:
    """Turns the engine's deltas into deltas with one token of every running choice."""

    def __init__(self, group: RequestId) -> None:
        self._group = group
        self._held: dict[int, deque[ChoiceDelta]] = {}
        """Deltas of one token each that wait to be returned, for every running choice."""
        self.waiting_bytes = 0
        """Approximate memory of these deltas."""
        self._missing: set[int] = set()
        """Running choices whose next token has not arrived."""
        self._prompt: PromptReport | None = None
        self._worker = ""
        self._weight_version = ""

    def start(self, indices: Iterable[int]) -> None:
        """Adds choices that start now."""
        for index in indices:
            self._held[index] = deque()
            self._missing.add(index)

    def end(self, index: int) -> None:
        """Removes a choice that ends at the current step. Its tokens after this step are dropped."""
        self.waiting_bytes -= sum(map(_num_bytes, self._held.pop(index, ())))
        self._missing.discard(index)

    def feed(self, delta: GroupDelta) -> None:
        self._prompt = delta.prompt or self._prompt
        self._worker = delta.worker or self._worker
        self._weight_version = delta.weight_version or self._weight_version
        for added in delta.choices:
            if (held := self._held.get(added.index)) is not None:
                for single in added.single_tokens():
                    held.append(single)
                    self.waiting_bytes += _num_bytes(single)
                if held:
                    self._missing.discard(added.index)

    def next(self) -> GroupDelta | None:
        """Returns the next step; None if one of its tokens has not arrived yet, or no choice is running."""
        if self._missing or not self._held:
            return None
        step = [self._held[index].popleft() for index in sorted(self._held)]
        for delta in step:
            self.waiting_bytes -= _num_bytes(delta)
            if delta.finish is not None:
                self.end(delta.index)
            elif not self._held[delta.index]:
                self._missing.add(delta.index)
        prompt, self._prompt = self._prompt, None
        worker, self._worker = self._worker, ""
        version, self._weight_version = self._weight_version, ""
        return GroupDelta(self._group, tuple(step), prompt, worker, version)


def _num_bytes(delta: ChoiceDelta) -> int:
    return WAITING_TOKEN_BYTES + WAITING_LOGPROB_BYTES * sum(1 + len(logprob.top) for logprob in delta.logprobs or ())

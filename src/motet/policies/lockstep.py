"""Puts the tokens of a group's choices into an order that depends on their number alone, not on when they came.

A step here is one token of every choice that is being written: the next step is given out once each of them has its
next token. So whatever is decided after a step is the same under any load, and however the engine bundled the tokens:

    engine    0: a b c . .      choice 1 was preempted      given out    a A | b B | c C
              1: A . . B C                                   step         1     2     3

A choice that begins later joins with its first token at the next step.
"""

from collections import deque
from collections.abc import Iterable, Iterator

from motet.ids import RequestId
from motet.types import ChoiceDelta, GroupDelta, PromptReport


class Lockstep:
    """Deltas of the engine in, deltas of such steps out."""

    def __init__(self, group: RequestId) -> None:
        self._group = group
        self._held: dict[int, deque[ChoiceDelta]] = {}
        """The deltas of one token each that wait, for every choice that is being written."""
        self._lacking: set[int] = set()
        """Choices whose next token has not come."""
        self._prompt: PromptReport | None = None
        self._worker = ""
        self._weight_version = ""

    def begin(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._held[index] = deque()
            self._lacking.add(index)

    def end(self, index: int) -> None:
        """Forgets a choice that has been ended; what it has written beyond the present step was never given out."""
        self._held.pop(index, None)
        self._lacking.discard(index)

    def feed(self, delta: GroupDelta) -> None:
        self._prompt = delta.prompt or self._prompt
        self._worker = delta.worker or self._worker
        self._weight_version = delta.weight_version or self._weight_version
        for added in delta.choices:
            if (held := self._held.get(added.index)) is not None:
                held.extend(_single(added))
                if held:
                    self._lacking.discard(added.index)

    def next(self) -> GroupDelta | None:
        """Returns the next step; None if a token of it has not come yet, or nothing is being written."""
        if self._lacking or not self._held:
            return None
        step = [self._held[index].popleft() for index in sorted(self._held)]
        for one in step:
            if one.finish is not None:
                self.end(one.index)
            elif not self._held[one.index]:
                self._lacking.add(one.index)
        prompt, self._prompt = self._prompt, None
        worker, self._worker = self._worker, ""
        version, self._weight_version = self._weight_version, ""
        return GroupDelta(self._group, tuple(step), prompt, worker, version)


def _single(delta: ChoiceDelta) -> Iterator[ChoiceDelta]:
    """Yields a delta for each token; an end goes with the last one, or alone."""
    ids, logprobs = delta.token_ids, delta.logprobs
    if len(ids) <= 1:
        if ids or delta.finish is not None:
            yield delta
        return
    for place, token_id in enumerate(ids):
        finish = delta.finish if place == len(ids) - 1 else None
        yield ChoiceDelta(delta.index, (token_id,), None if logprobs is None else logprobs[place : place + 1], finish)

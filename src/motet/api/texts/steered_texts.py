"""The choices of one prompt on a text upstream, under the policy of their request.

    read ──► SteeredPrompt.feed ──► Steering ──► end_choice: the request of a choice is closed
             the text of its pieces              begin:      the request of a choice is sent

What one read brings is one step of the steering. A choice that is ended here still has a last piece: it comes with the
next read, as of any choice.
"""

from collections.abc import Sequence
from operator import attrgetter

from motet.api.known_groups import ChoiceReport, ChoiceState
from motet.engines.upstream.text_source import TextGroupStream, TextPiece
from motet.policies.steering import GroupPolicy, GroupReport, Steering
from motet.types import FinishReason

_INDEX = attrgetter("index")


class SteeredPrompt:
    """A `KnownPart`. Its choices are numbered from 0, and from `first` in the request."""

    def __init__(self, policy: GroupPolicy, stream: TextGroupStream, *, first: int, n: int) -> None:
        self._stream = stream
        self._first = first
        self._n = n
        self._steering = Steering(policy, range(n))
        self._begun = set(range(policy.num_first(n)))
        self._reasons: dict[int, FinishReason] = {}
        """Why choices have ended, for those that have."""

    def feed(self, pieces: Sequence[TextPiece]) -> Sequence[int]:
        """Takes in what one read has brought of this prompt, and lets choices end and begin. Returns those that begin,
        as the request numbers them."""
        steering, first = self._steering, self._first
        for piece in sorted(pieces, key=_INDEX):
            index = piece.index - first
            if piece.finish is FinishReason.ABORT:
                continue  # it was ended here, which the steering knows
            if steering.reads_answers:
                steering.wrote(index, piece.text)
            if piece.finish is not None:
                self._reasons[index] = piece.finish
                steering.ended(index, piece.finish)
        decision = steering.decide()
        for index in decision.abort:
            self._end(index)
        begun = [first + index for index in decision.begin]
        if begun:
            self._begun.update(decision.begin)
            self._stream.begin(begun)
        return begun

    def choices(self) -> Sequence[ChoiceReport]:
        return [ChoiceReport(index, self._state(index), None, self._reasons.get(index)) for index in range(self._n)]

    async def end_choice(self, index: int) -> bool:
        if self._steering.withdraw(index):
            return True
        if self._state(index) is not ChoiceState.WRITING:
            return False
        self._end(index)
        self._steering.ended(index, None)
        return True

    async def end_all(self) -> None:
        self._steering.withdraw_all()
        for index in range(self._n):
            await self.end_choice(index)

    def report(self, id: str) -> GroupReport:
        """`id`: the group's name."""
        return self._steering.report(id)

    def _state(self, index: int) -> ChoiceState:
        if index in self._reasons:
            return ChoiceState.OVER
        if index in self._begun:
            return ChoiceState.WRITING
        return ChoiceState.WAITING if index in self._steering.waiting else ChoiceState.DROPPED

    def _end(self, index: int) -> None:
        self._reasons[index] = FinishReason.ABORT
        self._stream.end_choice(self._first + index)

"""From what one request brings to pieces of the group's choices. Pure: one `Merge` a request, fed in order.

    index           as the server counts it -> the number of the choice in the group; one that is missing is 0. Choices
                    of a whole answer that are all number 0 are numbered by their order
    role            once a choice, in its first piece, whether the server repeats it or leaves it out
    finish_reason   once a choice; what comes after it is dropped. "", null and none at all are the same
    usage           of a stream, that of a chunk without choices; with a single choice, the last that any chunk tells

A choice has ended well when its `finish_reason` has come, and not before: a stream that ends without it was cut, by
whomever, and an answer that looks whole and is not would be worse than an error.
"""

from collections.abc import Sequence

import msgspec

from motet.engines.upstream.base import Fields, Piece, TextStep, TextUsage
from motet.engines.upstream.shapes import ToldChoice, read_fields, read_told
from motet.errors import EngineDiedError, EngineError

FAILED = frozenset({"error", "abort"})
"""With these, some servers tell that a choice was not written to its end."""
EMPTY = frozenset({b"null", b"{}"})

_ASSISTANT = msgspec.Raw(b'"assistant"')


class _Choice:
    """How far one choice has come."""

    def __init__(self) -> None:
        self.begun = False
        self.finished = False


class Merge:
    """The choices `first` to `first + count - 1` of a group, which one request brings."""

    def __init__(self, first: int, count: int, *, chat: bool) -> None:
        self._first = first
        self._chat = chat
        self._choices = [_Choice() for _ in range(count)]
        self.usage: TextUsage | None = None

    @property
    def unfinished(self) -> list[int]:
        """Numbers in the group."""
        return [self._first + number for number, choice in enumerate(self._choices) if not choice.finished]

    def chunk(self, data: bytes) -> TextStep | None:
        """One event of a stream; None if it has nothing to show. Raises EngineError, UpstreamRefusalError."""
        told = read_told(data)
        if told.usage is not None and (len(self._choices) == 1 or not told.choices):
            self.usage = told.usage
        pieces = [piece for choice in told.choices if (piece := self._part(choice)) is not None]
        return TextStep(tuple(pieces), told.extras) if pieces else None

    def body(self, data: bytes) -> TextStep:
        """A whole answer. Raises the same."""
        told = read_told(data)
        self.usage = told.usage
        numbers = [choice.index for choice in told.choices]
        if len(numbers) == len(self._choices) and not any(numbers):
            numbers = list(range(len(numbers)))
        pieces = [self._whole(choice, number) for choice, number in zip(told.choices, numbers, strict=True)]
        return TextStep(tuple(piece for piece in pieces if piece is not None), told.extras)

    def close(self) -> None:
        """At the end of the answer. Raises EngineDiedError if a choice has not ended."""
        if unfinished := self.unfinished:
            raise EngineDiedError(f"its answer ended before the finish_reason of {named(unfinished)}")

    def _part(self, told: ToldChoice) -> Piece | None:
        choice = self._choice(told.index)
        if choice.finished:
            return None
        first, choice.begun = not choice.begun, True
        self._end(choice, told)
        fields = _with_role_once(told.fields, first=first) if self._chat else told.fields
        if not first and told.finish is None and all(bytes(value) in EMPTY for value in fields.values()):
            return None
        return Piece(self._first + told.index, fields, told.finish)

    def _whole(self, told: ToldChoice, number: int) -> Piece | None:
        choice = self._choice(number)
        if choice.finished:
            return None
        self._end(choice, told)
        return Piece(self._first + number, told.fields, told.finish)

    def _choice(self, number: int) -> _Choice:
        if not 0 <= number < len(self._choices):
            raise EngineError(f"it sent a choice numbered {number}, and was asked for {len(self._choices)}")
        return self._choices[number]

    def _end(self, choice: _Choice, told: ToldChoice) -> None:
        if told.finish in FAILED:
            raise EngineError(f"it gave up, with finish_reason {told.finish}")
        choice.finished = told.finish is not None


def named(numbers: Sequence[int]) -> str:
    """For messages."""
    first, last = numbers[0], numbers[-1]
    return f"choice {first}" if first == last else f"choices {first} to {last}"


def _with_role_once(fields: Fields, *, first: bool) -> Fields:
    delta = fields.get("delta")
    parts = read_fields(delta) if delta is not None else {}
    role = parts.pop("role", _ASSISTANT)
    if first:
        parts = {"role": role, **parts}
    elif delta is not None and b'"role"' not in bytes(delta):
        return fields
    return {**fields, "delta": msgspec.Raw(msgspec.json.encode(parts))}

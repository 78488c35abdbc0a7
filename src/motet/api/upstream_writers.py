"""Pieces of choices as bodies and chunks of OpenAI's shape: what the server wrote stays as it is, the rest is ours.

    {id, object, created: ours, model: as asked, choices: [{index: ours, its fields, finish_reason}], what stood beside
     the choices, usage: summed}

On a stream, what stood beside the choices goes with them; in a whole answer it stays if all requests of the group agree
on it.
"""

from collections.abc import Callable, Sequence

import msgspec
import orjson

from motet.api.event_bytes import DONE, END
from motet.api.usage_shape import text_usage_json
from motet.engines.upstream.base import Fields, Piece, TextRoute, TextStep, TextUsage

Used = Callable[[], TextUsage | None]


class TextHead(msgspec.Struct, frozen=True):
    """What every object of one answer repeats."""

    id: str
    object: str
    created: int
    model: str


def kind_of(route: TextRoute, *, stream: bool) -> str:
    if route is TextRoute.COMPLETIONS:
        return "text_completion"
    return "chat.completion.chunk" if stream else "chat.completion"


class TextChunks:
    """The writer of a stream: one chunk a piece."""

    streams = True

    def __init__(self, head: TextHead, *, include_usage: bool) -> None:
        self._opening = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":['
        self._include_usage = include_usage
        self._closing = b',"usage":null' + END if include_usage else END

    def feed(self, steps: Sequence[TextStep], usage: Used) -> bytes:
        return b"".join(
            self._opening + _choice(piece) + b"]" + _members(step.extras) + self._closing
            for step in steps
            for piece in step.pieces
        )

    def close(self, usage: TextUsage | None) -> bytes:
        if not self._include_usage:
            return DONE
        return self._opening + b'],"usage":' + text_usage_json(usage) + END + DONE


class TextBody:
    """The writer of a whole answer."""

    streams = False

    def __init__(self, head: TextHead) -> None:
        self._opening = msgspec.json.encode(head)[:-1] + b',"choices":['
        self._pieces: list[Piece] = []
        self._extras: list[Fields] = []

    def feed(self, steps: Sequence[TextStep], usage: Used) -> bytes:
        for step in steps:
            self._pieces += step.pieces
            self._extras.append(step.extras)
        return b""

    def close(self, usage: TextUsage | None) -> bytes:
        choices = b",".join(map(_choice, sorted(self._pieces, key=lambda piece: piece.index)))
        agreed = _members(_agreed(self._extras))
        return self._opening + choices + b"]" + agreed + b',"usage":' + text_usage_json(usage) + b"}"


def _choice(piece: Piece) -> bytes:
    fields, finish = _members(piece.fields), orjson.dumps(piece.finish)
    return b'{"index":%d%b,"finish_reason":%b}' % (piece.index, fields, finish)


def _members(fields: Fields) -> bytes:
    return b"".join(b",%b:%b" % (orjson.dumps(name), bytes(value)) for name, value in fields.items())


def _agreed(all_extras: Sequence[Fields]) -> Fields:
    """What each of them says, and in the same words."""
    first, *others = all_extras or [{}]
    return {
        name: value
        for name, value in first.items()
        if all(bytes(extras.get(name, msgspec.Raw())) == bytes(value) for extras in others)
    }

"""Bodies and chunks of OpenAI's shape, read as far as they have to be understood. Pure.

What stands in a choice, and beside `choices`, stays the JSON it is.
"""

from dataclasses import dataclass

import msgspec

from motet.engines.upstream.base import Fields, TextUsage
from motet.engines.upstream.refusal import Said, refusal_error, said_in
from motet.engines.wire import UNREADABLE
from motet.errors import EngineError, MotetError

OURS = frozenset({"id", "object", "created", "model", "choices", "usage"})
"""Fields of a chunk or a body that are written anew."""
NULL = msgspec.Raw(b"null")

_fields = msgspec.json.Decoder(Fields)
_maybe_fields = msgspec.json.Decoder(Fields | None)
_choices = msgspec.json.Decoder(list[Fields] | None)
_integer = msgspec.json.Decoder(int | None)
_word = msgspec.json.Decoder(str | None)


class _Cached(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Reasoned(msgspec.Struct, frozen=True):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Cached | None = None
    completion_tokens_details: _Reasoned | None = None


_usage = msgspec.json.Decoder(_Usage | None)


@dataclass(frozen=True)
class ToldChoice:
    index: int
    """As the server counts; 0 where it does not say."""
    finish: str | None
    fields: Fields
    """All others."""


@dataclass(frozen=True)
class Told:
    """A chunk or a body."""

    choices: list[ToldChoice]
    usage: TextUsage | None
    extras: Fields
    """What stands beside `choices` and is not ours."""


def read_told(data: bytes) -> Told:
    """Raises EngineError for what is no chunk, and for an error: UpstreamRefusalError if it is the client's fault."""
    try:
        fields = _fields.decode(data)
        if _is_error(fields):
            raise _failure(said_in(data))
        return Told(
            choices=[_choice(choice) for choice in _choices.decode(fields.get("choices", NULL)) or ()],
            usage=_read_usage(fields.get("usage", NULL)),
            extras={name: value for name, value in fields.items() if name not in OURS},
        )
    except UNREADABLE as error:
        raise EngineError(f"it sent what this server cannot read: {error}") from error


def read_fields(raw: msgspec.Raw) -> Fields:
    """Of an object inside; null has none. Raises EngineError for anything else."""
    try:
        return _maybe_fields.decode(raw) or {}
    except UNREADABLE as error:
        raise EngineError(f"it sent what this server cannot read: {error}") from error


def _choice(fields: Fields) -> ToldChoice:
    index = _integer.decode(fields.pop("index", NULL)) or 0
    return ToldChoice(index, _word.decode(fields.pop("finish_reason", NULL)) or None, fields)


def _is_error(fields: Fields) -> bool:
    return bytes(fields.get("error", NULL)) != b"null" or bytes(fields.get("object", NULL)) == b'"error"'


def _failure(said: Said | None) -> MotetError:
    if said is None:
        return EngineError("it sent an error without a message")
    if said.status is not None and said.status < 500:
        return refusal_error(said, said.status)
    return EngineError(f"it sent an error: {said.message}")


def _read_usage(raw: msgspec.Raw) -> TextUsage | None:
    try:
        told = _usage.decode(raw)
    except UNREADABLE:  # some servers send one with holes
        return None
    if told is None:
        return None
    cached, reasoned = told.prompt_tokens_details, told.completion_tokens_details
    return TextUsage(
        prompt_tokens=told.prompt_tokens,
        completion_tokens=told.completion_tokens,
        cached_tokens=cached.cached_tokens if cached else None,
        reasoning_tokens=reasoned.reasoning_tokens if reasoned else None,
    )

"""Bodies in OpenAI's form: requests to text upstreams, and their answers. Pure.

    TextRequest ──► UpstreamCall.body() ──► server ──► read_chunk ──PieceReader──► TextStep

A group is sent as one request, or as one for each choice. All fields go as the client wrote them, except

    model             the server's own name for it
    n                 left out where one choice is asked for
    seed              s + i for choice i, modulo 2^64, in the signed form, which every server takes
    prompt            the one prompt of the choice
    stream_options    `include_usage` where the server takes it, so that the server tells the usage
    best_of, session_id  left out where a group is several requests: one session cannot write two answers at once

In an answer, all JSON in a choice and beside `choices` stays as it is, except

    index           as the server counts it -> the number of the choice in the group; a missing one is 0. Choices of a
                    whole answer that are all number 0 are numbered by their order
    role            once a choice, in its first piece, whether the server repeats it or leaves it out
    finish_reason   once a choice, in OpenAI's words; all after it is dropped. "", null and none are the same
    usage           of a stream, the one of a chunk without choices; with a single choice, the last one of any chunk

A choice has ended only when its `finish_reason` has come. A stream that ends without it was cut somewhere, and an
answer that looks whole and is not would be worse than an error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec.structs import replace

from motet.engines.openai import OpenAIError, any_error_in
from motet.engines.upstream.text_source import Fields, TextPiece, TextRequest, TextRoute, TextStep
from motet.engines.wire import UNREADABLE
from motet.errors import EngineDiedError, EngineError, MotetError, RequestError, UpstreamRefusalError, WorkerFaultError
from motet.types import FinishReason, Usage

INCLUDE_USAGE = msgspec.Raw(b'{"include_usage":true}')


@dataclass(frozen=True)
class UpstreamCall:
    request: TextRequest
    wants_usage: bool
    """True if a stream is asked for its usage."""
    first: int
    """Number of its first choice in the group."""
    count: int

    @property
    def name(self) -> str:
        return choices_named(range(self.first, self.first + self.count))

    def body(self) -> bytes:
        request = self.request
        fields = dict(request.body)
        fields["model"] = _raw(request.model)
        fields.pop("stream_options", None)
        if request.stream and self.wants_usage:
            fields["stream_options"] = INCLUDE_USAGE
        number = 0
        if self.count < request.num_choices:
            prompt, number = divmod(self.first, request.n)
            for name in ("best_of", "session_id"):
                fields.pop(name, None)
            if request.prompts:
                fields["prompt"] = request.prompts[prompt]
        if self.count == 1:
            fields.pop("n", None)
        if request.seed is not None:
            fields["seed"] = _raw((request.seed + number + 2**63) % 2**64 - 2**63)  # 64 bits as a signed integer
        return msgspec.json.encode(fields)


def ask_at_once(request: TextRequest, *, wants_usage: bool) -> list[UpstreamCall]:
    return [UpstreamCall(request, wants_usage, 0, request.num_choices)]


def ask_singly(request: TextRequest, *, wants_usage: bool) -> list[UpstreamCall]:
    """Returns a request for each choice. Raises RequestError for `best_of`, which single requests cannot give."""
    if request.num_choices > 1 and request.best_of is not None and request.best_of > request.n:
        raise RequestError(
            f"Unsupported parameter: the server of `{request.model}` has no 'best_of' for several choices.",
            param="best_of",
            code="unsupported_parameter",
        )
    return [UpstreamCall(request, wants_usage, number, 1) for number in range(request.num_choices)]


def usage_of(asks: Sequence[UpstreamCall], told: Mapping[int, Usage]) -> Usage | None:
    """Returns the usage of a group: each prompt once, the choices summed; None if one request has not reported it,
    since nothing is guessed. `told`: the reports, by the first choice of each request that has ended."""
    if len(told) < len(asks):
        return None
    total, counted = Usage(prompt_tokens=0, completion_tokens=0), set[int]()
    for ask in asks:
        usage, prompt = told[ask.first], ask.first // ask.request.n
        total += replace(usage, prompt_tokens=0, cached_tokens=0) if prompt in counted else usage
        counted.add(prompt)
    return total


def _raw(value: str | int) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def choices_named(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    return f"choice {first}" if first == last else f"choices {first} to {last}"


def aborted(request: TextRequest, index: int, *, shown: bool) -> TextPiece:
    """Returns the last piece of a choice that is ended here. `shown`: pieces of it have been read."""
    if request.route is TextRoute.COMPLETIONS:
        fields = {"text": _EMPTY}
    elif request.stream:
        fields = {"delta": msgspec.Raw(b"{}")}
        fields = fields if shown else _with_role_once(fields, first=True)
    else:
        fields = {"message": msgspec.Raw(b'{"role":"assistant","content":""}')}
    return TextPiece(index, fields, FinishReason.ABORT)


class PieceReader:
    """Turns the answer to one request into the choices `first` to `first + count - 1` of a group. Fed in order."""

    def __init__(self, first: int, count: int, *, chat: bool) -> None:
        self.usage: Usage | None = None
        self._first = first
        self._count = count
        self._chat = chat
        self._begun: set[int] = set()
        self._finished: set[int] = set()

    @property
    def unfinished(self) -> list[int]:
        """The numbers, within the group, of choices that have not finished."""
        return [self._first + number for number in range(self._count) if number not in self._finished]

    def chunk(self, data: bytes) -> TextStep | None:
        """Reads one event of a stream; returns None if it has nothing to show. Raises EngineError,
        UpstreamRefusalError."""
        chunk, usage = read_chunk(_in_one_line(data))
        if usage is not None and (self._count == 1 or not chunk.pieces):
            self.usage = usage
        pieces = [piece for part in chunk.pieces if (piece := self._part(part)) is not None]
        return TextStep(tuple(pieces), chunk.extras) if pieces else None

    def body(self, data: bytes) -> TextStep:
        """Reads a whole answer. Raises the same."""
        whole, self.usage = read_chunk(data)
        numbers = [choice.index for choice in whole.pieces]
        if len(numbers) == self._count and not any(numbers):
            numbers = list(range(self._count))
        pieces = [
            TextPiece(self._first + number, choice.fields, choice.finish)
            for choice, number in zip(whole.pieces, numbers, strict=True)
            if self._is_new(number, ends=choice.finish is not None)
        ]
        return TextStep(tuple(pieces), whole.extras)

    def close(self) -> None:
        """Called at the end of the answer. Raises EngineDiedError if a choice has not ended."""
        if unfinished := self.unfinished:
            raise EngineDiedError(f"its answer ended before the finish_reason of {choices_named(unfinished)}")

    def _part(self, part: TextPiece) -> TextPiece | None:
        first = part.index not in self._begun
        if not self._is_new(part.index, ends=part.finish is not None):
            return None
        fields = _with_role_once(part.fields, first=first) if self._chat else part.fields
        if not first and part.finish is None and all(bytes(value) in _NOTHING for value in fields.values()):
            return None
        return TextPiece(self._first + part.index, fields, part.finish)

    def _is_new(self, number: int, *, ends: bool) -> bool:
        """Returns False for a piece that comes after the end of its choice."""
        if not 0 <= number < self._count:
            raise WorkerFaultError(f"it sent a choice with the number {number}, but {self._count} were requested")
        if number in self._finished:
            return False
        self._begun.add(number)
        if ends:
            self._finished.add(number)
        return True


def _with_role_once(fields: Fields, *, first: bool) -> Fields:
    delta = fields.get("delta")
    try:
        parts = _maybe_fields.decode(delta or NULL) or {}
    except UNREADABLE as error:
        raise WorkerFaultError(f"it sent what this server cannot read: {error}") from error
    role = parts.pop("role", _ASSISTANT)
    if first:
        parts = {"role": role, **parts}
    elif delta is not None and b'"role"' not in bytes(delta):
        return fields
    return {**fields, "delta": msgspec.Raw(msgspec.json.encode(parts))}


OURS = frozenset({"id", "object", "created", "model", "choices", "usage"})
"""Fields of a chunk or a body that we write ourselves."""
NULL = msgspec.Raw(b"null")

FINISH_REASONS = {
    **{reason.value: reason for reason in FinishReason},
    **dict.fromkeys(
        ("eos", "eos_token", "end_turn", "stop_sequence", "stop_token", "complete", "word"), FinishReason.STOP
    ),
    **dict.fromkeys(
        ("limit", "max_length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded"),
        FinishReason.LENGTH,
    ),
    **dict.fromkeys(("function_call", "tool_call", "tool_use"), FinishReason.TOOL_CALLS),
    **dict.fromkeys(("sensitive", "safety", "refusal", "recitation", "error_toxic"), FinishReason.CONTENT_FILTER),
}
"""Words of vLLM, SGLang, TGI, llama.cpp, Zhipu, Mistral, Cohere, Gemini and Anthropic, in lower case. Any other word
counts as an ordinary end."""
FAILURES = frozenset({"abort", "error", "insufficient_system_resource", "network_error"})
"""Servers use these words for a choice that they did not write to its end."""

_ASSISTANT = msgspec.Raw(b'"assistant"')
_EMPTY = msgspec.Raw(b'""')
_NOTHING = frozenset({b"null", b"{}"})


Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class _UsageDetails(msgspec.Struct, frozen=True):
    cached_tokens: Count | None = None
    reasoning_tokens: Count | None = None


class _OpenAIUsage(msgspec.Struct, frozen=True):
    prompt_tokens: Count
    completion_tokens: Count
    prompt_tokens_details: _UsageDetails | None = None
    completion_tokens_details: _UsageDetails | None = None


_fields = msgspec.json.Decoder(Fields)
_maybe_fields = msgspec.json.Decoder(Fields | None)
_choices = msgspec.json.Decoder(list[Fields] | None)
_integer = msgspec.json.Decoder(int | None)
_word = msgspec.json.Decoder(str | None)
_usage = msgspec.json.Decoder(_OpenAIUsage | None)


def read_chunk(data: bytes) -> tuple[TextStep, Usage | None]:
    """Reads a chunk of a stream, or a whole body; choices have the server's numbers, or 0 if it gives none. Raises
    WorkerFaultError for anything else; EngineError for an error, or UpstreamRefusalError if it is the client's fault.
    """
    try:
        if not data.isascii():
            data.decode()  # what is passed on as it is has not been read
        fields = _fields.decode(data)
        if bytes(fields.get("error", NULL)) != b"null" or bytes(fields.get("object", NULL)) == b'"error"':
            raise _failure(any_error_in(data))
        choices = [_read_choice(choice) for choice in _choices.decode(fields.get("choices", NULL)) or ()]
        extras = {name: value for name, value in fields.items() if name not in OURS}
        return TextStep(tuple(choices), extras), _read_usage(fields.get("usage", NULL))
    except UNREADABLE as error:
        raise WorkerFaultError(f"it sent what this server cannot read: {error}") from error


def _in_one_line(data: bytes) -> bytes:
    """Returns JSON without line breaks between its parts, each of which would end the event that it is passed on in."""
    if b"\n" not in data and b"\r" not in data:
        return data
    try:
        return msgspec.json.encode(msgspec.json.decode(data))
    except UNREADABLE as error:
        raise WorkerFaultError(f"it sent what this server cannot read: {error}") from error


def _read_choice(fields: Fields) -> TextPiece:
    index = _integer.decode(fields.pop("index", NULL)) or 0
    word = _word.decode(fields.pop("finish_reason", NULL)) or None
    if word is None:
        return TextPiece(index, fields)
    if word.lower() in FAILURES:
        raise EngineError(f"it gave up, with finish_reason {word}")
    finish = FINISH_REASONS.get(word.lower(), FinishReason.STOP)
    if word != finish and bytes(fields.get("stop_reason", NULL)) == b"null":
        fields["stop_reason"] = _raw(word)
    return TextPiece(index, fields, finish)


def _failure(error: OpenAIError | None) -> MotetError:
    if error is None:
        return EngineError("it sent an error without a message")
    if error.status is not None and error.status < 500:
        return in_its_words(error, error.status)
    return EngineError(f"it sent an error: {error.message}")


def in_its_words(error: OpenAIError, status: int, *, retry_after_s: int | None = None) -> UpstreamRefusalError:
    """Returns a 4xx with the server's own message."""
    return UpstreamRefusalError(
        error.message,
        status=status,
        type=error.type or "invalid_request_error",
        param=error.param,
        code=error.code if isinstance(error.code, str) else None,
        retry_after_s=retry_after_s,
    )


def _read_usage(raw: msgspec.Raw) -> Usage | None:
    try:
        told = _usage.decode(raw)
    except UNREADABLE:  # some servers leave fields out, or count below zero
        return None
    if told is None:
        return None
    cached_tokens = (told.prompt_tokens_details or _UsageDetails()).cached_tokens
    return Usage(
        prompt_tokens=told.prompt_tokens,
        completion_tokens=told.completion_tokens,
        cached_tokens=None if cached_tokens is None else min(cached_tokens, told.prompt_tokens),
        reasoning_tokens=(told.completion_tokens_details or _UsageDetails()).reasoning_tokens,
    )

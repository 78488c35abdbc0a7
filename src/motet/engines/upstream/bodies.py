"""Bodies of OpenAI's API: requests to text upstreams, and their answers. Pure.

    TextRequest ──► UpstreamCall.body() ──► server ──► read_chunk ──► PieceReader ──► TextStep

A group is sent as one request, or as one request for each choice. All fields pass unchanged, except

    model             the server's own name for the model
    n                 left out if one choice is requested
    seed              s + i for choice i, modulo 2^64, as a signed integer, which every server accepts
    prompt            the prompt of the choice, if each choice is a request
    stream_options    `include_usage` if the server takes it, so that the server reports the usage
    best_of, session_id  left out if a group is several requests: one session cannot generate two answers at a time

In an answer, all JSON in a choice and next to `choices` stays unchanged, except

    index           the server's number becomes the number of the choice in the group; a missing number is 0. If all
                    choices of an answer that is not streamed have the number 0, they are numbered in their order
    role            once for each choice, in its first piece, whether the server repeats it or leaves it out
    finish_reason   once for each choice, one of OpenAI's values; data after it is dropped. "" and null are the same as
                    a missing field
    usage           of a stream, from a chunk without choices; with a single choice, the last usage of any chunk

A choice has ended only when its `finish_reason` has arrived. A stream that ends before that was cut off. It is an
error, because an incomplete answer must not look complete.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated

import msgspec
from msgspec.structs import replace

from motet.engines.refusals import UNAVAILABLE, OpenAIError, any_error_in
from motet.engines.upstream.text_source import Fields, TextPiece, TextRequest, TextRoute, TextStep
from motet.engines.wire import UNREADABLE
from motet.errors import (
    EngineDiedError,
    EngineError,
    MotetError,
    OverloadedError,
    RequestError,
    UpstreamRefusalError,
    WorkerFaultError,
)
from motet.types import FinishReason, Usage

INCLUDE_USAGE = msgspec.Raw(b'{"include_usage":true}')


@dataclass(frozen=True)
class UpstreamCall:
    """A request to an upstream, for some choices of a group."""

    request: TextRequest
    include_usage: bool
    """True if the usage of a stream is requested."""
    first: int
    """Number of the first choice in the group."""
    count: int
    """Number of choices."""

    @property
    def name(self) -> str:
        return choices_named(range(self.first, self.first + self.count))

    def body(self) -> bytes:
        request = self.request
        fields = dict(request.body)
        fields["model"] = _raw(request.model)
        fields.pop("stream_options", None)
        if request.stream and self.include_usage:
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


def joint_call(request: TextRequest, *, include_usage: bool) -> list[UpstreamCall]:
    """Returns one request for all choices."""
    return [UpstreamCall(request, include_usage, 0, request.num_choices)]


def single_calls(request: TextRequest, *, include_usage: bool) -> list[UpstreamCall]:
    """Returns a request for each choice. Raises RequestError for `best_of`, which single requests cannot have."""
    if request.num_choices > 1 and request.best_of is not None and request.best_of > request.n:
        raise RequestError(
            f"Unsupported parameter: 'best_of' with several choices, on the server of `{request.model}`.",
            param="best_of",
            code="unsupported_parameter",
        )
    return [UpstreamCall(request, include_usage, number, 1) for number in range(request.num_choices)]


def usage_of(calls: Sequence[UpstreamCall], reports: Mapping[int, Usage]) -> Usage | None:
    """Returns the usage of a group: each prompt once, and the sum of the choices. Returns None if the usage of a
    request is missing, since usage is never estimated. `reports`: usages by the first choice of their requests."""
    if len(reports) < len(calls):
        return None
    total, counted = Usage(prompt_tokens=0, completion_tokens=0), set[int]()
    for call in calls:
        usage, prompt = reports[call.first], call.first // call.request.n
        total += replace(usage, prompt_tokens=0, cached_tokens=0) if prompt in counted else usage
        counted.add(prompt)
    return total


def _raw(value: str | int) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def choices_named(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    return f"choice {first}" if first == last else f"choices {first} to {last}"


def aborted(request: TextRequest, index: int, *, shown: bool) -> TextPiece:
    """Returns the last piece of a choice that Motet ends. `shown`: True if pieces of the choice have been read."""
    if request.route is TextRoute.COMPLETIONS:
        fields = {"text": _EMPTY}
    elif request.stream:
        fields = {"delta": msgspec.Raw(b"{}")}
        fields = fields if shown else _with_role_once(fields, first=True)
    else:
        fields = {"message": msgspec.Raw(b'{"role":"assistant","content":""}')}
    return TextPiece(index, fields, FinishReason.ABORT)


class PieceReader:
    """Reads the answer to one request as the choices `first` to `first + count - 1` of a group."""

    def __init__(self, first: int, count: int, *, chat: bool) -> None:
        self.usage: Usage | None = None
        self._first = first
        self._count = count
        self._chat = chat
        self._started: set[int] = set()
        self._finished: set[int] = set()

    @property
    def unfinished(self) -> list[int]:
        """Choices that have not finished, by their numbers in the group."""
        return [self._first + number for number in range(self._count) if number not in self._finished]

    def chunk(self, data: bytes) -> TextStep | None:
        """Reads an event of a stream; None if it shows nothing. Raises EngineError and UpstreamRefusalError."""
        chunk, usage = read_chunk(_in_one_line(data))
        if usage is not None and (self._count == 1 or not chunk.pieces):
            self.usage = usage
        pieces = [shown for piece in chunk.pieces if (shown := self._streamed(piece)) is not None]
        return TextStep(tuple(pieces), chunk.extras) if pieces else None

    def body(self, data: bytes) -> TextStep:
        """Reads an answer that is not streamed. Raises the errors of `chunk`."""
        answer, self.usage = read_chunk(data)
        numbered = [(choice.index, choice) for choice in answer.pieces]
        if len(numbered) == self._count and not any(number for number, _ in numbered):
            numbered = list(enumerate(answer.pieces))
        pieces = [
            TextPiece(self._first + number, choice.fields, choice.finish)
            for number, choice in numbered
            if self._is_new(number, ends=choice.finish is not None)
        ]
        return TextStep(tuple(pieces), answer.extras)

    def close(self) -> None:
        """Ends the answer. Raises EngineDiedError if a choice has not ended."""
        if unfinished := self.unfinished:
            raise EngineDiedError(f"its answer ended before the finish_reason of {choices_named(unfinished)}")

    def _streamed(self, piece: TextPiece) -> TextPiece | None:
        """Returns a piece of a stream with its number in the group; None if it has nothing to show."""
        first = piece.index not in self._started
        if not self._is_new(piece.index, ends=piece.finish is not None):
            return None
        fields = _with_role_once(piece.fields, first=first) if self._chat else piece.fields
        if not first and piece.finish is None and all(bytes(value) in _EMPTY_VALUES for value in fields.values()):
            return None
        return TextPiece(self._first + piece.index, fields, piece.finish)

    def _is_new(self, number: int, *, ends: bool) -> bool:
        """Records a piece of a choice. Returns False if the choice has already ended."""
        if not 0 <= number < self._count:
            raise WorkerFaultError(f"it sent a choice with the number {number}, but {self._count} were requested")
        if number in self._finished:
            return False
        self._started.add(number)
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


OWN_FIELDS = frozenset({"id", "object", "created", "model", "choices", "usage"})
"""Fields of a chunk or a body that Motet sets itself."""
NULL = msgspec.Raw(b"null")
FINISH_REASONS = {
    **{reason.value: reason for reason in FinishReason},
    **dict.fromkeys(("limit", "max_length", "max_tokens", "max_output_tokens", "model_length"), FinishReason.LENGTH),
    "model_context_window_exceeded": FinishReason.LENGTH,
    **dict.fromkeys(("function_call", "tool_call", "tool_use"), FinishReason.TOOL_CALLS),
    **dict.fromkeys(("sensitive", "safety", "refusal", "recitation", "error_toxic"), FinishReason.CONTENT_FILTER),
}
"""OpenAI's value for each value of vLLM, SGLang, TGI, llama.cpp, Zhipu, Mistral, Cohere, Gemini and Anthropic, in lower
case. Any other value counts as `stop`, such as eos, eos_token, end_turn, stop_sequence, stop_token, complete, word."""
FAILURES = frozenset({"abort", "error", "insufficient_system_resource", "network_error"})
"""Values of `finish_reason` for a choice that the server did not generate to its end."""
UNREACHED = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)

_ASSISTANT = msgspec.Raw(b'"assistant"')
_EMPTY = msgspec.Raw(b'""')
_EMPTY_VALUES = frozenset({b"null", b"{}"})


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
_string = msgspec.json.Decoder(str | None)
_usage = msgspec.json.Decoder(_OpenAIUsage | None)


def read_chunk(data: bytes) -> tuple[TextStep, Usage | None]:
    """Reads a chunk of a stream, or a body that is not streamed. Choices have the server's numbers; a missing number is
    0. Raises EngineError if the server reports an error, UpstreamRefusalError if the client caused it, and
    WorkerFaultError for anything else."""
    try:
        if not data.isascii():
            data.decode()  # checks the parts that are passed on without being decoded
        fields = _fields.decode(data)
        if bytes(fields.get("error", NULL)) != b"null" or bytes(fields.get("object", NULL)) == b'"error"':
            raise _failure(any_error_in(data))
        choices = [_read_choice(choice) for choice in _choices.decode(fields.get("choices", NULL)) or ()]
        extras = {name: value for name, value in fields.items() if name not in OWN_FIELDS}
        return TextStep(tuple(choices), extras), _read_usage(fields.get("usage", NULL))
    except UNREADABLE as error:
        raise WorkerFaultError(f"it sent what this server cannot read: {error}") from error


def _in_one_line(data: bytes) -> bytes:
    """Returns JSON without line breaks, since a line break would end the event in which it is passed on."""
    if b"\n" not in data and b"\r" not in data:
        return data
    try:
        return msgspec.json.encode(msgspec.json.decode(data))
    except UNREADABLE as error:
        raise WorkerFaultError(f"it sent what this server cannot read: {error}") from error


def _read_choice(fields: Fields) -> TextPiece:
    index = _integer.decode(fields.pop("index", NULL)) or 0
    if (reason := _string.decode(fields.pop("finish_reason", NULL)) or None) is None:
        return TextPiece(index, fields)
    if reason.lower() in FAILURES:
        raise EngineError(f"it gave up, with finish_reason {reason}")
    finish = FINISH_REASONS.get(reason.lower(), FinishReason.STOP)
    if reason != finish and bytes(fields.get("stop_reason", NULL)) == b"null":
        fields["stop_reason"] = _raw(reason)
    return TextPiece(index, fields, finish)


def _failure(error: OpenAIError | None) -> MotetError:
    """Returns the error for an error in an event or a body. A stream that waits can have sent its headers, so the event
    is all that says that another server can be tried."""
    if error is None:
        return EngineError("it sent an error without a message")
    if error.status is not None and error.status < 500:
        return refusal_of(error, error.status)
    elsewhere = error.status in UNREACHED or error.type == OverloadedError.type or error.code in UNAVAILABLE
    return (EngineDiedError if elsewhere else EngineError)(f"it sent an error: {error.message}")


def refusal_of(error: OpenAIError, status: int, *, retry_after_s: int | None = None) -> UpstreamRefusalError:
    """Returns the error for a 4xx of the server, with the server's message."""
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
        usage = _usage.decode(raw)
    except UNREADABLE:  # some servers leave fields out, or send negative numbers
        return None
    if usage is None:
        return None
    cached_tokens = (usage.prompt_tokens_details or _UsageDetails()).cached_tokens
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=None if cached_tokens is None else min(cached_tokens, usage.prompt_tokens),
        reasoning_tokens=(usage.completion_tokens_details or _UsageDetails()).reasoning_tokens,
    )

"""Reads the answers of a vLLM server: events of a stream, all forms of log-probabilities, and errors. Pure.

    data: {"choices": [{"index", "token_ids", "logprobs", "finish_reason", "stop_reason"}]}    a VLLMPiece per choice
    data: {"choices": [], "usage": {...}}                                                     VLLMUsage, once
    data: {"error": {...}}                                                                    a MotetError
    data: [DONE]

An answer without a stream has the same choices and usage in one object, and the log-probabilities of the prompt.

A server with many children sends thousands of events per second, so they are decoded into structs with only the
required fields.

A list of log-probabilities has the sampled token (or the prompt token) first, then the k best tokens without it, best
first. So it has k + 1 entries if that token is not among the k best, and k if it is.

    /v1/completions           {"token_logprobs": [-0.1], "top_logprobs": [{"token_id:5": -0.1, "token_id:7": -2.0}]}
    /inference/v1/generate    {"content": [{"token_id", "logprob", "rank", "top_logprobs": [...]}]}
    prompt_logprobs           [null, {"5": {"logprob", "rank", "decoded_token"}, ...}]                of either route

Errors are translated, in a response and in the middle of a stream:

    400, 422                 RequestError that names vLLM's field; ContextLengthError if that is the prompt's length
    404 of a model           ModelNotFoundError, an error of the client only if no server has it (`vllm_server`)
    401, 403                 EngineError that says what to do about the key
    429, 503                 OverloadedError; in a stream WorkerLeavingError, since the group can continue elsewhere
    other 404, 405, 501      OtherServerError: the server has no such route
    5xx without its JSON     EngineDiedError: a proxy answers for the server
    any other                EngineError that quotes it

A server whose engine is dead also answers 500, with the message of a failed request. `vllm_server` queries `/health` to
distinguish the two.
"""

from collections.abc import Iterable, Iterator, Sequence
from http import HTTPStatus

import msgspec

from motet.engines.http import NO_SUCH_ROUTE, NOT_TAKEN, WRONG_KEY
from motet.engines.openai import DONE, EventSplitter, read_json
from motet.engines.refusals import OpenAIError, Refusal, error_in
from motet.engines.vllm.requests import TOKEN_PREFIX, KVParams
from motet.engines.wire import UNREADABLE
from motet.errors import (
    ContextLengthError,
    EngineDiedError,
    EngineError,
    ModelNotFoundError,
    MotetError,
    OtherServerError,
    OverloadedError,
    RequestError,
    WorkerFaultError,
    WorkerLeavingError,
)
from motet.types import Finish, FinishReason, SamplingParams, Score, TokenLogprob

QUOTED_BYTES = 200

LOWEST = -9999.0
"""vLLM's number for minus infinity, for which it also sends null."""

Listed = Iterable[tuple[int, float | None]]
"""Token ids and log-probabilities, best first; the token to which the list belongs can be among them."""

KEY_HINT = "Give the gateway a key that this server accepts."
TOO_LONG_PARAMS = ("input_tokens", "input_text")
"""Fields that vLLM names if the prompt is too long for the model."""
NO_SUCH_MODEL = "NotFoundError"
"""Type of vLLM's error for an unknown model; an unknown route has another type."""

MAX_RANK = 2**31

SCORED = "vLLM's answer to a request for prompt_logprobs"

_FINISHES = {
    "length": Finish(FinishReason.LENGTH),
    "repetition": Finish(FinishReason.STOP, worker_reason="repetition"),
    "parse_error": Finish(FinishReason.STOP, worker_reason="parse_error"),
}
"""Ends of choices by `finish_reason`, in addition to `stop`."""


class VLLMPiece(msgspec.Struct, frozen=True, gc=False):
    index: int
    token_ids: tuple[int, ...]
    """Token ids, including the token that ends a choice."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each of `token_ids`, if requested. On `/v1/completions`, a token not among the k best has rank k + 1."""
    finish: Finish | None = None


class VLLMUsage(msgspec.Struct, frozen=True, gc=False):
    """The usage at the end of an answer."""

    cached_tokens: int | None = None
    """Cached prompt tokens; None unless the server was started with `--enable-prompt-tokens-details`."""


def refused(refusal: Refusal, server: str) -> MotetError:
    """Returns the error for a refusal. `server` names the server in the message."""
    fault = error_in(refusal.body)
    message = f"{server} answered {refusal.status}: {(fault.message if fault else refusal.quoted) or refusal.phrase}"
    if refusal.status in WRONG_KEY:
        return EngineError(f"{message}. {KEY_HINT}")
    busy = refusal.status == HTTPStatus.SERVICE_UNAVAILABLE and fault is not None
    if busy or refusal.status == HTTPStatus.TOO_MANY_REQUESTS:
        return OverloadedError(message, retry_after_s=refusal.retry_after_s or 1)
    if fault is not None and (error_of_client := _of_client(refusal.status, fault)) is not None:
        return error_of_client
    if refusal.status in NO_SUCH_ROUTE:
        return OtherServerError(message)
    if refusal.status >= HTTPStatus.INTERNAL_SERVER_ERROR and fault is None:
        return EngineDiedError(message)
    return EngineError(message)


def broken_off(fault: OpenAIError, server: str) -> MotetError:
    """Returns the error for an error event in the middle of a stream."""
    message = f"{server} ended its answer with an error: {fault.message}"
    if fault.status == HTTPStatus.SERVICE_UNAVAILABLE:
        return WorkerLeavingError(message)
    return _of_client(fault.status, fault) or EngineError(message)


def _of_client(status: int | None, fault: OpenAIError) -> RequestError | None:
    """Returns the error of the client; None if it is not an error of the client."""
    message = f"The engine refused the request: {fault.message}"
    if status == HTTPStatus.NOT_FOUND and fault.type == NO_SUCH_MODEL:
        return ModelNotFoundError(fault.message, param="model")
    if status not in NOT_TAKEN:
        return None
    if fault.param in TOO_LONG_PARAMS:
        return ContextLengthError(message)
    return RequestError(message, param=fault.param and fault.param.removeprefix("body."))


class _Best(msgspec.Struct, gc=False):
    token_id: int
    logprob: float | None


class _Content(_Best, gc=False):
    rank: int | None = None
    best: tuple[_Best, ...] = msgspec.field(default=(), name="top_logprobs")

    def entry(self, sampling: SamplingParams) -> TokenLogprob:
        listed = [(best.token_id, best.logprob) for best in self.best]
        return _sampled(self.token_id, self.logprob, rank=self.rank, listed=listed, sampling=sampling)


class _Logprobs(msgspec.Struct, gc=False):
    """The log-probabilities of one choice, in the form of either route."""

    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float | None] | None] = []
    content: tuple[_Content, ...] | None = None
    """Log-probabilities of `/inference/v1/generate`, which replace the other two lists."""

    def of(self, tokens: Sequence[int], sampling: SamplingParams) -> tuple[TokenLogprob, ...]:
        if self.content is not None:
            return tuple([one.entry(sampling) for one in self.content])
        tokens_with_lists = zip(tokens, self.token_logprobs, self.top_logprobs, strict=False)
        return tuple(
            [
                _sampled(token, value, rank=None, listed=_by_id(top or {}), sampling=sampling)
                for token, value, top in tokens_with_lists
            ]
        )


class _PromptLogprob(msgspec.Struct, gc=False):
    logprob: float | None
    rank: int | None = None


_decode_row = msgspec.json.Decoder(dict[int, _PromptLogprob] | None).decode


def _by_id(texts: dict[str, float | None]) -> Listed:
    try:
        return [(int(text[len(TOKEN_PREFIX) :]), logprob) for text, logprob in texts.items()]
    except ValueError as error:
        raise WorkerFaultError(f"vLLM lists log-probabilities of {list(texts)[:3]}: these are not token ids") from error


def _of_prompt(token: int, entry: dict[int, _PromptLogprob], *, k: int) -> TokenLogprob:
    own = entry.get(token)
    if own is None:
        raise WorkerFaultError(f"vLLM sent no log-probability of prompt token {token}")
    listed = [(other, one.logprob) for other, one in entry.items()]
    return _entry(token, own.logprob, rank=own.rank, listed=listed, k=k)


def _sampled(
    token: int, logprob: float | None, *, rank: int | None, listed: Listed, sampling: SamplingParams
) -> TokenLogprob:
    named = sampling.logprob_token_ids
    entry = _entry(token, logprob, rank=rank, listed=listed, k=sampling.logprobs or 0)
    if not named:
        return entry
    known = {other: LOWEST if value is None else value for other, value in listed} | {token: entry.logprob}
    if missing := [other for other in named if other not in known]:
        raise WorkerFaultError(f"vLLM sent no log-probability of token {missing[0]}, which was requested")
    top = {token: entry.logprob} | {other: known[other] for other in named}
    return msgspec.structs.replace(entry, top=tuple(top.items()))


def _entry(token: int, logprob: float | None, *, rank: int | None, listed: Listed, k: int) -> TokenLogprob:
    """Returns the log-probability of a token. If `rank` is None or impossible, the rank is counted in the list:
    it is k + 1 if the token is not among the k best."""
    own = LOWEST if logprob is None else logprob
    others = [(other, LOWEST if value is None else value) for other, value in listed if other != token]
    if rank is None or not 1 <= rank < MAX_RANK:
        rank = 1 + sum(value > own for _, value in others)
    if rank <= k:
        others.insert(rank - 1, (token, own))
    return TokenLogprob(token, own, rank, tuple(others[:k]))


class _UsageBody(msgspec.Struct, gc=False):
    prompt_tokens_details: VLLMUsage | None = None


class _WireChoice(msgspec.Struct, gc=False):
    index: int
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: tuple[_WireChoice, ...] | None = None
    usage: _UsageBody | None = None
    error: OpenAIError | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class _ScoredChoice(_WireChoice, gc=False):
    prompt_logprobs: list[msgspec.Raw] | None = None


class ScoredAnswer(msgspec.Struct):
    """An answer without a stream, with log-probabilities of the prompt: `/v1/completions` has them in the choice,
    `/inference/v1/generate` at the top level."""

    choices: tuple[_ScoredChoice, ...]
    prompt_logprobs: list[msgspec.Raw] | None = None
    usage: _UsageBody | None = None

    @classmethod
    def read(cls, body: bytes) -> "ScoredAnswer":
        """Parses an answer. Raises WorkerFaultError."""
        return read_json(body, cls, error=WorkerFaultError, what=SCORED)

    def scores(self, prompt: Sequence[int], *, k: int) -> Iterator[Score]:
        """Yields one entry per token, first None. Each entry is decoded when it is read, since all of a long prompt
        would take 80 ms. Raises WorkerFaultError."""
        listed = self.prompt_logprobs or next((choice.prompt_logprobs for choice in self.choices), None)
        if listed is None or len(listed) != len(prompt):
            raise WorkerFaultError(f"vLLM sent log-probabilities of {len(listed or ())} of {len(prompt)} prompt tokens")
        for token, row in zip(prompt, listed, strict=True):
            try:
                entry = _decode_row(row)
            except UNREADABLE as error:
                raise WorkerFaultError(f"{SCORED} cannot be read: {error}") from error
            yield _of_prompt(token, entry, k=k) if entry else None


class VLLMReader:
    """Parses one answer. Raises MotetError for errors and invalid events; the reader cannot be used afterwards."""

    def __init__(self, sampling: SamplingParams, *, server: str = "vLLM") -> None:
        """`sampling` has the parameters of the `VLLMRequest`; `server` names the server in messages."""
        self._done = False
        self._sampling = sampling
        self._server = server
        self._events = EventSplitter()

    def feed(self, data: bytes) -> list[VLLMPiece | VLLMUsage]:
        """Returns the items that `data` completes, in order."""
        read: list[VLLMPiece | VLLMUsage] = []
        for event in self._events.feed(data):
            if event == DONE:
                self._done = True
                continue
            try:
                chunk = _decode_chunk(event)
            except UNREADABLE as error:
                raise self._invalid_event(str(error), event) from error
            if chunk.error is not None:
                raise broken_off(chunk.error, self._server)
            if chunk.choices:
                read.extend([piece for choice in chunk.choices if (piece := self._piece(choice)) is not None])
            elif chunk.usage is not None:
                read.append(chunk.usage.prompt_tokens_details or VLLMUsage())
            elif chunk.choices is None:
                raise self._invalid_event("it has no choices", event)
        return read

    def complete(self, answer: ScoredAnswer) -> list[VLLMPiece | VLLMUsage]:
        """Returns the items of an answer without a stream."""
        usage = answer.usage and answer.usage.prompt_tokens_details
        pieces = [piece for choice in answer.choices if (piece := self._piece(choice)) is not None]
        return [usage or VLLMUsage(), *pieces]

    def close(self) -> None:
        """Checks the end of the stream. Raises EngineDiedError unless the server has sent its last event."""
        if not self._done:
            raise EngineDiedError(f"{self._server} broke off in the middle of its answer")

    def _piece(self, choice: _WireChoice) -> VLLMPiece | None:
        """Returns the piece of a choice in an event; None if it is empty."""
        tokens = choice.token_ids
        if tokens is None:
            raise WorkerFaultError(f"{self._server} sends no token ids: it is an old vLLM, or not a vLLM server")
        logprobs = None
        if self._sampling.logprobs is not None:
            logprobs = choice.logprobs.of(tokens, self._sampling) if choice.logprobs and tokens else ()
            if len(logprobs) != len(tokens):
                raise WorkerFaultError(f"{self._server} sent {len(logprobs)} log-probabilities of {len(tokens)} tokens")
        if choice.finish_reason is not None:
            return VLLMPiece(choice.index, tokens, logprobs, self._finish(choice.finish_reason, choice.stop_reason))
        return VLLMPiece(choice.index, tokens, logprobs) if tokens else None

    def _finish(self, finish_reason: str, stop: int | str | None) -> Finish:
        """Returns the end of a choice. vLLM also reports other end-of-sequence tokens as stop tokens; only requested
        stop tokens are returned."""
        if finish_reason == "abort":
            raise WorkerLeavingError(f"{self._server} ended the request: finish_reason 'abort'")
        if finish_reason == FinishReason.STOP:
            token = stop if isinstance(stop, int) and stop in self._sampling.stop_token_ids else None
            return Finish(FinishReason.STOP, token)
        if (finish := _FINISHES.get(finish_reason)) is None:
            raise EngineError(f"{self._server} ended a choice with finish_reason {finish_reason!r}")
        return finish

    def _invalid_event(self, why: str, event: bytes) -> WorkerFaultError:
        quoted = event[:QUOTED_BYTES].decode(errors="replace")
        return WorkerFaultError(f"{self._server} sent an event that cannot be read ({why}): {quoted}")


class _PrefillBody(msgspec.Struct):
    kv_transfer_params: KVParams | list[KVParams] | None = None


def kv_params_in(body: bytes, server: str = "vLLM") -> list[KVParams]:
    """Parses the answer of `server` to a prefill: one object for each request that may fetch the KV. Raises EngineError
    if there is none."""
    params = read_json(body, _PrefillBody, what=f"the answer of {server} to a prefill").kv_transfer_params
    found = [params] if isinstance(params, dict) else params
    if not found or not all(found):
        raise EngineError(
            f"{server} computed the prompt, but made no ticket (kv_transfer_params): start it with a KV connector, as "
            """--kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'"""
        )
    return found

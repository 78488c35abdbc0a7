"""What a vLLM server answers while it generates, out of its server-sent events. Pure.

    data: {"choices": [{"index", "token_ids", "logprobs", "finish_reason", "stop_reason"}], ...}    a Piece a choice
    data: {"choices": [], "usage": {...}}                                                          Usage, once
    data: {"error": {...}}                                                                         a MotetError
    data: [DONE]

A server with many children sends thousands of these a second, so they are decoded into structs that have the fields
needed and no others.
"""

import msgspec

from motet.engines.sse import DONE, EventSplitter
from motet.engines.vllm.ask import Dialect
from motet.engines.vllm.faults import Fault, broken_off
from motet.engines.vllm.listed import CompletionLogprobs, GenerateLogprobs
from motet.engines.wire import UNREADABLE
from motet.errors import EngineError, MotetError, WorkerLeavingError
from motet.types import Finish, FinishReason, SamplingParams, TokenLogprob

QUOTED_BYTES = 200

_FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class Piece(msgspec.Struct, frozen=True, gc=False):
    """What was added to one child."""

    index: int
    token_ids: tuple[int, ...]
    """The token that ends a choice is among them."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """As long as `token_ids` when asked for. `/v1/completions` tells no rank: that of a token which is not among the k
    best is said to be k + 1."""
    finish: Finish | None = None


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Comes at the end."""

    prompt_tokens: int
    cached_tokens: int | None
    """None: the server does not tell (it does with `--enable-prompt-tokens-details`)."""


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct, gc=False, kw_only=True):
    index: int
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _CompletionChoice(_Choice, gc=False, kw_only=True):
    logprobs: CompletionLogprobs | None = None


class _GenerateChoice(_Choice, gc=False, kw_only=True):
    logprobs: GenerateLogprobs | None = None


class _Chunk(msgspec.Struct, gc=False, kw_only=True):
    usage: _Usage | None = None
    error: Fault | None = None


class _CompletionChunk(_Chunk, gc=False, kw_only=True):
    choices: tuple[_CompletionChoice, ...] | None = None


class _GenerateChunk(_Chunk, gc=False, kw_only=True):
    choices: tuple[_GenerateChoice, ...] | None = None


_DECODERS: dict[Dialect, msgspec.json.Decoder[_CompletionChunk] | msgspec.json.Decoder[_GenerateChunk]] = {
    Dialect.COMPLETIONS: msgspec.json.Decoder(_CompletionChunk),
    Dialect.GENERATE: msgspec.json.Decoder(_GenerateChunk),
}


class Reader:
    """Reads one answer. Raises MotetError for errors in mid-stream and for nonsense; then nothing more can be read."""

    def __init__(self, dialect: Dialect, sampling: SamplingParams, *, server: str = "vLLM") -> None:
        """`sampling`: of the `Ask` that is answered; `server` names who answers in messages."""
        self.done = False
        """Whether the server said that this is all."""
        self._decode = _DECODERS[dialect].decode
        self._sampling = sampling
        self._server = server
        self._events = EventSplitter()

    def feed(self, data: bytes) -> list[Piece | Usage]:
        """What `data` completes, in order."""
        read: list[Piece | Usage] = []
        for event in self._events.feed(data):
            if event == DONE:
                self.done = True
                continue
            try:
                chunk = self._decode(event)
            except UNREADABLE as error:
                raise self._nonsense(str(error), event) from error
            if chunk.error is not None:
                raise broken_off(chunk.error, self._server)
            if chunk.choices:
                read.extend([piece for choice in chunk.choices if (piece := self._piece(choice)) is not None])
            elif chunk.usage is not None:
                details = chunk.usage.prompt_tokens_details
                read.append(Usage(chunk.usage.prompt_tokens, details.cached_tokens if details else None))
            elif chunk.choices is None:
                raise self._nonsense("it has no choices", event)
        return read

    def _piece(self, choice: _CompletionChoice | _GenerateChoice) -> Piece | None:
        """None: nothing was added."""
        tokens = choice.token_ids
        if tokens is None:
            raise EngineError(f"{self._server} sends no token ids: its vLLM is too old, or it is none")
        logprobs = None
        if self._sampling.logprobs is not None:
            logprobs = choice.logprobs.of(tokens, self._sampling.logprobs) if choice.logprobs and tokens else ()
            if len(logprobs) != len(tokens):
                raise EngineError(f"{self._server} sent {len(logprobs)} log-probabilities of {len(tokens)} tokens")
        if choice.finish_reason is not None:
            return Piece(choice.index, tokens, logprobs, self._finish(choice.finish_reason, choice.stop_reason))
        return Piece(choice.index, tokens, logprobs) if tokens else None

    def _finish(self, said: str, stop: int | str | None) -> Finish:
        """vLLM tells other ends of sequence as stop tokens too; of ours are those that were asked for."""
        if (reason := _FINISHES.get(said)) is None:
            raise self._bad_end(said)
        return Finish(reason, stop if isinstance(stop, int) and stop in self._sampling.stop_token_ids else None)

    def _bad_end(self, said: str) -> MotetError:
        if said == "abort":
            return WorkerLeavingError(f"{self._server} ended the request: finish_reason 'abort'")
        return EngineError(f"{self._server} ended a choice with finish_reason {said!r}")

    def _nonsense(self, why: str, event: bytes) -> EngineError:
        quoted = event[:QUOTED_BYTES].decode(errors="replace")
        return EngineError(f"{self._server} streams what cannot be read ({why}): {quoted}")

"""vLLM's errors as ours, whether they come as a response or in mid-stream. Pure.

    400, 422                 RequestError that names vLLM's field; ContextLengthError if that is the prompt's length
    404 of a model           ModelNotFoundError, which is the client's only if no server has it (`server`)
    401, 403                 EngineError that says what to do about the key
    429, 503                 OverloadedError; in mid-stream WorkerLeavingError, since the group may go on elsewhere
    404, 405, 501 else       OtherServerError: it has no such route
    5xx without its JSON     EngineDiedError: something before the server answers for it
    any other                EngineError that quotes it

A server whose engine is dead answers 500 too, in the same words as for one request that failed. `/health` tells them
apart; whoever has the connection asks it (`server`).
"""

import contextlib
from http import HTTPStatus

import msgspec

from motet.engines.refusal import NO_SUCH_ROUTE, NOT_TAKEN, Refusal
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
    WorkerLeavingError,
)

KEY_HINT = "Give the gateway a key that this server knows."
TOO_LONG_PARAMS = ("input_tokens", "input_text")
"""What vLLM names when the prompt is longer than the model takes."""
NO_SUCH_MODEL = "NotFoundError"
"""Its type of error for a model; that for a route has other words."""


class Fault(msgspec.Struct):
    """vLLM's `ErrorInfo`."""

    message: str
    type: str = ""
    param: str | None = None
    code: int | str | None = None

    @property
    def status(self) -> int:
        return self.code if isinstance(self.code, int) else HTTPStatus.INTERNAL_SERVER_ERROR


class _Envelope(msgspec.Struct):
    error: Fault | str
    """A bare text comes from what stands before vLLM's routes: the check of the key, say."""


def refused(refusal: Refusal, server: str) -> MotetError:
    """`server` names it in the message."""
    fault = None
    with contextlib.suppress(*UNREADABLE):
        error = msgspec.json.decode(refusal.body, type=_Envelope).error
        fault = Fault(error) if isinstance(error, str) else error
    said = f"{server} answered {refusal.status}: {(fault.message if fault else refusal.quoted) or refusal.phrase}"
    if refusal.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return EngineError(f"{said}. {KEY_HINT}")
    busy = refusal.status == HTTPStatus.SERVICE_UNAVAILABLE and fault is not None
    if busy or refusal.status == HTTPStatus.TOO_MANY_REQUESTS:
        return OverloadedError(said, retry_after_s=refusal.retry_after_s or 1)
    if fault is not None and (error_of_client := _of_client(refusal.status, fault)) is not None:
        return error_of_client
    if refusal.status in NO_SUCH_ROUTE:
        return OtherServerError(said)
    if refusal.status >= HTTPStatus.INTERNAL_SERVER_ERROR and fault is None:
        return EngineDiedError(said)
    return EngineError(said)


def broken_off(fault: Fault, server: str) -> MotetError:
    """Of an error in mid-stream."""
    said = f"{server} gave up in mid-answer: {fault.message}"
    if fault.status == HTTPStatus.SERVICE_UNAVAILABLE:
        return WorkerLeavingError(said)
    return _of_client(fault.status, fault) or EngineError(said)


def _of_client(status: int, fault: Fault) -> RequestError | None:
    """What the client's request is refused for; None: it is not the client's fault."""
    words = f"The engine refused the request: {fault.message}"
    if status == HTTPStatus.NOT_FOUND and fault.type == NO_SUCH_MODEL:
        return ModelNotFoundError(fault.message, param="model")
    if status not in NOT_TAKEN:
        return None
    if fault.param in TOO_LONG_PARAMS:
        return ContextLengthError(words)
    return RequestError(words, param=fault.param and fault.param.removeprefix("body."))

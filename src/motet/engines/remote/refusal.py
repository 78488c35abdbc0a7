"""Another server's refusal as an error of ours. Pure.

    5xx that is not from a server of this kind    EngineDiedError
    503                                           DrainingError, OverloadedError, or EngineDiedError if it says so
    404, 405, 501                                 OtherServerError: it has no such route; but EngineError if it is a
                                                  server of ours that is no worker, having several models
    any other                                     EngineError that quotes it

A 4xx is not the client's fault here: the two servers disagree about what a request may hold.
"""

import contextlib
from http import HTTPStatus

import msgspec

from motet.engines.refusal import NO_SUCH_ROUTE, Refusal
from motet.engines.wire import UNREADABLE
from motet.errors import (
    DrainingError,
    EngineClosedError,
    EngineDiedError,
    EngineError,
    MotetError,
    NoSingleModelError,
    OtherServerError,
    OverloadedError,
)

GONE_CODES = {EngineDiedError.code, EngineClosedError.code}


class _Reason(msgspec.Struct):
    message: str
    code: str | int | None = None


class _Envelope(msgspec.Struct):
    error: _Reason


def refused(refusal: Refusal, server: str, *, key_hint: str) -> MotetError:
    """`server` names it in the message; `key_hint`: what to do if it wants another key."""
    reason = None
    with contextlib.suppress(*UNREADABLE):
        reason = msgspec.json.decode(refusal.body, type=_Envelope).error
    status = refusal.status
    said = f"{server} answered {status}: {reason.message if reason else refusal.quoted or refusal.phrase}"
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return EngineError(f"{said}. {key_hint}")
    if status in NO_SUCH_ROUTE and (reason is None or reason.code != NoSingleModelError.code):
        return OtherServerError(said)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR and (reason is None or reason.code in GONE_CODES):
        return EngineDiedError(said)
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        kind = DrainingError if reason and reason.code == DrainingError.code else OverloadedError
        return kind(said, retry_after_s=refusal.retry_after_s or 1)
    return EngineError(said)

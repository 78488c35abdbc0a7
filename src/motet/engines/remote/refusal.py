"""Another server's refusal as an error of ours. Pure.

    5xx that is not from a server of this kind    EngineDiedError
    503                                           DrainingError, OverloadedError, or EngineDiedError if it says so
    404, 405, 501                                 OtherServerError: it has no such route
    any other                                     EngineError that quotes it

A 4xx is not the client's fault here: the two servers disagree about what a request may hold.
"""

import contextlib
from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from motet.engines.wire import UNREADABLE
from motet.errors import (
    DrainingError,
    EngineClosedError,
    EngineDiedError,
    EngineError,
    MotetError,
    OtherServerError,
    OverloadedError,
)

NO_SUCH_ROUTE = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED)
GONE_CODES = {EngineDiedError.code, EngineClosedError.code}
QUOTED_CHARS = 300


class _Reason(msgspec.Struct):
    message: str
    code: str | int | None = None


class _Envelope(msgspec.Struct):
    error: _Reason


@dataclass(frozen=True)
class Refusal:
    """A response that is not what was asked for."""

    status: int
    phrase: str
    """Of the status line."""
    body: bytes
    retry_after: str = ""

    def error(self, server: str, *, key_hint: str) -> MotetError:
        """`server` names it in the message; `key_hint`: what to do if it wants another key."""
        reason = None
        with contextlib.suppress(*UNREADABLE):
            reason = msgspec.json.decode(self.body, type=_Envelope).error
        quoted = reason.message if reason else self.body.decode(errors="replace")[:QUOTED_CHARS].strip()
        said = f"{server} answered {self.status}: {quoted or self.phrase}"
        if self.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return EngineError(f"{said}. {key_hint}")
        if self.status in NO_SUCH_ROUTE:
            return OtherServerError(said)
        if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR and (reason is None or reason.code in GONE_CODES):
            return EngineDiedError(said)
        if self.status == HTTPStatus.SERVICE_UNAVAILABLE:
            kind = DrainingError if reason and reason.code == DrainingError.code else OverloadedError
            return kind(said, retry_after_s=self.retry_after_s)
        return EngineError(said)

    @property
    def retry_after_s(self) -> int:
        return int(self.retry_after) if self.retry_after.isascii() and self.retry_after.isdigit() else 1

"""What a text upstream says when it refuses, as an error of ours. Pure.

401, 403    of our own key: EngineError, for the client can do nothing about it; of the client's: passed on
other 4xx   UpstreamRefusalError: the client's fault, in the server's own words
502, 504    EngineDiedError: what stands before it does not reach it
503         OverloadedError
else        EngineError that quotes it; redirects too, which are not followed: they would get the key
"""

import contextlib
from http import HTTPStatus

import msgspec

from motet.engines.refusal import QUOTED_CHARS, Refusal
from motet.engines.wire import UNREADABLE
from motet.errors import EngineDiedError, EngineError, MotetError, OverloadedError, UpstreamRefusalError


class Said(msgspec.Struct, frozen=True):
    """An error as OpenAI writes it; other servers leave out some of it, or write a number as `code`."""

    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | int | None = None

    @property
    def status(self) -> int | None:
        """Of an error that came as an event, where `code` tells it."""
        return self.code if isinstance(self.code, int) and 400 <= self.code < 600 else None


class _Body(msgspec.Struct, frozen=True):
    """The shapes there are: an object or a text as `error`, the error itself, FastAPI's `detail`."""

    error: Said | str | None = None
    detail: object = ""
    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


def refused(refusal: Refusal, server: str, *, clients_key: bool) -> MotetError:
    """`server` names it in the message; `clients_key`: whether the key it got is the client's."""
    said = said_in(refusal.body) or Said(_words(refusal) or refusal.phrase)
    status, quoted = refusal.status, f"{server} answered {refusal.status}: {said.message or refusal.phrase}"
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN) and not clients_key:
        return EngineError(f"{quoted}. It refused the key of this gateway, not the client's.")
    if status in (HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT):
        return EngineDiedError(quoted)
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return OverloadedError(quoted, retry_after_s=refusal.retry_after_s or 1)
    if HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return refusal_error(said, status, retry_after_s=refusal.retry_after_s)
    if HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
        return EngineError(f"{server} answered {status}: redirects are not followed; give its own URL")
    return EngineError(quoted)


def said_in(body: bytes) -> Said | None:
    """None: it is no error in a shape that is known."""
    with contextlib.suppress(*UNREADABLE):
        found = msgspec.json.decode(body, type=_Body)
        if isinstance(found.error, Said):
            return found.error
        detail = found.detail if isinstance(found.detail, str) else msgspec.json.encode(found.detail).decode()
        if message := found.error or found.message or detail[:QUOTED_CHARS]:
            return Said(message, found.type, found.param, found.code)
    return None


def refusal_error(said: Said, status: int, *, retry_after_s: int | None = None) -> UpstreamRefusalError:
    """A 4xx in the server's own words."""
    return UpstreamRefusalError(
        said.message,
        status=status,
        type=said.type or "invalid_request_error",
        param=said.param,
        code=said.code if isinstance(said.code, str) else None,
        retry_after_s=retry_after_s,
    )


def _words(refusal: Refusal) -> str:
    """A page for browsers tells nothing."""
    return "" if refusal.quoted.startswith(("<", "{", "[")) else refusal.quoted

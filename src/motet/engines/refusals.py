"""Responses of other servers that are not a success: the error in their body, and what they mean for a request. Pure.

The Python API (`llm.client`), `motet batch` (`batch.sender`) and the Batch API (`api.batches.batch_run`) send a request
again or not by the table of `verdict_on`. Each limits the attempts in its own way.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus

import msgspec

from motet.engines.wire import UNREADABLE

QUOTED_CHARS = 300
MAX_SECONDS_DIGITS = 6
"""Maximum number of digits of a server's `retry-after`; longer ones are ignored. Python refuses to parse thousands."""


@dataclass(frozen=True)
class Refusal:
    """A response with an error status. Its meaning depends on the kind of server that sent it."""

    status: int
    phrase: str
    body: bytes
    retry_after_s: int | None = None
    """The server's `retry-after`; None if it sent no number of seconds."""

    @property
    def quoted(self) -> str:
        """The start of the body in one line. Empty for an HTML page, which says no more than the status."""
        line = quoted(self.body)
        return "" if line.startswith("<") else line


def quoted(body: bytes) -> str:
    """Returns the start of a body in one line."""
    return " ".join(body[: 4 * QUOTED_CHARS].decode(errors="replace").split())[:QUOTED_CHARS]


def seconds_in(retry_after: str | None) -> int | None:
    """Returns the value of a `retry-after` header; None if it is missing, or not a number of seconds."""
    text = retry_after or ""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_SECONDS_DIGITS else None


class OpenAIError(msgspec.Struct, frozen=True):
    """An error in OpenAI's form. Other servers omit some of the fields, or send a number as `code`."""

    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | int | None = None

    @property
    def status(self) -> int | None:
        """The HTTP status of an error in an event, if `code` is a status."""
        return self.code if isinstance(self.code, int) and 400 <= self.code < 600 else None


class _ErrorBody(OpenAIError, frozen=True):
    error: OpenAIError | str | None = None
    detail: object = ""


def error_in(body: bytes) -> OpenAIError | None:
    """Reads the member `error`, an object or a text. Returns None if there is none."""
    with contextlib.suppress(*UNREADABLE):
        error = msgspec.json.decode(body, type=_ErrorBody).error
        return OpenAIError(error) if isinstance(error, str) else error
    return None


def error_message(body: bytes) -> str:
    """Returns the message of an error in OpenAI's form, or the start of any other body in one line."""
    error = error_in(body)
    return error.message if error else quoted(body)


def any_error_in(body: bytes) -> OpenAIError | None:
    """Reads an error in any known form: under `error`, as the body itself, or under FastAPI's `detail`."""
    with contextlib.suppress(*UNREADABLE):
        found = msgspec.json.decode(body, type=_ErrorBody)
        if isinstance(found.error, OpenAIError):
            return found.error
        detail = found.detail if isinstance(found.detail, str) else msgspec.json.encode(found.detail).decode()
        if message := found.error or found.message or detail[:QUOTED_CHARS]:
            return OpenAIError(message, found.type, found.param, found.code)
    return None


class ReplyVerdict(Enum):
    """What a response means for its request."""

    COMPLETED = auto()
    UNAUTHORIZED = auto()
    FAILED = auto()
    """The request is wrong, or has failed for good."""
    BUSY = auto()
    """The server has no capacity now, or is paused: the request is sent again later, as often as needed."""
    AWAY = auto()
    """No worker has received the request: it waits for a worker, or for a restart of the server."""
    BROKEN = auto()
    """The request was lost: it is sent again a few times, since it can be the reason."""

    @property
    def is_final(self) -> bool:
        """True if the request is not sent again."""
        return self in (ReplyVerdict.COMPLETED, ReplyVerdict.UNAUTHORIZED, ReplyVerdict.FAILED)


UNAVAILABLE: Mapping[str | int | None, ReplyVerdict] = {
    **dict.fromkeys(("no_worker", "draining", "engine_closed"), ReplyVerdict.AWAY),
    **dict.fromkeys(("engine_died", "engine_silent", "worker_fault", "worker_leaving"), ReplyVerdict.BROKEN),
}
"""Codes of Motet's errors with status 503 from a server that is not busy."""


def verdict_on(status: int, body: bytes, *, repeat_faults: bool) -> ReplyVerdict:
    """Returns what a response means for its request.

        2xx              COMPLETED
        401              UNAUTHORIZED
        429              BUSY
        503              by the code of the error (`UNAVAILABLE`); BUSY for any other code, and for none
        408, other 5xx   BROKEN if `repeat_faults`, except 501
        any other        FAILED

    `repeat_faults`: True for servers of any kind. A Motet server has continued the request on its other workers before
    it responds with such a status, and would fail again."""
    if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
        return ReplyVerdict.COMPLETED
    match status:
        case HTTPStatus.UNAUTHORIZED:
            return ReplyVerdict.UNAUTHORIZED
        case HTTPStatus.TOO_MANY_REQUESTS:
            return ReplyVerdict.BUSY
        case HTTPStatus.SERVICE_UNAVAILABLE:
            error = error_in(body)
            return UNAVAILABLE.get(error.code if error else None, ReplyVerdict.BUSY)
    is_fault = status == HTTPStatus.REQUEST_TIMEOUT or status >= HTTPStatus.INTERNAL_SERVER_ERROR
    is_broken = repeat_faults and is_fault and status != HTTPStatus.NOT_IMPLEMENTED
    return ReplyVerdict.BROKEN if is_broken else ReplyVerdict.FAILED


def growing_pauses(first_s: float, *, longest_s: float) -> Iterator[float]:
    """Yields the pauses in seconds between the attempts of one request, each twice as long as the pause before it."""
    while True:
        yield first_s
        first_s = min(2 * first_s, longest_s)

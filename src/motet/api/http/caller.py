"""Who sends a request: the ids that go along with its groups to their engine, to other servers and into the log."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fastapi import Request

from motet.api.http.admission import ANONYMOUS
from motet.api.http.failure import invalid_value
from motet.api.http.request_spans import NO_REQUEST_SPAN, RequestSpan, request_span_of

HEADER = "x-request-id"
SESSION_HEADER = "x-session-id"
NO_SESSION = -1

_ID = re.compile(r"[\x21-\x7e]{1,200}")


@dataclass(frozen=True)
class Caller:
    trace: str
    """The client's `x-request-id`, or the one given to it."""
    session_id: str
    """The client's `x-session-id`, or nothing."""
    client: str
    """The client whose limits count, named by its key's number in the server's list: the key itself goes no further."""
    body_bytes: int = 0
    """Size of the request."""
    span: RequestSpan = NO_REQUEST_SPAN


def caller_of(request: Request, *, named: str | None = None, session: str | int | None = None) -> Caller:
    """`named`, `session`: the ids of the request and of its conversation in the body, used if no header has them.
    Raises RequestError for a session that cannot be one."""
    trace: str = request.state.trace
    if named is not None and is_id(named) and request.headers.get(HEADER) != trace:
        trace = named
    told = "" if session in (None, NO_SESSION) else str(session)
    if told and not is_id(told):
        raise invalid_value("session_id", "expected up to 200 printable characters without spaces")
    session_id = session_id_of(request.headers.items()) or told
    state = request.scope["state"]
    size, client = len(state.get("body", b"")), state.get("client", ANONYMOUS)
    return Caller(trace, session_id, client, size, request_span_of(request.scope))


def session_id_of(headers: Iterable[tuple[str, str]]) -> str:
    """Returns the session id, empty without a valid one. Clients and proxies differ in the case and in `-` and `_`."""
    given = (value for name, value in headers if name.lower().replace("_", "-") == SESSION_HEADER)
    return next(filter(is_id, given), "")


def is_id(text: str) -> bool:
    """Returns True if the text may be used as an id in a header and in a log line."""
    return _ID.fullmatch(text) is not None

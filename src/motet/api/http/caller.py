"""The sender of a request: the ids that its groups pass on to the engine, to other servers and to the log."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request

from motet.api.http.admission import ANONYMOUS, batch_client
from motet.api.http.failure import invalid_value
from motet.api.http.long_work import LONG_WORK, in_thread, work_client, work_size
from motet.api.http.request_spans import NO_REQUEST_SPAN, RequestSpan, request_span_of
from motet.session_ids import is_id

HEADER = "x-request-id"
NO_SESSION = -1

T = TypeVar("T")


@dataclass(frozen=True)
class Caller:
    """The ids of a request and of its client."""

    trace: str
    """The client's `x-request-id`, or the id that the server gave the request."""
    session_id: str
    """Id of the conversation, from a session header or the body; empty without one."""
    client: str
    """Name of the client whose limits apply. It contains the number of the API key, not the key itself. All requests
    without a key have one name."""
    own_id: str = ""
    """The client's own id of the request, from the header or the body; empty if the server gave the request its id."""
    body_bytes: int = 0
    work_size: int = 0
    """Size of the work of rendering and tokenising the body."""
    work_client: str = ""
    """Client in whose turns long work for the request is done (`long_work`). Without an API key, the request belongs to
    this client also in the shares of workers."""
    span: RequestSpan = NO_REQUEST_SPAN

    async def in_thread_if_long(self, work: Callable[[], T], size: int | None = None) -> T:
        """Runs work for the request: on the event loop if it is short, otherwise in the thread for long work. `size`:
        number of characters or tokens; None for work on the body."""
        is_short = (self.work_size if size is None else size) < LONG_WORK
        return work() if is_short else await in_thread(work, client=self.work_client)


def caller_of(
    request: Request, *, named: str | None = None, session: str | int | None = None, cache_salt: str = ""
) -> Caller:
    """Returns the caller of a request. `named`, `session`: the ids of the request and of its conversation in the body,
    used if no header has them. `cache_salt`: the body's. Raises RequestError for a session that is not a valid id."""
    trace: str = request.state.trace
    own_id = trace if request.headers.get(HEADER) == trace else ""
    if not own_id and named is not None and is_id(named):
        trace = own_id = named
    session_in_body = "" if session in (None, NO_SESSION) else str(session)
    if session_in_body and not is_id(session_in_body):
        raise invalid_value("session_id", "expected up to 200 printable characters without spaces")
    state = request.scope["state"]
    body = state.get("body", b"")
    client = state.get("client", ANONYMOUS)
    return Caller(
        trace,
        own_id=own_id,
        session_id=state.get("session") or session_in_body,
        client=batch_client(client) if state.get("batch") else client,
        body_bytes=len(body),
        work_size=work_size(body),
        work_client=work_client(request.scope, cache_salt),
        span=request_span_of(request.scope),
    )

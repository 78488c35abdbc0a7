"""The edge of the app: it finds out whose request it is, gives it an id, and reads its body.

RequestIds   every request has an id, in its answer and in its log lines; a bug is answered as any error. A client's
             own `x-request-id` is kept if it is short and printable. HTTP figures are counted here, where the
             status of every response passes by, and the span of the request begins and ends here
RefusalLog   a refused request has a line in the log; a flood of them has a few, and one with their number
new_router   what the routes of this server are hung on; those that generate are a PostRoute with_body
caller_of    the ids that go along with a group to its engine, to other servers and into the log
"""

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

import anyio
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from motet.api.generation.schema import ignored_paths
from motet.api.http.admission import ANONYMOUS
from motet.api.http.body import Body, read_json
from motet.api.http.dialect import speaks_anthropic
from motet.api.http.failure import (
    CLIENT_GONE,
    ErrorResponse,
    error_body,
    invalid_value,
    schema_failure,
    validation_failure,
)
from motet.api.http.request_spans import (
    NO_REQUEST_SPAN,
    WORKER_ROUTES,
    RequestSpan,
    end_request_span,
    request_span_of,
    sent_context,
)
from motet.errors import BodyTooLargeError, OverloadedError, RequestError
from motet.ids import new_request_id
from motet.log import cut
from motet.metrics.prometheus import Metrics
from motet.tracing.spans import Tracer

log = logging.getLogger("motet.api")

HEADER = "x-request-id"
MESSAGE_HEADER = "request-id"
"""The header's name in Anthropic's API."""
SESSION_HEADER = "x-session-id"
NO_SESSION = -1

MAX_NAMES = 20
MAX_NAME_CHARS = 100
"""Limits on lines of the log with the client's own names of fields and routes."""

Handler = Callable[[Request], Awaitable[Response]]
Write = Callable[[bytes], Awaitable[None] | None]  # at least one byte; what it returns is awaited before there are more
WRITE_EXTENSION = "motet.write"
"""The ASGI extension of a server that writes pieces of a body without a message for each: a `Write`."""

_ID = re.compile(r"[\x21-\x7e]{1,200}")
_JSON_TYPE = re.compile(r"\s*$|application/([^;\s]+\+)?json\s*(;|$)", re.IGNORECASE)


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


def new_router(prefix: str = "", *, told: bool = True) -> APIRouter:
    """Returns a router without routes. JSON is read also if a client gives it no content type. `told`: the OpenAPI
    document has the routes."""
    return APIRouter(prefix=prefix, redirect_slashes=False, strict_content_type=False, include_in_schema=told)


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


async def body_of(request: Request) -> bytes:
    """Returns the body, which the request keeps for whoever reads it next, until `drop_body`."""
    state = request.scope["state"]
    try:
        if "body" not in state:
            state["body"] = b"".join([piece async for piece in request.stream()])
        body: bytes = state["body"]
        return body
    except ClientDisconnect as error:
        raise RequestError("The client left before the body was complete.") from error


def drop_body(request: Request) -> None:
    """Frees the body and its part of the memory for bodies: the request itself lives as long as its answer."""
    request.scope["state"].pop("body", None)
    request.scope["state"]["release_body"]()


class PostRoute(Route):
    """A route without FastAPI's own way to the body, which is longer. Figures of HTTP name it like FastAPI's."""

    def __init__(self, path: str, handle: Handler, *, body: type[BaseModel], summary: str) -> None:
        """`body`, `summary`: for the OpenAPI document."""
        super().__init__(path, handle, methods=["POST"])
        self.body = body
        self.summary = summary

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        return match, {**found, "route": self}


async def read_body(request: Request, schema: type[Body]) -> Body:
    """Returns the request's JSON body, checked against its schema. Raises RequestError for a body that does not match,
    and for other content types than JSON: browsers let pages of any site post those."""
    content_type = request.headers.get("content-type", "")
    if not _JSON_TYPE.match(content_type):
        message = f"Unsupported content type {content_type[:MAX_NAME_CHARS]!r}: the body must be application/json."
        raise RequestError(message, code="invalid_content_type")
    try:
        body = await read_json(await body_of(request), schema)
    except ValidationError as error:
        raise schema_failure(error) from error
    except (ValueError, RecursionError) as error:  # the body is not JSON
        raise validation_failure([{"type": "json_invalid", "loc": ("body",)}]) from error
    if log.isEnabledFor(logging.DEBUG):
        _log_ignored(json.loads(await body_of(request)), body, request=request)
    return body


def with_body(schema: type[Body], answer: Callable[[Body, Request], Awaitable[Response]]) -> Handler:
    """Returns a handler that reads the body, frees its memory when the response is prepared, and calls `answer`."""

    async def handle(request: Request) -> Response:
        response = await answer(await read_body(request, schema), request)
        drop_body(request)
        return response

    return handle


def _log_ignored(given: object, body: BaseModel, *, request: Request) -> None:
    """Writes one line with the places of the fields that nothing reads, if there are any."""
    paths = [*islice(ignored_paths(given, body), MAX_NAMES + 1)]
    if paths:
        names = ", ".join(path[:MAX_NAME_CHARS] for path in paths[:MAX_NAMES]) + ", ..." * (len(paths) > MAX_NAMES)
        fields = {"request_id": request.state.trace, "route": request.url.path, "ignored": names}
        log.debug("fields of a request are ignored", extra={"fields": fields})


def body_send(scope: Scope) -> Send:
    """Returns the server's own `send`, for bodies: the layers between look at the start of a response only."""
    send: Send = scope["state"]["send"]
    return send


def body_write(scope: Scope) -> Write:
    """Returns what writes a piece of a body that is not the last: the server's extension, or `send`."""
    send, extensions = body_send(scope), scope.get("extensions") or {}
    write: Write | None = extensions.get(WRITE_EXTENSION)
    return write or (lambda piece: send({"type": "http.response.body", "body": piece, "more_body": True}))


async def while_client_stays(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Runs `work` until it ends, or cancels it when the client leaves."""
    # In a task of its own: each time a task wakes, Python goes through all calls that await in it, which here would be
    # the framework's too.
    working = asyncio.create_task(work)
    with anyio.CancelScope() as listening:
        working.add_done_callback(lambda _: listening.cancel())
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        finally:
            if working.cancel():
                with anyio.CancelScope(shield=True):
                    await asyncio.wait((working,))
    if not working.cancelled():
        working.result()


class RefusalLog:
    """Writes a line for each refused request, `most` at the most in a window, and then how many had none."""

    def __init__(self, *, most: int = 10, window_s: float = 1.0) -> None:
        self._most = most
        self._window_s = window_s
        self._window: asyncio.TimerHandle | None = None
        self._num_refused = 0
        """Refused requests of the window that is open."""

    def write(self, fields: Mapping[str, str | int | None]) -> None:
        if self._window is None:
            self._window = asyncio.get_running_loop().call_later(self._window_s, self._end_window)
        self._num_refused += 1
        if self._num_refused <= self._most:
            log.info("request refused", extra={"fields": fields})

    def _end_window(self) -> None:
        if self._num_refused > self._most:
            left_out = {"requests": self._num_refused - self._most}
            log.info("more requests refused, without a line of their own", extra={"fields": left_out})
        self._window, self._num_refused = None, 0


class RequestIds:
    """ASGI middleware, the outermost one."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, tracer: Tracer) -> None:
        self._app = app
        self._metrics = metrics
        self._tracer = tracer
        self._refusals = RefusalLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        given = headers.get(HEADER, "")
        trace = given if is_id(given) else new_request_id("req")
        scope["state"]["trace"] = trace
        scope["state"]["span"] = self._tracer.request(sent_context(headers))
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[HEADER] = trace
                if speaks_anthropic(scope):
                    headers[MESSAGE_HEADER] = trace
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            log.exception("a request failed", extra={"fields": {"request_id": trace}})
            if status is None:
                await ErrorResponse(error)(scope, receive, send_with_id)
        finally:
            route = scope.get("route")
            handler = route.path if isinstance(route, Route) else ""
            status, refusal = status or CLIENT_GONE, scope["state"].get("error")
            self._metrics.http_request(handler=handler or "none", method=scope["method"], status=status)
            if isinstance(route, PostRoute) or handler in WORKER_ROUTES or isinstance(refusal, BodyTooLargeError):
                end_request_span(scope, handler, status=status)
            if isinstance(refusal, RequestError | OverloadedError):
                self._log_refusal(refusal, scope)

    def _log_refusal(self, refusal: RequestError | OverloadedError, scope: Scope) -> None:
        told = error_body(refusal)
        self._refusals.write(
            {
                "request_id": scope["state"]["trace"],
                "route": cut(f"{scope['method']} {scope['path']}", MAX_NAME_CHARS),
                "status": refusal.status,
                "code": told.code and cut(told.code, MAX_NAME_CHARS),
                "param": told.param and cut(told.param, MAX_NAME_CHARS),
            }
        )

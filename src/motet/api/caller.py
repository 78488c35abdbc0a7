"""The edge of the app: it finds out whose request it is, gives it an id, and decides if it may come in.

RequestIds   every request has an id, in its answer and in its log lines; a bug is answered as any error. A client's
             own `x-request-id` is kept if it is short and printable. HTTP figures are counted here, where the
             status of every response passes by
ApiKeys      with keys set, all but the open routes need one of them, and operators' routes the operators' key
new_router   what the routes of this server are hung on; those that generate are a PostRoute with_body
caller_of    the ids that go along with a group to its engine, to other servers and into the log
"""

import asyncio
import json
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import anyio
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from motet.api.admission import ANONYMOUS
from motet.api.failure import error_response, schema_failure, validation_failure
from motet.errors import RequestError, UnauthorizedError
from motet.ids import new_request_id
from motet.metrics.prometheus import Metrics

log = logging.getLogger("motet.api")

HEADER = "x-request-id"
SESSION_HEADER = "x-session-id"
CLIENT_GONE = 499
"""nginx's status for a request whose client has left. It is logged and counted; nobody receives it."""
OPEN_ROUTES = frozenset({"/health", "/ping", "/ready", "/version"})
NO_KEY = (
    "You didn't provide an API key. You need to provide your API key in an Authorization header using Bearer auth "
    "(i.e. Authorization: Bearer YOUR_KEY)."
)
WRONG_KEY = "Incorrect API key provided."
NO_ADMIN_KEY = "This route needs the server's admin key in an Authorization header (Authorization: Bearer ADMIN_KEY)."

Body = TypeVar("Body", bound=BaseModel)
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


def new_router(prefix: str = "") -> APIRouter:
    """Returns a router without routes. JSON is read also if a client gives it no content type."""
    return APIRouter(prefix=prefix, redirect_slashes=False, strict_content_type=False)


def caller_of(request: Request, *, named: str | None = None) -> Caller:
    """`named`: the request id in the body, used if there is no `x-request-id` header."""
    trace: str = request.state.trace
    if named is not None and is_id(named) and request.headers.get(HEADER) != trace:
        trace = named
    return Caller(trace, session_id_of(request.headers.items()), getattr(request.state, "client", ANONYMOUS))


def session_id_of(headers: Iterable[tuple[str, str]]) -> str:
    """Returns the session id, empty without a valid one. Clients and proxies differ in the case and in `-` and `_`."""
    given = (value for name, value in headers if name.lower().replace("_", "-") == SESSION_HEADER)
    return next(filter(is_id, given), "")


def is_id(text: str) -> bool:
    """Returns True if the text may be used as an id in a header and in a log line."""
    return _ID.fullmatch(text) is not None


async def body_of(request: Request) -> bytes:
    """Returns the body, which the request keeps for whoever reads it next."""
    try:
        return await request.body()
    except ClientDisconnect as error:
        raise RequestError("The client left before the body was complete.") from error


class PostRoute(Route):
    """A route without FastAPI's own way to the body, which is longer. Figures of HTTP name it like FastAPI's."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        return match, {**found, "route": self}


def with_body(schema: type[Body], answer: Callable[[Body, Request], Awaitable[Response]]) -> Handler:
    """Returns what answers requests with such a JSON body. Pages of any site may post other content types."""

    async def handle(request: Request) -> Response:
        try:
            if not _JSON_TYPE.match(request.headers.get("content-type", "")):
                raise ValueError("the content type is not JSON's")
            body = schema.model_validate(json.loads(await body_of(request)))
        except ValidationError as error:
            raise schema_failure(error) from error
        except (ValueError, RecursionError) as error:  # the body is no JSON
            raise validation_failure([{"type": "json_invalid", "loc": ("body",)}]) from error
        return await answer(body, request)

    return handle


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


class RequestIds:
    """ASGI middleware, the outermost one."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(HEADER, "")
        trace = given if is_id(given) else new_request_id("req")
        scope["state"]["trace"] = trace
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = trace
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            log.exception("a request failed", extra={"fields": {"request_id": trace}})
            if status is None:
                await error_response(error)(scope, receive, send_with_id)
        finally:
            route = scope.get("route")
            handler = route.path if isinstance(route, Route) else "none"
            self._metrics.http_request(handler=handler, method=scope["method"], status=status or CLIENT_GONE)


class ApiKeys:
    """ASGI middleware. Compares a key with all of the server's in constant time, so timing reveals nothing of them.

    `admin_key`: operators' routes need it in place of an API key; if it is empty, they are like the other routes."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], admin_key: str) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._admin_keys = [admin_key.encode()] if admin_key else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope)
        except UnauthorizedError as error:
            await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Raises UnauthorizedError, or notes which key it was."""
        path = scope["path"]
        admin = bool(self._admin_keys) and (path in ("/drain", "/workers") or path.startswith("/workers/"))
        keys = self._admin_keys if admin else self._keys
        if not keys or path in OPEN_ROUTES:
            return
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise UnauthorizedError(NO_ADMIN_KEY if admin else NO_KEY)
        # Compares with all of them, so that the time reveals nothing.
        matches = [secrets.compare_digest(given.strip().encode("latin-1"), key) for key in keys]
        if not any(matches):
            raise UnauthorizedError(NO_ADMIN_KEY if admin else WRONG_KEY)
        scope["state"]["client"] = "admin" if admin else f"key-{matches.index(True)}"

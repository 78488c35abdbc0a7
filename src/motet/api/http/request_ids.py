"""The outermost layer of the app: ids of requests and sessions, HTTP metrics, and log lines of refused and failed
requests.

Every response and its log lines have a request id; a client's own `x-request-id` is used if it is short and printable.
An unexpected exception is answered like any other error. This layer sees the status of every response, so it counts
HTTP metrics, and starts and ends the span of the request."""

import asyncio
import logging
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from motet.api.http.caller import HEADER
from motet.api.http.dialect import speaks_anthropic
from motet.api.http.failure import CLIENT_GONE, ErrorResponse, error_body
from motet.api.http.request_spans import WORKER_ROUTES, end_request_span, sent_context
from motet.api.http.routes import MAX_NAME_CHARS, PostRoute
from motet.errors import BodyTooLargeError, OverloadedError, RequestError
from motet.ids import new_request_id
from motet.log import cut
from motet.metrics.prometheus import Metrics
from motet.session_ids import SessionHeaders, is_id
from motet.tracing.spans import Tracer

log = logging.getLogger("motet.api")

MESSAGE_HEADER = "request-id"
"""The header's name in Anthropic's API."""


class RefusalLog:
    """Logs a line for each refused request, up to `max_lines` in a window; then the number of the other requests."""

    def __init__(self, *, max_lines: int = 10, window_s: float = 1.0) -> None:
        self._max_lines = max_lines
        self._window_s = window_s
        self._window: asyncio.TimerHandle | None = None
        self._num_refused = 0
        """Number of refused requests in the current window."""

    def write(self, fields: Mapping[str, str | int | None]) -> None:
        if self._window is None:
            self._window = asyncio.get_running_loop().call_later(self._window_s, self._end_window)
        self._num_refused += 1
        if self._num_refused <= self._max_lines:
            log.info("request refused", extra={"fields": fields})

    def _end_window(self) -> None:
        if self._num_refused > self._max_lines:
            left_out = {"requests": self._num_refused - self._max_lines}
            log.info("more requests refused, without a line of their own", extra={"fields": left_out})
        self._window, self._num_refused = None, 0


class RequestIds:
    def __init__(self, app: ASGIApp, *, metrics: Metrics, tracer: Tracer, sessions: SessionHeaders) -> None:
        self._app = app
        self._metrics = metrics
        self._tracer = tracer
        self._sessions = sessions
        self._refusals = RefusalLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        given = headers.get(HEADER, "")
        trace = given if is_id(given) else new_request_id("req")
        scope["state"]["trace"] = trace
        scope["state"]["session"] = self._sessions.session_of(scope["headers"])
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
            # Its traceback refers to the request, which would exist until garbage is collected.
            scope["state"].pop("error", None)

    def _log_refusal(self, refusal: RequestError | OverloadedError, scope: Scope) -> None:
        body = error_body(refusal)
        self._refusals.write(
            {
                "request_id": scope["state"]["trace"],
                "route": cut(f"{scope['method']} {scope['path']}", MAX_NAME_CHARS),
                "status": refusal.status,
                "code": body.code and cut(body.code, MAX_NAME_CHARS),
                "param": body.param and cut(body.param, MAX_NAME_CHARS),
            }
        )


class ProxiedApp:
    """The app of a server for requests through Serve's proxy. The proxy adds the request's `x-request-id` to every
    response, so the app's own header is left out: two equal headers would reach the client as one with two values."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)[HEADER]
            await send(message)

        await self._app(scope, receive, send_without_id)

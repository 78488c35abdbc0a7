"""The rim of the app: every request has an id, in its answer and in its log lines, a bug is answered as any error.

A client's own `x-request-id` is kept if it is short and printable. HTTP figures are counted here, where the status of
every response passes by.
"""

import logging
import re

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from motet.api.failure import error_response
from motet.ids import new_request_id
from motet.metrics.prometheus import Metrics

HEADER = "x-request-id"
CLIENT_GONE = 499
"""Counted as nginx does when the client left before its answer began."""
_ACCEPTED = re.compile(r"[\x21-\x7e]{1,200}")

log = logging.getLogger("motet.api")


def is_id(text: str) -> bool:
    """Whether it may stand in a header and in a log line."""
    return _ACCEPTED.fullmatch(text) is not None


def trace_of(request: Request) -> str:
    """The id that `RequestIds` gave the request."""
    trace: str = request.state.trace
    return trace


def straight_send(scope: Scope) -> Send:
    """Past all layers of the app, for bodies: what lies between looks at the start of a response and nothing else."""
    send: Send = scope["state"]["send"]
    return send


class RequestIds:
    """ASGI middleware, the outermost one."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        trace = given if is_id(given) else new_request_id("req")
        scope.setdefault("state", {}).update(trace=trace, send=send)
        await self._answer(scope, receive, _Tap(send, trace))

    async def _answer(self, scope: Scope, receive: Receive, tap: "_Tap") -> None:
        try:
            await self._app(scope, receive, tap)
        except Exception as error:
            log.exception("a request failed", extra={"fields": {"request_id": tap.trace}})
            if tap.status is None:
                await error_response(error)(scope, receive, tap)
        finally:
            route = scope.get("route")
            self._metrics.http_request(
                handler=route.path if isinstance(route, Route) else "none",
                method=scope["method"],
                status=tap.status or CLIENT_GONE,
            )


class _Tap:
    """Passes messages on; adds the id to the headers and notes the status."""

    def __init__(self, send: Send, trace: str) -> None:
        self._send = send
        self.trace = trace
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)[HEADER] = self.trace
        await self._send(message)

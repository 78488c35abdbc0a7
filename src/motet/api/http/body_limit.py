"""Limits the size of each request body, and of all request bodies together."""

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from motet.api.http.failure import ErrorResponse, body_too_large
from motet.engines.wire import TENSORS

SMALL_BODY_BYTES = 64 * 1024
"""Number of bytes of a body that uvicorn reads before the app requests any."""
NO_MEMORY = "The requests in progress use all memory that this server has for bodies. Try again later."
TENSOR_ROUTES = ("/update_weights", "/engine/checkpoint")
"""Routes whose bodies can be tensors, as large as a model. Such bodies do not count against the limits."""


class BodyLimit:
    """ASGI middleware that refuses a body that is too large; if its length is announced, before a byte is read. All
    bodies together can have `max_open_bytes`. The first `SMALL_BODY_BYTES` of each body do not count, so that short
    requests are accepted while other clients send long requests."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, max_open_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._free_bytes = max_open_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if scope["path"].endswith(TENSOR_ROUTES) and is_tensors(headers):
            await self._app(scope, receive, send)  # the tensors are written to separate memory while they arrive
            return
        announced = headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await ErrorResponse(body_too_large(self._max_bytes))(scope, receive, send)
            return
        num_read = num_held = 0

        async def receive_counted() -> Message:
            """Raises HTTPException to the reader of the body, as the framework turns any other error into a 400."""
            nonlocal num_read, num_held
            message = await receive()
            num_read += len(message.get("body", b""))
            if num_read > self._max_bytes:
                raise HTTPException(413, body_too_large(self._max_bytes).message)
            if (more := num_read - SMALL_BODY_BYTES - num_held) > 0:
                if more > self._free_bytes:
                    raise HTTPException(503, NO_MEMORY)
                self._free_bytes -= more
                num_held += more
            return message

        def release() -> None:
            nonlocal num_held
            self._free_bytes += num_held
            num_held = 0

        scope["state"]["release_body"] = release
        try:
            await self._app(scope, receive_counted, send)
        finally:
            release()


def is_tensors(headers: Headers) -> bool:
    return headers.get("content-type", "").partition(";")[0].strip().lower() == TENSORS

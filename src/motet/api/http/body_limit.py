"""How large the bodies of requests may be, each and all together."""

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from motet.api.http.failure import ErrorResponse, body_too_large
from motet.engines.wire import TENSORS

SMALL_BODY_BYTES = 64 * 1024
"""Uvicorn reads as much of a body before anybody asks for it."""
NO_ROOM = "The bodies of requests under way fill the memory that this server has for them. Try again later."
TENSOR_ROUTES = ("/update_weights", "/engine/checkpoint")
"""Their bodies may be tensors, and are then as large as a model."""


class BodyLimit:
    """ASGI middleware. Refuses a body that is too large: before a byte is read if its length is announced. All bodies
    together have `max_open_bytes`; the first `SMALL_BODY_BYTES` of each do not count, so that short requests get in
    while others send long ones."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, max_open_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._free_bytes = max_open_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if takes_tensors(scope["path"], headers):  # they are written to memory of their own as they come
            await self._app(scope, receive, send)
            return
        announced = headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await ErrorResponse(body_too_large(self._max_bytes))(scope, receive, send)
            return
        num_read = num_held = 0

        async def receive_counted() -> Message:
            """Raises HTTPException to whoever reads the body: the framework turns any other error into a 400."""
            nonlocal num_read, num_held
            message = await receive()
            num_read += len(message.get("body", b""))
            if num_read > self._max_bytes:
                raise HTTPException(413, body_too_large(self._max_bytes).message)
            if (more := num_read - SMALL_BODY_BYTES - num_held) > 0:
                if more > self._free_bytes:
                    raise HTTPException(503, NO_ROOM)
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


def takes_tensors(path: str, headers: Headers) -> bool:
    """Returns True for a body whose bytes must not be counted among those of requests."""
    return path.endswith(TENSOR_ROUTES) and is_tensors(headers)

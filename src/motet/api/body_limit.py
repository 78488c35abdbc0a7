"""Bodies have a largest size: refused by the announced length before a byte is read, else at the limit."""

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from motet.api.failure import body_too_large, error_response


class BodyLimit:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await error_response(body_too_large(self._max_bytes))(scope, receive, send)
            return
        await self._app(scope, _Counted(receive, self._max_bytes), send)


class _Counted:
    """Raises inside whoever reads the body; an HTTPException, since the framework turns any other into a 400."""

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._read = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._read += len(message.get("body", b""))
            if self._read > self._max_bytes:
                raise HTTPException(413, body_too_large(self._max_bytes).message)
        return message

"""Bodies that are sent while they are generated: they bypass the middleware, and end when the client leaves."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

import anyio
from starlette.types import Receive, Scope, Send

Write = Callable[[bytes], Awaitable[None] | None]
"""Sends a piece of a body, at least one byte. The caller awaits the returned object, if any, before the next piece."""
WRITE_EXTENSION = "motet.write"
"""The ASGI extension of Motet's HTTP server, a `Write`: pieces of a body are sent without an ASGI message for each."""


class ResponseSender:
    """Sends one response. The start passes the middleware, which adds headers; the body bypasses it. Several tasks can
    call `start`: it is sent once, and before everything else."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send_start = send
        self._send_body: Send = scope["state"]["send"]  # the HTTP server's own (`app.App`)
        extensions = scope.get("extensions") or {}
        self.write: Write = extensions.get(WRITE_EXTENSION) or self.send
        """Sends a piece like `send`, but without an ASGI message if the server has the extension."""
        self.started = False
        self._starting = asyncio.Lock()

    async def start(self, headers: list[tuple[bytes, bytes]], *, status: int = 200) -> None:
        async with self._starting:
            if not self.started:
                await self._send_start({"type": "http.response.start", "status": status, "headers": headers})
                self.started = True

    def send(self, piece: bytes) -> Awaitable[None]:
        """Sends a piece of the body that is not the last."""
        return self._send_body({"type": "http.response.body", "body": piece, "more_body": True})

    def end(self, piece: bytes) -> Awaitable[None]:
        return self._send_body({"type": "http.response.body", "body": piece, "more_body": False})


async def while_client_stays(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Runs `work` until it ends, or cancels it when the client leaves."""
    # `work` runs in a task of its own: each time a task wakes, Python passes through all its awaiting calls, and the
    # task of the request has many awaiting calls of the framework.
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

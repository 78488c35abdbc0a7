"""Bodies that are sent while they are generated: they bypass the middleware, and end when the client leaves."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

import anyio
from starlette.types import Receive, Scope, Send

Write = Callable[[bytes], Awaitable[None] | None]  # at least one byte; what it returns is awaited before there are more
WRITE_EXTENSION = "motet.write"
"""The ASGI extension of a server that writes pieces of a body without a message for each: a `Write`."""


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

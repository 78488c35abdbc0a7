"""uvicorn without its own ideas about signals and logs: who starts it says when it ends."""

import contextlib
import socket
from collections.abc import Awaitable, Callable, Generator

import uvicorn

KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that none is closed while a request is on its way in."""
LINGER_S = 3
"""Connections that are still open so long after the end are cut."""


class HttpServer(uvicorn.Server):
    """Serves one app on one listening socket until `stop`."""

    def __init__(self, app: Callable[..., Awaitable[None]], listener: socket.socket) -> None:
        """`app`: any ASGI application."""
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=LINGER_S,
        )
        super().__init__(config)
        self._listener = listener

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leaves signals to the deployment: a first one drains, which is more than to close connections."""
        yield

    async def run_until_stopped(self) -> None:
        await self.serve(sockets=[self._listener])

    def stop(self, *, at_once: bool = False) -> None:
        """Ends `run_until_stopped` when open answers are complete, or without waiting for them."""
        self.should_exit = True
        self.force_exit = at_once

"""Waits for a server that does not answer, so that a restart of the server delays a batch and fails no line."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from motet.batch.sender import RequestSender
from motet.engines.refusals import ReplyVerdict, growing_pauses
from motet.errors import BatchStoppedError
from motet.log import notice

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 5.0

Sleep = Callable[[float], Awaitable[None]]


class ServerWatch:
    """Lets requests pass while the server answers. After a fault, one task probes the server for all requests."""

    def __init__(
        self,
        sender: RequestSender,
        *,
        timeout_s: float,
        revive: Callable[[], Awaitable[None]] | None = None,
        sleep: Sleep = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout_s`: maximum time to wait for the server. `revive`: called before each probe; starts a server of this
        process again if it has ended."""
        self._sender = sender
        self._timeout_s = timeout_s
        self._revive = revive
        self._sleep = sleep
        self._clock = clock
        self._probing: asyncio.Task[None] | None = None

    async def check(self) -> None:
        """Returns when the server answers. Raises BatchStoppedError if it does not in time, or refuses the API key."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._wait_for_server())
        await asyncio.shield(self._probing)

    async def passage(self) -> None:
        """Waits while the server is known not to answer."""
        if self._probing is not None and not self._probing.done():
            await asyncio.shield(self._probing)

    async def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)

    async def _wait_for_server(self) -> None:
        start_s, is_noted = self._clock(), False
        for pause_s in growing_pauses(FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S):
            if self._revive is not None:
                await self._revive()
            reply = await self._sender.probe()
            if reply.verdict is ReplyVerdict.UNAUTHORIZED or reply.status == HTTPStatus.FORBIDDEN:
                raise BatchStoppedError("the server refuses the API key: give a valid --api-key")
            if reply.status and reply.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                if is_noted:
                    notice(f"the server answers again after {self._clock() - start_s:.0f} s")
                return
            if self._clock() - start_s >= self._timeout_s:
                raise BatchStoppedError(
                    f"the server has not answered for {self._timeout_s:g} s (--server-timeout): {reply.shown}. Run the "
                    "same command again to continue."
                )
            if not is_noted:
                notice(f"waiting for the server: {reply.shown}")
                is_noted = True
            await self._sleep(pause_s)

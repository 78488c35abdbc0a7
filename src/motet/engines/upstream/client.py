"""One text upstream: connections, keys, time-outs, and what its failures mean.

    no connection, or it broke    EngineDiedError
    nothing for too long          EngineSilentError
    a refusal                     as in `refusal`
    nonsense                      EngineError

The key: the one configured for it; else the client's own, where that is allowed; else none. A key of ours never
goes there, nor does any key follow a redirect.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TypeVar

import aiohttp
import msgspec

from motet.engines.calls import FAULTS, Client, refusal_in
from motet.engines.upstream.refusal import refused
from motet.engines.wire import UNREADABLE
from motet.errors import EngineDiedError, EngineError, EngineSilentError

T = TypeVar("T")

END_S = 0.05
MAX_ANSWER_BYTES = 2**28
EVENT_STREAM = "text/event-stream"


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    connect_s: float = 5.0
    first_byte_s: float = 600.0
    """Up to the first byte of an answer: its first token on a stream, else the whole of it."""
    idle_s: float = 120.0
    """Between two bytes; comments that keep a connection alive count."""
    report_s: float = 2.0
    """Of a whole answer to a heartbeat."""


@dataclass(frozen=True, kw_only=True)
class UpstreamOptions:
    """How one server is dealt with."""

    api_key: str | None = None
    """Sent to it in place of the client's."""
    pass_key: bool = False
    """Whether it gets the client's own `Authorization`. Only for gateways without keys of their own."""
    timeouts: Timeouts = Timeouts()
    names: Mapping[str, str] = field(default_factory=dict)
    """Name for clients -> name there. Empty: all models it lists, by its own names; else only these."""
    max_singles: int = 16
    """Requests of one group that it has at once, where it does not honour n."""


@dataclass(frozen=True, kw_only=True)
class Ids:
    """What goes along in headers."""

    trace: str = ""
    session_id: str = ""
    authorization: str = ""
    """The client's."""


class Reply:
    """An answer that has begun. Closing it before its end ends the request there."""

    def __init__(self, server: "UpstreamServer", response: aiohttp.ClientResponse) -> None:
        self._server = server
        self._response = response
        self._begun = False
        self.is_stream = response.content_type == EVENT_STREAM

    async def read(self) -> bytes:
        """What has come; nothing at the end."""
        timeouts = self._server.options.timeouts
        limit_s = timeouts.idle_s if self._begun else timeouts.first_byte_s
        try:
            async with asyncio.timeout(limit_s):
                data = await self._response.content.readany()
        except TimeoutError as error:
            raise self._server.silent(limit_s) from error
        except FAULTS as error:
            raise self._server.fault(error) from error
        self._begun = True
        return data

    async def whole(self, *, max_bytes: int = MAX_ANSWER_BYTES) -> bytes:
        parts, num_bytes = [], 0
        while data := await self.read():
            parts.append(data)
            num_bytes += len(data)
            if num_bytes > max_bytes:
                raise EngineError(f"{self._server.name} sent an answer of more than {max_bytes} bytes")
        return b"".join(parts)

    async def end(self) -> None:
        """Reads what little follows the end of a stream, so that the connection can be used again."""
        with contextlib.suppress(TimeoutError, *FAULTS):
            async with asyncio.timeout(END_S):
                while await self._response.content.readany():
                    pass

    def close(self) -> None:
        """May be called twice. A connection whose answer has been read to its end is used again."""
        self._response.close()


class UpstreamServer:
    """One server. The client belongs to who made it."""

    def __init__(self, url: str, client: Client, *, options: UpstreamOptions | None = None) -> None:
        """`url`: with or without `/v1`."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.name = f"the upstream {self.url}"
        self.options = options or UpstreamOptions()
        self._client = client

    async def post(self, path: str, body: bytes, ids: Ids) -> Reply:
        """Returns when an answer has begun that is no refusal."""
        limit_s = self.options.timeouts.first_byte_s
        try:
            async with asyncio.timeout(limit_s):
                response = await self._request("POST", path, body, ids)
        except TimeoutError as error:
            raise self.silent(limit_s) from error
        return Reply(self, response)

    async def get(self, path: str, *, timeout_s: float) -> bytes:
        """A whole body."""
        try:
            async with asyncio.timeout(timeout_s):
                reply = Reply(self, await self._request("GET", path, b"", Ids()))
                try:
                    return await reply.whole()
                finally:
                    reply.close()
        except TimeoutError as error:
            raise self.silent(timeout_s) from error

    def decode(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=kind)
        except UNREADABLE as error:
            raise EngineError(f"{self.name} answered what this server cannot read: {error}") from error

    def clients_key(self) -> bool:
        """Whether it gets the client's key."""
        return self.options.pass_key and not self.options.api_key

    def fault(self, error: Exception) -> EngineDiedError:
        """What is wrong with a connection, in our words."""
        return EngineDiedError(f"{self.name} did not answer: {str(error) or type(error).__name__}")

    def silent(self, limit_s: float) -> EngineSilentError:
        return EngineSilentError(f"{self.name} gave no sign of life for {limit_s:g} s")

    async def _request(self, method: str, path: str, body: bytes, ids: Ids) -> aiohttp.ClientResponse:
        timeout = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=self.options.timeouts.connect_s)
        try:
            response = await self._client.request(
                method,
                self.url + path,
                data=body or None,
                headers=self._headers(ids),
                timeout=timeout,
                allow_redirects=False,
            )
            if response.status == HTTPStatus.OK:
                return response
            raise refused(await refusal_in(response), self.name, clients_key=self.clients_key())
        except aiohttp.InvalidURL as error:
            raise EngineError(f"{self.name} cannot be asked: its URL is none") from error
        except FAULTS as error:  # not reached in time, too: that is an OSError
            raise self.fault(error) from error

    def _headers(self, ids: Ids) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self.options.api_key:
            headers["authorization"] = f"Bearer {self.options.api_key}"
        elif self.options.pass_key and ids.authorization:
            headers["authorization"] = ids.authorization
        if ids.trace:
            headers["x-request-id"] = ids.trace
        if ids.session_id:
            headers["x-session-id"] = ids.session_id
        return headers

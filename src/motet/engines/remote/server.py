"""A `motet serve` server as a gateway asks it, in the protocol of `engines.wire`: calls, and what their failures mean.

    no answer in time                    EngineSilentError
    no answer, or a connection broke     EngineDiedError
    a refusal                            as in `refusal`
    another protocol, or nonsense        EngineError

aiohttp and not httpx: on streams of small frames it takes a third to a fifth of the time.
"""

from http import HTTPStatus
from typing import TypeVar

import aiohttp
import msgspec

from motet.engines.remote.refusal import Refusal
from motet.engines.wire import MSGPACK, PROTOCOL, PROTOCOL_HEADER, TOKENIZER_FILES, UNREADABLE, EngineReport
from motet.errors import EngineDiedError, EngineError, EngineSilentError, MotetError, OtherServerError

T = TypeVar("T")

CONNECT_TIMEOUT_S = 2.0
REPORT_TIMEOUT_S = 1.0
"""Twice what a server waits for its engine before it reports that it is silent."""
QUESTION_TIMEOUT_S = 10.0
KEEPALIVE_S = 4.0
"""Shorter than a server keeps an idle connection, so that it never closes one that is just being used again."""
MAX_REFUSAL_BYTES = 64 * 1024

FAULTS: tuple[type[Exception], ...] = (aiohttp.ClientError, OSError, TimeoutError)
"""What goes wrong with a connection."""


class _Spoken(msgspec.Struct):
    """What every version says of itself."""

    protocol: int
    version: str = "unknown"


def engine_client() -> aiohttp.ClientSession:
    """For any number of servers and of calls at once. To be made in the event loop, and closed after the engines."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
    )


class EngineServer:
    """One server. The client belongs to who made it."""

    def __init__(self, url: str, client: aiohttp.ClientSession, *, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.name = f"the worker {self.url}"
        self._client = client
        self._headers = {PROTOCOL_HEADER: str(PROTOCOL), "content-type": MSGPACK}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    async def report(self, *, timeout_s: float = REPORT_TIMEOUT_S) -> EngineReport:
        """How it is. EngineError if it speaks another protocol, OtherServerError if it is no server of ours."""
        body = await self.ask("GET", "/engine", timeout_s=timeout_s)
        try:
            spoken = self.decode(body, _Spoken)
        except EngineError as error:
            raise OtherServerError(error.message) from error
        if spoken.protocol != PROTOCOL:
            raise EngineError(
                f"{self.name} (Motet {spoken.version}) speaks engine protocol {spoken.protocol}, and this server "
                f"{PROTOCOL}: run the same version of Motet on both"
            )
        return self.decode(body, EngineReport)

    async def tokenizer(self) -> dict[str, bytes]:
        """Name of each file -> its content. Put into a folder, they are what `Tokenizer.load` reads."""
        files = self.decode(await self.ask("GET", "/engine/tokenizer", timeout_s=None), dict[str, bytes])
        return {name: content for name, content in files.items() if name in TOKENIZER_FILES}

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        trace: str = "",
        timeout_s: float | None = QUESTION_TIMEOUT_S,
    ) -> bytes:
        """The whole body of an answer."""
        response = await self._send(method, path, body, trace=trace, timeout_s=timeout_s)
        try:
            return await response.read()
        except FAULTS as error:
            raise self.fault(error) from error
        finally:
            response.release()

    async def open(self, path: str, body: bytes, *, trace: str) -> aiohttp.ClientResponse:
        """An answer that lasts; whoever gets it closes it."""
        return await self._send("POST", path, body, trace=trace, timeout_s=None)

    def decode(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except UNREADABLE as error:
            raise EngineError(f"{self.name} answered what this server cannot read: {error}") from error

    def fault(self, error: Exception) -> MotetError:
        """What is wrong with a connection, in our words."""
        if isinstance(error, aiohttp.InvalidURL):
            return EngineError(f"{self.name} cannot be asked: its URL is none")
        kind = EngineSilentError if isinstance(error, TimeoutError) else EngineDiedError
        return kind(f"{self.name} did not answer: {str(error) or type(error).__name__}")

    async def _send(
        self, method: str, path: str, body: bytes, *, trace: str, timeout_s: float | None
    ) -> aiohttp.ClientResponse:
        """A response that is neither a refusal nor read."""
        headers = self._headers
        if trace and trace.isascii() and trace.isprintable():  # else it would fail the call
            headers = {**headers, "x-request-id": trace}
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            response = await self._client.request(
                method, self.url + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
            )
            if response.status in (HTTPStatus.OK, HTTPStatus.NO_CONTENT):
                return response
            raise await self._refusal(response)
        except FAULTS as error:
            raise self.fault(error) from error

    async def _refusal(self, response: aiohttp.ClientResponse) -> MotetError:
        async with response:
            said = await response.content.read(MAX_REFUSAL_BYTES)
        refusal = Refusal(response.status, response.reason or "", said, response.headers.get("retry-after", ""))
        return refusal.error(self.name, key_hint="Give the gateway a key that the worker knows.")

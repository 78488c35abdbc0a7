"""HTTP calls to other servers, and what their failures mean.

    no answer in time                    EngineSilentError
    no answer, or a connection broke     EngineDiedError
    a refusal                            as the server's kind says

aiohttp and not httpx: on streams of small frames it takes a third to a fifth of the time.
"""

import ssl
from collections.abc import Callable, Mapping
from http import HTTPStatus

import aiohttp

from motet.engines.refusal import Refusal
from motet.errors import ConfigError, EngineDiedError, EngineError, EngineSilentError, MotetError

CONNECT_TIMEOUT_S = 2.0
REPORT_TIMEOUT_S = 1.0
"""Twice what a server of ours waits for its engine before it reports that it is silent."""
QUESTION_TIMEOUT_S = 10.0
KEEPALIVE_S = 4.0
"""Shorter than a server keeps an idle connection, so that it never closes one that is just being used again."""
MAX_REFUSAL_BYTES = 64 * 1024

FAULTS: tuple[type[Exception], ...] = (aiohttp.ClientError, OSError)
"""What goes wrong with a connection; TimeoutError is an OSError."""

Client = aiohttp.ClientSession
"""What `server_client` makes."""

NO_HEADERS: Mapping[str, str] = {}


def server_client(*, ca_file: str | None = None) -> Client:
    """For any number of servers of any kind, and of calls at once. To be made in the event loop, and closed after all
    that asks by it.

    `ca_file`: certificates to trust in place of the system's. Raises ConfigError if they cannot be read."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=_trust(ca_file)),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


def header_text(text: str) -> str:
    """A client's words as the value of a header; empty if they can be none: they would fail the call."""
    return text if text.isascii() and text.isprintable() else ""


async def refusal_in(response: aiohttp.ClientResponse) -> Refusal:
    """Of a response that is not what was asked for; it is closed."""
    async with response:
        said = await response.content.read(MAX_REFUSAL_BYTES)
    return Refusal(response.status, response.reason or "", said, response.headers.get("retry-after", ""))


class Calls:
    """To one server. The client belongs to who made it."""

    def __init__(
        self,
        url: str,
        client: Client,
        *,
        name: str,
        headers: Mapping[str, str],
        refused: Callable[[Refusal], MotetError],
    ) -> None:
        """`name`: in messages; `headers`: of every call."""
        self._url = url
        self._client = client
        self._name = name
        self._headers = headers
        self._refused = refused

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] = NO_HEADERS,
        timeout_s: float | None = QUESTION_TIMEOUT_S,
    ) -> bytes:
        """The whole body of an answer. Cancelling it closes the connection."""
        response = await self._send(method, path, body, headers=headers, timeout_s=timeout_s)
        try:
            return await response.read()
        except FAULTS as error:
            raise self.fault(error) from error
        finally:
            response.release()

    async def open(self, path: str, body: bytes, *, headers: Mapping[str, str] = NO_HEADERS) -> aiohttp.ClientResponse:
        """An answer that lasts; whoever gets it closes it."""
        return await self._send("POST", path, body, headers=headers, timeout_s=None)

    async def status(self, method: str, path: str, body: bytes = b"", *, timeout_s: float = QUESTION_TIMEOUT_S) -> int:
        """Of the answer, whichever it is; for who only wants to know whether there is such a route."""
        try:
            async with await self._request(method, path, body, NO_HEADERS, timeout_s) as response:
                return response.status
        except FAULTS as error:
            raise self.fault(error) from error

    def fault(self, error: Exception) -> MotetError:
        """What is wrong with a connection, in our words."""
        if isinstance(error, aiohttp.InvalidURL):
            return EngineError(f"{self._name} cannot be asked: its URL is none")
        kind = EngineSilentError if isinstance(error, TimeoutError) else EngineDiedError
        return kind(f"{self._name} did not answer: {str(error) or type(error).__name__}")

    async def _send(
        self, method: str, path: str, body: bytes, *, headers: Mapping[str, str], timeout_s: float | None
    ) -> aiohttp.ClientResponse:
        """A response that is neither a refusal nor read."""
        try:
            response = await self._request(method, path, body, headers, timeout_s)
            if response.status in (HTTPStatus.OK, HTTPStatus.NO_CONTENT):
                return response
            raise self._refused(await refusal_in(response))
        except FAULTS as error:
            raise self.fault(error) from error

    async def _request(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], timeout_s: float | None
    ) -> aiohttp.ClientResponse:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        every = {**self._headers, **headers}
        return await self._client.request(
            method, self._url + path, data=body, headers=every, timeout=timeout, allow_redirects=False
        )


def _trust(ca_file: str | None) -> ssl.SSLContext | bool:
    """Whose certificates are good. Raises ConfigError."""
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"{ca_file}: no certificates can be read from it: {error}") from error

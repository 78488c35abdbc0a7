"""HTTP calls to other servers of any kind: connections, the errors for their failures, and refusals.

    no answer in time                    EngineSilentError
    no file left here for a connection   OverloadedError
    no answer, or a connection broke     EngineDiedError
    a refusal                            a `Refusal`; the kind of the server says what it means

aiohttp and not httpx: on streams of small frames it takes a third to a fifth of the time.
"""

import errno
import logging
import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import BinaryIO

import aiohttp

from motet.errors import (
    ConfigError,
    EngineDiedError,
    EngineError,
    EngineSilentError,
    MotetError,
    OverloadedError,
    WorkerFaultError,
)
from motet.log import ONCE_A_MINUTE

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2.0
REPORT_TIMEOUT_S = 1.0
"""Twice what a server of ours waits for its engine before it reports that the engine is silent."""
QUESTION_TIMEOUT_S = 10.0
KEEPALIVE_S = 4.0
"""Shorter than a server keeps an idle connection, so that it never closes one that is just being used again."""

MAX_ANSWER_BYTES = 2**28
"""The largest whole answer that is read: log-probabilities of a long prompt, as JSON."""
MAX_REPORT_BYTES = 2**22
"""A list of a thousand models, or vLLM's figures, has some hundred thousand."""
MAX_REFUSAL_BYTES = 64 * 1024
QUOTED_CHARS = 300
MAX_SECONDS_DIGITS = 6
"""Digits of a time that a server may tell: a longer one is no time, and Python refuses to read some thousands."""
NO_SUCH_ROUTE = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED)
NOT_TAKEN = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY)
"""Statuses of a server that does not accept something in the request."""
WRONG_KEY = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)

FAULTS: tuple[type[Exception], ...] = (aiohttp.ClientError, OSError, UnicodeError)
"""The errors of a connection; TimeoutError is an OSError, and UnicodeError says that no host has such a name."""

NO_FILES = (errno.EMFILE, errno.ENFILE)
NO_FILES_LEFT = "no file is left for another connection: raise the limit of open files (ulimit -n)"

Client = aiohttp.ClientSession

NO_HEADERS: Mapping[str, str] = {}
JSON_BODY: Mapping[str, str] = {"content-type": "application/json"}


def server_client(*, ca_file: str | None = None) -> Client:
    """Makes a client for any number of servers and calls at once. Must be called in the event loop; the client must be
    closed after everything that uses it.

    `ca_file`: certificates to trust in place of the system's. Raises ConfigError if they cannot be read."""
    try:
        trusted = True if ca_file is None else ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"{ca_file}: no certificates can be read from it: {error}") from error
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=trusted),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


def header_text(text: str) -> str:
    """Returns a client's text as the value of a header, or an empty one if it cannot be a header's value."""
    return text if text.isascii() and text.isprintable() else ""


@dataclass(frozen=True)
class Refusal:
    """A response with an error status. Its meaning depends on the kind of server that sent it."""

    status: int
    phrase: str
    body: bytes
    retry_after_s: int | None = None
    """None if the server gave no time in seconds."""

    @property
    def quoted(self) -> str:
        """The beginning of the body."""
        return self.body.decode(errors="replace").strip()[:QUOTED_CHARS]


class Reply:
    """An answer that is read piece by piece. Closing it early closes the connection, which ends the request there."""

    def __init__(self, server_name: str, response: aiohttp.ClientResponse) -> None:
        self._server_name = server_name
        self._response = response

    @property
    def is_stream(self) -> bool:
        return self._response.content_type == "text/event-stream"

    async def read(self) -> bytes:
        """Returns the bytes that have come; none at the end. Raises EngineDiedError if the connection breaks."""
        try:
            return await self._response.content.readany()
        except FAULTS as error:
            raise EngineDiedError(
                f"{self._server_name} was lost in the middle of its answer: {_reason(error)}"
            ) from error

    def close(self) -> None:
        """May be called twice. A connection whose answer has been read to its end is used again."""
        self._response.close()


class ServerCalls:
    """Calls to one server. The client belongs to whoever made it."""

    def __init__(
        self,
        url: str,
        client: Client,
        *,
        name: str,
        headers: Mapping[str, str] = JSON_BODY,
        api_key: str | None,
        refused: Callable[[Refusal], MotetError],
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        """`name`: names the server in messages; `headers`: sent with every call, such as the key; a call may add a
        client's headers, of which empty ones are left out; `refused`: turns a refusal into an error."""
        self._url = url
        self._client = client
        self._name = name
        self._headers = {**headers, "authorization": f"Bearer {api_key}"} if api_key else headers
        self._refused = refused
        self._connect_timeout_s = connect_timeout_s

    async def ask(
        self,
        method: str,
        path: str,
        *,
        body: bytes | BinaryIO = b"",
        headers: Mapping[str, str] = NO_HEADERS,
        timeout_s: float | None = QUESTION_TIMEOUT_S,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> bytes:
        """Returns the whole body of an answer. Cancelling it closes the connection. Raises WorkerFaultError if it has
        more than `max_bytes`."""
        response = await self._send(method, path, body=body, headers=headers, timeout_s=timeout_s)
        try:
            return await self._whole(response, max_bytes)
        except FAULTS as error:
            raise self._fault(error) from error
        finally:
            response.release()

    async def _whole(self, response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
        body = bytearray()
        async for part in response.content.iter_any():
            body += part
            if len(body) > max_bytes:
                raise WorkerFaultError(f"{self._name} sent an answer of more than {max_bytes} bytes")
        return bytes(body)

    async def open(self, path: str, body: bytes, *, headers: Mapping[str, str] = NO_HEADERS) -> Reply:
        """Returns an answer to be read piece by piece; the caller closes it."""
        return Reply(self._name, await self._send("POST", path, body=body, headers=headers, timeout_s=None))

    async def status(self, path: str, body: bytes) -> int:
        """Returns the status of the answer, which shows if the server has such a route."""
        try:
            async with await self._request("POST", path, body=body, timeout_s=QUESTION_TIMEOUT_S) as response:
                return response.status
        except FAULTS as error:
            raise self._fault(error) from error

    async def _send(
        self, method: str, path: str, *, body: bytes | BinaryIO, headers: Mapping[str, str], timeout_s: float | None
    ) -> aiohttp.ClientResponse:
        """Returns a response that is no refusal, before its body is read."""
        try:
            response = await self._request(method, path, body=body, headers=headers, timeout_s=timeout_s)
            if response.status in (HTTPStatus.OK, HTTPStatus.NO_CONTENT):
                return response
            async with response:
                said = await response.content.read(MAX_REFUSAL_BYTES)
        except FAULTS as error:
            raise self._fault(error) from error
        after = response.headers.get("retry-after", "")
        retry_after_s = int(after) if after.isascii() and after.isdigit() and len(after) <= MAX_SECONDS_DIGITS else None
        raise self._refused(Refusal(response.status, response.reason or "", said, retry_after_s))

    async def _request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | BinaryIO,
        headers: Mapping[str, str] = NO_HEADERS,
        timeout_s: float | None,
    ) -> aiohttp.ClientResponse:
        told = {name: text for name, words in headers.items() if (text := header_text(words))}
        return await self._client.request(
            method,
            self._url + path,
            data=body or None,
            headers={**self._headers, **told},
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=self._connect_timeout_s),
            allow_redirects=False,
        )

    def _fault(self, error: Exception) -> MotetError:
        if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError | UnicodeError):
            return EngineError(
                f"The URL of {self._name} is not valid: '{self._url}'. Expected http://HOST:PORT or https://HOST:PORT."
            )
        logger.debug("%s at %s did not answer: %r", self._name, self._url, error)
        if isinstance(error, OSError) and error.errno in NO_FILES:
            logger.error(NO_FILES_LEFT, extra=ONCE_A_MINUTE)
            return OverloadedError("The server has no file left for a connection to a worker.")
        kind = EngineSilentError if isinstance(error, TimeoutError) else EngineDiedError
        return kind(f"{self._name} did not answer: {_reason(error)}")


def _reason(error: Exception) -> str:
    """Returns why a connection failed, without the address, which is not for clients."""
    match error:
        case TimeoutError():
            return "no answer in time"
        case aiohttp.ClientConnectorCertificateError(certificate_error=ssl.SSLCertVerificationError() as refused):
            return f"its certificate cannot be trusted: {refused.verify_message}"
        case aiohttp.ClientResponseError():
            return error.message or type(error).__name__
        case OSError(errno=int(number)) if number > 0:
            return os.strerror(number)
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientPayloadError():
            return str(error)
    return type(error).__name__

"""HTTP calls to other servers of any kind: connections, the errors for their failures, and refusals.

    no answer in time                      EngineSilentError
    this process has no free descriptor    OverloadedError
    no answer, or a broken connection      EngineDiedError
    a refusal                              a `Refusal`; the caller's `refused` turns it into an error

Uses aiohttp instead of httpx, which takes three to five times as long on streams of small frames.
"""

import errno
import logging
import os
import ssl
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import BinaryIO

import aiohttp

from motet.engines.refusals import Refusal, seconds_in
from motet.errors import (
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
"""Time in seconds to wait for a report: twice the time after which a Motet server reports that its engine is silent."""
CALL_TIMEOUT_S = 10.0
KEEPALIVE_S = 4.0
"""Time in seconds to keep idle connections. Servers keep them longer, so they never close one that is being reused."""

MAX_ANSWER_BYTES = 2**28
"""Maximum size of a complete answer. The largest answers have the log-probabilities of a long prompt, as JSON."""
MAX_REPORT_BYTES = 2**22
"""Maximum size of a report. A list of a thousand models, or vLLM's figures, has some hundred thousand bytes."""
MAX_REFUSAL_BYTES = 64 * 1024
NO_SUCH_ROUTE = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED)
NOT_TAKEN = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY)
"""Statuses of a server that does not accept a field or a value of the request."""
WRONG_KEY = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)

FAULTS: tuple[type[Exception], ...] = (aiohttp.ClientError, OSError, UnicodeError)
"""The errors of a connection. TimeoutError is an OSError; UnicodeError means that the host name is invalid."""

NO_FILES = (errno.EMFILE, errno.ENFILE)
NO_FILES_LEFT = "no file descriptor is left for another connection: raise the limit of open files (ulimit -n)"

Client = aiohttp.ClientSession

Headers = Mapping[str, str]

NO_HEADERS: Headers = {}
JSON_BODY: Headers = {"content-type": "application/json"}


def server_client(*, tls: ssl.SSLContext | None = None) -> Client:
    """Returns a client for any number of servers and concurrent calls. Must be called in the event loop. The client
    must be closed after all objects that use it.

    `tls`: for servers at https URLs; None to trust the system's certificates."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=tls or True),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


def header_text(text: str) -> str:
    """Returns a client's text as the value of a header, or an empty string if the text is not a valid value."""
    return text if text.isascii() and text.isprintable() else ""


class Reply:
    """An answer that is read piece by piece. Closing it early closes its connection, which ends the server's work."""

    def __init__(self, server_name: str, response: aiohttp.ClientResponse) -> None:
        self._server_name = server_name
        self._response = response

    @property
    def is_stream(self) -> bool:
        return self._response.content_type == "text/event-stream"

    async def read(self) -> bytes:
        """Returns the bytes received so far; empty at the end. Raises EngineDiedError if the connection breaks."""
        try:
            return await self._response.content.readany()
        except FAULTS as error:
            raise EngineDiedError(
                f"{self._server_name} was lost in the middle of its answer: {_reason(error)}"
            ) from error

    def close(self) -> None:
        """Closes the answer. Can be called twice. The connection is reused if the answer has been read to its end."""
        self._response.close()


class ServerCalls:
    """Calls to one server. Does not own the HTTP client."""

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
        """`name`: name of the server in messages. `headers`: sent with every call; a call can add headers of a client,
        except empty ones. `api_key`: bearer token. `refused`: returns the error for a refusal."""
        self._url = url
        self._client = client
        self._name = name
        self._headers = {**headers, "authorization": f"Bearer {api_key}"} if api_key else headers
        self._refused = refused
        self._connect_timeout_s = connect_timeout_s

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: bytes | BinaryIO = b"",
        headers: Mapping[str, str] = NO_HEADERS,
        timeout_s: float | None = CALL_TIMEOUT_S,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> bytes:
        """Returns a complete body. Cancelling closes the connection. Raises WorkerFaultError above `max_bytes`."""
        response = await self._send(method, path, body=body, headers=headers, timeout_s=timeout_s)
        try:
            received = bytearray()
            async for part in response.content.iter_any():
                received += part
                if len(received) > max_bytes:
                    raise WorkerFaultError(f"{self._name} sent an answer of more than {max_bytes} bytes")
            return bytes(received)
        except FAULTS as error:
            raise self._fault(error) from error
        finally:
            response.release()

    async def open(self, path: str, body: bytes, *, headers: Mapping[str, str] = NO_HEADERS) -> Reply:
        """Returns an answer that the caller reads piece by piece and closes."""
        return Reply(self._name, await self._send("POST", path, body=body, headers=headers, timeout_s=None))

    async def status(self, path: str, body: bytes) -> int:
        """Returns the status of the answer, which shows if the server has the route."""
        try:
            reply = await self._request("POST", path, body=body, headers=NO_HEADERS, timeout_s=CALL_TIMEOUT_S)
            async with reply as response:
                return response.status
        except FAULTS as error:
            raise self._fault(error) from error

    async def _send(
        self, method: str, path: str, *, body: bytes | BinaryIO, headers: Mapping[str, str], timeout_s: float | None
    ) -> aiohttp.ClientResponse:
        """Returns a successful response before its body is read. Raises the error for a refusal."""
        try:
            response = await self._request(method, path, body=body, headers=headers, timeout_s=timeout_s)
            if response.status in (HTTPStatus.OK, HTTPStatus.NO_CONTENT):
                return response
            async with response:
                refusal = await response.content.read(MAX_REFUSAL_BYTES)
        except FAULTS as error:
            raise self._fault(error) from error
        retry_after_s = seconds_in(response.headers.get("retry-after"))
        raise self._refused(Refusal(response.status, response.reason or "", refusal, retry_after_s))

    async def _request(
        self, method: str, path: str, *, body: bytes | BinaryIO, headers: Headers, timeout_s: float | None
    ) -> aiohttp.ClientResponse:
        valid_headers = {name: value for name, text in headers.items() if (value := header_text(text))}
        return await self._client.request(
            method,
            self._url + path,
            data=body or None,
            headers={**self._headers, **valid_headers},
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
            return OverloadedError("The server has no file descriptor left for a connection to a worker.")
        kind = EngineSilentError if isinstance(error, TimeoutError) else EngineDiedError
        return kind(f"{self._name} did not answer: {_reason(error)}")


def _reason(error: Exception) -> str:
    """Returns the reason why a connection failed, without the address, which clients must not see."""
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

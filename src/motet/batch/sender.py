"""Sends the requests of a batch to a server of any kind."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Protocol

import aiohttp
import msgspec

from motet.batch.lines import BatchLine, is_json
from motet.batch.response_memory import ArrivingBody, ResponseMemory
from motet.engines.http import FAULTS, JSON_BODY, server_client
from motet.engines.refusals import ReplyVerdict, error_message, seconds_in, verdict_on
from motet.log import cut, escaped

CONNECT_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 10.0
MAX_REASON_CHARS = 300
MAX_COUNTED_TOKENS = 2**40
"""Maximum number of tokens of one response. JSON has numbers that no float can represent."""
INVALID = (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError, UnicodeError)
"""Errors of a URL that is not valid."""


@dataclass(frozen=True, slots=True)
class ServerReply:
    """A response, or the reason why there is none."""

    status: int
    """HTTP status; 0 if the response did not arrive completely."""
    body: bytes = b""
    request_id: str = ""
    retry_after_s: int | None = None
    reason: str = ""
    """The error of the connection; None if the response arrived."""
    was_sent: bool = True
    """False if no connection could be made."""
    is_json: bool = True

    @property
    def verdict(self) -> ReplyVerdict:
        """BROKEN if the connection broke, AWAY if there was none, FAILED for a success that is not JSON."""
        if not self.status:
            return ReplyVerdict.BROKEN if self.was_sent else ReplyVerdict.AWAY
        verdict = verdict_on(self.status, self.body, repeat_faults=True)
        return ReplyVerdict.FAILED if verdict is ReplyVerdict.COMPLETED and not self.is_json else verdict

    @property
    def shown(self) -> str:
        """The reply in one line, for people."""
        return self.reason or f"status {self.status}: {escaped(cut(error_message(self.body), MAX_REASON_CHARS))}"


class RequestSender(Protocol):
    async def send(self, line: BatchLine) -> ServerReply: ...

    async def probe(self) -> ServerReply:
        """Returns the response to a request that generates nothing."""
        ...


class HttpSender:
    """Sends requests over HTTP. An asynchronous context manager, which owns its connections."""

    def __init__(
        self,
        url: Callable[[], str],
        *,
        api_key: str | None,
        timeout_s: float,
        memory: ResponseMemory | None = None,
    ) -> None:
        """`url`: returns the base URL, which can change when a server is started again. `timeout_s`: maximum time of a
        request. `memory`: limits the responses in memory; None for the default limits."""
        self._url = url
        self._headers = {**JSON_BODY, "authorization": f"Bearer {api_key}"} if api_key else JSON_BODY
        self._timeout_s = timeout_s
        self._memory = memory or ResponseMemory()

    async def __aenter__(self) -> "HttpSender":
        self._client = server_client()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.close()

    async def send(self, line: BatchLine) -> ServerReply:
        return await self._request("POST", line.url, body=line.body, timeout_s=self._timeout_s, memory=self._memory)

    async def probe(self) -> ServerReply:
        return await self._request("GET", "/v1/models", body=None, timeout_s=PROBE_TIMEOUT_S, memory=ResponseMemory())

    async def _request(
        self, method: str, path: str, *, body: bytes | None, timeout_s: float, memory: ResponseMemory
    ) -> ServerReply:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._client.request(
                method, self._url() + path, data=body, headers=self._headers, timeout=timeout, allow_redirects=False
            ) as response:
                with ArrivingBody(memory) as arriving:
                    async for part in response.content.iter_any():
                        if not await arriving.add(part):
                            reason = f"the server sent a response of more than {memory.max_response_bytes} bytes"
                            return ServerReply(response.status, reason=reason, is_json=False)
                    return _reply(response, bytes(arriving.received))
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, *INVALID) as error:
            return ServerReply(
                0, reason=_reason(error, late=f"no connection within {CONNECT_TIMEOUT_S:g} s"), was_sent=False
            )
        except FAULTS as error:
            flag = "" if body is None else " (--request-timeout)"
            return ServerReply(0, reason=_reason(error, late=f"no response within {timeout_s:g} s{flag}"))


def _reply(response: aiohttp.ClientResponse, body: bytes) -> ServerReply:
    return ServerReply(
        response.status,
        body,
        request_id=cut(response.headers.get("x-request-id", ""), MAX_REASON_CHARS),
        retry_after_s=seconds_in(response.headers.get("retry-after")),
        is_json=response.content_type == "application/json" and is_json(body),
    )


class _TokenCount(msgspec.Struct):
    total_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNTED_TOKENS)] = 0


class _Used(msgspec.Struct):
    usage: _TokenCount | None = None


_USED = msgspec.json.Decoder(_Used)


def total_tokens(body: bytes) -> int:
    """Returns the number of prompt and output tokens that a response counts; 0 if it has no valid usage."""
    try:
        usage = _USED.decode(body).usage
    except (msgspec.DecodeError, RecursionError):
        return 0
    return usage.total_tokens if usage else 0


def _reason(error: Exception, *, late: str) -> str:
    """`late`: the reason in words, for an error that is a time-out."""
    if isinstance(error, TimeoutError) and error.errno is None:  # with a number, it is the system's time-out
        return late
    return escaped(cut(str(error) or type(error).__name__, MAX_REASON_CHARS))

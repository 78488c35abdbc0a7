"""An asynchronous HTTP client of one Motet server or gateway, for programs that send many requests.

    async with ServerClient("http://127.0.0.1:8000", api_key="...") as client:
        answer = await client.post("/v1/completions", {"prompt": "Hi", "n": 4}, answer=Completion, num_choices=4)

- `send` returns the response with its status, also an error, and `post` decodes the body of a success and raises the
  exception of `motet.errors` for an error. `stream` yields the data of server-sent events.
- A request that the server refuses because it has too many (429, 503), or whose connection breaks before the response,
  is sent again: after `Retry-After`, or after a growing pause. `RetryRule` limits the time: a server that has never
  been reached fails after some seconds, and a running server has a minute to restart.
- The number of choices in progress is limited, and adapts to the server (`limit.ChoiceLimit`). Requests start in the
  order in which they were sent.
- A cancelled request, or a stream that is left, closes its connection, and the server ends the choices at once.
- A client can be used in one event loop after another, but in one at a time.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from types import TracebackType
from typing import Final, Self, TypeVar
from urllib.request import getproxies, proxy_bypass

import httpx
import msgspec

from motet.engines.openai import DONE, EventSplitter
from motet.engines.refusals import ReplyVerdict, growing_pauses, verdict_on
from motet.errors import ConfigError, EngineDiedError, MotetError
from motet.llm.failures import error_of
from motet.llm.limit import ChoiceLimit
from motet.settings.server_url import server_url

Answer = TypeVar("Answer")

CONNECT_TIMEOUT_S: Final = 10.0
KEEPALIVE_S: Final = 4.0
"""Time in seconds to keep idle connections. Servers keep them longer, so they never close one that is being reused."""
MAX_PAUSE_S: Final = 10.0
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
PROBE_S: Final = 30
"""Time without data after which the kernel checks that the other side of a connection still exists."""


@dataclass(frozen=True, kw_only=True)
class RetryRule:
    """The times in seconds for which a request is sent again. 0 means that it is sent once."""

    busy_s: float = 3600.0
    """Maximum time from the first refusal of a request by a server that has too many requests, or is paused."""
    down_s: float = 60.0
    """Maximum time in which a server has no workers or does not respond, such as during a restart."""
    absent_s: float = 3.0
    """Maximum time in which a server that has never accepted a connection refuses them: its URL is probably wrong."""
    first_pause_s: float = 0.25
    """Pause after the first attempt, and minimum of all pauses. Each pause without `Retry-After` is twice as long."""


@dataclass(frozen=True)
class ServerAnswer:
    """The complete response to a request."""

    status: int
    body: bytes
    retry_after: str | None = None

    @property
    def is_success(self) -> bool:
        return self.status < HTTPStatus.BAD_REQUEST

    @property
    def error(self) -> MotetError:
        """The exception for a response with an error status."""
        return error_of(self.status, self.body, retry_after=self.retry_after)


class ServerClient:
    """See the module. `url`: the server's base URL, with or without /v1. `headers`: sent with every request."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        limit: ChoiceLimit | None = None,
        retry: RetryRule | None = None,
        gone: Callable[[], str] | None = None,
        transport: Callable[[], httpx.AsyncBaseTransport] | None = None,
    ) -> None:
        """`gone`: returns why the server will not respond again, or an empty string; called when it does not respond.
        `transport`: makes the transport in place of sockets. Raises ConfigError for a URL that cannot be used."""
        self.url = server_url(url.strip(), shown=f"url={url!r}")
        try:
            httpx.URL(self.url)
        except (httpx.InvalidURL, UnicodeError) as error:  # for example 256.1.1.1
            raise ConfigError(f"url={url!r} is not a URL: {error}") from error
        self.limit = limit or ChoiceLimit()
        self._headers = {**(headers or {}), **({"authorization": f"Bearer {api_key}"} if api_key else {})}
        self._retry = retry or RetryRule()
        self._gone = gone
        self._transport = transport or partial(ConnectionStack, self.url)
        self._was_reached = False
        self._http: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connections. A later request opens new ones."""
        http, self._http = self._http, None
        if http is not None and self._loop is asyncio.get_running_loop():
            await http.aclose()

    async def get(self, route: str, *, answer: type[Answer]) -> Answer:
        """Returns the decoded body of a GET. Raises MotetError for an error."""
        return _decoded(await self._sent_until_accepted("GET", route), answer)

    async def post(self, route: str, body: object, *, answer: type[Answer], num_choices: int = 0) -> Answer:
        """Returns the decoded body of a POST: see `send`. Raises MotetError for an error."""
        return _decoded(await self.send(route, body, num_choices=num_choices), answer)

    async def send(self, route: str, body: object, *, num_choices: int = 0) -> ServerAnswer:
        """Sends a body, which is encoded as JSON unless it is bytes, and returns the response, also for an error.

        `num_choices`: number of choices that the request generates, for the limit; 0 for a request that does not wait
        for it. Raises EngineDiedError if the server does not respond."""
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        if not num_choices:
            return await self._sent_until_accepted("POST", route, content=content)
        async with self.limit.hold(num_choices):
            response = await self._sent_until_accepted("POST", route, content=content)
        if response.is_success:
            self.limit.completed(num_choices)
        return response

    async def stream(self, route: str, body: object, *, num_choices: int = 1) -> AsyncGenerator[list[bytes], None]:
        """Yields the data of the server-sent events of a response: at a time, all events that have arrived together.

        The end of the stream (`[DONE]`) is not yielded. Raises MotetError for an error before the first event or in the
        middle of the stream, and EngineDiedError for a stream without an end."""
        content = msgspec.json.encode(body)
        async with self.limit.hold(num_choices):
            pauses = Pauses(self._retry)
            while True:
                try:
                    async with self._client().stream("POST", self.url + route, content=content) as response:
                        self._was_reached = True
                        if response.status_code < HTTPStatus.BAD_REQUEST:
                            async with aclosing(_events(response, url=self.url)) as received:
                                async for events in received:
                                    yield events
                            self.limit.completed(num_choices)
                            return
                        refusal = await _answer_of(response)
                except httpx.TransportError as error:
                    await self._after_broken(pauses, error)
                    continue
                if not await self._pause(pauses, refusal):
                    raise refusal.error

    async def _sent_until_accepted(self, method: str, route: str, *, content: bytes | None = None) -> ServerAnswer:
        pauses = Pauses(self._retry)
        while True:
            try:
                response = await self._client().request(method, self.url + route, content=content)
            except httpx.TransportError as error:
                await self._after_broken(pauses, error)
                continue
            self._was_reached = True
            answer = await _answer_of(response)
            if not await self._pause(pauses, answer):
                return answer

    async def _after_broken(self, pauses: "Pauses", error: httpx.TransportError) -> None:
        """Waits after a broken connection. Raises EngineDiedError if the server cannot come back in time."""
        if self._gone is not None and (reason := self._gone()):
            raise EngineDiedError(reason) from error
        self._was_reached = self._was_reached or not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        if not await pauses.before_next(None, is_busy=False, is_absent=not self._was_reached):
            how = "does not respond" if self._was_reached else "cannot be reached"
            raise EngineDiedError(f"{self.url} {how}: {error or type(error).__name__}") from error

    async def _pause(self, pauses: "Pauses", answer: ServerAnswer) -> bool:
        """Waits if the request should be sent again. Returns False for any other response."""
        verdict = verdict_on(answer.status, answer.body, repeat_faults=False)
        if verdict.is_final:
            return False
        if is_busy := verdict is ReplyVerdict.BUSY:
            self.limit.refused(asyncio.get_running_loop().time())
        return await pauses.before_next(answer.error.retry_after_s, is_busy=is_busy)

    def _client(self) -> httpx.AsyncClient:
        """Returns the connections of the running event loop. Connections of an earlier event loop are dropped."""
        loop = asyncio.get_running_loop()
        if self._http is None or self._loop is not loop:
            self._loop = loop
            self.limit = ChoiceLimit() if self._http is not None else self.limit
            self._http = httpx.AsyncClient(
                headers={"content-type": "application/json", **self._headers},
                timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
                transport=self._transport(),
            )
        return self._http


class Pauses:
    """The pauses of one request that is sent again."""

    def __init__(self, rule: RetryRule) -> None:
        self._rule = rule
        self._growing = growing_pauses(rule.first_pause_s, longest_s=MAX_PAUSE_S)
        self._since_s: dict[bool, float] = {}
        """Time of the first attempt at a busy server (True) and at a server that is down (False), since the other."""

    async def before_next(self, retry_after_s: int | None, *, is_busy: bool, is_absent: bool = False) -> bool:
        """Waits before the next attempt. Returns False if the time for attempts is over."""
        now_s = asyncio.get_running_loop().time()
        self._since_s.pop(not is_busy, None)
        since_s = self._since_s.setdefault(is_busy, now_s)
        pause_s = next(self._growing)
        if retry_after_s is not None:
            pause_s = max(retry_after_s, self._rule.first_pause_s)
        down_s = min(self._rule.absent_s, self._rule.down_s) if is_absent else self._rule.down_s
        if now_s + pause_s - since_s > (self._rule.busy_s if is_busy else down_s):
            return False
        await asyncio.sleep(pause_s)
        return True


async def _events(response: httpx.Response, *, url: str) -> AsyncGenerator[list[bytes], None]:
    splitter = EventSplitter()
    try:
        async for received in response.aiter_bytes():
            events = splitter.feed(received)
            for number, event in enumerate(events):
                if event == DONE:
                    if number:
                        yield events[:number]
                    return
                if event.startswith(b'{"error"'):
                    raise error_of(HTTPStatus.INTERNAL_SERVER_ERROR, event)
            if events:
                yield events
    except httpx.TransportError as error:
        raise EngineDiedError(
            f"{url} was lost in the middle of its response: {error or type(error).__name__}"
        ) from error
    raise EngineDiedError(f"{url} ended its response before it was complete")


async def _answer_of(response: httpx.Response) -> ServerAnswer:
    return ServerAnswer(response.status_code, await response.aread(), response.headers.get("retry-after"))


def _decoded(response: ServerAnswer, answer: type[Answer]) -> Answer:
    if not response.is_success:
        raise response.error
    return msgspec.json.decode(response.body, type=answer)


class ConnectionStack(httpx.AsyncBaseTransport):
    """Connections to one server, the last one used first.

    Each connection is a transport of its own: with all connections in one pool, httpx checks all of them at the start
    and at the end of each request, which took ten times as long with 256 connections."""

    def __init__(self, url: str) -> None:
        options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]  # a response can take hours without a byte
        known = [name for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL") if hasattr(socket, name)]  # not on all systems
        options += [(socket.IPPROTO_TCP, getattr(socket, name), PROBE_S) for name in known]
        is_secure = url.startswith("https:")
        self._make = partial(
            httpx.AsyncHTTPTransport,
            verify=httpx.create_ssl_context() if is_secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            proxy=proxy_of(url),
            socket_options=options,
            limits=httpx.Limits(max_connections=1, keepalive_expiry=KEEPALIVE_S),
        )
        self._all: list[httpx.AsyncHTTPTransport] = []
        self._idle: list[httpx.AsyncHTTPTransport] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if not self._idle:
            self._all.append(self._make())
            self._idle.append(self._all[-1])
        connection = self._idle.pop()
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            self._idle.append(connection)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)  # a transport has no other streams
        response.stream = ReturnedStream(response.stream, partial(self._idle.append, connection))
        return response

    async def aclose(self) -> None:
        for connection in self._all:
            await connection.aclose()


class ReturnedStream(httpx.AsyncByteStream):
    """The body of a response, at whose end the connection can be used again."""

    def __init__(self, stream: httpx.AsyncByteStream, on_close: Callable[[], None]) -> None:
        self._stream = stream
        self._on_close: Callable[[], None] | None = on_close

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        async for piece in self._stream:
            yield piece

    async def aclose(self) -> None:
        on_close, self._on_close = self._on_close, None
        try:
            await self._stream.aclose()
        finally:
            if on_close is not None:
                on_close()


def proxy_of(url: str) -> str | None:
    """Returns the proxy for a URL: the value of `http_proxy` or `https_proxy`, unless the host is a loopback address or
    in `no_proxy`."""
    parsed = httpx.URL(url)
    if parsed.host in LOOPBACK or proxy_bypass(parsed.host):
        return None
    return getproxies().get(parsed.scheme)

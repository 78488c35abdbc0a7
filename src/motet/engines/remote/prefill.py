"""A prefill server as an engine that prefills: one HTTP call a group, with token ids in and a ticket out.

1. `POST /inference/v1/generate`; a server without that route is asked at `/v1/completions` from then on
2. cancelling it closes the connection, by which the server knows that nobody wants the prompt any more and frees it;
   a ticket that was on its way at that moment is lost, and its lease expires
3. the ticket is given back through the side channel of its owner, not over HTTP (`release_through`)
4. `watch` asks `GET /status` all the time, so that a server that joins or returns is met before it is needed, one that
   is down is known to be before it is asked, and nobody waits for one that was cut off without a word
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable

import httpx
import msgspec

from motet.engines.base import NoGroup
from motet.engines.refusal import NO_SUCH_ROUTE
from motet.engines.remote.answers import RemoteStatus, failure_in, status_in, ticket_in
from motet.engines.remote.prefill_request import Route, prefill_request
from motet.engines.under_way import FarGroup, UnderWay
from motet.errors import EngineDiedError, EngineError, MotetError
from motet.ids import RequestId
from motet.transfer.ticket import Ticket, TransferAddress
from motet.types import EngineInfo, EngineStats, GenerateRequest, Role

logger = logging.getLogger(__name__)

Meet = Callable[[TransferAddress], Awaitable[None]]
"""Connects to a worker before it is needed. Raises MotetError if that fails."""

UP_WAIT_S = 5.0
DOWN_WAIT_S = 0.5
CONNECT_TIMEOUT_S = 2.0
STATUS_TIMEOUT_S = 5.0
"""A server in the middle of a long step answers late, and is not down for that."""
KEEPALIVE_S = 4.0
"""Shorter than a server keeps an idle connection, so that it never closes one that is just being used again."""

PREFILL_TIMEOUT = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
"""How long a prefill may take is for its caller to say."""
STATUS_TIMEOUT = httpx.Timeout(STATUS_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)

_NOT_IN_A_HEADER = re.compile(r"[^\x20-\x7e\x80-\xff]")


def prefill_client() -> httpx.AsyncClient:
    """For any number of calls at once: a question for the status must not wait behind prefills."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S)
    return httpx.AsyncClient(limits=limits)


class RemotePrefill:
    """An `Engine` that only prefills. The client belongs to who made it.

    `info` is that of the decode engine which will use the KV: both are engines of one model.
    """

    def __init__(
        self,
        url: str,
        *,
        info: EngineInfo,
        client: httpx.AsyncClient,
        release_through: Callable[[Ticket], Awaitable[None]],
        api_key: str | None = None,
    ) -> None:
        self.down = False
        """Whether it did not answer when it was last asked anything."""
        self._url = url.rstrip("/").removesuffix("/v1")
        self._server = f"the prefill server {self._url}"
        self._info = msgspec.structs.replace(info, role=Role.PREFILL, pid=None, transfer=None)
        self._client = client
        self._release_through = release_through
        self._authorization = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._route = Route.GENERATE
        self._seen_down = False
        self._complaint: str | None = None
        self._under_way = UnderWay[FarGroup](self._server)

    @property
    def info(self) -> EngineInfo:
        """`transfer` is the address last heard of."""
        return self._info

    def generate(self, request: GenerateRequest) -> NoGroup:
        return NoGroup(EngineError(f"{self._server} is asked for prefill only; it generates nothing for this server"))

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        """Raises EngineDiedError, OverloadedError or EngineError; never RequestError."""
        if self._seen_down:
            raise EngineDiedError(f"{self._server} is down")
        response = await self._under_way.call(self._ask_prefill(request, readers))
        self._check(response)
        ticket = ticket_in(response, self._server)
        self._heard_of(ticket.address)
        return ticket

    async def release(self, ticket: Ticket) -> None:
        await self._release_through(ticket)

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        """There is no choice here."""

    async def stats(self) -> EngineStats:
        """EngineDiedError if it does not tell; zeros if it is of a kind that keeps no such figures."""
        try:
            response = await self._ask_status()
            if response.status_code in NO_SUCH_ROUTE:
                return EngineStats()
            return self._status(response).stats()
        except MotetError as error:
            raise EngineDiedError(error.message) from error

    async def close(self) -> None:
        """Ends what is being prefilled; no more calls from now on."""
        await self._under_way.close()

    async def watch(
        self,
        meet: Meet,
        *,
        tell: Callable[[bool], None] = lambda up: None,
        wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Runs until it is cancelled. Calls `meet` with every address that is new, and again while that fails; `tell`
        after each look, with whether it answers."""
        met: TransferAddress | None = None
        while True:
            try:
                address = await self._look()
                if address is not None and address != met:
                    await meet(address)
                    met = address
                self._complain(None)
            except MotetError as error:
                self._complain(error.message)
                if self.down:
                    self._under_way.lost(error)
            self._seen_down = self.down
            tell(not self.down)
            await wait(DOWN_WAIT_S if self._complaint else UP_WAIT_S)

    async def _look(self) -> TransferAddress | None:
        """The address it has now; None if it has none, or is of a kind that does not tell."""
        response = await self._ask_status()
        if response.status_code in NO_SUCH_ROUTE:
            return None
        address = self._status(response).transfer
        if address is not None:
            self._heard_of(address)
        return address

    def _complain(self, complaint: str | None) -> None:
        """Once, not every time it is looked at."""
        if complaint == self._complaint:
            return
        self._complaint = complaint
        if complaint is None:
            logger.info("%s can be reached again", self._server)
        else:
            logger.warning("prefill from another server is disturbed: %s", complaint)

    def _heard_of(self, address: TransferAddress) -> None:
        if address != self._info.transfer:
            self._info = msgspec.structs.replace(self._info, transfer=address)

    def _status(self, response: httpx.Response) -> RemoteStatus:
        self._check(response)
        status = status_in(response, self._server)
        if status.dead:
            self.down = True
            raise EngineDiedError(f"{self._server} has lost its engine")
        return status

    def _check(self, response: httpx.Response) -> None:
        if response.status_code == httpx.codes.OK:
            return
        error = failure_in(response, self._server)
        self.down = isinstance(error, EngineDiedError)
        raise error

    async def _ask_status(self) -> httpx.Response:
        return await self._call(self._client.build_request("GET", self._url + "/status", timeout=STATUS_TIMEOUT))

    async def _ask_prefill(self, request: GenerateRequest, readers: int) -> httpx.Response:
        route = self._route
        body = prefill_request(route, _body(route, request), readers=readers)
        call = self._client.build_request(
            "POST",
            self._url + route,
            content=msgspec.json.encode(body),
            headers=_headers(request),
            timeout=PREFILL_TIMEOUT,
        )
        response = await self._call(call)
        if response.status_code in NO_SUCH_ROUTE and route is Route.GENERATE:
            self._route = Route.COMPLETIONS
            return await self._ask_prefill(request, readers)
        return response

    async def _call(self, call: httpx.Request) -> httpx.Response:
        if self._under_way.closed is not None:
            raise self._under_way.closed
        call.headers.update(self._authorization)
        try:
            response = await self._client.send(call)
        except (httpx.LocalProtocolError, httpx.UnsupportedProtocol) as error:
            raise EngineError(f"{self._server} cannot be asked: {error}") from error
        except httpx.HTTPError as error:
            self.down = True
            raise EngineDiedError(f"{self._server} did not answer: {str(error) or type(error).__name__}") from error
        self.down = False
        return response


def _body(route: Route, request: GenerateRequest) -> dict[str, object]:
    """What the two routes call a prompt of token ids and its place in the queue and the cache."""
    around: dict[str, object] = {}
    if request.cache_salt:
        around["cache_salt"] = request.cache_salt
    if request.priority:
        around["priority"] = request.priority
    if route is Route.GENERATE:
        return around | {"request_id": request.request_id, "token_ids": request.prompt, "sampling_params": {}}
    return around | {"prompt": request.prompt}


def _headers(request: GenerateRequest) -> dict[bytes, bytes]:
    names = {b"x-request-id": _printable(request.trace), b"x-session-id": _printable(request.session_id)}
    return {b"content-type": b"application/json"} | {name: value for name, value in names.items() if value}


def _printable(text: str) -> bytes:
    """A client's words as the value of a header: what no header may hold would fail the call."""
    return _NOT_IN_A_HEADER.sub("", text).strip(" ").encode("latin-1")

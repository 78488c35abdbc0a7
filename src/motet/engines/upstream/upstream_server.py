"""One text upstream: connections, keys, time-outs, the errors for its failures, its report and its abilities.

    no connection, or a lost one        EngineDiedError
    no data within the time limit       EngineSilentError
    unreadable answer                   EngineError
    401, 403                            EngineError, since it is not the client's fault; if the client's key was passed
                                        on, the same as any other 4xx
    other 4xx                           UpstreamRefusalError with the server's message: the client caused the refusal
    502, 504                            EngineDiedError: the proxy in front of the server cannot reach it
    503                                 OverloadedError
    other status, also redirects        EngineError that quotes the answer

Redirects are not followed, since their target would get the key.

The server gets the key that is configured for it, or the client's key if that is allowed, or no key. It never gets a
key of the gateway.

A probe determines the abilities of a model. It requests two choices of one token, streamed and not streamed:

    both answers have the indices 0 and 1              n is honoured
    any other answer, or a refusal                     n is not honoured: choices are requested one by one
    a server error, no answer, an unreadable answer    unknown: choices are requested one by one, and the probe is
                                                       repeated later

A refused probe is repeated with other fields, since a server can refuse a field instead of the number of choices:
`max_completion_tokens` instead of `max_tokens`, and a stream without `stream_options`.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeVar

import msgspec

from motet import errors
from motet.engine import WorkerState
from motet.engine_info import EngineInfo, EngineKind, ModelCard
from motet.engines.http import (
    MAX_ANSWER_BYTES,
    MAX_REPORT_BYTES,
    NO_SUCH_ROUTE,
    NOT_TAKEN,
    WRONG_KEY,
    Client,
    Reply,
    ServerCalls,
)
from motet.engines.openai import DONE, EventSplitter, ListedModel, ListedModels, read_json
from motet.engines.refusals import OpenAIError, Refusal, any_error_in
from motet.engines.upstream.bodies import read_chunk, refusal_of
from motet.engines.upstream.text_source import UNKNOWN_LENGTH, TextRoute
from motet.engines.wire import EngineReport, checked
from motet.ids import ModelName
from motet.settings.server_url import without_v1
from motet.types import Role

T = TypeVar("T")

MODELS = "/v1/models"
CONNECT_TIMEOUT_S = 5.0
REPORT_TIMEOUT_S = 2.0
END_S = 0.05
"""Time limit in seconds for the bytes after the end of a stream."""
PROBE_S = 20.0
"""Time limit in seconds for all probes of one model."""
CHOICES = 2
"""Number of choices that a probe requests."""
MAX_PROBE_BYTES = 2**20

PROMPTS: dict[TextRoute, tuple[str, object]] = {
    TextRoute.CHAT: ("messages", [{"role": "user", "content": "Hi"}]),
    TextRoute.COMPLETIONS: ("prompt", "Hi"),
}
LIMITS = {TextRoute.CHAT: ("max_tokens", "max_completion_tokens"), TextRoute.COMPLETIONS: ("max_tokens",)}


@dataclass(frozen=True, kw_only=True)
class UpstreamOptions:
    api_key: str | None = None
    """Key that is sent to the server instead of the client's."""
    pass_key: bool = False
    """True if the server gets the client's `Authorization` header. Only for gateways without keys of their own."""
    timeout_s: float = 300.0
    """Maximum time in seconds to the first byte of an answer (the first token of a stream, or the complete answer), and
    from one byte to the next. Comments that keep a connection alive count."""
    max_singles: int = 16
    """Maximum number of requests of one group at a time, if choices are requested one by one."""


class UpstreamReply:
    """An answer whose headers have arrived. Closing it before its end ends the request at the server."""

    def __init__(self, server: "UpstreamServer", reply: Reply) -> None:
        self.is_stream = reply.is_stream
        self._server = server
        self._reply = reply

    def close(self) -> None:
        self._reply.close()

    async def read(self) -> bytes:
        """Returns the bytes that have arrived; empty at the end."""
        return await self._server.in_time(self._reply.read(), self._server.options.timeout_s)

    async def read_all(self, *, max_bytes: int = MAX_ANSWER_BYTES) -> bytes:
        parts, num_bytes = [], 0
        while data := await self.read():
            parts.append(data)
            num_bytes += len(data)
            if num_bytes > max_bytes:
                raise errors.WorkerFaultError(f"{self._server.name} sent an answer of more than {max_bytes} bytes")
        return b"".join(parts)

    async def end(self) -> None:
        """Reads the few bytes after the end of a stream, so that the connection can be used again."""
        with contextlib.suppress(TimeoutError, errors.EngineDiedError):
            async with asyncio.timeout(END_S):
                while await self._reply.read():
                    pass


class UpstreamServer:
    """One server. Does not own the HTTP client."""

    def __init__(self, url: str, client: Client, *, options: UpstreamOptions | None = None, id: str = "") -> None:
        """`url`: with or without `/v1`; `id`: name of the server in messages for clients, instead of its URL."""
        self.url = without_v1(url)
        self.name = f"the upstream {id or self.url}"
        self.options = options or UpstreamOptions()
        self._passes_key = self.options.pass_key and not self.options.api_key
        self._calls = ServerCalls(
            self.url,
            client,
            name=self.name,
            api_key=self.options.api_key,
            refused=self._refused,
            connect_timeout_s=CONNECT_TIMEOUT_S,
        )

    async def post(self, path: str, body: bytes, *, headers: Mapping[str, str]) -> UpstreamReply:
        """Sends a request. Returns when the headers of the answer have arrived. `headers`: the client's headers, if
        any; the client's key is sent only if that is allowed. Raises the error for a refusal."""
        sent = headers if self._passes_key else {**headers, "authorization": ""}
        return UpstreamReply(self, await self.in_time(self._open(path, body, headers=sent), self.options.timeout_s))

    async def report(self) -> EngineReport:
        """Requests the server's list of models, and returns it as a report, which keepers get from every worker. The
        list has no facts about the engine, so the engine's fields have values that do not limit routing. Raises
        OtherServerError if the server refuses to list models or its answer is not such a list, EngineSilentError and
        EngineDiedError if it cannot be reached, and another EngineError if its answer cannot be used."""
        try:
            call = self._calls.call("GET", MODELS, timeout_s=None, max_bytes=MAX_REPORT_BYTES)
            body = await self.in_time(call, REPORT_TIMEOUT_S)
        except errors.UpstreamRefusalError as error:
            refused = f"{self.name} refused {MODELS} with {error.status}: {error.message}"
            raise errors.OtherServerError(refused) from error
        what = f"the list of models of {self.name}"
        listed = read_json(body, ListedModels, error=errors.OtherServerError, what=what).data
        if not listed:
            raise errors.EngineError(f"{self.name} lists no models")
        ids = {model.id for model in listed}
        cards = sorted((_card(model, ids) for model in listed), key=lambda card: card.parent is not None)
        report = EngineReport(
            version="",
            engine_id=f"texts at {self.url}",
            state=WorkerState.READY,
            info=EngineInfo(
                model=cards[0].name,
                max_model_len=cards[0].max_model_len,
                block_size=1,
                num_blocks=0,
                max_num_seqs=0,
                role=Role.BOTH,
                kind=EngineKind.OPENAI,
            ),
            models=tuple(cards),
        )
        return checked(report, self.name, texts=True)

    async def in_time(self, work: Coroutine[None, None, T], limit_s: float) -> T:
        """Awaits `work`. Raises EngineSilentError if it takes longer than `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                return await work
        except TimeoutError as error:
            raise errors.EngineSilentError(f"{self.name} sent no data for {limit_s:g} s") from error

    async def _open(self, path: str, body: bytes, *, headers: Mapping[str, str]) -> Reply:
        try:
            return await self._calls.open(path, body, headers=headers)
        except errors.EngineSilentError as error:  # a time-out of the connection: another server can be tried
            raise errors.EngineDiedError(error.message) from error

    def _refused(self, refusal: Refusal) -> errors.MotetError:
        text = "" if refusal.quoted.startswith(("{", "[")) else refusal.quoted  # JSON without an error
        status, error = refusal.status, any_error_in(refusal.body) or OpenAIError(text or refusal.phrase)
        quoted = f"{self.name} answered {status}: {error.message or refusal.phrase}"
        if status in WRONG_KEY and not self._passes_key:
            return errors.EngineError(f"{quoted}. It refused the key of this gateway, not the client's.")
        if status in (HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT):
            return errors.EngineDiedError(quoted)
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            return errors.OverloadedError(quoted, retry_after_s=refusal.retry_after_s or 1)
        if HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR:
            return refusal_of(error, status, retry_after_s=refusal.retry_after_s)
        if HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
            return errors.EngineError(f"{self.name} answered {status}: redirects are not followed; give its own URL")
        return errors.EngineError(quoted)


def _card(model: ListedModel, listed: set[str]) -> ModelCard:
    return ModelCard(
        name=ModelName(model.id),
        root=model.root or model.id,
        parent=ModelName(model.parent) if model.parent is not None and model.parent in listed else None,
        max_model_len=model.max_model_len or UNKNOWN_LENGTH,
    )


class RouteAbilities(msgspec.Struct, frozen=True, kw_only=True):
    """The abilities of a model on one route. The defaults are safe with any server."""

    exists: bool = True
    honours_n: bool = False
    """True if an answer has as many choices as requested."""
    takes_usage: bool = False
    """True if streams take `stream_options`."""


Abilities = Mapping[TextRoute, RouteAbilities]
"""Abilities of one model on one server, by route."""


async def probe(server: UpstreamServer, model: str, *, limit_s: float = PROBE_S) -> Abilities | None:
    """Determines the abilities of a model (see the module's docstring). Returns None if they stay unknown."""
    try:
        async with asyncio.timeout(limit_s):
            abilities = {route: await _Probe(server, model, route).ability() for route in TextRoute}
    except (errors.MotetError, TimeoutError):
        return None
    return abilities if any(ability.exists for ability in abilities.values()) else None


@dataclass(frozen=True)
class _Probe:
    """Determines the abilities of one model on one route."""

    server: UpstreamServer
    model: str
    route: TextRoute

    async def ability(self) -> RouteAbilities:
        """Raises MotetError if the abilities stay unknown."""
        # After two choices, one choice is requested, to determine if the number of choices was refused.
        for n, limit, usage in itertools.product((CHOICES, 1), LIMITS[self.route], (True, False)):
            requested = set(range(n))
            try:
                streamed = await self._ended(n, limit, usage=usage, stream=True)
                honoured = streamed == requested and await self._ended(n, limit, usage=usage, stream=False) == requested
            except errors.UpstreamRefusalError as error:
                if error.status in NO_SUCH_ROUTE:
                    return RouteAbilities(exists=False)
                if error.status not in NOT_TAKEN:
                    raise
            else:
                return RouteAbilities(honours_n=honoured and n > 1, takes_usage=usage)
        return RouteAbilities()

    async def _ended(self, n: int, limit: str, *, usage: bool, stream: bool) -> set[int]:
        """Returns the numbers of the choices that ended. `limit`: name of the field for the maximum number of tokens;
        `usage`: True if `stream_options` are sent."""
        name, prompt = PROMPTS[self.route]
        body = {"model": self.model, name: prompt, "n": n, limit: 1, "temperature": 1, "stream": stream}
        if stream and usage:
            body["stream_options"] = {"include_usage": True}
        reply = await self.server.post(self.route, msgspec.json.encode(body), headers={})
        try:
            if reply.is_stream is not stream:
                raise errors.EngineError(f"{self.server.name} does not stream as requested")
            answer = await reply.read_all(max_bytes=MAX_PROBE_BYTES)
        finally:
            reply.close()
        events = [event for event in EventSplitter().feed(answer) if event != DONE] if stream else [answer]
        pieces = [piece for event in events for piece in read_chunk(event)[0].pieces]
        return {piece.index for piece in pieces if piece.finish is not None}

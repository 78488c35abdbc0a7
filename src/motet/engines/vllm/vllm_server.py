"""The questions and requests of a gateway to a vLLM server.

After each of its starts the server is asked once what it offers; its version does not count:

1. `/health`, `/metrics` and `/v1/models` say how it is; another `process_start_time_seconds` is another start
2. it has `/inference/v1/generate` if that refuses an empty request with another error than 404
3. else `/v1/completions` must answer a request for one token with token ids

vLLM answers the same for a request that failed and for an engine that died. So after a failure we ask `/health`, and
`/metrics` for the time of the start, since a server that was started again meanwhile is healthy too.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import NoReturn, TypeVar

import msgspec

from motet.engines.http import (
    MAX_REPORT_BYTES,
    NOT_TAKEN,
    QUESTION_TIMEOUT_S,
    REPORT_TIMEOUT_S,
    Client,
    Reply,
    ServerCalls,
    header_text,
)
from motet.engines.openai import read_json
from motet.engines.vllm.report import (
    ServerStart,
    VLLMScrape,
    cards_in,
    event_source_in,
    report_of,
    scrape_of,
    version_in,
)
from motet.engines.vllm.requests import Dialect, KVParams, VLLMRequest, body_of, prefill_ask, prompt_ask
from motet.engines.vllm.vllm_wire import (
    KEY_HINT,
    VLLMPiece,
    VLLMReader,
    VLLMUsage,
    kv_params_in,
    prompt_logprobs_in,
    refused,
)
from motet.engines.wire import EngineReport, checked
from motet.errors import (
    EngineDiedError,
    EngineError,
    EngineSilentError,
    ModelNotFoundError,
    MotetError,
    OtherServerError,
    OverloadedError,
    RequestError,
)
from motet.ids import new_request_id
from motet.tracing.context import headers_of
from motet.types import Role, SamplingParams, TokenLogprob

T = TypeVar("T")

REFUSED_TOKENS = 10**9
PROBED = VLLMRequest(
    request_id="motet-probe",
    model="",  # the server's
    prompt=(1, 2),
    n=1,
    seed=None,
    sampling=SamplingParams(max_tokens=1, temperature=0.0, logprobs=1),
    stream=False,
)
"""The least that shows whether token ids come back."""


class _ProbedChoice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Probed(msgspec.Struct):
    choices: list[_ProbedChoice]


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class VLLMServer:
    """One server. The client belongs to whoever made it."""

    def __init__(
        self,
        url: str,
        client: Client,
        *,
        api_key: str | None = None,
        role: Role | None = None,
        id: str = "",
        verdict_timeout_s: float = QUESTION_TIMEOUT_S,
    ) -> None:
        """`role`: its use here, which vLLM does not know. `id`: names the server for clients in place of its URL.
        `verdict_timeout_s`: the time that a server has after a failure to answer how it is."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.name = f"the vLLM server {id or self.url}"
        self._id = id or self.url
        self._role = role
        self._verdict_timeout_s = verdict_timeout_s
        self.root = ""
        """The source of its own model: a folder there, or a name on the hub. Known after the first `report`."""
        self.dialect = Dialect.COMPLETIONS
        self._calls = ServerCalls(
            self.url, client, name=self.name, api_key=api_key, refused=lambda refusal: refused(refusal, self.name)
        )
        self._start: ServerStart | None = None
        self._times_lost = 0

    async def report(self, *, timeout_s: float = REPORT_TIMEOUT_S) -> EngineReport:
        """Asks how the server is. Raises EngineSilentError, EngineDiedError, OtherServerError if it is no vLLM server
        or sends no token ids, or another EngineError if it cannot be used."""
        try:
            return await self._report(timeout_s)
        except EngineSilentError:
            raise
        except EngineDiedError:
            self._times_lost += 1
            raise
        except OverloadedError as error:
            raise EngineSilentError(error.message) from error
        except (OtherServerError, RequestError) as error:
            raise OtherServerError(f"{self._id} is no vLLM server that takes tokens: {error.message}") from error

    async def open(self, ask: VLLMRequest) -> "VLLMAnswer":
        """Returns when the server has taken the request. Raises MotetError."""
        start = self._start
        body, headers = body_of(self.dialect, ask), _headers_of(ask)
        reply = await self._judged(self._calls.open(self.dialect, body, headers=headers))
        return VLLMAnswer(reply, VLLMReader(ask.sampling, server=self.name), judge=partial(self.judge, start=start))

    async def prefill(self, ask: VLLMRequest) -> list[KVParams]:
        """Computes the KV of the prompt, and returns one object for each request that may fetch it. Cancelling it
        closes the connection, which ends it there."""
        return kv_params_in(await self._whole(prefill_ask(ask)), self.name)

    async def prompt_logprobs(self, ask: VLLMRequest) -> tuple[TokenLogprob | None, ...]:
        """`ask.sampling.prompt_logprobs` of each token of the prompt; None for the first."""
        body = await self._whole(prompt_ask(ask))
        return prompt_logprobs_in(body, ask.prompt, k=ask.sampling.prompt_logprobs or 0)

    async def reject(self, params: KVParams, model: str, *, trace: str = "") -> bool:
        """Frees the blocks of a ticket on the server that made it. To do so it sends this server, which could use the
        ticket, a request that it must refuse; this server then tells the other. Returns True if it refused. Never
        raises."""
        request_id = new_request_id("release")
        body = {
            "model": model,
            "prompt": [1],
            "max_tokens": REFUSED_TOKENS,
            "kv_transfer_params": params,
            "request_id": request_id,
        }
        headers = {"x-request-id": _name(request_id, trace)}
        try:
            await self._calls.ask("POST", Dialect.COMPLETIONS, body=msgspec.json.encode(body), headers=headers)
        except MotetError as error:
            return isinstance(error, RequestError)
        return False

    async def tokenize(self, text: str, model: str) -> list[int] | None:
        """Returns the tokens without special ones; None if the server has no tokenizer."""
        body = msgspec.json.encode({"model": model, "prompt": text, "add_special_tokens": False})
        try:
            return read_json(await self._calls.ask("POST", "/tokenize", body=body), _Tokenized, what="it").tokens
        except EngineDiedError:
            raise
        except MotetError:
            return None

    async def judge(self, error: EngineError, *, start: ServerStart | None) -> NoReturn:
        """Raises `error`, or EngineDiedError if the engine failed and not only the request. `start`: the start of the
        server that got the request."""
        if type(error) is not EngineError:
            raise error
        try:
            await self._calls.ask("GET", "/health", timeout_s=self._verdict_timeout_s)
            scrape = scrape_of(await self._calls.ask("GET", "/metrics", timeout_s=self._verdict_timeout_s))
        except EngineDiedError as lost:
            raise type(lost)(error.message) from error
        except MotetError:
            raise error from None
        if start is None or start.engine_id == self._engine_id(scrape):
            raise error
        raise EngineDiedError(error.message) from error

    async def _report(self, timeout_s: float) -> EngineReport:
        await self._watch("/health", timeout_s)
        scrape = scrape_of(await self._watch("/metrics", timeout_s))
        listed = await self._calls.ask("GET", "/v1/models", timeout_s=timeout_s, max_bytes=MAX_REPORT_BYTES)
        cards = cards_in(listed)
        self.root = cards[0].root or cards[0].id
        engine_id = self._engine_id(scrape)
        if self._start is None or self._start.engine_id != engine_id:
            self._start = await self._meet(engine_id, cards[0].id)
        return checked(report_of(self.url, self._start, scrape=scrape, cards=cards, role=self._role), self.name)

    def _engine_id(self, scrape: VLLMScrape) -> str:
        """Names the start of the server. If it does not report the time, it gets a new name when it was lost and is
        back."""
        start = f"lost-{self._times_lost}" if scrape.start_s is None else f"{scrape.start_s:.3f}"
        return f"{self.url}@{start}"

    async def _watch(self, path: str, timeout_s: float) -> bytes:
        """Asks a route that vLLM answers without a key; a server that wants one there is no vLLM server."""
        try:
            return await self._calls.ask("GET", path, timeout_s=timeout_s, max_bytes=MAX_REPORT_BYTES)
        except EngineDiedError:
            raise
        except EngineError as error:
            raise OtherServerError(error.message) from error

    async def _meet(self, engine_id: str, model: str) -> ServerStart:
        version = version_in(await self._calls.ask("GET", "/version", max_bytes=MAX_REPORT_BYTES))
        try:
            events = event_source_in(await self._calls.ask("GET", "/kv_event_sources", max_bytes=MAX_REPORT_BYTES))
        except OtherServerError:
            events = None  # older servers do not report it
        if await self._has_generate():
            self.dialect = Dialect.GENERATE
        else:
            await self._check_completions(model)
            self.dialect = Dialect.COMPLETIONS
        return ServerStart(engine_id=engine_id, version=version, events=events)

    async def _has_generate(self) -> bool:
        """Returns True if the route is there: then it refuses an empty request, which costs nothing."""
        status = await self._calls.status(Dialect.GENERATE, b"{}")
        if status == HTTPStatus.UNAUTHORIZED:
            raise EngineError(f"{self.name} answered 401. {KEY_HINT}")
        return status in NOT_TAKEN

    async def _check_completions(self, model: str) -> None:
        """Raises OtherServerError if no token ids come back."""
        asked = body_of(Dialect.COMPLETIONS, replace(PROBED, model=model))
        body = await self._calls.ask("POST", Dialect.COMPLETIONS, body=asked)
        choices = read_json(body, _Probed, error=OtherServerError, what="the answer of /v1/completions").choices
        if not choices or choices[0].token_ids is None:
            raise OtherServerError("it sends no token ids at /v1/completions, and has no /inference/v1/generate")

    async def _whole(self, ask: VLLMRequest) -> bytes:
        body, headers = body_of(self.dialect, ask), _headers_of(ask)
        return await self._judged(self._calls.ask("POST", self.dialect, body=body, headers=headers, timeout_s=None))

    async def _judged(self, call: Awaitable[T]) -> T:
        """Awaits `call`. If the model is gone, it is not the client's error: it was there at the last report, adapters
        may be unloaded at any time, and another server may still have it."""
        start = self._start
        try:
            return await call
        except ModelNotFoundError as error:
            raise OverloadedError(f"{self.name} has the model no more: {error.message}") from error
        except EngineError as error:
            await self.judge(error, start=start)


class VLLMAnswer:
    """One answer as it streams. Closing it before its end ends the request there."""

    def __init__(
        self, reply: Reply, reader: VLLMReader, *, judge: Callable[[EngineError], Awaitable[NoReturn]]
    ) -> None:
        """`judge`: raises an error of the stream, or EngineDiedError if the engine has failed."""
        self._reply = reply
        self._reader = reader
        self._judge = judge

    async def read(self) -> list[VLLMPiece | VLLMUsage]:
        """Returns the items that have come, at least one; none at the end. Raises MotetError: EngineDiedError if the
        connection breaks."""
        while True:
            data = await self._reply.read()
            if not data:
                self._reader.close()
                return []
            try:
                items = self._reader.feed(data)
            except EngineError as error:
                await self._judge(error)
            if items:
                return items

    def close(self) -> None:
        """May be called at any time, twice too."""
        self._reply.close()


def _headers_of(ask: VLLMRequest) -> dict[str, str]:
    names = {"x-request-id": _name(ask.request_id, ask.trace), "x-session-id": ask.session_id}
    return {**names, **headers_of(ask.traceparent)}


def _name(request_id: str, trace: str) -> str:
    """Returns the name of a request. vLLM names it by `x-request-id`, and older servers refuse a name that is in use,
    so each request of a group has its own, which begins with the client's."""
    return "-".join(filter(None, map(header_text, (trace, request_id))))

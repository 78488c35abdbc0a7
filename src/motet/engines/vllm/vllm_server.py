"""The requests of a gateway to one vLLM server.

The routes of a server are detected once after each of its starts, regardless of its version:

1. `/health`, `/metrics` and `/v1/models` report its state; another `process_start_time_seconds` is another start.
2. It has `/inference/v1/generate` if that route refuses an empty request with an error other than 404.
   `/v1/completions/render` then shows the defaults of sampling fields, which the route does not apply.
3. Otherwise `/v1/completions` must answer a request for one token with token ids.

vLLM gives the same answer for a failed request and for a dead engine. So after a failure the gateway queries `/health`,
and `/metrics` for the start time, since a server that was restarted after the failure is healthy too.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import NamedTuple, NoReturn, TypeVar

import msgspec

from motet.engines.http import (
    CALL_TIMEOUT_S,
    MAX_REPORT_BYTES,
    NOT_TAKEN,
    REPORT_TIMEOUT_S,
    Client,
    Reply,
    ServerCalls,
    header_text,
)
from motet.engines.openai import ListedModel, read_json
from motet.engines.vllm.report import (
    ServerStart,
    VLLMScrape,
    cards_in,
    defaults_in,
    event_source_in,
    report_of,
    scrape_of,
    version_in,
)
from motet.engines.vllm.requests import (
    Dialect,
    KVParams,
    VLLMRequest,
    body_of,
    prefill_request,
)
from motet.engines.vllm.vllm_wire import (
    KEY_HINT,
    ScoredAnswer,
    VLLMPiece,
    VLLMReader,
    VLLMUsage,
    kv_params_in,
    refused,
)
from motet.engines.wire import EngineReport, checked
from motet.errors import (
    EngineDiedError,
    EngineError,
    EngineSilentError,
    ModelGoneError,
    ModelNotFoundError,
    MotetError,
    OtherServerError,
    OverloadedError,
    RequestError,
)
from motet.ids import new_request_id
from motet.loop_budget import batched_within_loop_budget
from motet.session_ids import SESSION_HEADER
from motet.settings.server_url import without_v1
from motet.tracing.context import headers_of
from motet.types import Role, SamplingParams, score_parts

T = TypeVar("T")

RENDER = "/v1/completions/render"
REFUSED_TOKENS = 10**9
ADAPTER_TIMEOUT_S = 120.0
"""Maximum time to load an adapter, which can be on a hub."""
ADAPTER_HINT = "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
PROBE = VLLMRequest(
    request_id="motet-probe",
    model="",  # the server's
    prompt=(1, 2),
    n=1,
    seed=None,
    sampling=SamplingParams(max_tokens=1, temperature=0.0, logprobs=1),
    stream=False,
)
"""The smallest request that shows whether a server returns token ids."""


class _ProbedChoice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Probed(msgspec.Struct):
    choices: list[_ProbedChoice]


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class ScoredReply(NamedTuple):
    """An answer with log-probabilities of the prompt."""

    parts: tuple[bytes, ...]
    """Log-probabilities of each prompt token but the first (None), as the parts of `PromptScores`."""
    items: list[VLLMPiece | VLLMUsage]
    """The complete choices, and the usage."""


class VLLMServer:
    """One server. Its HTTP client belongs to the caller."""

    def __init__(
        self,
        url: str,
        client: Client,
        *,
        api_key: str | None = None,
        role: Role | None = None,
        id: str = "",
        verdict_timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """`role` is the server's role in this cell, which vLLM does not know. `id` names the server to clients instead
        of its URL. `verdict_timeout_s` is the maximum time of a health check after a failure."""
        self.url = without_v1(url)
        self.name = f"the vLLM server {id or self.url}"
        self._id = id or self.url
        self._role = role
        self._verdict_timeout_s = verdict_timeout_s
        self.root = ""
        """Source of the base model: a folder on the server, or a Hugging Face model. Set by the first `report`."""
        self.dialect = Dialect.COMPLETIONS
        self._calls = ServerCalls(
            self.url, client, name=self.name, api_key=api_key, refused=lambda refusal: refused(refusal, self.name)
        )
        self._start: ServerStart | None = None
        self._times_lost = 0

    async def report(self, *, timeout_s: float = REPORT_TIMEOUT_S) -> EngineReport:
        """Returns the state of the server. Raises EngineSilentError, EngineDiedError, OtherServerError if it is not a
        vLLM server or sends no token ids, or another EngineError if it cannot be used."""
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
            raise OtherServerError(f"{self._id} is not a vLLM server that takes tokens: {error.message}") from error

    async def open(self, vllm_request: VLLMRequest) -> "VLLMAnswer":
        """Sends a request and returns when the server has accepted it. Raises MotetError."""
        start = self._start
        body, headers = body_of(self.dialect, vllm_request), _headers_of(vllm_request)
        reply = await self._diagnosed(self._calls.open(self.dialect, body, headers=headers))
        return VLLMAnswer(
            reply, VLLMReader(vllm_request.sampling, server=self.name), diagnose=partial(self.diagnose, start=start)
        )

    async def prefill(self, vllm_request: VLLMRequest) -> list[KVParams]:
        """Computes the KV of the prompt, and returns one object for each request that may fetch it. Cancelling closes
        the connection, which ends the request on the server."""
        return kv_params_in(await self._complete_answer(prefill_request(vllm_request)), self.name)

    async def scored(self, vllm_request: VLLMRequest) -> ScoredReply:
        """Returns the answer to a request without a stream that has `prompt_logprobs`."""
        answer = ScoredAnswer.read(await self._complete_answer(vllm_request))
        scores = answer.scores(vllm_request.prompt, k=vllm_request.sampling.prompt_logprobs or 0)
        parts = score_parts(map(msgspec.msgpack.encode, scores))
        read = tuple([part for (part,) in await batched_within_loop_budget(parts, 1)])
        return ScoredReply(read, VLLMReader(vllm_request.sampling, server=self.name).complete(answer))

    async def reject(self, params: KVParams, model: str, *, trace: str = "") -> bool:
        """Frees the blocks of an unused ticket on the server that made it: sends this server a request that has the
        ticket and that it must refuse (`REFUSED_TOKENS`). vLLM then releases the ticket. Returns True if the request
        was refused. Never raises."""
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
            await self._calls.call("POST", Dialect.COMPLETIONS, body=msgspec.json.encode(body), headers=headers)
        except MotetError as error:
            return isinstance(error, RequestError)
        return False

    async def load_adapter(self, name: str, path: str, *, in_place: bool) -> None:
        """Loads a LoRA adapter from a path on the server. Raises MotetError."""
        body: dict[str, object] = {"lora_name": name, "lora_path": path}
        await self._change_adapters("/v1/load_lora_adapter", body | ({"load_inplace": True} if in_place else {}))

    async def unload_adapter(self, name: str) -> None:
        await self._change_adapters("/v1/unload_lora_adapter", {"lora_name": name})

    async def _change_adapters(self, path: str, body: Mapping[str, object]) -> None:
        try:
            await self._calls.call("POST", path, body=msgspec.json.encode(body), timeout_s=ADAPTER_TIMEOUT_S)
        except OtherServerError as error:
            raise RequestError(f"{self.name} cannot change its adapters: {ADAPTER_HINT}") from error

    async def tokenize(self, text: str, model: str) -> list[int] | None:
        """Returns the token ids of a text without special tokens; None if the server has no tokenizer."""
        body = msgspec.json.encode({"model": model, "prompt": text, "add_special_tokens": False})
        try:
            return read_json(await self._calls.call("POST", "/tokenize", body=body), _Tokenized, what="it").tokens
        except EngineDiedError:
            raise
        except MotetError:
            return None

    async def diagnose(self, error: EngineError, *, start: ServerStart | None) -> NoReturn:
        """Raises `error`, or EngineDiedError if the engine failed and not only the request. `start` is the start of the
        server that took the request."""
        if type(error) is not EngineError:
            raise error
        try:
            await self._calls.call("GET", "/health", timeout_s=self._verdict_timeout_s)
            scrape = scrape_of(await self._calls.call("GET", "/metrics", timeout_s=self._verdict_timeout_s))
        except EngineDiedError as lost:
            raise type(lost)(error.message) from error
        except MotetError:
            raise error from None
        if start is None or start.engine_id == self._engine_id(scrape):
            raise error
        raise EngineDiedError(error.message) from error

    async def _report(self, timeout_s: float) -> EngineReport:
        await self._read_keyless("/health", timeout_s)
        scrape = scrape_of(await self._read_keyless("/metrics", timeout_s))
        listed = await self._calls.call("GET", "/v1/models", timeout_s=timeout_s, max_bytes=MAX_REPORT_BYTES)
        cards = cards_in(listed)
        self.root = cards[0].root or cards[0].id
        engine_id = self._engine_id(scrape)
        if self._start is None or self._start.engine_id != engine_id:
            self._start = await self._detect_routes(engine_id, cards[0])
        return checked(report_of(self.url, self._start, scrape=scrape, cards=cards, role=self._role), self.name)

    def _engine_id(self, scrape: VLLMScrape) -> str:
        """Returns an id for the current start of the server. A server that does not report its start time gets a new id
        when it returns after it was lost."""
        start = f"lost-{self._times_lost}" if scrape.start_s is None else f"{scrape.start_s:.3f}"
        return f"{self.url}@{start}"

    async def _read_keyless(self, path: str, timeout_s: float) -> bytes:
        """Reads a route that vLLM serves without a key: a server that requires one there is not a vLLM server."""
        try:
            return await self._calls.call("GET", path, timeout_s=timeout_s, max_bytes=MAX_REPORT_BYTES)
        except EngineDiedError:
            raise
        except EngineError as error:
            raise OtherServerError(error.message) from error

    async def _detect_routes(self, engine_id: str, card: ListedModel) -> ServerStart:
        version = version_in(await self._calls.call("GET", "/version", max_bytes=MAX_REPORT_BYTES))
        try:
            events = event_source_in(await self._calls.call("GET", "/kv_event_sources", max_bytes=MAX_REPORT_BYTES))
        except OtherServerError:
            events = None  # older servers do not report it
        defaults = None
        if await self._has_generate():
            self.dialect = Dialect.GENERATE
            defaults = await self._defaults(card)
        else:
            await self._check_completions(card.id)
            self.dialect = Dialect.COMPLETIONS
        return ServerStart(engine_id=engine_id, version=version, events=events, defaults=defaults)

    async def _defaults(self, card: ListedModel) -> dict[str, int | float] | None:
        """Returns the defaults of sampling fields in a rendered request, since `/inference/v1/generate` does not apply
        them. None for a server that does not render."""
        prompt = PROBE.prompt
        body = msgspec.json.encode({"model": card.id, "prompt": prompt, "max_tokens": None})
        try:
            rendered = await self._calls.call("POST", RENDER, body=body, max_bytes=MAX_REPORT_BYTES)
            return defaults_in(rendered, num_free=(card.max_model_len or 0) - len(prompt))
        except EngineDiedError:
            raise
        except MotetError:
            return None

    async def _has_generate(self) -> bool:
        """Returns True if the server has the route: then it refuses an empty request, which costs nothing."""
        status = await self._calls.status(Dialect.GENERATE, b"{}")
        if status == HTTPStatus.UNAUTHORIZED:
            raise EngineError(f"{self.name} answered 401. {KEY_HINT}")
        return status in NOT_TAKEN

    async def _check_completions(self, model: str) -> None:
        """Raises OtherServerError if the server returns no token ids."""
        probe = body_of(Dialect.COMPLETIONS, replace(PROBE, model=model))
        body = await self._calls.call("POST", Dialect.COMPLETIONS, body=probe)
        choices = read_json(body, _Probed, error=OtherServerError, what="the answer of /v1/completions").choices
        if not choices or choices[0].token_ids is None:
            raise OtherServerError("it sends no token ids at /v1/completions, and has no /inference/v1/generate")

    async def _complete_answer(self, vllm_request: VLLMRequest) -> bytes:
        body, headers = body_of(self.dialect, vllm_request), _headers_of(vllm_request)
        return await self._diagnosed(self._calls.call("POST", self.dialect, body=body, headers=headers, timeout_s=None))

    async def _diagnosed(self, call: Awaitable[T]) -> T:
        """Awaits `call`. A missing model is not the client's error: it existed at the last report, adapters can be
        unloaded at any time, and another server may still have it."""
        start = self._start
        try:
            return await call
        except ModelNotFoundError as error:
            raise ModelGoneError(f"{self.name} no longer has the model: {error.message}") from error
        except EngineError as error:
            await self.diagnose(error, start=start)


class VLLMAnswer:
    """The stream of one answer. Closing it before its end ends the request on the server."""

    def __init__(
        self, reply: Reply, reader: VLLMReader, *, diagnose: Callable[[EngineError], Awaitable[NoReturn]]
    ) -> None:
        """`diagnose` raises an error of the stream, or EngineDiedError if the engine has failed."""
        self._reply = reply
        self._reader = reader
        self._diagnose = diagnose

    async def read(self) -> list[VLLMPiece | VLLMUsage]:
        """Returns the items that have arrived, none at the end. Raises EngineDiedError if the connection breaks."""
        while True:
            data = await self._reply.read()
            if not data:
                self._reader.close()
                return []
            try:
                items = self._reader.feed(data)
            except EngineError as error:
                await self._diagnose(error)
            if items:
                return items

    def close(self) -> None:
        """Closes the connection. Can be called at any time, also twice."""
        self._reply.close()


def _headers_of(vllm_request: VLLMRequest) -> dict[str, str]:
    names = {
        "x-request-id": _name(vllm_request.request_id, vllm_request.trace),
        SESSION_HEADER: vllm_request.session_id,
    }
    return {**names, **headers_of(vllm_request.traceparent)}


def _name(request_id: str, trace: str) -> str:
    """Returns the id of a request. vLLM takes it from `x-request-id`, and older servers refuse the id of a running
    request, so each request of a group has its own, which starts with the client's."""
    return "-".join(filter(None, map(header_text, (trace, request_id))))

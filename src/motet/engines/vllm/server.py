"""A vLLM server as a gateway asks it: how it is, and what it generates.

What the server offers is found out by asking, never by its version, once for each of its starts:

1. `/health`, `/metrics` and `/v1/models` say how it is; another `process_start_time_seconds` is another start
2. it has `/inference/v1/generate` if that refuses an empty request instead of not being there
3. else it must send back token ids at `/v1/completions`, of one token that it is asked for

vLLM says the same of a request that failed and of an engine that died. So who is told of a failure asks `/health`, and
`/metrics` whether it is still the same start: a server that was started again meanwhile is healthy.
"""

from collections.abc import Awaitable
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import TypeVar

import aiohttp
import msgspec

from motet.engines.calls import QUESTION_TIMEOUT_S, REPORT_TIMEOUT_S, Calls, header_text
from motet.engines.refusal import NOT_TAKEN, Refusal
from motet.engines.vllm.answer import Answer
from motet.engines.vllm.ask import Ask, Dialect, body_of, prefill_ask, prompt_ask
from motet.engines.vllm.faults import KEY_HINT, refused
from motet.engines.vllm.listed import prompt_logprobs_in
from motet.engines.vllm.report import Card, Start, cards_in, event_source_in, report_of, version_in
from motet.engines.vllm.scrape import Scrape, scrape_of
from motet.engines.vllm.tickets import KVParams, kv_params_in
from motet.engines.vllm.wire import Reader
from motet.engines.wire import UNREADABLE, EngineReport
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
from motet.types import Role, SamplingParams, TokenLogprob

T = TypeVar("T")

REFUSED_TOKENS = 10**9
"""More than any model has room for."""
PROBED = Ask(
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
    """One server. The client (`motet.engines.calls.server_client`) belongs to who made it."""

    def __init__(
        self,
        url: str,
        client: aiohttp.ClientSession,
        *,
        api_key: str | None = None,
        role: Role | None = None,
        verdict_timeout_s: float = QUESTION_TIMEOUT_S,
    ) -> None:
        """`role`: what it is used for; vLLM does not tell. `verdict_timeout_s`: how long one that failed may take to
        say how it is."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.name = f"the vLLM server {self.url}"
        self._role = role
        self._verdict_timeout_s = verdict_timeout_s
        headers = {"content-type": "application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        self._calls = Calls(self.url, client, name=self.name, headers=headers, refused=self._refused)
        self._start: Start | None = None
        self._dialect = Dialect.COMPLETIONS
        self._root = ""
        self._times_lost = 0

    @property
    def root(self) -> str:
        """Where its own model came from: a folder there, or a name on the hub. Known after the first `report`."""
        return self._root

    @property
    def dialect(self) -> Dialect:
        """Known after the first `report`."""
        return self._dialect

    async def report(self, *, timeout_s: float = REPORT_TIMEOUT_S) -> EngineReport:
        """How it is. Raises EngineSilentError, EngineDiedError, OtherServerError if it is no vLLM server or one that
        sends no token ids, or another EngineError if it cannot be used."""
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
            raise OtherServerError(f"{self.url} is no vLLM server that takes tokens: {error.message}") from error

    async def open(self, ask: Ask, *, trace: str = "", session_id: str = "") -> Answer:
        """Returns when the server has taken the request. Raises MotetError."""
        headers = _headers(ask, trace, session_id)
        verdict = partial(self.verdict, start=self._start)
        response = await self._judged(self._calls.open(self._dialect, body_of(self._dialect, ask), headers=headers))
        return Answer(self.name, response, Reader(self._dialect, ask.sampling, server=self.name), verdict)

    async def prefill(self, ask: Ask, *, trace: str = "", session_id: str = "") -> list[KVParams]:
        """Computes the KV of the prompt; one object for each request that may fetch it. Cancelling it closes the
        connection, which ends it there."""
        return kv_params_in(await self._whole(prefill_ask(ask), trace, session_id), self.name)

    async def prompt_logprobs(self, ask: Ask, *, trace: str = "") -> tuple[TokenLogprob | None, ...]:
        """`ask.sampling.prompt_logprobs` of each token of the prompt; None for the first."""
        body = await self._whole(prompt_ask(ask), trace, "")
        return prompt_logprobs_in(body, ask.prompt, ask.sampling.prompt_logprobs or 0)

    async def reject(self, params: object, model: str) -> bool:
        """Frees what a ticket holds on the server that made it: this one, which could use it, is sent a request with it
        that it must refuse, and tells the other. Whether it refused. Never raises."""
        body = {
            "model": model,
            "prompt": [1],
            "max_tokens": REFUSED_TOKENS,
            "kv_transfer_params": params,
            "request_id": new_request_id("release"),
        }
        try:
            await self._calls.ask("POST", Dialect.COMPLETIONS, msgspec.json.encode(body))
        except RequestError:
            return True
        except MotetError:
            return False
        return False

    async def tokenize(self, text: str, model: str) -> list[int] | None:
        """Without special tokens. None: the server does not say, as one without a tokenizer of its own."""
        body = msgspec.json.encode({"model": model, "prompt": text, "add_special_tokens": False})
        try:
            answer = await self._calls.ask("POST", "/tokenize", body)
        except EngineDiedError:
            raise
        except MotetError:
            return None
        try:
            return msgspec.json.decode(answer, type=_Tokenized).tokens
        except UNREADABLE:
            return None

    async def verdict(self, error: MotetError, *, start: Start | None) -> MotetError:
        """What a failure comes from: of the request, or of the engine. `start`: which one was asked."""
        if type(error) is not EngineError:
            return error
        try:
            await self._calls.ask("GET", "/health", timeout_s=self._verdict_timeout_s)
            scrape = scrape_of(await self._calls.ask("GET", "/metrics", timeout_s=self._verdict_timeout_s))
        except EngineDiedError as lost:
            return type(lost)(error.message)
        except MotetError:
            return error
        same = start is None or start.engine_id == self._engine_id(scrape)
        return error if same else EngineDiedError(error.message)

    async def _report(self, timeout_s: float) -> EngineReport:
        await self._watch("/health", timeout_s)
        scrape = scrape_of(await self._watch("/metrics", timeout_s))
        cards = cards_in(await self._calls.ask("GET", "/v1/models", timeout_s=timeout_s))
        self._root = cards[0].root or cards[0].id
        engine_id = self._engine_id(scrape)
        if self._start is None or self._start.engine_id != engine_id:
            self._start = await self._meet(engine_id, cards[0])
        return report_of(self.url, self._start, scrape, cards, role=self._role)

    def _engine_id(self, scrape: Scrape) -> str:
        """Without a time of its start, one that was lost and is back is taken for another."""
        start = f"lost-{self._times_lost}" if scrape.start_s is None else f"{scrape.start_s:.3f}"
        return f"{self.url}@{start}"

    async def _watch(self, path: str, timeout_s: float) -> bytes:
        """What vLLM answers without a key; who asks for one there is another server."""
        try:
            return await self._calls.ask("GET", path, timeout_s=timeout_s)
        except EngineDiedError:
            raise
        except EngineError as error:
            raise OtherServerError(error.message) from error

    async def _meet(self, engine_id: str, card: Card) -> Start:
        """A start that nothing is known of."""
        version = version_in(await self._calls.ask("GET", "/version"))
        try:
            events = event_source_in(await self._calls.ask("GET", "/kv_event_sources"))
        except OtherServerError:
            events = None  # older servers do not tell
        if await self._has_generate():
            self._dialect = Dialect.GENERATE
        else:
            await self._check_completions(card.id)
            self._dialect = Dialect.COMPLETIONS
        return Start(engine_id=engine_id, version=version, events=events)

    async def _has_generate(self) -> bool:
        """An empty request is refused where the route is, and never costs anything."""
        status = await self._calls.status("POST", Dialect.GENERATE, b"{}")
        if status == HTTPStatus.UNAUTHORIZED:
            raise EngineError(f"{self.name} answered 401. {KEY_HINT}")
        return status in NOT_TAKEN

    async def _check_completions(self, model: str) -> None:
        """Raises OtherServerError if no token ids come back."""
        body = await self._calls.ask(
            "POST", Dialect.COMPLETIONS, body_of(Dialect.COMPLETIONS, replace(PROBED, model=model))
        )
        try:
            choices = msgspec.json.decode(body, type=_Probed).choices
        except UNREADABLE as error:
            raise OtherServerError(f"/v1/completions answers what cannot be read: {error}") from error
        if not choices or choices[0].token_ids is None:
            raise OtherServerError("it sends no token ids at /v1/completions, and has no /inference/v1/generate")

    async def _whole(self, ask: Ask, trace: str, session_id: str) -> bytes:
        headers = _headers(ask, trace, session_id)
        body = body_of(self._dialect, ask)
        return await self._judged(self._calls.ask("POST", self._dialect, body, headers=headers, timeout_s=None))

    async def _judged(self, call: Awaitable[T]) -> T:
        """It had the model when it was last asked, and adapters may be unloaded at any time: another server may have
        it still, so that is no error of the client's."""
        start = self._start
        try:
            return await call
        except ModelNotFoundError as error:
            raise OverloadedError(f"{self.name} has the model no more: {error.message}") from error
        except EngineError as error:
            if (judged := await self.verdict(error, start=start)) is error:
                raise
            raise judged from error

    def _refused(self, refusal: Refusal) -> MotetError:
        return refused(refusal, self.name)


def _headers(ask: Ask, trace: str, session_id: str) -> dict[str, str]:
    """vLLM names a request by `x-request-id`, and older ones refuse a name that is under way: so each request of a
    group has its own, which begins with the client's."""
    names = [header_text(name) for name in (trace, ask.request_id)]
    headers = {"x-request-id": "-".join(filter(None, names)), "x-session-id": header_text(session_id)}
    return {name: value for name, value in headers.items() if value}

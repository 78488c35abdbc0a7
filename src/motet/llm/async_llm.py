"""`AsyncLLM`: generation in an event loop, with a server of its own or a running one."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, Unpack

from motet.errors import ConfigError, EngineError, ModelNotFoundError, RequestError
from motet.llm.background import in_daemon_thread
from motet.llm.client import ServerClient
from motet.llm.outputs import RequestOutput, ScoreOutput
from motet.llm.own_server import START_TIMEOUT_S, LLMServer, ServerSettings
from motet.llm.prompts import (
    ChatFields,
    CheckedPrompt,
    Conversation,
    Prompt,
    chat_body,
    checked_continuations,
    checked_conversations,
    checked_prompts,
    one_prompt,
    params_for_each,
    send_order,
)
from motet.llm.requests import (
    LoRARequest,
    LoRARequests,
    PromptRequest,
    adapters_for_each,
    generate_one,
    load_adapters,
    stream_one,
)
from motet.llm.running import PromptRun
from motet.llm.sampling_params import PromptSeeds, SamplingParams
from motet.llm.tokenizers import load_tokenizer
from motet.llm.wire import ModelList, SentModel, SentScores, score_output

OnDone = Callable[[RequestOutput], None]


class AsyncLLM:
    """Generates with a server that it starts, or with a running server or gateway.

        async with AsyncLLM("smollm2", max_num_seqs=64) as llm:
            async for step in llm.stream("The sea is", SamplingParams(n=4)):
                for output in step.outputs:
                    print(output.index, output.text)

    With `url`, no server is started, and `model` can select one of its models. Otherwise `model` is a folder, a name on
    the Hugging Face Hub, or `smollm2`, and `settings` are the settings of `motet serve`. The server ends with `close`,
    with the context, or with this process.

    Raises ConfigError here for wrong settings. The server starts at the first call, or with the context: then
    StartupError and its subclasses say why it could not. All other methods raise `motet.errors.RequestError` for
    requests that cannot be answered, and `EngineError` if the server fails.

    An object can be used in one event loop after another, but in one at a time."""

    def __init__(
        self,
        model: str | None = None,
        *,
        url: str | None = None,
        api_key: str | None = None,
        admin_key: str | None = None,
        seed: int | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        **settings: object,
    ) -> None:
        """`admin_key`: key of the server's operators, for `lora_request` on a running server with keys. `seed`:
        determines the seeds of all prompts whose `SamplingParams.seed` is None, by their order. `start_timeout_s`:
        maximum time until the server is ready, after the download of the model."""
        self._seeds = PromptSeeds(seed)
        self._own: LLMServer | None = None
        self._model: str | None = None
        if url is None:
            if api_key is not None:
                raise ConfigError("api_key: it is for a running server, whose URL is missing: LLM(url=...)")
            given = {**settings, **({} if model is None else {"model": model}), "admin_key": admin_key}
            self._own = LLMServer(ServerSettings(given), start_timeout_s=start_timeout_s)
            self._client: ServerClient | None = None
        elif settings:
            raise ConfigError(f"{next(iter(settings))}: the server at {url} runs already, with its own settings")
        else:
            self._client = ServerClient(url, api_key=api_key)
            self._model = model
        self._api_key = api_key
        self.admin_key = admin_key if self._own is None else self._own.admin_key
        """Key of the server for the routes of operators and trainers; None if there is none, or if it is not known."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def url(self) -> str:
        """Base URL of the server. Empty before a server of its own has started."""
        return self._client.url if self._client is not None else ""

    @property
    def api_key(self) -> str | None:
        """Key of the server, for its other routes, such as `GET /metrics`. None if it needs none."""
        return self._api_key if self._own is None else self._own.api_key

    @property
    def own_server(self) -> LLMServer | None:
        """The server that this object has started; None with `url`."""
        return self._own

    async def start(self) -> None:
        """Starts the server, unless it runs already. Raises StartupError."""
        if self._own is not None and self._client is None:
            try:
                await in_daemon_thread(self._own.start)
            except asyncio.CancelledError:
                await asyncio.to_thread(self._own.close)
                raise
            self.connect()

    def connect(self) -> None:
        """Makes the client of an own server, which has started."""
        if self._own is not None and self._client is None:
            self._client = ServerClient(self._own.url, api_key=self._own.api_key, gone=self._own.gone)

    async def close(self) -> None:
        """Closes the connections, which ends all answers in progress, and ends the server that was started."""
        await self.disconnect()
        if self._own is not None:
            await asyncio.to_thread(self._own.close)

    async def disconnect(self) -> None:
        """Closes the connections. Later calls open new ones."""
        if self._client is not None:
            await self._client.aclose()

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
        lora_request: LoRARequests = None,
        priority: int = 0,
        on_done: OnDone | None = None,
    ) -> list[RequestOutput]:
        """Returns the answers to one or several prompts, in the order of the prompts.

        `prompts`: texts, lists of token ids, or mappings (`TextPrompt`, `TokensPrompt`). `sampling_params`: for all
        prompts, or one for each; None for the model's default values. `adapter`: name of a LoRA adapter of the server.
        `lora_request`: an adapter that is loaded if the server does not have it, for all prompts, or one for each.
        `priority`: lower goes first. `on_done`: called with the output of each prompt when it is complete.

        Raises the error of the first prompt that fails, after the others have been stopped."""
        run = await self.run(
            checked_prompts(prompts),
            sampling_params,
            adapter=adapter,
            lora_request=lora_request,
            priority=priority,
            on_done=on_done,
        )
        return _complete(await run.finish())

    async def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
        lora_request: LoRARequests = None,
        priority: int = 0,
        on_done: OnDone | None = None,
        **chat: Unpack[ChatFields],
    ) -> list[RequestOutput]:
        """Returns the answers to one or several conversations: see `generate`.

        `messages`: a list of messages in OpenAI's form, or a list of such lists. `chat`: the fields of `ChatFields`."""
        run = await self.run(
            checked_conversations(messages),
            sampling_params,
            adapter=adapter,
            lora_request=lora_request,
            priority=priority,
            on_done=on_done,
            chat=chat_body(chat),
        )
        return _complete(await run.finish())

    async def stream(
        self,
        prompt: Prompt | Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        **chat: Unpack[ChatFields],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the steps of the answers to one prompt or one conversation, as they are generated.

        Each step has the new text, tokens and log-probabilities of the choices that have some
        (`SamplingParams.output_kind` selects other steps). The text contains the tags of reasoning and tool calls. The
        last step has `finished`. Leaving the loop, or cancelling its task, ends the choices at once. `chat`: the fields
        of `ChatFields`, for a conversation."""
        checked, fields = one_prompt(prompt), chat_body(chat)
        _check_chat(checked, fields)
        requests = await self._requests(
            [checked], sampling_params, adapter=adapter, lora_request=lora_request, priority=priority, chat=fields
        )
        async with aclosing(stream_one(await self._connected(), requests[0])) as steps:
            async for step in steps:
                yield step

    async def score(
        self,
        prompt: Prompt | Conversation,
        continuations: Sequence[str | Sequence[int]],
        *,
        adapter: str | None = None,
        **chat: Unpack[ChatFields],
    ) -> ScoreOutput:
        """Returns the log-probabilities of continuations of one prompt or one conversation, which is computed once.

        `continuations`: texts or lists of token ids, none of them empty. docs/api.md explains how texts are
        tokenised. `chat`: the fields of `ChatFields`, for a conversation."""
        checked, fields, listed = one_prompt(prompt), chat_body(chat), checked_continuations(continuations)
        _check_chat(checked, fields)
        named = adapter or self._model
        sent: dict[str, object] = {} if named is None else {"model": named}
        if checked.messages is not None:
            sent |= {"messages": checked.messages, **fields}
        else:
            sent["prompt"] = checked.text if checked.token_ids is None else checked.token_ids
        if checked.cache_salt:
            sent["cache_salt"] = checked.cache_salt
        client = await self._connected()
        answer = await client.post(
            "/v1/score", {**sent, "continuations": listed}, answer=SentScores, num_choices=max(1, len(listed))
        )
        return score_output(answer)

    async def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters that apply if none are given: the values of the model's `generation_config.json`."""
        return SamplingParams(**((await self.model_entry()).default_sampling_params or {}))  # type: ignore[arg-type]

    async def model_entry(self) -> SentModel:
        """Returns the entry of the model in `GET /v1/models`. Raises ModelNotFoundError."""
        models = (await (await self._connected()).get("/v1/models", answer=ModelList)).data
        for model in models:
            if model.id == self._model or (self._model is None and model.parent is None):
                return model
        names = ", ".join(model.id for model in models)
        raise ModelNotFoundError(f"The server has no model {self._model or ''}. Available: {names}.", param="model")

    async def get_tokenizer(self) -> Any:
        """Returns transformers' tokenizer of the model, from the folder or the name from which the server loaded it."""
        entry = await self.model_entry()
        return await asyncio.to_thread(load_tokenizer, entry.root or entry.id)

    async def run(
        self,
        prompts: Sequence[CheckedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        adapter: str | None = None,
        lora_request: LoRARequests = None,
        priority: int = 0,
        on_done: OnDone | None = None,
        chat: Mapping[str, object] | None = None,
    ) -> "PromptRun[PromptRequest, RequestOutput]":
        """Returns a run of these prompts that has not started."""
        client = await self._connected()
        requests = await self._requests(
            prompts, sampling_params, adapter=adapter, lora_request=lora_request, priority=priority, chat=chat
        )
        return PromptRun(
            requests, lambda request: generate_one(client, request), order=send_order(prompts), on_done=on_done
        )

    async def _requests(
        self,
        prompts: Sequence[CheckedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        adapter: str | None,
        lora_request: LoRARequests,
        priority: int,
        chat: Mapping[str, object] | None,
    ) -> list[PromptRequest]:
        if sampling_params is None:
            sampling_params = await self.get_default_sampling_params()
        each = params_for_each(sampling_params, len(prompts))
        loras = adapters_for_each(lora_request, len(prompts))
        if any(loras):
            if adapter is not None:
                message = "Invalid 'adapter': give either adapter or lora_request."
                raise RequestError(message, param="adapter", code="invalid_value")
            client, admin_key = await self._connected(), self.admin_key or self._api_key
            await load_adapters(client, loras, base=self._model, admin_key=admin_key)
        models = [adapter or self._model if lora is None else lora.lora_name for lora in loras]
        return [
            PromptRequest(prompt=prompt, params=self._seeds.next(params), model=model, priority=priority, chat=chat)
            for prompt, params, model in zip(prompts, each, models, strict=True)
        ]

    async def _connected(self) -> ServerClient:
        await self.start()
        if self._client is None:
            raise EngineError("the server has not started")
        return self._client


def _check_chat(prompt: CheckedPrompt, fields: Mapping[str, object]) -> None:
    """Refuses fields of a chat for a prompt that is not a conversation."""
    if fields and prompt.messages is None:
        name = next(iter(fields))
        raise RequestError(f"Unsupported parameter: '{name}' is for conversations.", param=name)


def _complete(results: Sequence[RequestOutput | None]) -> list[RequestOutput]:
    outputs = [result for result in results if result is not None]
    if len(outputs) != len(results):
        raise asyncio.CancelledError
    return outputs

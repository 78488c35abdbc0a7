"""The bodies of requests, and the steps of one prompt: tokens of the prompt, then the answers.

The adapters of `LoRARequest`s are loaded before the prompts of a call, unless the server has them. A text is tokenised
by `/tokenize`, and a conversation is rendered by `/v1/chat/completions/render`, as the server does for its own routes
of texts and chats. Both then generate with `/inference/v1/generate`, whose log-probabilities have token ids and ranks.
Errors about the tokens of a prompt name the argument that the program has given."""

import re
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from motet.errors import RequestError
from motet.llm.client import ServerClient
from motet.llm.outputs import KeptPrompt, RequestOutput
from motet.llm.prompts import CheckedPrompt
from motet.llm.sampling_params import GENERATE_ONLY, RequestOutputKind, SamplingParams, sampling_body
from motet.llm.wire import DetokenizedText, GeneratedAnswer, GrowingOutput, ModelList, TokenizedText, request_output

GENERATE: Final = "/inference/v1/generate"
TOKEN_IDS: Final = "token_ids"
"""Field of the prompt in a request."""
PROMPT_TOKEN_IDS: Final = "prompt_token_ids"
"""Name of token ids in a program."""
RENDER: Final = "/v1/chat/completions/render"
NOT_SENT: Final = frozenset({"request_id", "stream", "stream_options", "token_offsets", "sampling_params"})
"""Members of a rendered conversation that a request has with its own values, or without."""

_decode_event = msgspec.json.Decoder(GeneratedAnswer).decode


@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter for the prompts of a call, with vLLM's fields. The server loads it when it is first used.

    Raises RequestError for a wrong value."""

    lora_name: str
    """Name of the adapter on the server. Two adapters cannot have the same name."""
    lora_int_id: int
    """Number from 1 on, which identifies an adapter in vLLM and has no effect here."""
    lora_path: str
    """Folder in PEFT's layout, on the machine of the server."""
    base_model_name: str | None = None
    """Base model of the adapter; None for the model of the `LLM`."""
    load_inplace: bool = False
    """True to load the adapter again at each call, in place of an adapter with this name."""

    def __post_init__(self) -> None:
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise _wrong_adapter("lora_int_id", f"it must be a whole number from 1 on, not {self.lora_int_id!r}")
        for name in ("lora_name", "lora_path"):
            if not isinstance(value := getattr(self, name), str) or not value:
                raise _wrong_adapter(name, f"it must be a text with at least one character, not {value!r}")

    @property
    def folder(self) -> Path:
        """Absolute path of the adapter."""
        return Path(self.lora_path).expanduser().absolute()

    def is_in(self, root: str) -> bool:
        """Returns True if `root` is the folder of the adapter."""
        return Path(root).resolve() == self.folder.resolve()


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""The adapter of all prompts of a call, or one for each prompt; None for the base model."""


def adapters_for_each(adapters: LoRARequests, count: int) -> list[LoRARequest | None]:
    """Returns the adapter of each prompt. Raises RequestError for another type or number of values, and for different
    adapters with the same name."""
    each = [*adapters] if isinstance(adapters, Sequence) else [adapters] * count
    if wrong := [one for one in each if not isinstance(one, LoRARequest | None)]:
        raise _wrong_adapter("lora_request", f"expected LoRARequest, or one for each prompt, not {repr(wrong[0])[:60]}")
    if len(each) != count:
        raise _wrong_adapter("lora_request", f"it has {len(each)} values, and there are {count} prompts")
    distinct = {one for one in each if one is not None}
    if len({one.lora_name for one in distinct}) < len({(one.lora_name, one.folder) for one in distinct}):
        raise _wrong_adapter("lora_request", "two adapters have the same lora_name")
    return each


async def load_adapters(
    client: ServerClient, adapters: Iterable[LoRARequest | None], *, base: str | None, admin_key: str | None
) -> None:
    """Loads adapters that the server does not have. `base`: base model of adapters that do not name it. Raises
    RequestError if the server refuses an adapter, or has another one with the same name."""
    models = (await client.get("/v1/models", answer=ModelList)).data
    roots = {model.id: model.root for model in models if model.parent is not None}
    async with ServerClient(client.url, api_key=admin_key) as admin:
        for adapter in dict.fromkeys(one for one in adapters if one is not None):
            name, folder = adapter.lora_name, adapter.folder
            if name in roots and not adapter.load_inplace:
                if not adapter.is_in(roots[name] or ""):
                    why = f"the server has loaded {name!r} from {roots[name]}, not from {folder}: choose another name"
                    raise _wrong_adapter("lora_name", why)
                continue
            fields = {"lora_name": name, "lora_path": str(folder), "load_inplace": adapter.load_inplace}
            if named := adapter.base_model_name or base:
                fields["base_model_name"] = named
            answer = await admin.send("/v1/load_lora_adapter", fields)
            if not answer.is_success and (error := answer.error).code != "adapter_exists":  # by a call at the same time
                raise error


def _wrong_adapter(param: str, why: str) -> RequestError:
    return RequestError(f"Invalid '{param}': {why}.", param=param, code="invalid_value")


@dataclass(frozen=True, kw_only=True)
class PromptRequest:
    """One prompt with everything that determines its answers."""

    prompt: CheckedPrompt
    params: SamplingParams
    model: str | None = None
    """Name of the model, or of an adapter; None for the only model of the server."""
    priority: int = 0
    chat: Mapping[str, object] | None = None
    """Fields of a chat in addition to its messages: tools, variables of the template, ..."""

    @property
    def shared_fields(self) -> dict[str, object]:
        """Fields that are next to `sampling_params` in a request."""
        fields = {
            "model": self.model,
            "cache_salt": self.prompt.cache_salt or None,
            "priority": self.priority or None,
            "keep_s": self.params.keep_s or None,
            "group": self.params.group,
        }
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class TokensRequestBody:
    """The body of a request for token ids, and the prompt as it is returned."""

    fields: Mapping[str, object]
    token_ids: list[int]
    text: str | None


async def body_of(client: ServerClient, request: PromptRequest) -> TokensRequestBody:
    """Returns the body of a request. A text is tokenised, and a conversation is rendered, by the server."""
    prompt, sampling, more = request.prompt, sampling_body(request.params), request.shared_fields
    mode = "text" if request.params.detokenize else "tokens"
    if prompt.messages is not None:
        return await _chat_body(client, request, sampling=sampling)
    if prompt.token_ids is not None:
        ids = [*prompt.token_ids]
    else:
        ids = (await client.post("/tokenize", {"prompt": prompt.text, **_named(request)}, answer=TokenizedText)).tokens
    if not ids:
        message = "Invalid 'prompt': it has no tokens; at least one is needed."
        raise RequestError(message, param="prompt", code="invalid_value")
    fields = {"token_ids": ids, "sampling_params": sampling, "output_mode": mode, **more}
    return TokensRequestBody(fields=fields, token_ids=ids, text=prompt.text)


async def _chat_body(
    client: ServerClient, request: PromptRequest, *, sampling: Mapping[str, object]
) -> TokensRequestBody:
    own = {name: value for name, value in sampling.items() if name in GENERATE_ONLY}
    shared = {name: value for name, value in sampling.items() if name not in GENERATE_ONLY}
    more = request.shared_fields
    body = {"messages": request.prompt.messages, **(request.chat or {}), **shared, **more}
    rendered = await client.post(RENDER, body, answer=dict[str, object])
    ids = msgspec.convert(rendered["token_ids"], list[int])
    mode = "derender" if request.params.detokenize else "tokens"
    kept = {name: value for name, value in rendered.items() if name not in NOT_SENT}
    rendered_sampling = msgspec.convert(rendered["sampling_params"], dict[str, object])
    fields = {**kept, **more, "sampling_params": {**rendered_sampling, **own}, "output_mode": mode}
    text = await client.post("/detokenize", {"tokens": ids, **_named(request)}, answer=DetokenizedText)
    return TokensRequestBody(fields=fields, token_ids=ids, text=text.prompt)


def _named(request: PromptRequest) -> dict[str, str]:
    return {} if request.model is None else {"model": request.model}


@contextmanager
def errors_of(prompt: CheckedPrompt) -> Iterator[None]:
    """Renames the field `token_ids` in errors of the server to the argument from which its value comes."""
    try:
        yield
    except RequestError as error:
        if error.param is None or not error.param.startswith(TOKEN_IDS):
            raise
        name = "messages" if prompt.messages is not None else "prompt" if prompt.token_ids is None else PROMPT_TOKEN_IDS
        message = re.sub(rf"\b{TOKEN_IDS}\b", name, error.message)
        raise error.reworded(message, param=error.param.replace(TOKEN_IDS, name, 1), others=error.others) from None


async def generate_one(client: ServerClient, request: PromptRequest) -> RequestOutput:
    """Returns the complete answers to one prompt."""
    body = await body_of(client, request)
    with errors_of(request.prompt):
        answer = await client.post(GENERATE, body.fields, answer=GeneratedAnswer, num_choices=request.params.n)
    output = request_output(answer, prompt=body.text, prompt_token_ids=body.token_ids)
    return with_kept(output, client, keep_s=request.params.keep_s)


def with_kept(output: RequestOutput, client: ServerClient, *, keep_s: float) -> RequestOutput:
    """Returns the output with the handle of its prompt, if the server keeps the prompt."""
    if not keep_s:
        return output
    return replace(output, kept=KeptPrompt(id=output.request_id, generate_more=partial(_more_of, client, first=output)))


async def _more_of(client: ServerClient, n: int, *, first: RequestOutput) -> RequestOutput:
    route = f"/v1/groups/{first.request_id}/more"
    answer = await client.post(route, {"n": n}, answer=GeneratedAnswer, num_choices=n)
    return request_output(answer, prompt=first.prompt, prompt_token_ids=first.prompt_token_ids)


async def stream_one(client: ServerClient, request: PromptRequest) -> AsyncGenerator[RequestOutput, None]:
    """Yields the steps of the answers to one prompt: see `AsyncLLM.stream`. The last step is finished."""
    kind = RequestOutputKind.DELTA if request.params.output_kind is None else request.params.output_kind
    is_delta, is_final = kind is RequestOutputKind.DELTA, kind is RequestOutputKind.FINAL_ONLY
    body = await body_of(client, request)
    mode = "text" if request.params.detokenize else "tokens"
    fields = {**body.fields, "output_mode": mode, "stream": True, "stream_options": {"include_usage": True}}
    fields.pop("parse_context", None)
    growing = GrowingOutput(prompt=body.text, prompt_token_ids=body.token_ids, keep=not is_delta)
    held: RequestOutput | None = None
    with errors_of(request.prompt):
        async with aclosing(client.stream(GENERATE, fields, num_choices=request.params.n)) as received:
            async for events in received:
                step = growing.add([*map(_decode_event, events)])
                if growing.num_ended >= request.params.n:
                    held = _merged(held, step)  # the usage, which comes at the end, belongs to the last step
                elif step.outputs and not is_final:
                    yield step if is_delta else growing.so_far(finished=False)
    if is_delta:
        last = replace(growing.add([]), outputs=[] if held is None else held.outputs, finished=True)
    else:
        last = growing.so_far(finished=True)
    yield with_kept(last, client, keep_s=request.params.keep_s)


def _merged(held: RequestOutput | None, step: RequestOutput) -> RequestOutput:
    return step if held is None else replace(step, outputs=[*held.outputs, *step.outputs])

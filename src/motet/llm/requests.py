"""The bodies of requests, and the steps of one prompt: tokens of the prompt, then the answers.

A text is tokenised by `/tokenize`, and a conversation is rendered by `/v1/chat/completions/render`, as the server does
for its own routes of texts and chats. Both then generate with `/inference/v1/generate`, whose log-probabilities have
token ids and ranks."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import msgspec

from motet.errors import RequestError
from motet.llm.client import ServerClient
from motet.llm.outputs import KeptPrompt, RequestOutput
from motet.llm.prompts import CheckedPrompt
from motet.llm.sampling_params import GENERATE_ONLY, RequestOutputKind, SamplingParams, sampling_body
from motet.llm.wire import DetokenizedText, GeneratedAnswer, GrowingOutput, TokenizedText, request_output

GENERATE: Final = "/inference/v1/generate"
RENDER: Final = "/v1/chat/completions/render"
NOT_SENT: Final = frozenset({"request_id", "stream", "stream_options", "token_offsets", "sampling_params"})
"""Members of a rendered conversation that a request has with its own values, or without."""

_decode_event = msgspec.json.Decoder(GeneratedAnswer).decode


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


async def generate_one(client: ServerClient, request: PromptRequest) -> RequestOutput:
    """Returns the complete answers to one prompt."""
    body = await body_of(client, request)
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

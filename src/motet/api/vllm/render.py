"""vLLM's routes that turn requests into token ids, as bodies for `/inference/v1/generate`:

POST /v1/chat/completions/render      a chat
POST /v1/messages/render              a chat in Anthropic's format
POST /v1/responses/render             a chat in the format of OpenAI's Responses
POST /v1/completions/render           each of several prompts, as a list

A trainer that renders a conversation and generates from its token ids gets the same tokens as the chat itself.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from msgspec.json import encode as json_bytes

from motet.api.anthropic import messages as anthropic
from motet.api.anthropic.messages_schema import MessagesRequest
from motet.api.generation.extensions import NamedRequest
from motet.api.generation.kv_params import PARAM, request_context
from motet.api.generation.plan import Plan
from motet.api.generation.request_fields import RequestFields
from motet.api.http.caller import Caller, caller_of
from motet.api.http.dialect import MESSAGES
from motet.api.http.failure import unsupported_parameter
from motet.api.http.routes import new_router, post
from motet.api.openai import responses as openai_responses
from motet.api.openai.chat_plan import chat_text, plan_chat
from motet.api.openai.chat_schema import ChatRequest
from motet.api.openai.completions import CompletionRequest, plan_completions
from motet.api.openai.responses_schema import ResponsesRequest
from motet.api.service import Service
from motet.api.vllm.parse_context import context_of
from motet.types import ANY_ANSWER, GenerateRequest

MoreFields = Callable[[], Mapping[str, object]]
"""Returns fields that a rendered request has in addition."""


def render_router(service: Service) -> APIRouter:
    router = new_router()

    @post(router, "/v1/chat/completions/render", body=ChatRequest, summary="A conversation as token ids")
    async def chat(body: ChatRequest, request: Request) -> Response:
        async with request_context(service, body, caller=_caller(body, request), num_choices=body.n) as context:
            plan = await plan_chat(service, body, context=context)
        text = None
        if body.return_token_offsets and body.prompt_token_ids is None:
            config, preparer = service.config, context.served.preparer
            text = (await chat_text(preparer, body, caller=context.caller, config=config)).text
        offsets = partial(_offsets, plan, body, number=0, text=text)
        return await _rendered_chat(plan, body, caller=context.caller, offsets=offsets)

    @post(router, f"{MESSAGES}/render", body=MessagesRequest, summary="A conversation for a message as token ids")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        caller = _caller(body, request)
        async with anthropic.as_chat(body).planned(service, request, prefix=anthropic.ID_PREFIX) as (plan, chat):
            return await _rendered_chat(plan, chat, caller=caller)

    @post(router, "/v1/responses/render", body=ResponsesRequest, summary="A conversation for a Response as token ids")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        caller, own = _caller(body, request), openai_responses
        async with own.as_chat(body).planned(service, request, prefix=own.ID_PREFIX) as (plan, chat):
            return await _rendered_chat(plan, chat, caller=caller)

    @post(router, "/v1/completions/render", body=CompletionRequest, summary="Prompts as token ids")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        for name, used in (("echo", body.echo), ("best_of", body.ranked)):
            if used:
                raise unsupported_parameter(name, "cannot be used here: the request is only rendered")
        async with request_context(service, body, caller=_caller(body, request), num_choices=body.n) as context:
            plan = await plan_completions(service, body, context=context)

        async def pieces() -> AsyncIterator[bytes]:
            """Yields one prompt after another, since with logit biases all prompts together can take 100 MB."""
            for number, group in enumerate(plan.groups):
                prompt = body.prompt[number]
                text = prompt if isinstance(prompt, str) else None
                offsets = partial(_offsets, plan, body, number=number, text=text)
                work = partial(_rendered_json, group, body, plan=plan, more=offsets)
                yield (b"," if number else b"[") + await context.caller.in_thread_if_long(work)
            yield b"]"

        return StreamingResponse(pieces(), headers=plan.capped_headers(), media_type="application/json")

    return router


async def _rendered_chat(plan: Plan, body: ChatRequest, *, caller: Caller, offsets: MoreFields = dict) -> Response:
    _check_renderable(plan, body)

    def more() -> Mapping[str, object]:
        return {**offsets(), "parse_context": context_of(body)}

    rendered = await caller.in_thread_if_long(partial(_rendered_json, plan.groups[0], body, plan=plan, more=more))
    return Response(rendered, headers=plan.capped_headers(), media_type="application/json")


def _offsets(
    plan: Plan, body: ChatRequest | CompletionRequest, *, number: int, text: str | None
) -> Mapping[str, object]:
    """Returns the characters [start, end) of each token of a prompt. `text`: None for a prompt that was sent as token
    ids. They are null without a text, and if the prompt encodes the text of a control token as plain text."""
    if not body.return_token_offsets:
        return {}
    if text is None:
        return {"token_offsets": None}
    ids, offsets = plan.served.tokenizer.offsets(text, add_special_tokens=bool(body.add_special_tokens))
    prompt = plan.groups[number].prompt
    part = slice(len(prompt)) if body.truncation_side == "right" else slice(len(ids) - len(prompt), None)
    return {"token_offsets": offsets[part] if tuple(ids[part]) == prompt else None}


def _caller(body: RequestFields, request: Request) -> Caller:
    if body.kv_transfer_params is not None:
        raise unsupported_parameter(PARAM, "cannot be used here: the request is only rendered")
    named = body.request_id if isinstance(body, NamedRequest) else None
    return caller_of(request, named=named, session=body.session_id, cache_salt=body.cache_salt)


def _check_renderable(plan: Plan, body: ChatRequest) -> None:
    """Refuses the one case in which the server that generates cannot know from the prompt how reasoning continues."""
    grammar = plan.groups[0].sampling.grammar
    if grammar is None or grammar.thinking is None:
        return
    known = plan.served.formats.thinking(plan.groups[0].prompt)
    if msgspec.structs.replace(grammar.thinking, budget=None) != known:
        raise unsupported_parameter("continue_final_message", "cannot be rendered for answers that follow a grammar")


def _rendered_json(
    group: GenerateRequest, body: ChatRequest | CompletionRequest, *, plan: Plan, more: MoreFields
) -> bytes:
    """Returns the body for `/inference/v1/generate`, without fields that have the default value there."""
    grammar = group.sampling.grammar
    sampling: dict[str, object] = msgspec.to_builtins(group.sampling, str_keys=True)
    thinking = None if grammar is None else grammar.thinking
    if grammar is not None and grammar.source != ANY_ANSWER:
        sampling["structured_outputs"] = grammar.request_field
    if thinking is not None and thinking.budget is not None:
        sampling["thinking_token_budget"] = thinking.budget.max_tokens
    if group.sampling.logprob_token_ids:
        del sampling["logprobs"]  # generate counts the named tokens itself
    for name in ("bad_word_ids", "grammar"):
        sampling.pop(name, None)
    if group.sampling.extra_args:
        sampling["extra_args"] = msgspec.Raw(group.sampling.extra_args.encode())
    for name in ("seed", "stop", "include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs_from"):
        if name in body.model_fields_set:
            sampling[name] = getattr(body, name)
    rendered = {
        "request_id": group.request_id,
        "model": plan.head.model,
        "token_ids": group.prompt,
        **more(),
        "sampling_params": sampling | ({"n": body.n} if body.n > 1 else {}),
        "stream": body.stream,
    }
    if thinking is not None:
        rendered["reasoning_ended"] = False
    if body.stream_options is not None:
        rendered["stream_options"] = body.stream_options.model_dump()
    rendered |= {name: getattr(body, name) for name in ("cache_salt", "keep_s", "priority") if getattr(body, name)}
    return json_bytes(rendered)

"""`POST /v1/chat/completions/render` and `POST /v1/completions/render`: a request as token ids, in vLLM's shape.

The answer is a body for `/inference/v1/generate`, and for completions a list with one for each prompt. A trainer that
renders a conversation and generates from its token ids gets the same tokens as the chat itself."""

import msgspec
from fastapi import APIRouter, Request, Response

from motet.api.generation.kv_params import PARAM, request_context
from motet.api.generation.plan import Plan
from motet.api.http.caller import Caller, caller_of
from motet.api.http.failure import unsupported_parameter
from motet.api.http.routes import json_response, new_router, post
from motet.api.openai.chat_plan import plan_chat
from motet.api.openai.chat_schema import ChatRequest
from motet.api.openai.completions import CompletionRequest, plan_completions
from motet.api.service import Service
from motet.types import GenerateRequest


def render_router(service: Service) -> APIRouter:
    router = new_router()

    @post(router, "/v1/chat/completions/render", body=ChatRequest, summary="A conversation as token ids")
    async def chat(body: ChatRequest, request: Request) -> Response:
        async with request_context(service, body, caller=_caller(body, request), num_choices=body.n) as context:
            plan = await plan_chat(service, body, context=context)
        (group,) = plan.groups
        return json_response(_rendered(group, body, plan=plan))

    @post(router, "/v1/completions/render", body=CompletionRequest, summary="Prompts as token ids")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        for name, used in (("echo", body.echo), ("best_of", body.ranked)):
            if used:
                raise unsupported_parameter(name, "has no place in a request of token ids")
        async with request_context(service, body, caller=_caller(body, request), num_choices=body.n) as context:
            plan = await plan_completions(service, body, context=context)
        return json_response([_rendered(group, body, plan=plan) for group in plan.groups])

    return router


def _caller(body: ChatRequest | CompletionRequest, request: Request) -> Caller:
    if body.kv_transfer_params is not None:
        raise unsupported_parameter(PARAM, "is for requests that are answered")
    return caller_of(request, session=body.session_id)


def _rendered(group: GenerateRequest, body: ChatRequest | CompletionRequest, *, plan: Plan) -> dict[str, object]:
    """Returns the body for `/inference/v1/generate`, without fields that have the default value there."""
    grammar = group.sampling.grammar
    if grammar is not None and grammar.thinking is not None:
        why = "cannot be rendered for a model that thinks before it answers"
        raise unsupported_parameter("tools" if body.form is None else body.form.param, why)
    sampling: dict[str, object] = msgspec.to_builtins(group.sampling, str_keys=True)
    if grammar is not None:
        sampling["structured_outputs"] = grammar.request_field
    if group.sampling.logprob_token_ids:
        del sampling["logprobs"]  # generate counts the named tokens itself
    sampling.pop("grammar", None)
    for name in ("seed", "stop", "include_stop_str_in_output", "skip_special_tokens"):
        if name in body.model_fields_set:
            sampling[name] = getattr(body, name)
    rendered = {
        "request_id": group.request_id,
        "model": plan.head.model,
        "token_ids": group.prompt,
        "sampling_params": sampling | ({"n": body.n} if body.n > 1 else {}),
        "stream": body.stream,
    }
    if body.stream_options is not None:
        rendered["stream_options"] = body.stream_options.model_dump()
    return rendered | {
        name: getattr(body, name) for name in ("cache_salt", "keep_s", "priority") if getattr(body, name)
    }

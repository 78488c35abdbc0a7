"""`POST /v1/chat/completions`: one prompt, n choices."""

from fastapi import APIRouter, Request, Response

from motet.api.answer_rules import check_reading, with_answer_rules
from motet.api.caller import Caller, caller_of
from motet.api.chat_body import ChatBody
from motet.api.chat_chunks import ChatChunks
from motet.api.chat_extras import ChatExtras
from motet.api.kv_params import Asked, read_kv_params
from motet.api.open_groups import GroupsAnswer, OpenGroups
from motet.api.plan import Plan, Wanted, check_counts, make_plan
from motet.api.prompts import chat_prompt
from motet.api.schema_chat import ChatRequest
from motet.api.service import Service
from motet.api.upstream_route import text_models_first
from motet.engines.upstream.base import TextRoute


def chat_router(service: Service) -> APIRouter:
    router = APIRouter(route_class=text_models_first(service, TextRoute.CHAT))

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        async with read_kv_params(service, body, num_choices=body.n) as asked:
            body = body.without_answer() if asked.kv_params.order else body
            return await _answer(service, body, chat_wanted(body, caller_of(request), asked))

    return router


async def _answer(service: Service, body: ChatRequest, wanted: Wanted) -> GroupsAnswer:
    plan = await plan_chat(service, body, wanted)
    writer = (ChatChunks if body.stream else ChatBody)(plan, wanted.served.tokenizer, chat_extras(body))
    return GroupsAnswer(OpenGroups(service, plan), writer)


async def plan_chat(service: Service, body: ChatRequest, wanted: Wanted) -> Plan:
    """A checked chat on its way to the engine, in whatever shape it will be answered."""
    check_reading(wanted.served, body)
    check_counts(service, 1, wanted)
    service.check_room(wanted.caller.client, num_groups=1, num_choices=body.n)
    prompt = await chat_prompt(wanted.served.preparer, body)
    return make_plan(service, [prompt], body, body, await with_answer_rules(wanted, body, prompt))


def chat_extras(body: ChatRequest) -> ChatExtras:
    return ChatExtras(
        num_top=body.num_logprobs,
        token_ids=body.return_token_ids,
        reasoning=body.include_reasoning,
        calls=body.tool_rules is not None,
    )


def chat_wanted(
    body: ChatRequest, caller: Caller, asked: Asked, *, prefix: str = "chatcmpl", prompt_param: str = "messages"
) -> Wanted:
    return Wanted(
        served=asked.served,
        prefix=prefix,
        caller=caller,
        kv_params=asked.kv_params,
        prompt_param=prompt_param,
        num_choices=body.n,
        default_max_tokens=None,
        logprobs=body.num_logprobs,
    )

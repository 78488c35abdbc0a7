"""`POST /v1/chat/completions`: one prompt, n choices."""

from fastapi import APIRouter, Request, Response

from motet.api.caller import Caller, caller_of
from motet.api.chat_body import ChatBody
from motet.api.chat_chunks import ChatChunks
from motet.api.kv_params import Asked, read_kv_params
from motet.api.open_groups import GroupsAnswer, OpenGroups
from motet.api.plan import Wanted, check_counts, make_plan
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
            return await _answer(service, body, _wanted(body, caller_of(request), asked))

    return router


async def _answer(service: Service, body: ChatRequest, wanted: Wanted) -> GroupsAnswer:
    check_counts(service, 1, wanted)
    service.check_room(wanted.caller.client, num_groups=1, num_choices=body.n)
    served = wanted.served
    prompt = await chat_prompt(served.preparer, body)
    plan = make_plan(service, [prompt], body, body, wanted)
    form = ChatChunks if body.stream else ChatBody
    writer = form(plan, served.tokenizer, num_top=body.num_logprobs, token_ids=body.return_token_ids)
    return GroupsAnswer(OpenGroups(service, plan), writer)


def _wanted(body: ChatRequest, caller: Caller, asked: Asked) -> Wanted:
    return Wanted(
        served=asked.served,
        prefix="chatcmpl",
        caller=caller,
        kv_params=asked.kv_params,
        prompt_param="messages",
        num_choices=body.n,
        default_max_tokens=None,
        logprobs=body.num_logprobs,
    )

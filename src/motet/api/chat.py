"""`POST /v1/chat/completions`: one prompt, n choices."""

from fastapi import APIRouter, Request

from motet.api.answer import Answer
from motet.api.caller import caller_of
from motet.api.chat_body import ChatBody
from motet.api.chat_chunks import ChatChunks
from motet.api.kv_params import KVParams, read_kv_params
from motet.api.plan import Wanted, check_counts, make_plan
from motet.api.prompts import chat_prompt
from motet.api.schema_chat import ChatRequest
from motet.api.service import Service


def chat_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Answer:
        async with read_kv_params(service, body.kv_transfer_params, num_choices=body.n) as params:
            return await _answer(service, body.without_answer() if params.order else body, request, params)

    return router


async def _answer(service: Service, body: ChatRequest, request: Request, params: KVParams) -> Answer:
    service.check_model(body.model)
    wanted = Wanted(
        prefix="chatcmpl",
        caller=caller_of(request),
        kv_params=params,
        prompt_param="messages",
        num_choices=body.n,
        default_max_tokens=None,
        logprobs=body.num_logprobs,
    )
    check_counts(service, 1, wanted)
    service.check_room(wanted.caller.client, num_groups=1, num_choices=body.n)
    prompt = await chat_prompt(service, body)
    plan = make_plan(service, [prompt], body, body, wanted)
    form = ChatChunks if body.stream else ChatBody
    writer = form(plan, service.tokenizer, num_top=body.num_logprobs, token_ids=body.return_token_ids)
    return Answer(service, plan, writer)

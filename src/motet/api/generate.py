"""`POST /inference/v1/generate`: token ids in, token ids out, in vLLM's shapes, so that other gateways can drive us."""

from fastapi import APIRouter, Request, Response

from motet.api.answer_rules import held_to
from motet.api.caller import Caller, caller_of
from motet.api.generate_body import TokensBody
from motet.api.generate_chunks import TokensChunks
from motet.api.kv_params import Asked, read_kv_params
from motet.api.open_groups import GroupsAnswer, OpenGroups
from motet.api.plan import Wanted, make_plan
from motet.api.schema_generate import TokensRequest
from motet.api.service import Service


def generate_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/inference/v1/generate")
    async def generate(body: TokensRequest, request: Request) -> Response:
        async with read_kv_params(service, body, num_choices=body.sampling_params.n) as asked:
            body = body.without_answer() if asked.kv_params.order else body
            return await _answer(service, body, _wanted(body, caller_of(request, named=body.request_id), asked))

    return router


async def _answer(service: Service, body: TokensRequest, wanted: Wanted) -> GroupsAnswer:
    served, sampling = wanted.served, body.sampling_params
    served.preparer.check_prompt(body.token_ids, param="token_ids")
    plan = make_plan(service, [body.token_ids], sampling, body, await held_to(wanted, sampling.form))
    groups = OpenGroups(service, plan)
    request_id = body.request_id or plan.head.id
    if body.stream:
        return GroupsAnswer(groups, TokensChunks(plan, request_id, num_top=sampling.logprobs))
    return GroupsAnswer(groups, TokensBody(plan, request_id, served.tokenizer, num_top=sampling.logprobs))


def _wanted(body: TokensRequest, caller: Caller, asked: Asked) -> Wanted:
    sampling = body.sampling_params
    return Wanted(
        served=asked.served,
        prefix="generate-tokens",
        caller=caller,
        kv_params=asked.kv_params,
        prompt_param="token_ids",
        num_choices=sampling.n,
        default_max_tokens=None,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        param="sampling_params.",
    )

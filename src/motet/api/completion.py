"""`POST /v1/completions`: several prompts, n choices of each."""

from fastapi import APIRouter, Request, Response

from motet.api.answer_rules import held_to
from motet.api.caller import Caller, caller_of
from motet.api.completion_body import CompletionBody
from motet.api.completion_chunks import CompletionChunks
from motet.api.echo import Echoes
from motet.api.kv_params import Asked, read_kv_params
from motet.api.open_groups import GroupsAnswer, GroupsWriter, OpenGroups
from motet.api.plan import Plan, Wanted, check_counts, make_plan
from motet.api.prompts import completion_prompts
from motet.api.schema_completion import DEFAULT_MAX_TOKENS, CompletionRequest
from motet.api.service import Service
from motet.api.upstream_route import text_models_first
from motet.engines.upstream.base import TextRoute


def completion_router(service: Service) -> APIRouter:
    router = APIRouter(route_class=text_models_first(service, TextRoute.COMPLETIONS))

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        async with read_kv_params(service, body, num_choices=body.num_drawn) as asked:
            body = body.without_answer() if asked.kv_params.order else body
            return await _answer(service, body, _wanted(body, caller_of(request), asked))

    return router


async def _answer(service: Service, body: CompletionRequest, wanted: Wanted) -> GroupsAnswer:
    num_prompts = len(body.prompt)
    check_counts(service, num_prompts, wanted)
    service.check_room(wanted.caller.client, num_groups=num_prompts, num_choices=num_prompts * wanted.num_choices)
    prompts = await completion_prompts(wanted.served.preparer, body.prompt, add_special_tokens=body.add_special_tokens)
    plan = make_plan(service, prompts, body, body, await held_to(wanted, body.form))
    return GroupsAnswer(OpenGroups(service, plan), _writer(plan, body))


def _wanted(body: CompletionRequest, caller: Caller, asked: Asked) -> Wanted:
    ranked = body.num_drawn > body.n
    return Wanted(
        served=asked.served,
        prefix="cmpl",
        caller=caller,
        kv_params=asked.kv_params,
        prompt_param="prompt",
        num_choices=body.num_drawn,
        count_param="best_of" if ranked else "n",
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=0 if body.logprobs is None and ranked else body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )


def _writer(plan: Plan, body: CompletionRequest) -> GroupsWriter:
    tokenizer, num_top, token_ids = plan.served.tokenizer, body.logprobs, body.return_token_ids
    echoes = Echoes(plan, body.prompt, tokenizer, num_top=num_top) if body.echo else None
    if body.stream:
        return CompletionChunks(plan, tokenizer, num_top=num_top, token_ids=token_ids, echoes=echoes)
    return CompletionBody(plan, tokenizer, num_sent=body.n, num_top=num_top, token_ids=token_ids, echoes=echoes)

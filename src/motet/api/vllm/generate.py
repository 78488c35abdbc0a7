"""`POST /inference/v1/generate`: token ids in, token ids out, in vLLM's shapes, so that third-party gateways can use
Motet as a worker."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec.json import encode as json_bytes

from motet.api.generation.answer_writer import GroupsWriter, usage_json, usage_shape
from motet.api.generation.chunks import ChunkShape, ChunkTemplate, ChunkWriter, finish_json, versions_before
from motet.api.generation.collect import (
    BodyShape,
    BodyWriter,
    CollectedAnswer,
    CollectedChoice,
    LogprobFields,
    around_choices,
    in_pieces,
)
from motet.api.generation.known_answers import answer_plan
from motet.api.generation.kv_params import RequestContext, request_context
from motet.api.generation.plan import Plan, RouteOptions, check_size, make_plan, with_grammar
from motet.api.generation.prompts import in_thread_if_long
from motet.api.generation.request_fields import num_listed
from motet.api.http.caller import caller_of
from motet.api.http.failure import invalid_value
from motet.api.http.routes import new_router, post
from motet.api.service import Service
from motet.api.vllm.generate_schema import GenerateSampling, StartedChoice, TokensRequest
from motet.text.choice import ChoiceEvent
from motet.text.logprobs import id_logprobs
from motet.text.text_group import GroupStep
from motet.types import ChoiceStart, LogprobsMode, TokenLogprob, Usage


def generate_router(service: Service) -> APIRouter:
    router = new_router()

    @post(router, "/inference/v1/generate", body=TokensRequest, summary="Token ids in, token ids out")
    async def generate(body: TokensRequest, request: Request) -> Response:
        caller = caller_of(request, named=body.request_id, session=body.session_id)
        async with request_context(service, body, caller=caller, num_choices=body.num_choices) as context:
            body = body.without_answer() if context.order else body
            plan = await _plan(service, body, context=context)

            def make_writer(plan: Plan, stream: bool) -> GroupsWriter:
                return tokens_writer(plan, body, stream=stream)

            return answer_plan(service, plan, writer=make_writer(plan, body.stream), more=make_writer)

    return router


async def _plan(service: Service, body: TokensRequest, *, context: RequestContext) -> Plan:
    sampling = body.sampling_params
    options = RouteOptions(
        context=context,
        streaming=body,
        prefix="generate-tokens",
        prompt_param="token_ids",
        num_choices=body.num_choices,
        count_param="sampling_params.n" if body.choices is None else "choices",
        default_max_tokens=None,
        logprobs=sampling.num_logprobs,
        logprobs_mode=None if sampling.logprobs_mode is None else LogprobsMode(sampling.logprobs_mode),
        prompt_logprobs=sampling.prompt_logprobs,
        param="sampling_params.",
        group=body.group,
    )
    check_size(service, 1, options=options)
    check = partial(context.served.preparer.check_prompt, body.token_ids, param="token_ids")
    await in_thread_if_long(check, len(body.token_ids))
    options = await with_grammar(options, sampling.form)
    plan = make_plan(service, [body.token_ids], sampling=sampling, request=body, options=options)
    if body.choices is None:
        return plan
    num_tokens = sum(len(choice.token_ids) for choice in body.choices)
    return await in_thread_if_long(partial(_with_choices, plan, body.choices), num_tokens)


def _with_choices(plan: Plan, choices: Sequence[StartedChoice]) -> Plan:
    """Returns the plan with these choices in place of new ones. Raises `RequestError` for one that cannot continue."""
    (group,) = plan.groups
    info, sampling, first = plan.served.info, group.sampling, group.choices[0].seed
    ends_at_eos = not sampling.ignore_eos or sampling.grammar is not None
    ending = {*sampling.stop_token_ids, *(info.eos_token_ids if ends_at_eos else ())}
    starts = []
    for number, choice in enumerate(choices):
        tokens, param = tuple(choice.token_ids), f"choices[{number}].token_ids"
        if len(tokens) >= sampling.max_tokens:
            why = f"it has {len(tokens)} tokens, and a choice can have {sampling.max_tokens} including these"
            raise invalid_value(param, why)
        for place, token in enumerate(tokens):
            if token >= info.vocab_size:
                why = f"the model's vocabulary of {info.vocab_size} has no token {token}"
                raise invalid_value(f"{param}[{place}]", why)
            if token in ending:
                raise invalid_value(f"{param}[{place}]", f"token {token} ends a choice, so it cannot continue")
        seed = first + choice.index if choice.seed is None else choice.seed
        starts.append(ChoiceStart(choice.index, seed % 2**64, tokens))
    seeded = group.seeded or any(choice.seed is not None for choice in choices)
    return replace(
        plan,
        groups=(msgspec.structs.replace(group, choices=tuple(starts), seeded=seeded),),
        rules=msgspec.structs.replace(plan.rules, client_sent_output=True),
    )


def tokens_writer(plan: Plan, body: TokensRequest, *, stream: bool) -> GroupsWriter:
    """Returns the writer of an answer in token ids."""
    if not stream:
        return BodyWriter(plan, TokensBody(plan, body))
    head = b'{"request_id":' + json_bytes(body.request_id or plan.head.id)
    template = ChunkTemplate(head, null_usage=True)
    return ChunkWriter(plan, TokensChunks(body, template), template=template, usage_json=usage_json)


def token_logprobs(logprobs: Sequence[TokenLogprob], sampling: GenerateSampling) -> LogprobFields | None:
    num_top = num_listed(sampling, sampling.num_logprobs)
    if num_top is None:
        return None
    return {"content": id_logprobs(logprobs, num_top=num_top, ranked=not sampling.logprob_token_ids)}


class TokensBody(BodyShape):
    """The body of an unstreamed answer."""

    def __init__(self, plan: Plan, body: TokensRequest) -> None:
        self._request_id = body.request_id or plan.head.id
        self._sampling = body.sampling_params
        self._token_ids = body.return_token_ids

    def body(self, answer: CollectedAnswer, usage: Usage) -> Sequence[bytes]:
        (group,) = answer.groups
        rest = {
            **({"prompt_token_ids": answer.plan.groups[0].prompt} if self._token_ids else {}),
            "prompt_logprobs": None,
            **answer.prompt_logprobs(0, self._sampling.prompt_logprobs),
            "kv_transfer_params": group.ticket,
            "usage": usage_shape(usage),
            **answer.reports(),
        }
        head = json_bytes({"request_id": self._request_id})[:-1]
        opening, closing = around_choices(head, rest)
        return in_pieces(opening, map(self._choice, group.choices), closing=closing)

    def logprobs(self, group: int, event: ChoiceEvent) -> LogprobFields | None:
        return token_logprobs(event.logprobs or (), self._sampling)

    def _choice(self, choice: CollectedChoice) -> dict[str, object]:
        return {
            "index": choice.index,
            "logprobs": None if choice.logprobs is None else choice.logprob_fields(),
            **choice.end_fields(),
            "token_ids": choice.token_ids,
            **choice.span_fields(),
        }


class TokensChunks(ChunkShape):
    """The chunks of a streamed answer. Events without tokens and without an end have no chunk."""

    def __init__(self, body: TokensRequest, template: ChunkTemplate) -> None:
        self._template = template
        self._prompt = b',"prompt_token_ids":' + json_bytes(body.token_ids) if body.return_token_ids else b""
        """The prompt's token ids, which only the first chunk has."""
        self._sampling = body.sampling_params

    def openings(self, step: GroupStep, indices: Sequence[int], *, closing: bytes) -> list[bytes]:
        return []

    def chunks(self, event: ChoiceEvent, group: int, *, closing: bytes) -> list[bytes]:
        if not (event.token_ids or event.finish):
            return []
        prompt, self._prompt = self._prompt, b""
        chunk = b'%b%d,"logprobs":%b,"finish_reason":%b,"token_ids":%b%b%b%b' % (
            self._template.opening,
            event.index,
            json_bytes(token_logprobs(event.logprobs or (), self._sampling)),
            finish_json(event),
            json_bytes(event.token_ids),
            versions_before(b"}]", event),
            prompt,
            closing,
        )
        return [chunk]

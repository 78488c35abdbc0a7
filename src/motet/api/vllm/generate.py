"""`POST /inference/v1/generate`: token ids in, token ids out, in vLLM's shapes, so that other gateways can drive us."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response

from motet.api.generation.answer import END, CountingWriter, GroupsWriter, spans_before, ticket_before
from motet.api.generation.collect import (
    LogprobFields,
    WholeChoice,
    WholeWriter,
    around_choices,
    in_pieces,
    usage_json,
    usage_shape,
)
from motet.api.generation.known_answers import answer_plan
from motet.api.generation.kv_params import RequestContext, request_context
from motet.api.generation.plan import Plan, RouteOptions, check_size, held_to, make_plan
from motet.api.generation.prompts import beside_the_loop
from motet.api.http.caller import caller_of
from motet.api.http.failure import invalid_value
from motet.api.http.routes import PostRoute, new_router, with_body
from motet.api.service import Service
from motet.api.vllm.generate_schema import GenerateSampling, StartedChoice, TokensRequest
from motet.text.choice import ChoiceEvent
from motet.text.logprobs import id_logprobs
from motet.text.text_group import GroupStep
from motet.types import ChoiceStart, LogprobsMode, TokenLogprob, Usage


def generate_router(service: Service) -> APIRouter:
    router = new_router()

    async def generate(body: TokensRequest, request: Request) -> Response:
        caller = caller_of(request, named=body.request_id, session=body.session_id)
        async with request_context(service, body, caller=caller, num_choices=body.num_choices) as context:
            body = body.without_answer() if context.order else body
            plan = await _plan(service, body, context=context)

            def write(plan: Plan, stream: bool) -> GroupsWriter:
                return (TokensChunks if stream else TokensBody)(plan, body)

            return answer_plan(service, plan, writer=write(plan, body.stream), more=write)

    handle = with_body(TokensRequest, generate)
    route = PostRoute("/inference/v1/generate", handle, body=TokensRequest, summary="Token ids in, token ids out")
    router.routes.append(route)
    return router


async def _plan(service: Service, body: TokensRequest, *, context: RequestContext) -> Plan:
    sampling = body.sampling_params
    options = RouteOptions(
        context=context,
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
    await beside_the_loop(check, len(body.token_ids))
    options = await held_to(options, sampling.form)
    plan = make_plan(service, [body.token_ids], sampling=sampling, around=body, options=options)
    if body.choices is None:
        return plan
    num_written = sum(len(choice.token_ids) for choice in body.choices)
    return await beside_the_loop(partial(_begun, plan, body.choices), num_written)


def _begun(plan: Plan, choices: Sequence[StartedChoice]) -> Plan:
    """Returns the plan with these choices in place of new ones. Raises `RequestError` for one that cannot go on."""
    (group,) = plan.groups
    info, sampling, first = plan.served.info, group.sampling, group.choices[0].seed
    ends_at_eos = not sampling.ignore_eos or sampling.grammar is not None
    ending = {*sampling.stop_token_ids, *(info.eos_token_ids if ends_at_eos else ())}
    starts = []
    for number, choice in enumerate(choices):
        written, param = tuple(choice.token_ids), f"choices[{number}].token_ids"
        if len(written) >= sampling.max_tokens:
            why = f"there are {len(written)}, and a choice may have {sampling.max_tokens} with those it had before"
            raise invalid_value(param, why)
        for place, token in enumerate(written):
            if token >= info.vocab_size:
                why = f"the model's vocabulary of {info.vocab_size} has no token {token}"
                raise invalid_value(f"{param}[{place}]", why)
            if token in ending:
                raise invalid_value(f"{param}[{place}]", f"token {token} ends a choice, so it cannot go on")
        seed = first + choice.index if choice.seed is None else choice.seed
        starts.append(ChoiceStart(choice.index, seed % 2**64, written))
    seeded = group.seeded or any(choice.seed is not None for choice in choices)
    return replace(
        plan,
        groups=(msgspec.structs.replace(group, choices=tuple(starts), seeded=seeded),),
        rules=msgspec.structs.replace(plan.rules, written_known=True),
    )


def token_logprobs(logprobs: Sequence[TokenLogprob], sampling: GenerateSampling) -> LogprobFields | None:
    num_top = sampling.listed(sampling.num_logprobs)
    if num_top is None:
        return None
    return {"content": id_logprobs(logprobs, num_top=num_top, ranked=not sampling.logprob_token_ids)}


class TokensBody(WholeWriter):
    """Token ids answered in one piece, in vLLM's shape."""

    def __init__(self, plan: Plan, body: TokensRequest) -> None:
        super().__init__(plan)
        self._request_id = body.request_id or plan.head.id
        self._sampling = body.sampling_params
        self._token_ids = body.return_token_ids

    def close(self, usage: Usage) -> Sequence[bytes]:
        (group,) = self._groups
        rest = {
            **({"prompt_token_ids": self._plan.groups[0].prompt} if self._token_ids else {}),
            "prompt_logprobs": None,
            **self.prompt_logprobs(0, self._sampling.prompt_logprobs),
            "kv_transfer_params": group.ticket,
            "usage": usage_shape(usage),
            **self.reports(),
        }
        head = msgspec.json.encode({"request_id": self._request_id})[:-1]
        opening, closing = around_choices(head, rest)
        return in_pieces(opening, map(self._choice, group.choices), closing=closing)

    def _logprobs_of(self, group: int, event: ChoiceEvent) -> LogprobFields | None:
        return token_logprobs(event.logprobs or (), self._sampling)

    def _choice(self, choice: WholeChoice) -> dict[str, object]:
        return {
            "index": choice.index,
            "logprobs": None if choice.logprobs is None else choice.logprob_fields(),
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids,
            **choice.span_fields(),
        }


class TokensChunks(CountingWriter):
    """Streamed token ids, in vLLM's shape: one choice a chunk, all chunks of a step in one piece."""

    def __init__(self, plan: Plan, body: TokensRequest) -> None:
        head = b'{"request_id":' + msgspec.json.encode(body.request_id or plan.head.id)
        super().__init__(head, plan, usage_json=usage_json)
        self._without_usage = b',"usage":null' + END
        self._prompt = b',"prompt_token_ids":' + msgspec.json.encode(body.token_ids) if body.return_token_ids else b""
        """The prompt's token ids, until the first chunk has told them."""
        self._sampling = body.sampling_params

    def feed(self, steps: Sequence[GroupStep], usage: Callable[[], Usage]) -> bytes:
        told = self._told(usage)
        self._note_reports(steps)
        return b"".join(
            self._chunk(event, ticket_before(self._closing(told, num_new=len(event.token_ids)), step.ticket))
            for step in steps
            for event in step.events
            if event.token_ids or event.finish
        )

    def _chunk(self, event: ChoiceEvent, closing: bytes) -> bytes:
        prompt, self._prompt = self._prompt, b""
        finish = b"null"
        if event.finish:
            finish = b'"%b","stop_reason":%b' % (event.finish.encode(), msgspec.json.encode(event.stop_reason))
        return b'%b%d,"logprobs":%b,"finish_reason":%b,"token_ids":%b%b%b%b' % (
            self._opening,
            event.index,
            msgspec.json.encode(token_logprobs(event.logprobs or (), self._sampling)),
            finish,
            msgspec.json.encode(event.token_ids),
            spans_before(b"}]", event),
            prompt,
            closing,
        )

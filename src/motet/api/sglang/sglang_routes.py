"""SGLang's routes, in its shapes, for trainers that know no other engine (slime, miles).

    POST /generate                    texts or token ids in, for clients; answers by the plans of our other routes
    POST /abort_request, ...          for trainers (`--rl`): other names for what `rollouts` does

A whole answer is an object, or a list of them where there are several prompts or choices, prompt by prompt. In a
stream each event has all of its choice that has come until then, as SGLang streams unless it is told otherwise.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
from fastapi import APIRouter, Request, Response

from motet.api.generation.answer import DONE, EVENTS
from motet.api.generation.collect import LogprobFields, WholeChoice, WholeGroup, WholeWriter, in_pieces
from motet.api.generation.known_answers import answer_plan
from motet.api.generation.kv_params import RequestContext, request_context
from motet.api.generation.plan import GROUP_CHARS, Plan, RouteOptions, check_size, held_to, make_plan
from motet.api.generation.prompts import beside_the_loop, completion_prompts
from motet.api.http.caller import caller_of
from motet.api.http.failure import names_table, renamed
from motet.api.http.routes import PostRoute, json_response, new_router, with_body
from motet.api.service import Service
from motet.api.sglang.sglang_schema import SglangAbort, SglangContinue, SglangPause, SglangRequest, SglangWeights
from motet.api.trainers.weight_routes import bring_weights
from motet.errors import NoWorkerError, RequestError
from motet.models.checkpoint import Checkpoint
from motet.text.choice import ChoiceEvent
from motet.text.logprobs import LOWEST
from motet.text.text_group import GroupStep
from motet.types import FIRST_VERSION, FinishReason, PauseMode, TokenLogprob, Usage

PAUSES = {"abort": PauseMode.ABORT, "in_place": PauseMode.KEEP, "retract": PauseMode.KEEP}
NAMES = names_table(
    (re.escape(there), here)
    for there, here in {
        "sampling_params.logprob_token_ids": "token_ids_logprob",
        "sampling_params.min_tokens": "sampling_params.min_new_tokens",
        "sampling_params.prompt_logprobs": "top_logprobs_num",
        "sampling_params.top_logprobs_num": "top_logprobs_num",
        "weight_dir": "model_path",
    }.items()
)
"""The names that fields have on our other routes, and those that they have here."""
Scored = list[object]
"""[log-probability, token id, text]; the text is null unless it was asked for."""


def sglang_router(service: Service) -> APIRouter:
    router = new_router()

    async def generate(body: SglangRequest, request: Request) -> Response:
        named = body.rid if isinstance(body.rid, str) else None
        caller = caller_of(request, named=named, session=body.session_id)
        async with request_context(service, body, caller=caller, num_choices=body.sampling_params.n) as context:
            plan = await _plan(service, body, context=context)
            make = partial(SglangEvents if body.stream else SglangBody, plan, body)
            writer = await beside_the_loop(make, GROUP_CHARS // 4 * plan.num_choices)
            return answer_plan(service, plan, writer=writer)

    handle = with_body(SglangRequest, generate)
    router.routes.append(PostRoute("/generate", handle, body=SglangRequest, summary="SGLang's way to ask"))
    _add_weights(router, service)
    _add_figures(router, service)
    return router


def _add_weights(router: APIRouter, service: Service) -> None:
    @router.post("/abort_request")
    async def abort_request(body: SglangAbort) -> Response:
        traces = None if body.abort_all else [body.rid]
        return json_response({"status": "aborted", "aborted": await service.opened(service.weights).abort(traces)})

    @router.post("/pause_generation")
    async def pause_generation(body: SglangPause | None = None) -> Response:
        await service.opened(service.weights).pause(PAUSES[(body or SglangPause()).mode])
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    @router.post("/continue_generation")
    async def continue_generation(body: SglangContinue | None = None) -> Response:
        await service.opened(service.weights).resume()
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    @router.post("/update_weights_from_disk")
    async def update_weights_from_disk(body: SglangWeights) -> Response:
        weights = service.opened(service.weights)
        if body.abort_all_requests:
            await weights.abort(None)
        checkpoint = Checkpoint.of(Path(body.model_path))
        update = await bring_weights(service, checkpoint, version=body.weight_version, field="model_path")
        told = f"Succeeded to update model weights. Weight version updated to {update.version}."
        return json_response({"success": True, "message": told, "num_paused_requests": 0})

    @router.get("/flush_cache")
    @router.post("/flush_cache")
    async def flush_cache() -> Response:
        """Groups under way keep their KV, so it never fails."""
        await service.opened(service.weights).forget_prefixes(anew=False)
        return Response("Cache flushed.\n", media_type="text/plain")


def _add_figures(router: APIRouter, service: Service) -> None:
    @router.get("/get_weight_version")
    async def get_weight_version() -> Response:
        return json_response({"weight_version": service.opened(service.weights).version})

    @router.get("/get_model_info")
    @router.get("/model_info")
    async def model_info() -> Response:
        version, served = service.opened(service.weights).version, service.only_model()
        told = {"model_path": served.root or served.name, "tokenizer_path": served.root or served.name}
        return json_response(
            {**told, "is_generation": True, "preferred_sampling_params": None, "weight_version": version}
        )

    @router.get("/v1/loads")
    async def loads() -> Response:
        """What is under way, in groups; a trainer asks it until all that it aborted has ended."""
        service.opened(service.weights)
        waiting, open_groups = service.admission.waiting, service.admission.open
        load = {"num_running_reqs": open_groups - waiting, "num_waiting_reqs": waiting, "num_total_reqs": open_groups}
        return json_response({"loads": [load]})


async def _plan(service: Service, body: SglangRequest, *, context: RequestContext) -> Plan:
    sampling = body.sampling
    options = RouteOptions(
        context=context,
        prefix="generate",
        prompt_param=body.prompt_param,
        num_choices=sampling.n,
        count_param="sampling_params.n",
        default_max_tokens=None,
        logprobs=body.top_logprobs_num if body.return_logprob else None,
        logprobs_param="top_logprobs_num",
        prompt_logprobs=body.top_logprobs_num if body.scores_prompt else None,
        prompt_only=sampling.prompt_only,
        param="sampling_params.",
    )
    given, preparer = body.given.prompts, context.served.preparer
    check_size(service, len(given), options=options)
    prompts = await completion_prompts(preparer, given, add_special_tokens=True, param=body.prompt_param)
    options = await held_to(options, sampling.form)
    make = partial(make_plan, service, prompts, sampling=sampling, around=body, options=options)
    try:
        plan = await beside_the_loop(make, GROUP_CHARS * len(prompts))
    except RequestError as error:
        raise renamed(error, NAMES) from error
    if isinstance(body.rid, list):
        named = zip(plan.groups, body.rid, strict=True)
        groups = tuple(msgspec.structs.replace(group, trace=rid) for group, rid in named)
        plan = replace(plan, groups=groups)
    return plan


class SglangBody(WholeWriter):
    """Answers in one piece, in SGLang's shape."""

    def __init__(self, plan: Plan, body: SglangRequest) -> None:
        super().__init__(plan)
        self._body = body
        self._tokenizer = plan.served.tokenizer

    def as_asked(self, error: RequestError) -> RequestError:
        return renamed(error, NAMES)

    def close(self, usage: Usage) -> Sequence[bytes]:
        answers = self._answers()
        if not self._body.in_list:
            return [msgspec.json.encode(next(answers))]
        return in_pieces(b"[", answers, closing=b"]")

    def _answers(self) -> Iterator[dict[str, object]]:
        for number, group in enumerate(self._groups):
            for choice in group.choices:
                yield self._answer(number, group, choice=choice)

    def _answer(self, number: int, group: WholeGroup, *, choice: WholeChoice) -> dict[str, object]:
        meta: dict[str, object] = {
            "id": self._id_of(number, choice.index),
            "finish_reason": _finish(choice),
            "prompt_tokens": len(self._plan.groups[number].prompt),
            "weight_version": self._version_of(choice),
            **self._logprobs(number, group, choice=choice),
            "completion_tokens": choice.num_tokens,
            "cached_tokens": 0 if group.prompt is None else group.prompt.cached_tokens,
            **choice.span_fields(),
        }
        return {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}

    def _version_of(self, choice: WholeChoice) -> str | None:
        """Returns the version of the weights that wrote last; while the choice is written, of those that write."""
        if choice.finish is not None:
            return choice.weight_versions[-1].version if choice.weight_versions else FIRST_VERSION
        try:
            return self._plan.served.info.weight_version
        except NoWorkerError:
            return None

    def _id_of(self, number: int, index: int) -> str:
        """The client's name for the request, with the place of the choice if there are several."""
        rid = self._body.rid or self._plan.head.id
        if isinstance(rid, list):
            return f"{rid[number]}_{index}" if self._plan.group_size > 1 else rid[number]
        return f"{rid}_{number * self._plan.group_size + index}" if self._body.in_list else rid

    def _logprobs(self, number: int, group: WholeGroup, *, choice: WholeChoice) -> dict[str, object]:
        if not self._body.return_logprob:
            return {}
        told: dict[str, object] = {"input_token_logprobs": []}
        scored = group.prompt.logprobs if group.prompt is not None else None
        if self._body.scores_prompt and scored is not None:
            told = self._of_prompt(scored, first=self._plan.groups[number].prompt[0])
        answered = self._fields(())
        return {**told, **answered, **choice.logprob_fields(), "output_token_logprobs_length": choice.num_logprobs}

    def _of_prompt(self, scored: Sequence[TokenLogprob | None], *, first: int) -> dict[str, object]:
        """`first`: the first token of the prompt, which has no log-probability."""
        told: dict[str, object] = {
            "input_token_logprobs": [
                [None, first, None] if one is None else self._scored(one.token_id, one.logprob) for one in scored
            ]
        }
        if self._body.top_logprobs_num:
            told["input_top_logprobs"] = [None if one is None else self._top(one) for one in scored]
        return told

    def _logprobs_of(self, group: int, event: ChoiceEvent) -> LogprobFields | None:
        return self._fields(event.logprobs or ()) if self._body.return_logprob else None

    def _fields(self, logprobs: Sequence[TokenLogprob]) -> dict[str, list[Scored] | list[list[Scored]]]:
        body = self._body
        fields: dict[str, list[Scored] | list[list[Scored]]] = {
            "output_token_logprobs": [self._scored(one.token_id, one.logprob) for one in logprobs]
        }
        if body.top_logprobs_num:
            fields["output_top_logprobs"] = [self._top(one) for one in logprobs]
        if wanted := body.token_ids_logprob:
            values = [dict(one.top) for one in logprobs]
            fields["output_token_ids_logprobs"] = [[self._scored(id, value[id]) for id in wanted] for value in values]
        return fields

    def _top(self, one: TokenLogprob) -> list[Scored]:
        return [self._scored(id, logprob) for id, logprob in one.top[: self._body.top_logprobs_num]]

    def _scored(self, token_id: int, logprob: float) -> Scored:
        text = self._tokenizer.token_text(token_id) if self._body.return_text_in_logprobs else None
        return [max(logprob, LOWEST), token_id, text]


class SglangEvents(SglangBody):
    """A stream in SGLang's shape: each event of a choice has all of it that has come."""

    content_type = EVENTS
    streams = True

    def feed(self, steps: Sequence[GroupStep], usage: Callable[[], Usage]) -> bytes:
        super().feed(steps, usage)
        return b"".join(self._event(step.group, event.index) for step in steps for event in step.events)

    def close(self, usage: Usage) -> Sequence[bytes]:
        return [DONE]

    @property
    def is_long(self) -> bool:
        return False

    def _event(self, number: int, index: int) -> bytes:
        group = self._groups[number]
        told = self._answer(number, group, choice=group.choice(index).so_far())
        if self._body.in_list:
            told["index"] = number * self._plan.group_size + index
        return b"data: %b\n\n" % msgspec.json.encode(told)


def _finish(choice: WholeChoice) -> dict[str, object] | None:
    """Returns why a choice has ended; None while it has not."""
    match choice.finish:
        case None:
            return None
        case FinishReason.LENGTH:
            return {"type": "length", "length": choice.num_tokens}
        case FinishReason.ABORT:
            return {"type": "abort", "message": "The request was aborted.", "status_code": None, "err_type": None}
        case _:
            matched = choice.last_token if choice.stop_reason is None else choice.stop_reason
            return {"type": "stop", "matched": matched}

"""SGLang's `POST /generate`, in its shapes: texts or token ids in, with the plans of the other routes.

An unstreamed answer is an object, or a list of objects for several prompts or choices, prompt by prompt. In a stream
each event has the choice so far from its start, which is SGLang's default."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response

from motet.api.generation.answer_writer import DONE, GroupsWriter, OncePerPrompt, undivided
from motet.api.generation.collect import (
    BodyShape,
    BodyWriter,
    CollectedAnswer,
    CollectedChoice,
    CollectedGroup,
    LogprobFields,
)
from motet.api.generation.json_pieces import Buffer, encode_answer, encode_arrays, encode_json
from motet.api.generation.known_answers import answer_plan
from motet.api.generation.kv_params import RequestContext, request_context
from motet.api.generation.plan import (
    GROUP_CHARS,
    Plan,
    RouteOptions,
    check_prompt_logprobs,
    check_size,
    joined_plans,
    make_plan,
    with_grammar,
)
from motet.api.generation.prompts import completion_prompts
from motet.api.http.caller import caller_of
from motet.api.http.failure import invalid_value, names_table, renamed
from motet.api.http.routes import new_router, post
from motet.api.service import Service
from motet.api.sglang.sglang_schema import SglangRequest
from motet.engine_info import FIRST_VERSION
from motet.errors import NoWorkerError, RequestError
from motet.text.choice import ChoiceEvent, WeightSpan
from motet.text.logprobs import LOWEST
from motet.text.text_group import GroupStep
from motet.types import FinishReason, PromptReport, SamplingParams, TokenLogprob, Usage

NAMES = names_table(
    (
        (r"(?:sampling_params(?:\[\d+\])?\.)?logprob_token_ids", "token_ids_logprob"),
        (r"sampling_params(\[\d+\])?\.max_tokens", r"sampling_params\1.max_new_tokens"),
        (r"sampling_params(\[\d+\])?\.min_tokens", r"sampling_params\1.min_new_tokens"),
        (r"sampling_params(?:\[\d+\])?\.(?:prompt_logprobs|top_logprobs_num)", "top_logprobs_num"),
    )
)
"""The names of fields on other routes, and their names on this one."""
MAX_STREAMED_BYTES = 256 * 1024
"""Maximum size of the last events of all choices of a stream together. Each event repeats its choice so far. So the
time of a step grows with the length of the choices, up to 1 ms at this limit, and the size of the stream grows with its
square."""
EVENT_TOKEN_BYTES, EVENT_LOGPROB_BYTES = 12, 40
"""Estimated size of an output token, and of each of its log-probabilities, in an event."""
ScoredToken = list[object]
"""[log-probability, token id, text]; the text is null unless the request has `return_text_in_logprobs`."""


def sglang_generate_router(service: Service) -> APIRouter:
    router = new_router()

    @post(router, "/generate", body=SglangRequest, summary="SGLang's native generation")
    async def generate(body: SglangRequest, request: Request) -> Response:
        named = body.rid if isinstance(body.rid, str) else None
        caller = caller_of(request, named=named, session=body.session_id, cache_salt=body.cache_salt)
        async with request_context(service, body, caller=caller, num_choices=body.n) as context:
            plan = await _plan(service, body, context=context)
            writer = await caller.in_thread_if_long(partial(_writer, plan, body), GROUP_CHARS // 4 * plan.num_choices)
            return answer_plan(service, plan, writer=writer, names=lambda: NAMES)

    return router


async def _plan(service: Service, body: SglangRequest, *, context: RequestContext) -> Plan:
    samplings = body.sampling
    listed = len(samplings) > 1
    options = RouteOptions(
        context=context,
        streaming=body,
        prefix="generate",
        prompt_param=body.prompt_param,
        num_choices=body.n,
        count_param="sampling_params.n",
        ignores_defaults=True,
        logprobs=body.top_logprobs_num if body.return_logprob else None,
        logprobs_param="top_logprobs_num",
        prompt_logprobs=body.top_logprobs_num if body.scores_prompt else None,
        scored_from=body.logprob_start_len if body.scores_prompt else 0,
        prompt_repeats=body.n,
    )
    given, preparer, caller, param = body.given.prompts, context.served.preparer, context.caller, body.prompt_param
    check_size(service, len(given), options=options)
    prompts = await completion_prompts(preparer, given, add_special_tokens=True, caller=caller, param=param)
    plans = []
    for number, sampling in enumerate(samplings):
        own_prompts = [prompts[number]] if listed else prompts
        where = f"sampling_params[{number}]." if listed else "sampling_params."
        own = await with_grammar(replace(options, param=where, prompt_only=sampling.prompt_only), sampling.form)
        make = partial(make_plan, service, own_prompts, sampling=sampling, request=body, options=own)
        size = max(caller.work_size // len(samplings), GROUP_CHARS * len(own_prompts))
        try:
            plans.append(await caller.in_thread_if_long(make, size))
        except RequestError as error:
            raise renamed(error, NAMES) from error
        await asyncio.sleep(0)  # other tasks run
    plan = joined_plans(service, plans, options=options) if listed else plans[0]
    _check_start(plan, body)
    _check_streamed(plan, body)
    plan = _with_named(plan, body) if body.longest_named else plan
    if isinstance(body.rid, list):
        named = zip(plan.groups, body.rid, strict=True)
        plan = replace(plan, groups=tuple(msgspec.structs.replace(group, trace=rid) for group, rid in named))
    return plan


def _with_named(plan: Plan, body: SglangRequest) -> Plan:
    """Returns the plan of a request that names tokens: they are reported next to the most likely tokens, and for the
    prompt if it is scored. Raises `RequestError` for too many log-probabilities."""
    num_top, scored = body.top_logprobs_num, body.scores_prompt
    if scored:
        num_tokens, num_listed = sum(len(group.prompt) for group in plan.groups), num_top + len(body.longest_named)
        check_prompt_logprobs(num_tokens, num_listed, prompt_param=body.prompt_param, repeats=body.n)

    def with_both(sampling: SamplingParams) -> SamplingParams:
        of_prompt = sampling.logprob_token_ids if scored else ()
        return msgspec.structs.replace(sampling, logprobs=num_top, prompt_logprob_token_ids=of_prompt)

    groups = (msgspec.structs.replace(group, sampling=with_both(group.sampling)) for group in plan.groups)
    return replace(plan, groups=tuple(groups))


def _check_start(plan: Plan, body: SglangRequest) -> None:
    """Raises RequestError if a prompt has no token at `logprob_start_len`."""
    for group in plan.groups:
        if body.scores_prompt and body.logprob_start_len >= len(group.prompt):
            why = f"it is {body.logprob_start_len}, and a prompt has {len(group.prompt)} tokens"
            raise invalid_value("logprob_start_len", why)


def _check_streamed(plan: Plan, body: SglangRequest) -> None:
    """Raises RequestError for a stream whose events could become too large."""
    if not body.stream:
        return
    listed = 1 + body.top_logprobs_num + len(body.longest_named) if body.return_logprob else 0
    tokens = sum(len(group.choices) * group.sampling.max_tokens for group in plan.groups)
    scored = sum(len(group.choices) * len(group.prompt) for group in plan.groups) if body.scores_prompt else 0
    num_bytes = tokens * EVENT_TOKEN_BYTES + (tokens + scored) * EVENT_LOGPROB_BYTES * listed
    if num_bytes > MAX_STREAMED_BYTES:
        of_prompts = f" and {scored} scored tokens of prompts" if scored else ""
        size = f"{tokens} tokens (prompts x n x 'max_new_tokens'){of_prompts} have about {num_bytes} bytes"
        why = f"each event repeats its choice, and the last events of {size}; the maximum is {MAX_STREAMED_BYTES}"
        raise invalid_value("stream", f"{why}; use /v1/completions, whose events do not repeat it")


def _writer(plan: Plan, body: SglangRequest) -> GroupsWriter:
    shape = SglangBody(plan, body)
    return SglangEvents(plan, shape) if body.stream else BodyWriter(plan, shape)


class SglangBody(BodyShape):
    """The answers to a request: one object for each choice."""

    def __init__(self, plan: Plan, body: SglangRequest) -> None:
        self._plan = plan
        self._request = body
        self._tokenizer = plan.served.tokenizer
        self._prompt_fields = OncePerPrompt[dict[str, object]]()

    def body(self, answer: CollectedAnswer, usage: Usage) -> Sequence[bytes]:
        opening, closing = (b"[", b"]") if self._request.in_list else (b"", b"")
        return encode_answer(opening, self._choices(answer), closing=[closing])

    def _choices(self, answer: CollectedAnswer) -> Iterator[object]:
        for number, group in enumerate(answer.groups):
            for choice in group.choices:
                yield self.choice(number, group, choice=choice)
                choice.free()

    def event(self, number: int, group: CollectedGroup, *, choice: CollectedChoice) -> dict[str, object]:
        """Returns the object of a choice for an event of a stream. `number`: number of the prompt."""
        fields = self.choice(number, group, choice=choice)
        if self._request.in_list:
            fields["index"] = number * self._plan.group_size + choice.index
        return fields

    def choice(self, number: int, group: CollectedGroup, *, choice: CollectedChoice) -> dict[str, object]:
        """Returns the object of a choice so far. `number`: number of the prompt."""
        meta: dict[str, object] = {
            "id": self._id_of(number, choice.index),
            "finish_reason": _finish(choice),
            "prompt_tokens": len(self._plan.groups[number].prompt),
            "weight_version": self._version_of(choice),
            **self._logprobs(number, group, choice=choice),
            "completion_tokens": choice.num_tokens,
            "cached_tokens": 0 if group.prompt is None else group.prompt.cached_tokens,
            **self._versions(choice),
        }
        return {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}

    def _version_of(self, choice: CollectedChoice) -> str | None:
        """Returns the weight version of the choice's last token; without tokens or before its end, the version of the
        current weights."""
        if choice.end is not None and (spans := choice.end.weight_versions):
            return spans[-1].version
        try:
            return self._plan.served.info.weight_version
        except NoWorkerError:
            return None

    def _versions(self, choice: CollectedChoice) -> dict[str, object]:
        """Returns the weight versions of an ended choice; as in SGLang, one empty range for a choice without tokens."""
        if choice.end is None:
            return {}
        spans = choice.end.weight_versions
        return {"weight_versions": spans or (WeightSpan(self._version_of(choice) or FIRST_VERSION, 0, 0),)}

    def _id_of(self, number: int, index: int) -> str:
        """Returns the client's name for the request, followed by the number of the choice if there are several."""
        rid = self._request.rid or self._plan.head.id
        if isinstance(rid, list):
            return f"{rid[number]}_{index}" if self._plan.group_size > 1 else rid[number]
        return f"{rid}_{number * self._plan.group_size + index}" if self._request.in_list else rid

    def _logprobs(self, number: int, group: CollectedGroup, *, choice: CollectedChoice) -> dict[str, object]:
        if not self._request.return_logprob:
            return {}
        prompt: dict[str, object] = {"input_token_logprobs": []}
        if self._request.scores_prompt and group.prompt is not None and group.prompt.logprobs is not None:
            encode = partial(self._prompt_logprobs, group.prompt, number)
            prompt = self._prompt_fields.value(number, encode)
        output = {**self._output_logprobs((), number), **choice.logprob_fields()}
        return {**prompt, **output, "output_token_logprobs_length": choice.logprob_mean.count}

    def _prompt_logprobs(self, report: PromptReport, number: int) -> dict[str, object]:
        """`number`: number of the prompt."""
        has_top, named = self._request.top_logprobs_num > 0, self._request.token_ids_logprob
        start = self._request.logprob_start_len
        first, sent = self._plan.groups[number].prompt[start], report.scores_since(start)

        def entries(part: slice) -> dict[str, Sequence[object]]:
            scored = sent[part] if part.start else (None, *sent[part][1:])  # the first one has no score
            own = [
                self._scored(first, None) if one is None else self._scored(one.token_id, one.logprob) for one in scored
            ]
            fields: dict[str, Sequence[object]] = {"input_token_logprobs": own}
            if has_top:
                fields["input_top_logprobs"] = [None if one is None else self._top(one) for one in scored]
            if named is not None:
                ids = named.of(number)
                fields["input_token_ids_logprobs"] = [None if one is None else self._named(one, ids) for one in scored]
            return fields

        return {name: array.json() for name, array in encode_arrays(len(sent), entries).items()}

    def logprobs(self, group: int, event: ChoiceEvent) -> LogprobFields | None:
        return self._output_logprobs(event.logprobs or (), group) if self._request.return_logprob else None

    def _output_logprobs(
        self, logprobs: Sequence[TokenLogprob], number: int
    ) -> dict[str, list[ScoredToken] | list[list[ScoredToken]]]:
        request = self._request
        fields: dict[str, list[ScoredToken] | list[list[ScoredToken]]] = {
            "output_token_logprobs": [self._scored(entry.token_id, entry.logprob) for entry in logprobs]
        }
        if request.top_logprobs_num:
            fields["output_top_logprobs"] = [self._top(entry) for entry in logprobs]
        if request.token_ids_logprob is not None:
            ids = request.token_ids_logprob.of(number)
            fields["output_token_ids_logprobs"] = [self._named(entry, ids) for entry in logprobs]
        return fields

    def _named(self, entry: TokenLogprob, ids: Sequence[int]) -> list[ScoredToken]:
        values = dict(entry.top)
        return [self._scored(id, values[id]) for id in ids]

    def _top(self, entry: TokenLogprob) -> list[ScoredToken]:
        return [self._scored(id, logprob) for id, logprob in entry.top[: self._request.top_logprobs_num]]

    def _scored(self, token_id: int, logprob: float | None) -> ScoredToken:
        text = self._tokenizer.token_text(token_id) if self._request.return_text_in_logprobs else None
        return [None if logprob is None else max(logprob, LOWEST), token_id, text]


class SglangEvents(GroupsWriter):
    """Writes a stream: each event has one choice so far. While the client has not received earlier events, several
    steps become one event for each choice."""

    takes_all_steps = True
    keeps_answer = True
    divide = staticmethod(undivided)

    def __init__(self, plan: Plan, shape: SglangBody) -> None:
        self._answer = CollectedAnswer(plan, shape.logprobs)
        self._shape = shape

    def feed(self, steps: Sequence[GroupStep], usage: Callable[[], Usage]) -> bytes:
        self._answer.feed(steps)
        changed = dict.fromkeys((step.group, event.index) for step in steps for event in step.events)
        return b"".join(piece for number, index in changed for piece in self._event(number, index))

    @property
    def held_bytes(self) -> int:
        return self._answer.num_bytes

    def close(self, usage: Usage) -> Sequence[bytes]:
        return [DONE]

    def _event(self, number: int, index: int) -> Iterator[Buffer]:
        group = self._answer.groups[number]
        yield b"data: "
        yield from encode_json(self._shape.event(number, group, choice=group.choice(index).so_far()))
        yield b"\n\n"


def _finish(choice: CollectedChoice) -> dict[str, object] | None:
    """Returns why a choice has ended; None before its end."""
    if choice.end is None:
        return None
    match choice.end.finish:
        case FinishReason.LENGTH:
            return {"type": "length", "length": choice.num_tokens}
        case FinishReason.ABORT:
            return {"type": "abort", "message": "The request was aborted.", "status_code": None, "err_type": None}
        case _:
            matched = choice.last_token if choice.end.stop_reason is None else choice.end.stop_reason
            return {"type": "stop", "matched": matched}

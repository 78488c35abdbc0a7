"""vLLM's routes for trainers and gateways:

POST /inference/v1/generate           token ids in, token ids out
POST /inference/v1/abort_requests     ends answers of the same client
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Annotated, ClassVar, Literal, Self

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec.json import encode as json_bytes
from pydantic import Field, model_validator

from motet.api.generation.answer_form import StructuredFields
from motet.api.generation.answer_writer import (
    GroupsWriter,
    num_listed,
    streamed_prompt_logprobs,
    usage_json,
    usage_shape,
)
from motet.api.generation.chunks import ChunkShape, ChunkTemplate, ChunkWriter, finish_json, versions_before
from motet.api.generation.collect import BodyShape, BodyWriter, CollectedAnswer, CollectedChoice, LogprobFields
from motet.api.generation.group_schema import SteeredFields, check_keep
from motet.api.generation.json_pieces import around_choices, encode_answer
from motet.api.generation.known_answers import answer_plan
from motet.api.generation.kv_params import PARAM, RequestContext, request_context
from motet.api.generation.plan import Plan, RouteOptions, check_size, make_plan, with_grammar
from motet.api.generation.prompts import truncated
from motet.api.generation.request_fields import (
    NO_REPETITION_DETECTION,
    PromptLogprobs,
    RequestFields,
    SamplingFields,
    Seed,
    StreamingFields,
    TokenIds,
    TruncationFields,
    VersionsShown,
    in_range,
    neutral_except,
)
from motet.api.http.admission import client_id_of
from motet.api.http.caller import caller_of
from motet.api.http.failure import FieldError, invalid_value, missing_parameter
from motet.api.http.routes import json_response, new_router, post
from motet.api.http.schema import Neutral, Schema
from motet.api.openai.chat_completions import hides_tokens, message_of
from motet.api.openai.chat_plan import BUDGET_PARAM, after_thinking, thinking_budget
from motet.api.openai.chat_schema import MAX_BUDGET
from motet.api.service import Service
from motet.api.vllm.parse_context import ParseContext
from motet.text.choice import ChoiceEvent
from motet.text.logprobs import id_logprobs, text_logprobs
from motet.text.text_group import GroupStep
from motet.types import ChoiceStart, LogprobsMode, Usage

MAX_ID_CHARS = 300
"""Maximum length of an id of an answer, which contains the client's own id."""
MAX_ABORTED = 4096


class OutputMode(StrEnum):
    """The content of each choice of an answer (vLLM's `output_mode`)."""

    TOKENS = "tokens"
    TEXT = "text"
    """Tokens with their text, and texts of tokens in log-probabilities, as in chats."""
    DERENDER = "derender"
    """Tokens with their text and with the message of a chat, with reasoning and tool calls."""


class GenerateSampling(StructuredFields, PromptLogprobs, SamplingFields, TruncationFields):
    """vLLM's `SamplingParams` as JSON. Fields without a meaning for token ids are ignored."""

    ignored = frozenset({"output_kind", "routed_experts_prompt_start", "skip_clone", "_all_stop_token_ids"})
    refused = frozenset({"repetition_detection"})
    advice: ClassVar[Mapping[str, str]] = {"repetition_detection": NO_REPETITION_DETECTION}
    neutral: ClassVar[Neutral] = {
        **neutral_except("thinking_token_budget"),
        "flat_logprobs": (False,),
        "skip_reading_prefix_cache": (False,),
    }

    logprobs: int | None = in_range("logprobs", None)
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] | None = None
    """None for the server's setting."""
    detokenize: bool = True
    """False only if the answer has no text."""
    thinking_token_budget: int | None = Field(None, ge=-1, le=MAX_BUDGET)
    """Maximum number of tokens of reasoning; -1 means no maximum."""

    @model_validator(mode="after")
    def check_logprob_token_ids(self) -> Self:
        if self.logprob_token_ids and self.logprobs not in (None, len(self.logprob_token_ids)):
            why = f"it names {len(self.logprob_token_ids)} tokens, and 'logprobs' is {self.logprobs}"
            raise FieldError(invalid_value, "logprob_token_ids", why)
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives to each token; None for no log-probabilities."""
        return len(self.logprob_token_ids) if self.logprobs is None and self.logprob_token_ids else self.logprobs

    @property
    def thinking_budget(self) -> int | None:
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget


class StartedChoice(Schema):
    """A choice that continues after output tokens that it already has."""

    index: int = Field(ge=0, lt=2**31)
    seed: Seed | None = None
    """None for the seed that the choice with this index has in a request without `choices`."""
    token_ids: TokenIds


class TokensRequest(SteeredFields, RequestFields, StreamingFields):
    has_token_ids = True
    ignored = frozenset({"reasoning_parser_kwargs", "token_offsets"})  # a rendered request can have them
    refused = frozenset({"features"})

    token_ids: TokenIds
    sampling_params: GenerateSampling = Field(default_factory=lambda: GenerateSampling.model_validate({}))
    choices: list[StartedChoice] | None = Field(None, min_length=1)
    """The choices to continue; None for n new choices."""
    request_id: str | None = Field(None, min_length=1, max_length=200)
    return_token_ids: bool = False
    """True if the answer repeats the prompt's token ids. It always has the token ids of choices."""
    output_mode: Annotated[OutputMode, Field(strict=False)] = OutputMode.TOKENS
    parse_context: ParseContext | None = None
    """Context with which the mode `derender` parses the texts of choices. The other modes ignore it."""
    reasoning_ended: bool | None = None
    """False if a grammar starts after the reasoning of choices, otherwise it starts with their first token."""

    @model_validator(mode="before")
    @classmethod
    def drop_parse_context(cls, data: object) -> object:
        """Drops the context in modes that do not use it: a rendered request can be sent unchanged for any of them."""
        if isinstance(data, dict) and data.get("output_mode") != OutputMode.DERENDER:
            return {name: value for name, value in data.items() if name != "parse_context"}
        return data

    @model_validator(mode="before")
    @classmethod
    def lift_transfer_params(cls, data: object) -> object:
        """Reads `sampling_params.extra_args.kv_transfer_params`, where vLLM's engines and Dynamo's proxies have it."""
        sampling = data.get("sampling_params") if isinstance(data, dict) else None
        extra = sampling.get("extra_args") if isinstance(sampling, dict) else None
        if not isinstance(data, dict) or not isinstance(sampling, dict) or not isinstance(extra, dict):
            return data
        if PARAM not in extra:
            return data
        inner, outer = extra[PARAM], data.get(PARAM)
        if None not in (inner, outer) and inner != outer:
            why = f"'{PARAM}' has another value"
            raise FieldError(invalid_value, f"sampling_params.extra_args.{PARAM}", why, PARAM)
        others = {name: value for name, value in extra.items() if name != PARAM}
        params = outer if inner is None else inner
        return {**data, PARAM: params, "sampling_params": {**sampling, "extra_args": others}}

    @property
    def num_choices(self) -> int:
        return self.sampling_params.n if self.choices is None else len(self.choices)

    @model_validator(mode="after")
    def check_choices(self) -> Self:
        indices: set[int] = set()
        for number, choice in enumerate(self.choices or ()):
            if choice.index in indices:
                raise FieldError(invalid_value, f"choices[{number}].index", f"there is a choice {choice.index} already")
            indices.add(choice.index)
        if indices and self.group is not None:
            raise FieldError(invalid_value, "group", "it cannot be used with 'choices': a policy needs entire answers")
        n = self.sampling_params.n
        if indices and "n" in self.sampling_params.model_fields_set and n != len(indices):
            raise FieldError(invalid_value, "sampling_params.n", f"it is {n}, but 'choices' has {len(indices)} entries")
        return self

    @model_validator(mode="after")
    def check_policy(self) -> Self:
        check_keep(self, self.group)
        return self

    @model_validator(mode="after")
    def check_mode(self) -> Self:
        mode, why = self.output_mode, "it cannot be used with the output_mode 'derender'"
        if mode is OutputMode.DERENDER:
            for name, value in (("stream", self.stream), ("choices", self.choices)):
                if value:
                    raise FieldError(invalid_value, name, why)
        if mode is not OutputMode.TOKENS and not self.sampling_params.detokenize:
            raise FieldError(
                invalid_value, "sampling_params.detokenize", f"the output_mode '{mode}' needs it to be true"
            )
        return self

    @property
    def mode_fields(self) -> dict[str, str]:
        """Returns the field with which answers repeat the mode, so that clients see that the server knows it."""
        return {"output_mode": self.output_mode} if "output_mode" in self.model_fields_set else {}

    def without_answer(self) -> Self:
        """Returns the request without the fields about an answer, for a prefill."""
        unset: dict[str, object] = {"n": 1, "logprobs": None, "logprob_token_ids": [], "prompt_logprobs": None}
        sampling = self.sampling_params.model_copy(update=unset)
        return self.model_copy(update={"sampling_params": sampling, "choices": None})

    def planned(self) -> Self:
        """See `FormattedFields.planned`."""
        sampling = self.sampling_params.model_copy(update={"structured_outputs": None})
        return self.model_copy(update={"sampling_params": sampling, "choices": None})


class AbortedAnswers(Schema):
    request_ids: list[Annotated[str, Field(max_length=MAX_ID_CHARS)]] = Field(max_length=MAX_ABORTED)
    """Ids of answers (`request_id` or `id`), or the ids that the client gave its requests."""


def generate_router(service: Service) -> APIRouter:
    router = new_router()

    @post(router, "/inference/v1/generate", body=TokensRequest, summary="Token ids in, token ids out")
    async def generate(body: TokensRequest, request: Request) -> Response:
        caller = caller_of(request, named=body.request_id, session=body.session_id, cache_salt=body.cache_salt)
        async with request_context(service, body, caller=caller, num_choices=body.num_choices) as context:
            body = body.without_answer() if context.order else body
            plan = await _plan(service, body, context=context)
            body = body.planned()

            def make_writer(plan: Plan, stream: bool) -> GroupsWriter:
                return tokens_writer(plan, body, stream=stream)

            return answer_plan(service, plan, writer=make_writer(plan, body.stream), more=make_writer)

    @post(router, "/inference/v1/abort_requests", body=AbortedAnswers, summary="Ends answers of the client")
    async def abort(body: AbortedAnswers, request: Request) -> Response:
        caller = caller_of(request)
        sender = service.rights(caller.client).client_id or client_id_of(caller.work_client)
        groups = service.groups.in_progress({*body.request_ids}, client=caller.client, sender=sender)
        for group in groups:
            for answer in [*group.open]:
                await answer.end_all()
        return json_response({"status": "aborted", "aborted": len(groups)})

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
        logprobs=sampling.num_logprobs,
        logprobs_mode=None if sampling.logprobs_mode is None else LogprobsMode(sampling.logprobs_mode),
        prompt_logprobs=sampling.prompt_logprobs,
        scored_from=sampling.prompt_logprobs_from,
        ignores_defaults=True,
        param="sampling_params.",
        group=body.group,
    )
    check_size(service, 1, options=options)
    check = partial(context.served.preparer.check_prompt, body.token_ids, param="token_ids")
    await context.caller.in_thread_if_long(check, len(body.token_ids))
    length, reserved = context.served.info.max_model_len, sampling.requested_max_tokens or 1
    prompt = truncated(body.token_ids, sampling, max_model_len=length, num_reserved=reserved, param=options.param)
    options = await _with_form(options, body, prompt=prompt)
    plan = make_plan(service, [prompt], sampling=sampling, request=body, options=options)
    if body.choices is None:
        return plan
    num_tokens = sum(len(choice.token_ids) for choice in body.choices)
    return await context.caller.in_thread_if_long(partial(_with_choices, plan, body.choices), num_tokens)


async def _with_form(options: RouteOptions, body: TokensRequest, *, prompt: Sequence[int]) -> RouteOptions:
    """Returns the options with the grammar of choices, and with the format of their texts if they are derendered."""
    served, sampling, context = options.context.served, body.sampling_params, body.parse_context
    form = await options.context.caller.in_thread_if_long(lambda: sampling.form)
    if body.output_mode is OutputMode.DERENDER:
        if context is None and served.formats.must_parse:
            raise missing_parameter("parse_context")
        if context is not None:
            has_grammar = form is not None
            make = partial(context.answer_format, served, prompt, has_grammar=has_grammar)
            options = replace(options, format=await options.context.caller.in_thread_if_long(make))
    budget = thinking_budget(served, sampling.thinking_budget, param=f"{options.param}{BUDGET_PARAM}")
    if budget is not None or body.reasoning_ended is False:
        form = after_thinking(form, served.formats.thinking(prompt), budget=budget)
    return await with_grammar(options, form)


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
        each_rules=tuple(msgspec.structs.replace(rules, client_sent_output=True) for rules in plan.each_rules),
    )


def tokens_writer(plan: Plan, body: TokensRequest, *, stream: bool) -> GroupsWriter:
    if not stream:
        return BodyWriter(plan, TokensBody(plan, body))
    head = json_bytes({"request_id": body.request_id or plan.head.id, **body.mode_fields})[:-1]
    template = ChunkTemplate(head, null_usage=True)
    return ChunkWriter(plan, TokensChunks(plan, body, template=template), template=template, usage_json=usage_json)


class LogprobsOfMode:
    """The log-probabilities of an answer: with token ids and, except in the mode `tokens`, with the texts of tokens."""

    def __init__(self, plan: Plan, body: TokensRequest) -> None:
        sampling = body.sampling_params
        self._num_top = num_listed(sampling, sampling.num_logprobs)
        self._ranked = not sampling.logprob_token_ids
        self._tokenizer = None if body.output_mode is OutputMode.TOKENS else plan.served.tokenizer

    def fields(self, event: ChoiceEvent) -> LogprobFields | None:
        logprobs, num_top = event.logprobs or (), self._num_top
        if num_top is None:
            return None
        if self._tokenizer is not None:
            return {"content": text_logprobs(self._tokenizer, logprobs, num_top=num_top, ranked=self._ranked)}
        return {"content": id_logprobs(logprobs, num_top=num_top, ranked=self._ranked)}


class TokensBody(BodyShape):
    def __init__(self, plan: Plan, body: TokensRequest) -> None:
        self._head = {"request_id": body.request_id or plan.head.id, **body.mode_fields}
        self._sampling = body.sampling_params
        self._logprobs = LogprobsOfMode(plan, body)
        self._mode = body.output_mode
        self._context = body.parse_context or ParseContext()
        self._hidden = self._mode is OutputMode.DERENDER and hides_tokens(plan, self._context)
        self._token_ids = body.return_token_ids

    def body(self, answer: CollectedAnswer, usage: Usage) -> Sequence[bytes]:
        (group,) = answer.groups
        rest = {
            **({"prompt_token_ids": answer.plan.groups[0].prompt} if self._token_ids else {}),
            **answer.prompt_logprobs(0, self._sampling),
            "kv_transfer_params": group.ticket,
            "usage": usage_shape(usage),
            **answer.reports(),
        }
        opening, closing = around_choices(json_bytes(self._head)[:-1], rest)
        return encode_answer(opening, answer.take_choices(self._choice), closing=closing)

    def logprobs(self, group: int, event: ChoiceEvent) -> LogprobFields | None:
        return None if self._hidden else self._logprobs.fields(event)

    def _choice(self, choice: CollectedChoice) -> dict[str, object]:
        content: dict[str, object] = {} if self._mode is OutputMode.TOKENS or self._hidden else {"text": choice.text}
        if self._mode is OutputMode.DERENDER:
            content["message"] = message_of(choice, self._context)
        return {
            "index": choice.index,
            **content,
            "logprobs": None if choice.logprobs is None else choice.logprob_fields(),
            **choice.end_fields(),
            "token_ids": None if self._hidden else choice.token_ids,
            **choice.span_fields(VersionsShown.ALWAYS),
        }


class TokensChunks(ChunkShape):
    """The chunks of a streamed answer. Events without tokens, text and end have no chunk."""

    def __init__(self, plan: Plan, body: TokensRequest, *, template: ChunkTemplate) -> None:
        self._template = template
        prompt = plan.groups[0].prompt
        self._prompt = b',"prompt_token_ids":' + json_bytes(prompt) if body.return_token_ids else b""
        """The prompt's token ids and log-probabilities, which only the first chunk has."""
        self._logprobs = LogprobsOfMode(plan, body)
        self._text = body.output_mode is OutputMode.TEXT
        self._tokenizer = plan.served.tokenizer
        self._prompt_logprobs: PromptLogprobs = body.sampling_params

    def openings(self, step: GroupStep, indices: Sequence[int], *, closing: bytes) -> list[bytes]:
        self._prompt += streamed_prompt_logprobs(step.prompt, self._prompt_logprobs, tokenizer=self._tokenizer)
        return []

    def chunks(self, event: ChoiceEvent, group: int, *, closing: bytes) -> list[bytes]:
        if not (event.token_ids or event.finish or (self._text and event.text)):
            return []
        prompt, self._prompt = self._prompt, b""
        chunk = b'%b%d%b,"logprobs":%b,"finish_reason":%b,"token_ids":%b%b%b%b' % (
            self._template.opening,
            event.index,
            b',"text":' + json_bytes(event.text) if self._text else b"",
            json_bytes(self._logprobs.fields(event)),
            finish_json(event),
            json_bytes(event.token_ids),
            versions_before(b"}]", event, shown=VersionsShown.ALWAYS),
            prompt,
            closing,
        )
        return [chunk]

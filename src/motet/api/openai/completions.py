"""`POST /v1/completions`: several prompts, n choices of each."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, ClassVar, Self

from fastapi import APIRouter, Request, Response
from msgspec.json import encode as json_bytes
from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from motet.api.generation.answer_form import check_named_logprobs
from motet.api.generation.answer_writer import (
    GroupsWriter,
    OncePerPrompt,
    num_listed,
    streamed_prompt_logprobs,
    usage_json,
    usage_shape,
)
from motet.api.generation.chunks import ChunkShape, ChunkTemplate, ChunkWriter, finish_json, versions_before
from motet.api.generation.collect import BodyShape, BodyWriter, CollectedAnswer, CollectedChoice, LogprobFields
from motet.api.generation.group_schema import check_keep
from motet.api.generation.json_pieces import JsonArray, encode_arrays, encode_json
from motet.api.generation.known_answers import answer_plan
from motet.api.generation.kv_params import RequestContext, request_context
from motet.api.generation.plan import GROUP_CHARS, Plan, RouteOptions, check_size, make_plan, with_grammar
from motet.api.generation.prompts import Prompt, completion_prompts, parse_prompts, truncated
from motet.api.generation.request_fields import in_range, neutral_except
from motet.api.http.caller import caller_of
from motet.api.http.failure import FieldError, invalid_value
from motet.api.http.routes import PostRoute, drop_body, new_router, read_body
from motet.api.http.schema import Neutral
from motet.api.openai.openai_request import OpenAIRequest
from motet.api.service import Service
from motet.api.texts.text_requests import answer_from_texts, pass_through
from motet.engines.upstream.text_source import TextRoute
from motet.text.choice import ChoiceEvent
from motet.text.logprobs import CompletionLogprobs, PromptEcho, completion_logprobs, echo
from motet.text.text_group import GroupStep
from motet.types import PromptReport, TokenLogprob, Usage

DEFAULT_MAX_TOKENS = 16


def _as_count(value: object) -> object:
    """Reads true as 1, as vLLM does, and false as None."""
    return (1 if value else None) if isinstance(value, bool) else value


class CompletionRequest(OpenAIRequest):
    neutral: ClassVar[Neutral] = {
        **neutral_except("return_token_offsets"),
        "modalities": (["text"], []),
        "suffix": ("",),
    }

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(parse_prompts)]
    max_tokens: int | None = Field(None, ge=0)
    """0, with `echo`, returns only the prompt and its log-probabilities."""
    best_of: int | None = Field(None, ge=1)
    echo: bool = False
    logprobs: Annotated[int | None, BeforeValidator(_as_count, json_schema_input_type=int | bool)] = in_range(
        "logprobs", None
    )
    add_special_tokens: bool = True

    @property
    def num_generated(self) -> int:
        """Number of choices to generate for each prompt; the `n` best of them are sent."""
        return self.best_of if self.best_of is not None else self.n

    @property
    def ranked(self) -> bool:
        """True if the choices in the answer are the best of several."""
        return self.num_generated > self.n

    def without_answer(self) -> Self:
        """Returns the request without the fields about answers, for a prefill."""
        unset: dict[str, object] = {"n": 1, "best_of": None, "echo": False, "logprobs": None, "prompt_logprobs": None}
        return self.model_copy(update=unset)

    @property
    def requested_max_tokens(self) -> int | None:
        """The maximum number of output tokens, at least one: sampling it from the prompt's logits costs no step."""
        return 1 if self.prompt_only else super().requested_max_tokens

    @property
    def prompt_only(self) -> bool:
        return self.max_tokens == 0 and self.max_completion_tokens is None

    @model_validator(mode="after")
    def check_max_tokens(self) -> Self:
        if self.prompt_only and not self.echo:
            raise FieldError(invalid_value, "max_tokens", "0 is allowed only with 'echo'")
        check_named_logprobs(self, self.logprobs)
        if self.prompt_only and self.logprob_token_ids:
            raise FieldError(invalid_value, "logprob_token_ids", "an answer of 0 tokens has no log-probabilities")
        return self

    @model_validator(mode="after")
    def check_best_of(self) -> Self:
        check_keep(self, self.group)
        if self.best_of is None:
            return self
        if self.best_of < self.n:
            raise FieldError(invalid_value, "best_of", f"it must be at least 'n' ({self.n}), but got {self.best_of}")
        if self.stream and self.best_of > self.n:
            raise FieldError(invalid_value, "best_of", "greater than 'n' it cannot be used with 'stream'")
        if self.group is not None and self.best_of > self.n:
            raise FieldError(invalid_value, "best_of", "greater than 'n' it cannot be used with 'group'")
        return self


def completion_router(service: Service) -> APIRouter:
    router = new_router()

    async def completions(request: Request) -> Response:
        passed = await pass_through(service, request)
        if passed is None:
            response = await answer_completions(service, await read_body(request, CompletionRequest), request=request)
        else:  # the body's `model` is on a third-party text server, which checks the rest of the body
            response = await answer_from_texts(service, passed, route=TextRoute.COMPLETIONS, request=request)
        drop_body(request)
        return response

    summary = "n answers to each of several prompts"
    router.routes.append(PostRoute("/v1/completions", completions, body=CompletionRequest, summary=summary))
    return router


async def answer_completions(service: Service, body: CompletionRequest, *, request: Request) -> Response:
    """Returns the answer of a model that takes tokens."""
    body.refuse_offsets()
    caller = caller_of(request, named=body.request_id, session=body.session_id, cache_salt=body.cache_salt)
    async with request_context(service, body, caller=caller, num_choices=body.num_generated) as context:
        body = body.without_answer() if context.order else body
        plan = await plan_completions(service, body, context=context)
        body = body.planned().named(as_ids=service.config.return_tokens_as_token_ids)

        def make_writer(plan: Plan, stream: bool) -> GroupsWriter:
            return completion_writer(plan, body, stream=stream)

        echoed = sum(len(group.prompt) for group in plan.groups) if body.echo else 0
        size = echoed + GROUP_CHARS // 4 * plan.num_choices
        writer = await caller.in_thread_if_long(partial(make_writer, plan, body.stream), size)
        return answer_plan(service, plan, writer=writer, more=None if body.ranked else make_writer)


async def plan_completions(service: Service, body: CompletionRequest, *, context: RequestContext) -> Plan:
    options = RouteOptions(
        context=context,
        streaming=body,
        prefix="cmpl",
        prompt_param="prompt",
        num_choices=body.num_generated,
        count_param="best_of" if body.ranked else "n",
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=0 if body.logprobs is None and body.ranked else body.logprobs,
        prompt_logprobs=max(_prompt_logprobs(body), default=None),
        scored_from=0 if body.echo and body.logprobs is not None else body.prompt_logprobs_from,
        prompt_repeats=body.n,
        prompt_only=body.prompt_only,
        group=body.group,
    )
    check_size(service, len(body.prompt), options=options)
    preparer, caller, special = context.served.preparer, context.caller, body.add_special_tokens
    prompts = await completion_prompts(preparer, body.prompt, add_special_tokens=special, caller=caller)
    length = context.served.info.max_model_len
    reserved = body.requested_max_tokens or DEFAULT_MAX_TOKENS
    prompts = [truncated(prompt, body, max_model_len=length, num_reserved=reserved) for prompt in prompts]
    options = await with_grammar(options, await caller.in_thread_if_long(lambda: body.form))
    plan = partial(make_plan, service, prompts, sampling=body, request=body, options=options)
    return await caller.in_thread_if_long(plan, max(caller.work_size, GROUP_CHARS * len(prompts)))


def _prompt_logprobs(body: CompletionRequest) -> list[int]:
    """Returns the number of alternatives in each field that requests log-probabilities of the prompt."""
    return [num for num in (body.prompt_logprobs, body.logprobs if body.echo else None) if num is not None]


def completion_writer(plan: Plan, body: CompletionRequest, *, stream: bool) -> GroupsWriter:
    texts = CompletionTexts(plan, body)
    if not stream:
        return BodyWriter(plan, CompletionBody(body, texts))
    template = ChunkTemplate(plan.head.json("text_completion"), null_usage=plan.include_usage)
    plain = body.logprobs is None and not body.return_token_ids
    return ChunkWriter(
        plan,
        CompletionChunks(plan, body, template=template, texts=texts),
        template=template,
        usage_json=usage_json,
        before_text=BEFORE_TEXT,
        after_text=AFTER_TEXT if plain else None,
    )


class CompletionTexts:
    """The parts of a choice in addition to its generated text: log-probabilities, and a repeated prompt (`echo`)."""

    def __init__(self, plan: Plan, body: CompletionRequest) -> None:
        self._plan = plan
        self._tokenizer = plan.served.tokenizer
        self.num_top = num_listed(body, body.logprobs)
        """Number of tokens listed with each sampled token; None without log-probabilities."""
        self._num_prompt_top = body.logprobs
        self._as_ids = body.return_tokens_as_token_ids
        self._echoes: list[PromptEcho] = []
        """The prompts to repeat, in the order of the groups; a prompt that was sent as text is repeated unchanged,
        unless the request can shorten it."""
        if body.echo:
            for group, prompt in zip(plan.groups, body.prompt, strict=True):
                text = prompt if isinstance(prompt, str) and body.truncate_prompt_tokens is None else None
                self._echoes.append(echo(self._tokenizer, group.prompt, text=text, added=body.add_special_tokens))
        self._prompt_logprobs = OncePerPrompt[Mapping[str, JsonArray]]()

    def prompt(self, group: int) -> str:
        """Returns the text of the prompt if it is repeated, else an empty text."""
        return self._echoes[group].text if self._echoes else ""

    def prompt_logprobs(self, group: int, report: PromptReport | None) -> Mapping[str, JsonArray] | None:
        """Returns the log-probabilities of the prompt if it is repeated with them."""
        num_top = self._num_prompt_top
        if not self._echoes or num_top is None or report is None or report.logprobs is None:
            return None
        ids, scored, offsets = self._plan.groups[group].prompt, report.logprobs, self._echoes[group].offsets

        def entries(part: slice) -> CompletionLogprobs:
            return self._form(ids[part], scored[part], offsets=offsets[part], num_top=num_top)

        return self._prompt_logprobs.value(group, lambda: encode_arrays(len(ids), entries))

    def logprobs(self, group: int, event: ChoiceEvent) -> CompletionLogprobs | None:
        if self.num_top is None:
            return None
        base, entries = len(self.prompt(group)), event.logprobs or ()
        ids, offsets = [entry.token_id for entry in entries], [base + offset for offset in event.offsets or ()]
        return self._form(ids, entries, offsets=offsets, num_top=self.num_top)

    def _form(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], *, offsets: Sequence[int], num_top: int
    ) -> CompletionLogprobs:
        return completion_logprobs(
            self._tokenizer, ids, logprobs=logprobs, offsets=offsets, num_top=num_top, as_ids=self._as_ids
        )


class CompletionBody(BodyShape):
    """The body of unstreamed completions. With `best_of` it has the best choices of each prompt."""

    def __init__(self, body: CompletionRequest, texts: CompletionTexts) -> None:
        self._texts = texts
        self._request = body

    def body(self, answer: CollectedAnswer, usage: Usage) -> Sequence[bytes]:
        return answer.openai_body("text_completion", self._choices(answer), usage=usage_shape(usage))

    def _choices(self, answer: CollectedAnswer) -> Iterator[object]:
        ranked = self._request.ranked
        for number, group in enumerate(answer.groups):
            for rank, choice in enumerate(self._best(group.choices) if ranked else group.choices):
                yield self._choice(answer, number, choice=choice, place=rank if ranked else choice.index)
                choice.free()

    def logprobs(self, group: int, event: ChoiceEvent) -> LogprobFields | None:
        return self._texts.logprobs(group, event)

    def _best(self, choices: Sequence[CollectedChoice]) -> list[CollectedChoice]:
        return sorted(choices, key=lambda choice: -choice.logprob_mean.value)[: self._request.n]

    def _choice(self, answer: CollectedAnswer, group: int, *, choice: CollectedChoice, place: int) -> dict[str, object]:
        """`place`: number of the choice among the choices of its prompt that are sent."""
        prompt = self._texts.prompt_logprobs(group, answer.groups[group].prompt)
        ids: dict[str, object] = {"token_ids": None, "prompt_token_ids": None}
        if self._request.return_token_ids:
            ids = {"token_ids": choice.token_ids, "prompt_token_ids": answer.plan.groups[group].prompt}
        return {
            "index": group * self._request.n + place,
            "text": self._texts.prompt(group) + choice.text,
            "logprobs": None if choice.logprobs is None else choice.logprob_fields(before=prompt),
            **choice.end_fields(),
            **ids,
            **choice.span_fields(self._request.versions_shown),
            **answer.prompt_logprobs(group, self._request),
        }


BEFORE_TEXT = b',"text":'
AFTER_TEXT = b',"logprobs":null,"finish_reason":null}]'


class CompletionChunks(ChunkShape):
    """The chunks of streamed completions: prompts x n choices, numbered prompt by prompt."""

    def __init__(self, plan: Plan, body: CompletionRequest, *, template: ChunkTemplate, texts: CompletionTexts) -> None:
        self._plan = plan
        self._template = template
        self._texts = texts
        self._token_ids = body.return_token_ids
        self._versions_shown = body.versions_shown
        self._request = body
        self._opens = body.echo or body.prompt_logprobs is not None
        """True if each choice starts with a chunk about the prompt."""
        self._without_prompt = {*plan.choice_indices} if body.return_token_ids and not self._opens else set[int]()
        """Choices whose first chunk, with the prompt's token ids, is still to come, by their indices in the answer."""
        self._prompts: dict[int, PromptReport] = {}
        """The reports on the prompts, for choices that start later."""
        self._prompt_logprobs = OncePerPrompt[bytes]()

    def openings(self, step: GroupStep, indices: Sequence[int], *, closing: bytes) -> list[bytes]:
        """Returns a chunk for each choice with the prompt's text, token ids and log-probabilities, if the request needs
        the text or the log-probabilities."""
        if not self._opens:
            return []
        group = step.group
        if step.prompt is not None:
            self._prompts[group] = step.prompt
        ids = b""
        if self._token_ids:
            ids = b',"prompt_token_ids":%b,"token_ids":[]' % json_bytes(self._plan.groups[group].prompt)
        scored = self._texts.prompt_logprobs(group, self._prompts.get(group))
        rest = b'%b,"logprobs":%b,"finish_reason":null%b%b}]%b' % (
            json_bytes(self._texts.prompt(group)),
            b"null" if scored is None else b"".join(encode_json({name: own.json() for name, own in scored.items()})),
            ids,
            self._prompt_logprobs.value(group, partial(self._scored, group)),
            closing,
        )
        return [self._before_text(group, index) + rest for index in indices]

    def _scored(self, group: int) -> bytes:
        tokenizer = self._plan.served.tokenizer
        return streamed_prompt_logprobs(self._prompts.get(group), self._request, tokenizer=tokenizer)

    def chunks(self, event: ChoiceEvent, group: int, *, closing: bytes) -> list[bytes]:
        index = group * self._plan.group_size + event.index
        prompt = b""
        if index in self._without_prompt:
            self._without_prompt.discard(index)
            prompt = b',"prompt_token_ids":' + json_bytes(self._plan.groups[group].prompt)
        chunk = b'%b%b,"logprobs":%b,"finish_reason":%b%b%b%b' % (
            self._before_text(group, event.index),
            json_bytes(event.text),
            json_bytes(self._texts.logprobs(group, event)),
            finish_json(event),
            prompt,
            self._ids_before(b"}]", event),
            closing,
        )
        return [chunk]

    def _before_text(self, group: int, index: int) -> bytes:
        return b"%b%d%b" % (self._template.opening, group * self._plan.group_size + index, BEFORE_TEXT)

    def _ids_before(self, closing: bytes, event: ChoiceEvent) -> bytes:
        closing = versions_before(closing, event, shown=self._versions_shown)
        return b',"token_ids":' + json_bytes(event.token_ids) + closing if self._token_ids else closing

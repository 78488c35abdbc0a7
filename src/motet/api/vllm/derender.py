"""vLLM's routes that turn the answers of `/inference/v1/generate` into answers of OpenAI's routes, without an engine:

POST /v1/chat/completions/derender      the answer to a rendered chat
POST /v1/completions/derender           the answers to each of several rendered prompts

The request that was rendered is planned again. Its plan reads the given tokens as if an engine had generated them, so
the answer has the text, reasoning, tool calls and log-probabilities that the request would have had without rendering.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, ClassVar, Self

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field, model_validator

from motet.api.generation.collect import PROMPT_LOGPROBS, BodyShape, CollectedAnswer
from motet.api.generation.kv_params import request_context
from motet.api.generation.plan import Plan
from motet.api.generation.request_fields import TokenIds
from motet.api.http.caller import Caller, caller_of
from motet.api.http.failure import FieldError, invalid_value
from motet.api.http.routes import new_router, post
from motet.api.http.schema import Neutral, OpenSchema, Schema
from motet.api.openai.chat_completions import ChatBody
from motet.api.openai.chat_plan import plan_chat
from motet.api.openai.chat_schema import ChatRequest
from motet.api.openai.completions import CompletionBody, CompletionRequest, CompletionTexts, plan_completions
from motet.api.service import Service
from motet.text.choice import ChoiceEvent
from motet.text.group_choices import GroupChoices
from motet.text.prepare import PromptPreparer
from motet.text.text_group import GroupStep
from motet.types import (
    ChoiceDelta,
    ChoiceStart,
    Finish,
    FinishReason,
    GroupDelta,
    TokenLogprob,
    Usage,
)

UNKNOWN_PROMPT = [0]
"""Placeholder for a prompt that the client did not send, while the request is planned."""
MAX_ID_CHARS = 200
CHOICE_TOKENS = 32
"""Number of tokens that take as long as the other work for a choice."""
PIECE_TOKENS = 2**14
"""Number of tokens after which a piece of work ends, and other clients have their turn. A million tokens take 2 s."""


class GeneratedToken(OpenSchema):
    token_id: int | None = Field(None, ge=0)
    token: str = Field("", max_length=MAX_ID_CHARS)
    """`token_id:N`, for servers that do not send `token_id`."""
    logprob: float
    rank: int | None = None

    @model_validator(mode="after")
    def check_id(self) -> Self:
        number = self.token.removeprefix("token_id:")
        if self.token_id is None and not (number != self.token and number.isascii() and number.isdigit()):
            raise FieldError(invalid_value, "token_id", "it is missing, and there is no 'token' such as 'token_id:5'")
        return self

    @property
    def id(self) -> int:
        return int(self.token.removeprefix("token_id:")) if self.token_id is None else self.token_id


class SampledToken(GeneratedToken):
    top_logprobs: list[GeneratedToken] = Field(default_factory=list)


class GeneratedLogprobs(OpenSchema):
    content: list[SampledToken] | None = None


class GeneratedChoice(OpenSchema):
    index: int = Field(ge=0, lt=2**31)
    token_ids: TokenIds
    finish_reason: Annotated[FinishReason, Field(strict=False)] | None = None
    stop_reason: str | int | None = None
    logprobs: GeneratedLogprobs | None = None

    @model_validator(mode="after")
    def check_tokens(self) -> Self:
        if not self.token_ids:
            raise FieldError(invalid_value, "token_ids", "the array is empty; at least one token is needed")
        if (entries := self.entries) is not None and len(entries) != len(self.token_ids):
            why = f"expected {len(self.token_ids)} entries, one for each token, but got {len(entries)}"
            raise FieldError(invalid_value, "logprobs.content", why)
        return self

    @property
    def entries(self) -> list[SampledToken] | None:
        return None if self.logprobs is None else self.logprobs.content

    def deltas(self, end_tokens: Container[int]) -> Iterator[ChoiceDelta]:
        """Yields the tokens and the end of the choice as an engine reports them. `end_tokens`: tokens that can end the
        choice and have no text; any other last token belongs to the text."""
        logprobs = None
        if self.entries is not None:
            logprobs = tuple(
                TokenLogprob(
                    one.id, one.logprob, one.rank or 0, tuple((top.id, top.logprob) for top in one.top_logprobs)
                )
                for one in self.entries
            )
        stop_token = self.stop_reason if isinstance(self.stop_reason, int) else None
        finish = Finish(self.finish_reason or FinishReason.STOP, stop_token)
        last = self.token_ids[-1]
        ends_in_text = isinstance(self.stop_reason, str) or (last != stop_token and last not in end_tokens)
        yield ChoiceDelta(self.index, tuple(self.token_ids), logprobs, None if ends_in_text else finish)
        if ends_in_text:
            yield ChoiceDelta(self.index, (), () if logprobs else None, finish)


class Generated(OpenSchema):
    """An answer of `/inference/v1/generate`."""

    request_id: str = Field(max_length=MAX_ID_CHARS)
    choices: list[GeneratedChoice] = Field(min_length=1)
    prompt_token_ids: TokenIds | None = None
    prompt_logprobs: list[dict[str, object] | None] | None = None
    kv_transfer_params: object = None

    @model_validator(mode="after")
    def check_indices(self) -> Self:
        if len({choice.index for choice in self.choices}) < len(self.choices):
            raise FieldError(invalid_value, "choices", "two choices have the same index")
        return self

    @property
    def num_top(self) -> int | None:
        """Maximum number of alternatives to a token; None without log-probabilities."""
        entries = [one for choice in self.choices for one in choice.entries or ()]
        return max(len(one.top_logprobs) for one in entries) if entries else None


class DerenderFields(Schema):
    has_token_ids = True
    neutral: ClassVar[Neutral] = {"stream": (False,)}

    model: str | None = None


class ChatDerender(DerenderFields):
    generate_response: Generated
    prompt_tokens: int | None = Field(None, ge=0)
    prompt_token_ids: TokenIds | None = None
    chat_request: ChatRequest | None = None

    @property
    def planned_request(self) -> ChatRequest:
        generated = self.generate_response
        chat = self.chat_request or ChatRequest.model_construct(messages=[])
        prompt = self.prompt_token_ids or generated.prompt_token_ids or chat.prompt_token_ids
        if prompt is None and self.chat_request is None:
            prompt = UNKNOWN_PROMPT
        update: dict[str, object] = {"model": self.model or chat.model, "prompt_token_ids": prompt}
        if self.chat_request is None and generated.num_top is not None:
            update |= {"logprobs": True, "top_logprobs": generated.num_top}
        unused = {"stream": False, "group": None, "kv_transfer_params": None}
        return chat.model_copy(update=update | unused | {"n": len(generated.choices)})


class CompletionDerender(DerenderFields):
    generate_responses: list[Generated] = Field(min_length=1)
    prompt_tokens: list[Annotated[int, Field(ge=0)]] | None = None
    prompt_token_ids: list[TokenIds] | None = None
    completion_request: CompletionRequest | None = None
    """Only `skip_special_tokens` is used."""

    @model_validator(mode="after")
    def check_lengths(self) -> Self:
        num_prompts = len(self.generate_responses)
        for field, given in (("prompt_tokens", self.prompt_tokens), ("prompt_token_ids", self.prompt_token_ids)):
            if given is not None and len(given) != num_prompts:
                why = f"expected {num_prompts} entries, one for each response, but got {len(given)}"
                raise FieldError(invalid_value, field, why)
        n = len(self.generate_responses[0].choices)
        for number, one in enumerate(self.generate_responses):
            if sorted(choice.index for choice in one.choices) != list(range(n)):
                why = f"expected {n} choices, as in the first response, with the indices from 0 to {n - 1}"
                raise FieldError(invalid_value, f"generate_responses[{number}].choices", why)
        return self

    @property
    def planned_request(self) -> CompletionRequest:
        request, responses = self.completion_request, self.generate_responses
        prompts: Sequence[list[int] | None] = self.prompt_token_ids or [one.prompt_token_ids for one in responses]
        fields = {
            "model": self.model or (request.model if request else None),
            "prompt": [ids or UNKNOWN_PROMPT for ids in prompts],
            "n": len(responses[0].choices),
            "max_tokens": 1,
            "skip_special_tokens": request is None or request.skip_special_tokens,
            "logprobs": max((one.num_top for one in responses if one.num_top is not None), default=None),
        }
        return CompletionRequest.model_validate(fields)


def derender_router(service: Service) -> APIRouter:
    router = new_router()

    @post(router, "/v1/chat/completions/derender", body=ChatDerender, summary="Token ids as an answer to a chat")
    async def chat(body: ChatDerender, request: Request) -> Response:
        caller, responses = caller_of(request), [body.generate_response]
        planned = await caller.in_thread_if_long(lambda: body.planned_request)
        async with request_context(service, planned, caller=caller, num_choices=planned.n) as context:
            await caller.in_thread_if_long(partial(_check, context.served.preparer, responses))
            plan = _with_choices(await plan_chat(service, planned, context=context), responses)
        counts = None if body.prompt_tokens is None else [body.prompt_tokens]
        shape = ChatBody(plan, planned)
        return await _response(plan, responses, prompt_tokens=counts, shape=shape, caller=caller)

    @post(router, "/v1/completions/derender", body=CompletionDerender, summary="Token ids as answers to prompts")
    async def completions(body: CompletionDerender, request: Request) -> Response:
        caller, responses = caller_of(request), body.generate_responses
        planned = await caller.in_thread_if_long(lambda: body.planned_request)
        async with request_context(service, planned, caller=caller, num_choices=planned.n) as context:
            await caller.in_thread_if_long(partial(_check, context.served.preparer, responses))
            plan = _with_choices(await plan_completions(service, planned, context=context), responses)
        shape = CompletionBody(planned, CompletionTexts(plan, planned))
        return await _response(plan, responses, prompt_tokens=body.prompt_tokens, shape=shape, caller=caller)

    return router


def _check(preparer: PromptPreparer, responses: Sequence[Generated]) -> None:
    """Raises RequestError for tokens that the model does not have, and for more tokens than its context can have."""
    for choice in (choice for one in responses for choice in one.choices):
        preparer.check_prompt(choice.token_ids, param="token_ids")
        preparer.check_length(choice.token_ids, param="token_ids")
        for entry in choice.entries or ():
            preparer.check_prompt([entry.id, *(top.id for top in entry.top_logprobs)], param="token_id")


def _with_choices(plan: Plan, responses: Sequence[Generated]) -> Plan:
    """Returns the plan with the ids of the responses and the numbers of their choices."""
    groups = [
        msgspec.structs.replace(
            group,
            prompt=() if group.prompt == tuple(UNKNOWN_PROMPT) else group.prompt,
            choices=tuple(ChoiceStart(choice.index, 0) for choice in response.choices),
        )
        for group, response in zip(plan.groups, responses, strict=True)
    ]
    return replace(plan, head=replace(plan.head, id=responses[0].request_id), groups=tuple(groups))


class DerenderedAnswer(CollectedAnswer):
    """An answer that copies the fields that cannot be computed from its tokens from the generated answers."""

    def __init__(self, plan: Plan, responses: Sequence[Generated], *, shape: BodyShape) -> None:
        super().__init__(plan, shape.logprobs)
        self._responses = responses
        self._plan = plan
        self._choices = [
            GroupChoices(group, tokenizer=plan.served.tokenizer, rules=plan.rules_of(number))
            for number, group in enumerate(plan.groups)
        ]
        common = {*plan.served.info.eos_token_ids, *plan.served.tokenizer.special_ids}
        self._ends = [common.union(group.sampling.stop_token_ids) for group in plan.groups]

    def read(self, number: int, choice: GeneratedChoice) -> None:
        """Reads the tokens of one choice. `number`: the number of its response."""
        for delta in choice.deltas(self._ends[number]):
            events: list[ChoiceEvent] = []
            self._choices[number].feed(GroupDelta(self._plan.groups[number].request_id, (delta,)), events)
            self.feed([GroupStep(events, None, number)])

    def usage(self, prompt_tokens: Sequence[int] | None) -> Usage:
        """`prompt_tokens`: number of tokens of each prompt; None for the prompts of the plan."""
        lengths = [len(group.prompt) for group in self._plan.groups] if prompt_tokens is None else prompt_tokens
        return Usage(
            prompt_tokens=sum(lengths),
            completion_tokens=sum(sum(choices.num_tokens.values()) for choices in self._choices),
            reasoning_tokens=sum(choices.reasoning_tokens for choices in self._choices),
        )

    def prompt_logprobs(self, group: int, num_top: int | None) -> dict[str, object]:
        return {PROMPT_LOGPROBS: self._responses[group].prompt_logprobs}

    def openai_body(
        self, kind: str, choices: Iterable[object], *, usage: dict[str, object], **more: object
    ) -> Sequence[bytes]:
        more["kv_transfer_params"] = self._responses[0].kv_transfer_params
        return super().openai_body(kind, choices, usage=usage, **more)

    def add_stop_reasons(self) -> None:
        """Adds the given reasons to choices that ended without one."""
        for group, response in zip(self.groups, self._responses, strict=True):
            given = {choice.index: choice.stop_reason for choice in response.choices}
            for choice in group.choices:
                if choice.end is not None and choice.end.stop_reason is None:
                    choice.end = msgspec.structs.replace(choice.end, stop_reason=given[choice.index])


async def _response(
    plan: Plan,
    responses: Sequence[Generated],
    *,
    prompt_tokens: Sequence[int] | None,
    shape: BodyShape,
    caller: Caller,
) -> Response:
    """`prompt_tokens`: number of tokens of each prompt; None for the prompts of the plan."""
    num_tokens = sum(CHOICE_TOKENS + len(choice.token_ids) for one in responses for choice in one.choices)
    num_tokens += sum(len(one.prompt_logprobs or ()) for one in responses)
    answer = await caller.in_thread_if_long(partial(DerenderedAnswer, plan, responses, shape=shape), num_tokens)

    def read(piece: Sequence[tuple[int, GeneratedChoice]]) -> None:
        for number, choice in piece:
            answer.read(number, choice)

    def body() -> bytes:
        answer.add_stop_reasons()
        return b"".join(shape.body(answer, answer.usage(prompt_tokens)))

    for piece in _pieces(responses):
        await caller.in_thread_if_long(partial(read, piece), num_tokens)
    return Response(await caller.in_thread_if_long(body, num_tokens), media_type="application/json")


def _pieces(responses: Sequence[Generated]) -> Iterator[list[tuple[int, GeneratedChoice]]]:
    """Yields the choices of each piece of work, with the numbers of their responses."""
    piece, size = list[tuple[int, GeneratedChoice]](), 0
    for number, response in enumerate(responses):
        for choice in response.choices:
            piece.append((number, choice))
            size += CHOICE_TOKENS + len(choice.token_ids)
            if size >= PIECE_TOKENS:
                yield piece
                piece, size = [], 0
    if piece:
        yield piece

"""vLLM's routes that turn the answers of `/inference/v1/generate` into answers of OpenAI's routes, without an engine:

POST /v1/chat/completions/derender      the answer to a rendered chat
POST /v1/completions/derender           the answers to each of several rendered prompts

The request that was rendered is planned again. Its plan reads the given tokens as if an engine had generated them, so
the answer has the text, reasoning, tool calls and log-probabilities that the request would have had without rendering.
With `stream`, a request has one chunk of a choice (`derender_stream`).
"""

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from motet.api.generation.collect import PROMPT_LOGPROBS, BodyShape, CollectedAnswer
from motet.api.generation.kv_params import request_context
from motet.api.generation.plan import Plan
from motet.api.generation.request_fields import PromptLogprobs
from motet.api.http.caller import Caller, caller_of
from motet.api.http.failure import missing_parameter
from motet.api.http.routes import new_router, post
from motet.api.openai.chat_completions import ChatBody
from motet.api.openai.chat_plan import plan_chat
from motet.api.openai.completions import CompletionBody, CompletionTexts, plan_completions
from motet.api.served import ServedModel
from motet.api.service import Service
from motet.api.vllm.derender_schema import (
    UNKNOWN_PROMPT,
    ChatDerender,
    CompletionDerender,
    Generated,
    GeneratedChoice,
    GeneratedChunk,
)
from motet.api.vllm.derender_stream import ChatChunk, CompletionChunk, check_state, chunk_response
from motet.text.choice import ChoiceEvent, ChoiceStream, TextRules, WeightSpan
from motet.text.prepare import PromptPreparer
from motet.text.stop_strings import StopStrings
from motet.text.text_group import GroupStep
from motet.types import ChoiceStart, TokenLogprob, Usage

CHOICE_TOKENS = 32
"""Number of tokens that take as long as the other work for a choice."""
PIECE_TOKENS = 2**14
"""Number of tokens after which a piece of work ends, and other clients have their turn. A million tokens take 2 s."""


def derender_router(service: Service) -> APIRouter:
    router = new_router()

    @post(router, "/v1/chat/completions/derender", body=ChatDerender, summary="Token ids as an answer to a chat")
    async def chat(body: ChatDerender, request: Request) -> Response:
        caller, responses = caller_of(request), body.responses
        planned = await caller.in_thread_if_long(lambda: body.planned_request)
        async with request_context(service, planned, caller=caller, num_choices=planned.n) as context:
            _check_parsed(context.served, body)
            await caller.in_thread_if_long(partial(_check, context.served.preparer, body))
            plan = await plan_chat(service, planned, context=context, generated=True)
        if body.stream:
            return await chunk_response(ChatChunk(plan, planned, body=body), caller=caller)
        counts = None if body.prompt_tokens is None else [body.prompt_tokens]
        plan, shape = _with_choices(plan, responses), ChatBody(plan, planned)
        return await _response(plan, responses, prompt_tokens=counts, shape=shape, caller=caller)

    @post(router, "/v1/completions/derender", body=CompletionDerender, summary="Token ids as answers to prompts")
    async def completions(body: CompletionDerender, request: Request) -> Response:
        caller, responses = caller_of(request), body.responses
        planned = await caller.in_thread_if_long(lambda: body.planned_request)
        async with request_context(service, planned, caller=caller, num_choices=planned.n) as context:
            await caller.in_thread_if_long(partial(_check, context.served.preparer, body))
            plan = await plan_completions(service, planned, context=context)
        if (asked := body.completion_request) is not None:
            plan = replace(plan, rules=msgspec.structs.replace(plan.rules, min_tokens=asked.min_tokens))
        if body.stream:
            return await chunk_response(CompletionChunk(plan, planned, body=body), caller=caller)
        plan = _with_choices(plan, responses)
        shape = CompletionBody(planned, CompletionTexts(plan, planned))
        return await _response(plan, responses, prompt_tokens=body.prompt_tokens, shape=shape, caller=caller)

    return router


def _check_parsed(served: ServedModel, body: ChatDerender) -> None:
    """Raises RequestError for an answer that has to be parsed without what its parser needs. A chunk needs the prompt,
    since its messages would be rendered for each chunk again."""
    if not served.formats.must_parse:
        return
    if body.chat_request is None:
        raise missing_parameter("chat_request")
    if body.stream and body.prompt_token_ids is None:
        raise missing_parameter("prompt_token_ids")


def _check(preparer: PromptPreparer, body: ChatDerender | CompletionDerender) -> None:
    """Raises RequestError for tokens that the model does not have, and for more tokens than its context can have."""
    if body.stream:
        check_state(preparer, body)
    sources: Sequence[Generated | GeneratedChunk] = [body.chunk] if body.stream else body.responses
    for choice in (choice for one in sources for choice in one.choices):
        if choice.token_ids:
            preparer.check_prompt(choice.token_ids, param="token_ids")
            preparer.check_length(choice.token_ids, param="token_ids")
        for entry in choice.logprob_entries or ():
            preparer.check_prompt([entry.token_id, *(token_id for token_id, _ in entry.top)], param="token_id")


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
        self._num_tokens = 0
        self._reasoning_tokens = 0
        common = {*plan.served.info.eos_token_ids, *plan.served.tokenizer.special_ids}
        self._ends = [common.union(group.sampling.stop_token_ids) for group in plan.groups]

    def read(self, number: int, choice: GeneratedChoice) -> None:
        """Reads the tokens of one choice. `number`: the number of its response."""
        plan, entries = self.plan, choice.logprob_entries
        complete = entries is not None and len(entries) == len(choice.token_ids)
        rules = msgspec.structs.replace(_rules(plan.rules_of(number), choice), logprobs=complete)
        start, prompt = ChoiceStart(choice.index, 0), plan.groups[number].prompt
        stream = ChoiceStream(start, prompt, tokenizer=plan.served.tokenizer, rules=rules)
        events = [stream.feed(delta) for delta in choice.deltas(self._ends[number], entries if complete else None)]
        if entries is not None and not complete:
            events = [self._unplaced(choice.index, entries), *events]
        self.feed([GroupStep([_ended(event, choice)], None, number) for event in events if event is not None])
        self._num_tokens += stream.num_tokens
        self._reasoning_tokens += stream.reasoning_tokens

    def _unplaced(self, index: int, entries: tuple[TokenLogprob, ...]) -> ChoiceEvent:
        """Returns an event with log-probabilities of only some tokens, with the places that their texts would have
        alone."""
        offsets, start = list[int](), 0
        for entry in entries:
            offsets.append(start)
            start += len(self.plan.served.tokenizer.token_text(entry.token_id))
        return ChoiceEvent(index, "", (), entries, tuple(offsets))

    def usage(self, prompt_tokens: Sequence[int] | None) -> Usage:
        """`prompt_tokens`: number of tokens of each prompt; None for the prompts of the plan."""
        lengths = [len(group.prompt) for group in self.plan.groups] if prompt_tokens is None else prompt_tokens
        return Usage(
            prompt_tokens=sum(lengths),
            completion_tokens=self._num_tokens,
            reasoning_tokens=self._reasoning_tokens,
        )

    def prompt_logprobs(self, group: int, fields: PromptLogprobs) -> dict[str, object]:
        return {PROMPT_LOGPROBS: self._responses[group].prompt_logprobs}

    def openai_body(
        self, kind: str, choices: Iterable[object], *, usage: dict[str, object], **more: object
    ) -> Sequence[bytes]:
        more["kv_transfer_params"] = self._responses[0].kv_transfer_params
        return super().openai_body(kind, choices, usage=usage, **more)


def _rules(rules: TextRules, choice: GeneratedChoice) -> TextRules:
    """Returns the rules of a choice: its text ends at the stop string that was reported, if any."""
    if (stop := choice.reported_stop) is None:
        return rules
    return msgspec.structs.replace(rules, stops=StopStrings([stop]))


def _ended(event: ChoiceEvent, choice: GeneratedChoice) -> ChoiceEvent:
    """Returns an event with the fields about the end of the choice that only the generated answer has."""
    if event.finish is None:
        return event
    spans = tuple(WeightSpan(span.version, span.start, span.end) for span in choice.weight_versions)
    reason = choice.stop_reason if event.stop_reason is None else event.stop_reason
    return msgspec.structs.replace(event, stop_reason=reason, weight_versions=spans)


async def _response(
    plan: Plan,
    responses: Sequence[Generated],
    *,
    prompt_tokens: Sequence[int] | None,
    shape: BodyShape,
    caller: Caller,
) -> Response:
    """`prompt_tokens`: number of tokens of each prompt; None for the prompts of the plan."""
    num_tokens = sum(_work_size(choice) for one in responses for choice in one.choices)
    num_tokens += sum(len(one.prompt_logprobs or ()) for one in responses)
    answer = await caller.in_thread_if_long(partial(DerenderedAnswer, plan, responses, shape=shape), num_tokens)

    def read(piece: Sequence[tuple[int, GeneratedChoice]]) -> None:
        for number, choice in piece:
            answer.read(number, choice)

    def body() -> Sequence[bytes]:
        return shape.body(answer, answer.usage(prompt_tokens))

    for piece in _pieces(responses):
        await caller.in_thread_if_long(partial(read, piece), num_tokens)
    encoded = await caller.in_thread_if_long(body, num_tokens)

    async def pieces() -> AsyncIterator[bytes]:
        for piece in encoded:
            yield piece

    headers = {"content-length": str(sum(map(len, encoded)))}
    return StreamingResponse(pieces(), headers=headers, media_type="application/json")


def _work_size(choice: GeneratedChoice) -> int:
    return CHOICE_TOKENS + len(choice.token_ids) + len(choice.reported_stop or "")


def _pieces(responses: Sequence[Generated]) -> Iterator[list[tuple[int, GeneratedChoice]]]:
    """Yields the choices of each piece of work, with the numbers of their responses."""
    piece, size = list[tuple[int, GeneratedChoice]](), 0
    for number, response in enumerate(responses):
        for choice in response.choices:
            piece.append((number, choice))
            size += _work_size(choice)
            if size >= PIECE_TOKENS:
                yield piece
                piece, size = [], 0
    if piece:
        yield piece

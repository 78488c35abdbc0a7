"""`POST /v1/score`: the log-probabilities of continuations of one prompt.

1. `ScoreRequest`      the checked body. Sampling fields are refused: nothing is sampled
2. `scored_prompts`    tokenises the prompt with each continuation
3. `make_plan`         one group for each continuation, whose prompt is scored and whose output is not sent. The engine
                       computes the common prefix of the prompts once, and cached blocks keep their scores
4. `ScoreWriter`       collects the scores of the continuations, and writes the answer
"""

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Self

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field, PlainValidator, model_validator

from motet.api.generation.answer_writer import LOGPROB_BYTES, GroupsWriter, usage_shape
from motet.api.generation.extensions import NamedRequest
from motet.api.generation.json_pieces import encode_answer, encode_arrays, encode_json
from motet.api.generation.known_answers import answer_plan
from motet.api.generation.kv_params import PARAM as TICKETS
from motet.api.generation.kv_params import RequestContext, request_context
from motet.api.generation.plan import GROUP_CHARS, Plan, RouteOptions, check_size, make_plan
from motet.api.generation.prompts import Prompt, parse_prompts
from motet.api.generation.request_fields import (
    IGNORED_FIELDS,
    SAMPLING_NAMES,
    RequestFields,
    SamplingFields,
    StreamingFields,
)
from motet.api.http.caller import Caller, caller_of
from motet.api.http.failure import FieldError, invalid_value, unsupported_parameter
from motet.api.http.long_work import LONG_WORK
from motet.api.http.routes import new_router, post
from motet.api.http.schema import Neutral
from motet.api.openai.chat_plan import chat_text
from motet.api.openai.chat_schema import ChatPrompt
from motet.api.scoring.continuations import PARAM, ScoredPrompt, ScoredText, parse_continuations, scored_prompts
from motet.api.service import Service
from motet.errors import EngineError
from motet.text.logprobs import LOWEST
from motet.text.text_group import GroupStep
from motet.types import PromptScores, TokenLogprob, Usage

NOT_SAMPLED = frozenset(
    {
        *SamplingFields.model_fields,
        *SAMPLING_NAMES,
        *StreamingFields.model_fields,
        *("best_of", "echo", "group", "logprobs", "max_completion_tokens", "prompt_logprobs", "top_logprobs"),
        *("ebnf", "regex", "response_format", "structured_outputs"),
    }
)
"""Fields of routes that sample tokens."""
OTHER_SERVERS_FIELDS = frozenset(
    {
        *("text_1", "text_2", "data_1", "data_2", "queries"),  # vLLM's route for pairs of texts
        *("query", "items", "label_token_ids", "apply_softmax", "item_first"),  # SGLang's route
    }
)
"""Fields of routes with the same path in other servers, which compare texts."""
ONE_TOKEN = SamplingFields.model_validate({"max_tokens": 1, "temperature": 0.0})
"""Sampling of each group: engines generate at least one token, which is not sent."""


class ScoreRequest(ChatPrompt, NamedRequest, RequestFields):
    """A prompt (`prompt`, or `messages` and the fields of a chat prompt), and its continuations."""

    has_token_ids = True
    aliases: ClassVar[Mapping[str, str]] = {**ChatPrompt.aliases, "rid": "request_id"}
    ignored = IGNORED_FIELDS
    refused = (NOT_SAMPLED - {"n", "stream"}) | OTHER_SERVERS_FIELDS
    neutral: ClassVar[Neutral] = {"n": (1,), "stream": (False,)}
    advice: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(NOT_SAMPLED, "'continuations' are scored, and nothing is sampled"),
        **dict.fromkeys(OTHER_SERVERS_FIELDS, "it scores 'continuations' of a 'prompt'"),
    }

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(parse_prompts)] | None = None
    """One text or the token ids of one prompt. `add_special_tokens` is True by default for a text."""
    continuations: Annotated[
        tuple[Prompt, ...],
        PlainValidator(parse_continuations, json_schema_input_type=list[str | list[Annotated[int, Field(ge=0)]]]),
    ]

    @model_validator(mode="after")
    def check_one_prompt(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise FieldError(invalid_value, "prompt", "exactly one of it and 'messages' must be given")
        if self.prompt is not None and len(self.prompt) > 1:
            raise FieldError(invalid_value, "prompt", "expected one text, or the token ids of one prompt")
        return self

    @property
    def prompt_param(self) -> str:
        return "messages" if self.prompt is None else "prompt"


def score_router(service: Service) -> APIRouter:
    router = new_router()

    @post(router, "/v1/score", body=ScoreRequest, summary="The log-probabilities of continuations of a prompt")
    async def score(body: ScoreRequest, request: Request) -> Response:
        caller = caller_of(request, named=body.request_id, session=body.session_id, cache_salt=body.cache_salt)
        async with request_context(service, body, caller=caller, num_choices=1) as context:
            if body.kv_transfer_params is not None:
                raise unsupported_parameter(TICKETS, "cannot be used here: it is for a single prompt")
            plan, prompts = await _plan(service, body, context=context)
            return answer_plan(service, plan, writer=ScoreWriter(plan, [prompt.first for prompt in prompts]))

    return router


async def _plan(
    service: Service, body: ScoreRequest, *, context: RequestContext
) -> tuple[Plan, Sequence[ScoredPrompt]]:
    options = RouteOptions(
        context=context,
        streaming=StreamingFields(),
        prefix="score",
        prompt_param=PARAM,
        num_choices=1,
        ignores_defaults=True,
        prompt_logprobs=0,
        prompt_only=True,
    )
    check_size(service, len(body.continuations), options=options)
    preparer, caller, param = context.served.preparer, context.caller, body.prompt_param
    prompt = await _prompt(service, body, context=context)
    prompts = await scored_prompts(preparer, prompt, continuations=body.continuations, param=param, caller=caller)

    def make() -> Plan:
        plan = make_plan(service, [prompt.ids for prompt in prompts], sampling=ONE_TOKEN, request=body, options=options)
        groups = (
            msgspec.structs.replace(group, scored_from=prompt.first)
            for group, prompt in zip(plan.groups, prompts, strict=True)
        )
        return replace(plan, groups=tuple(groups))

    return await caller.in_thread_if_long(make, _size(caller, prompts)), prompts


def _size(caller: Caller, prompts: Sequence[ScoredPrompt]) -> int:
    """Returns the size of the work of planning the groups."""
    return max(caller.work_size, GROUP_CHARS * len(prompts), sum(len(prompt.ids) for prompt in prompts) // GROUP_CHARS)


async def _prompt(service: Service, body: ScoreRequest, *, context: RequestContext) -> ScoredText | Sequence[int]:
    """Returns the prompt: token ids, or a text that is not yet tokenised."""
    if body.prompt is None:
        rendered = await chat_text(context.served.preparer, body, caller=context.caller, config=service.config)
        # The template adds the special tokens.
        return ScoredText(rendered.text, bool(body.add_special_tokens), "messages", rendered.as_text)
    (prompt,) = body.prompt
    return ScoredText(prompt, body.add_special_tokens is not False, "prompt") if isinstance(prompt, str) else prompt


class ScoreWriter(GroupsWriter):
    """Collects the scores of the continuations, without the scores of the prompt, and writes the answer."""

    content_type = "application/json"
    streams = False
    keeps_answer = True

    def __init__(self, plan: Plan, firsts: Sequence[int]) -> None:
        """`firsts`: index of the first token of each continuation."""
        self._plan = plan
        self._firsts = firsts
        self._scores: list[PromptScores | None] = [None] * len(plan.groups)
        self._num_tokens = sum(len(group.prompt) - first for group, first in zip(plan.groups, firsts, strict=True))

    def feed(self, steps: Sequence[GroupStep], usage: Callable[[], Usage]) -> bytes:
        for step in steps:
            if step.prompt is not None:
                self._scores[step.group] = step.prompt.scores_since(self._firsts[step.group])
        return b""

    @property
    def held_bytes(self) -> int:
        return LOGPROB_BYTES * self._num_tokens

    @property
    def close_is_long(self) -> bool:
        return self._num_tokens + GROUP_CHARS // 4 * len(self._firsts) >= LONG_WORK

    def close(self, usage: Usage) -> Sequence[bytes]:
        (rest,) = encode_json({"usage": usage_shape(usage)})
        items = (self._score(number) for number in range(len(self._firsts)))
        return encode_answer(self._plan.head.json("score") + b',"scores":[', items, closing=[b"],", rest[1:]])

    def _score(self, number: int) -> dict[str, object]:
        ids = self._plan.groups[number].prompt[self._firsts[number] :]
        logprobs, greedy = array("d"), True
        for score in self._token_scores(number, ids):
            logprobs.append(max(score.logprob, LOWEST))
            greedy = greedy and score.rank == 1
        total = math.fsum(logprobs)
        arrays = encode_arrays(len(ids), lambda part: {"token_ids": ids[part], "token_logprobs": [*logprobs[part]]})
        return {
            "index": number,
            "logprob": total,
            "mean_logprob": total / len(ids),
            "is_greedy": greedy,
            "num_tokens": len(ids),
            **{name: entries.json() for name, entries in arrays.items()},
        }

    def _token_scores(self, number: int, ids: Sequence[int]) -> Iterator[TokenLogprob]:
        """Yields the score of each token of a continuation. Raises EngineError if the engine did not report them."""
        scores = iter(self._scores[number] or ())
        for token in ids:
            score = next(scores, None)
            if score is None or score.token_id != token:
                raise EngineError("The engine did not report the log-probabilities of a continuation.")
            yield score

"""`POST /v1/decisions`: the probabilities of the answers to several questions about one input.

1. `DecisionRequest`   the checked body. Sampling fields are refused: nothing is sampled
2. `QuestionPrompts`   renders the input once, and tokenises each question's prompt and answers
3. `AnswerReads`       the reads of the model's next-token distribution that the answers need
4. `decision_plan`     groups whose choices each perform one read. The engine computes the common prefix of their
                       prompts once
5. `DecisionWriter`    collects the log-probabilities, and writes the answers
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, ClassVar

from fastapi import APIRouter, Request, Response
from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationError

from motet.api.generation.answer_writer import GroupsWriter
from motet.api.generation.extensions import NamedRequest
from motet.api.generation.json_pieces import encode_answer, encode_arrays, encode_json
from motet.api.generation.known_answers import answer_plan
from motet.api.generation.kv_params import PARAM as TICKETS
from motet.api.generation.kv_params import request_context
from motet.api.generation.plan import Plan
from motet.api.generation.request_fields import IGNORED_FIELDS, RequestFields
from motet.api.http.caller import caller_of
from motet.api.http.failure import (
    FieldError,
    Names,
    invalid_value,
    names_table,
    renamed,
    schema_failure,
    unsupported_parameter,
)
from motet.api.http.long_work import LONG_WORK
from motet.api.http.routes import new_router, post
from motet.api.http.schema import Neutral, check_num_values
from motet.api.openai.chat_schema import ChatPrompt
from motet.api.openai.converted_chat import RESPONSE_NAMES
from motet.api.openai.responses import messages
from motet.api.openai.responses_schema import InputItem, as_items, read_item
from motet.api.scoring.answer_reads import Tokens
from motet.api.scoring.decision_plan import PARAM, ReadGroup, TokenizedQuestion, decision_plan, tokenized_questions
from motet.api.scoring.decision_prompts import with_placeholder
from motet.api.scoring.questions import AnyQuestion, as_text_parts, read_question
from motet.api.scoring.scores import NOT_SAMPLED
from motet.api.service import Service
from motet.errors import EngineError, RequestError
from motet.text.logprobs import LOWEST
from motet.text.text_group import GroupStep
from motet.types import Usage

MAX_QUESTIONS = 200
READ_CHARS = 64
"""Time to encode the result of one read, as the number of characters of a text that takes as long."""
READ_BYTES = 300
"""Approximate memory of the result of one read."""
NAMES: Names = [*names_table([(r"(?:allowed|logprob|stop)_token_ids", PARAM)]), *RESPONSE_NAMES]
"""Names of fields of a chat or a group in the client's request, for errors."""


def _as_input(value: object) -> object:
    """Returns the items of an input, without JSON in their parts."""
    if value == "":
        raise FieldError(invalid_value, None, "it is empty")
    items = as_items(value)
    return list(map(_without_json, items)) if isinstance(items, list) else items


def _without_json(item: object) -> object:
    if not isinstance(item, dict):
        return item
    listed = {name: as_text_parts(item[name]) for name in ("content", "output") if isinstance(item.get(name), list)}
    return {**item, **listed}


class DecisionRequest(NamedRequest, RequestFields):
    """An input, as in a request for a Response, and the questions about it."""

    aliases: ClassVar[Mapping[str, str]] = {"rid": "request_id"}
    ignored = IGNORED_FIELDS
    refused = NOT_SAMPLED - {"n", "stream"}
    neutral: ClassVar[Neutral] = {"n": (1,), "stream": (False,)}
    advice: ClassVar[Mapping[str, str]] = dict.fromkeys(NOT_SAMPLED, "probabilities are read, and nothing is sampled")

    input: Annotated[
        list[Annotated[InputItem, PlainValidator(read_item)]],
        BeforeValidator(_as_input, json_schema_input_type=str | list[object]),
        Field(min_length=1),
    ]
    questions: list[Annotated[AnyQuestion, PlainValidator(read_question, json_schema_input_type=AnyQuestion)]] = Field(
        min_length=1, max_length=MAX_QUESTIONS
    )
    chat_template_kwargs: Annotated[dict[str, object], AfterValidator(check_num_values)] = Field(default_factory=dict)
    return_token_ids: bool = False
    """True if the answer has the tokens of the prompts and of the answers."""

    def chat(self) -> ChatPrompt:
        """Returns the chat with a placeholder for the question. Reasoning is turned off if the template can do that.
        Raises the errors of the chat's schema."""
        listed = with_placeholder(messages(None, self.input))
        fields = {"messages": listed, "chat_template_kwargs": self.chat_template_kwargs}
        try:
            return ChatPrompt.model_validate({**fields, "reasoning_effort": "none"})
        except ValidationError as error:
            raise schema_failure(error) from error


def decision_router(service: Service) -> APIRouter:
    router = new_router()

    @post(router, "/v1/decisions", body=DecisionRequest, summary="The probabilities of the answers to questions")
    async def decisions(body: DecisionRequest, request: Request) -> Response:
        caller = caller_of(request, named=body.request_id, session=body.session_id, cache_salt=body.cache_salt)
        async with request_context(service, body, caller=caller, num_choices=1) as context:
            if body.kv_transfer_params is not None:
                raise unsupported_parameter(TICKETS, "cannot be used here: it is for a single prompt")
            try:
                questions = await tokenized_questions(service, body.questions, chat=body.chat, context=context)
                plan, groups = await decision_plan(service, questions, request=body, context=context)
            except RequestError as error:
                raise renamed(error, NAMES) from error
            writer = DecisionWriter(plan, questions=questions, groups=groups, shows_tokens=body.return_token_ids)
            return answer_plan(service, plan, writer=writer, names=lambda: NAMES)

    return router


class DecisionWriter(GroupsWriter):
    """Collects the log-probabilities of the reads, and writes the answers."""

    content_type = "application/json"
    streams = False
    keeps_answer = True

    def __init__(
        self, plan: Plan, *, questions: Sequence[TokenizedQuestion], groups: Sequence[ReadGroup], shows_tokens: bool
    ) -> None:
        """`groups`: the reads of each group of the plan. `shows_tokens`: see `DecisionRequest.return_token_ids`."""
        self._plan = plan
        self._questions = questions
        self._groups = groups
        self._shows_tokens = shows_tokens
        self._logprobs: list[list[array[float] | None]] = [[None] * len(group.reads) for group in groups]
        """For each read of each group, the log-probabilities of its tokens once they have arrived."""

    def feed(self, steps: Sequence[GroupStep], usage: Callable[[], Usage]) -> bytes:
        for step in steps:
            logprobs, reads = self._logprobs[step.group], self._groups[step.group].reads
            for event in step.events:
                if event.logprobs and logprobs[event.index] is None:
                    top, read = dict(event.logprobs[0].top), reads[event.index]
                    if top.keys() >= {*read.token_ids}:
                        logprobs[event.index] = array("d", [max(top[token], LOWEST) for token in read.token_ids])
        return b""

    @property
    def held_bytes(self) -> int:
        return READ_BYTES * self._plan.num_choices

    @property
    def close_is_long(self) -> bool:
        shown = sum(len(one.prompt) for one in self._questions) if self._shows_tokens else 0
        listed = sum(len(one.reads.answers) for one in self._questions)
        return READ_CHARS * (self._plan.num_choices + listed) + shown >= LONG_WORK

    def close(self, usage: Usage) -> Sequence[bytes]:
        (rest,) = encode_json({"model": self._plan.head.model, "usage": _usage_shape(usage)})
        return encode_answer(b'{"answers":[', self._answers(), closing=[b"],", rest[1:]])

    def _answers(self) -> Iterator[object]:
        results: list[dict[Tokens, dict[int, float]]] = [{} for _ in self._questions]
        for group, logprobs in zip(self._groups, self._logprobs, strict=True):
            for read, values in zip(group.reads, logprobs, strict=True):
                if values is None:
                    raise EngineError("The engine did not report the log-probabilities of an answer.")
                results[group.question].setdefault(read.prefix, {}).update(zip(read.token_ids, values, strict=True))
        for one, result in zip(self._questions, results, strict=True):
            question, distribution = one.question, one.reads.distribution(result)
            fields = {"type": question.type, "name": question.name, **question.result(distribution)}
            yield {**fields, **self._tokens(one)} if self._shows_tokens else fields

    def _tokens(self, one: TokenizedQuestion) -> dict[str, object]:
        arrays = encode_arrays(len(one.prompt), lambda part: {"prompt_token_ids": one.prompt[part]})
        return {"prompt_token_ids": arrays["prompt_token_ids"].json(), "answer_token_ids": one.reads.answers}


def _usage_shape(usage: Usage) -> dict[str, object]:
    """Returns the usage in OpenAI's shape. No tokens are generated for the client."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens,
    }

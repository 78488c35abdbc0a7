"""`POST /v1/chat/completions`: one prompt, n choices."""

from collections.abc import Sequence
from typing import Protocol

from fastapi import APIRouter, Request, Response
from msgspec.json import encode as json_bytes

from motet.api.generation.answer_writer import (
    GroupsWriter,
    chat_usage_json,
    num_listed,
    streamed_prompt_logprobs,
    usage_shape,
)
from motet.api.generation.chunks import ChunkShape, ChunkTemplate, ChunkWriter, finish_json, versions_before
from motet.api.generation.collect import BodyShape, BodyWriter, CollectedAnswer, CollectedChoice, LogprobFields
from motet.api.generation.known_answers import answer_plan
from motet.api.generation.kv_params import request_context
from motet.api.generation.plan import Plan
from motet.api.http.caller import caller_of
from motet.api.http.routes import PostRoute, drop_body, new_router, read_body
from motet.api.openai.chat_plan import plan_chat
from motet.api.openai.chat_schema import ChatRequest
from motet.api.service import Service
from motet.api.texts.text_requests import answer_from_texts, pass_through
from motet.engines.upstream.text_source import TextRoute
from motet.text.choice import ChoiceEvent
from motet.text.logprobs import chat_logprobs
from motet.text.parts import Content, Reasoning, ToolCallArguments, ToolCallBegin
from motet.text.text_group import GroupStep
from motet.text.tools.tool_format import ToolMode, ToolRules
from motet.types import Usage


def chat_router(service: Service) -> APIRouter:
    router = new_router()

    async def chat_completions(request: Request) -> Response:
        passed = await pass_through(service, request)
        if passed is None:
            response = await answer_chat(service, await read_body(request, ChatRequest), request=request)
        else:  # the body's `model` is on a third-party text server, which checks the rest of the body
            response = await answer_from_texts(service, passed, route=TextRoute.CHAT, request=request)
        drop_body(request)
        return response

    summary = "n answers to one conversation"
    router.routes.append(PostRoute("/v1/chat/completions", chat_completions, body=ChatRequest, summary=summary))
    return router


async def answer_chat(service: Service, body: ChatRequest, *, request: Request) -> Response:
    """Returns the answer of a model that takes tokens."""
    body.refuse_offsets()
    caller = caller_of(request, named=body.request_id, session=body.session_id, cache_salt=body.cache_salt)
    async with request_context(service, body, caller=caller, num_choices=body.n) as context:
        body = body.without_answer() if context.order else body
        plan = await plan_chat(service, body, context=context)
        body = body.planned().named(as_ids=service.config.return_tokens_as_token_ids)

        def make_writer(plan: Plan, stream: bool) -> GroupsWriter:
            return chat_writer(plan, body, stream=stream)

        return answer_plan(service, plan, writer=make_writer(plan, body.stream), more=make_writer)


def chat_writer(plan: Plan, body: ChatRequest, *, stream: bool) -> GroupsWriter:
    if not stream:
        return BodyWriter(plan, ChatBody(plan, body))
    template = ChunkTemplate(plan.head.json("chat.completion.chunk"), null_usage=plan.include_usage)
    shape = ChatChunks(plan, body, template=template)
    return ChunkWriter(
        plan,
        shape,
        template=template,
        usage_json=chat_usage_json,
        before_text=b',"delta":{"content":',
        after_text=AFTER_TEXT if shape.plain else None,
    )


class ParsedFields(Protocol):
    """The fields of a request that determine the message of a choice."""

    @property
    def tool_rules(self) -> ToolRules | None: ...
    @property
    def include_reasoning(self) -> bool: ...
    @property
    def separate_reasoning(self) -> bool: ...


def requires_call(body: ParsedFields) -> bool:
    return body.tool_rules is not None and body.tool_rules.mode is ToolMode.REQUIRED


def hides_tokens(plan: Plan, body: ParsedFields) -> bool:
    """Returns True if the answer has neither token ids nor log-probabilities, which would show hidden reasoning."""
    return not body.include_reasoning and body.separate_reasoning and plan.served.formats.reasons


def message_of(choice: CollectedChoice, body: ParsedFields) -> dict[str, object]:
    reasoning = choice.reasoning if body.include_reasoning else ""
    calls = []
    for call, arguments in choice.calls:
        function = {"name": call.name, "arguments": arguments.joined()}
        calls.append({"id": call.id, "type": "function", "function": function})
    no_content = None if calls or requires_call(body) else ""
    return {
        "role": "assistant",
        "content": choice.content or no_content,
        # Some clients read one name of the field, some the other.
        **({"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}),
        **({"tool_calls": calls} if calls else {}),
        "refusal": None,
    }


class ChatBody(BodyShape):
    def __init__(self, plan: Plan, body: ChatRequest) -> None:
        self._tokenizer = plan.served.tokenizer
        self._request = body
        self._hidden = hides_tokens(plan, body)

    def body(self, answer: CollectedAnswer, usage: Usage) -> Sequence[bytes]:
        request = self._request
        # Fields that vLLM adds are null without a request for them, as in vLLM: its clients read them unconditionally.
        ids = answer.plan.groups[0].prompt if request.return_token_ids else None
        prompt = {"prompt_token_ids": ids, **answer.prompt_logprobs(0, request)}
        choices = answer.take_choices(self._choice)
        return answer.openai_body("chat.completion", choices, usage=usage_shape(usage, reasoning=True), **prompt)

    def logprobs(self, group: int, event: ChoiceEvent) -> LogprobFields | None:
        num_top = num_listed(self._request, self._request.num_logprobs)
        if num_top is None or self._hidden:
            return None
        as_ids = self._request.return_tokens_as_token_ids
        return {"content": chat_logprobs(self._tokenizer, event.logprobs or (), num_top=num_top, as_ids=as_ids)}

    def _choice(self, choice: CollectedChoice) -> dict[str, object]:
        logprobs = None if choice.logprobs is None else {**choice.logprob_fields(), "refusal": None}
        return {
            "index": choice.index,
            "message": message_of(choice, self._request),
            "logprobs": logprobs,
            **choice.end_fields(),
            "token_ids": choice.token_ids if self._request.return_token_ids and not self._hidden else None,
            **choice.span_fields(self._request.versions_shown),
        }


AFTER_DELTA = b',"logprobs":null,"finish_reason":null}]'
"""The rest of a choice without log-probabilities and token ids, before its end."""
AFTER_TEXT = b"}" + AFTER_DELTA
NOTHING = b"{}"
NO_TEXT = b'{"content":""}'


class ChatChunks(ChunkShape):
    """The chunks of a streamed chat. The first chunk of each choice has the role.

    An event is a chunk for its text, or for each of its parts, and one more for the end of its choice: as in OpenAI's
    API, the chunk with the finish reason has no text."""

    def __init__(self, plan: Plan, body: ChatRequest, *, template: ChunkTemplate) -> None:
        hidden = hides_tokens(plan, body)
        self.plain = hidden or not (body.logprobs or body.return_token_ids)
        """True if a chunk has nothing but its delta before the end of its choice."""
        self._template = template
        self._prompt = plan.groups[0].prompt
        self._tokenizer = plan.served.tokenizer
        self._num_top = None if hidden else num_listed(body, body.num_logprobs)
        self._as_ids = body.return_tokens_as_token_ids
        self._request = body
        self._token_ids = body.return_token_ids and not hidden
        self._versions_shown = body.versions_shown
        self._reasoning = body.include_reasoning
        self._calls = body.tool_rules is not None
        """True if an answer can have tool calls."""
        undecided = self._calls and not requires_call(body)
        self._undecided = {start.index for start in plan.groups[0].choices} if undecided else set[int]()
        """Choices without content and tool calls so far: their content can still become a string, or stay null."""

    def openings(self, step: GroupStep, indices: Sequence[int], *, closing: bytes) -> list[bytes]:
        prompt = b',"prompt_token_ids":' + json_bytes(self._prompt) if self._request.return_token_ids else b""
        scored = streamed_prompt_logprobs(step.prompt, self._request, tokenizer=self._tokenizer)
        delta = b'{"role":"assistant","content":%b}' % (b"null" if self._calls else b'""')
        rest = delta + AFTER_DELTA + prompt
        ends = [scored + closing, *[closing] * (len(indices) - 1)]  # only the first chunk has the log-probabilities
        return [self._chunk(index, rest + end) for index, end in zip(indices, ends, strict=True)]

    def chunks(self, event: ChoiceEvent, group: int, *, closing: bytes) -> list[bytes]:
        """Returns a chunk for each delta; the first one has the event's tokens and log-probabilities. Clients read
        `token_ids` of each chunk, so it is empty in the others."""
        deltas = self._deltas(event)
        if event.finish is not None:
            deltas.append(NO_TEXT if event.index in self._undecided else NOTHING)
        elif not deltas and not self.plain:
            deltas.append(NOTHING)
        if self.plain and event.finish is None:
            return [self._chunk(event.index, delta + AFTER_DELTA + closing) for delta in deltas]
        last = len(deltas) - 1
        return [
            self._chunk(event.index, delta + self._after_delta(event, tokens=number == 0, end=number == last) + closing)
            for number, delta in enumerate(deltas)
        ]

    def _deltas(self, event: ChoiceEvent) -> list[bytes]:
        """Returns the deltas of an event. All deltas of a choice, joined, are the message of an unstreamed answer."""
        deltas = []
        for part in (Content(event.text),) if event.parts is None else event.parts:
            match part:
                case Content(text) if text:
                    deltas.append(b'{"content":%b}' % json_bytes(text))
                    self._undecided.discard(event.index)
                case Reasoning(text) if text and self._reasoning:
                    deltas.append(b'{"reasoning_content":%b,"reasoning":%b}' % ((json_bytes(text),) * 2))
                case ToolCallBegin(number, id, name):
                    function = b'{"name":%b,"arguments":""}' % json_bytes(name)
                    fields = (number, json_bytes(id), function)
                    deltas.append(b'{"tool_calls":[{"index":%d,"id":%b,"type":"function","function":%b}]}' % fields)
                    self._undecided.discard(event.index)
                case ToolCallArguments(number, text):
                    arguments = json_bytes(text)
                    deltas.append(b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (number, arguments))
        return deltas

    def _chunk(self, index: int, rest: bytes) -> bytes:
        """`rest`: the bytes of the chunk from its delta on."""
        return b'%b%d,"delta":%b' % (self._template.opening, index, rest)

    def _after_delta(self, event: ChoiceEvent, *, tokens: bool, end: bool) -> bytes:
        """Returns the fields of a choice after its delta: with its tokens, and with its end if it has ended."""
        return b',"logprobs":%b,"finish_reason":%b%b%b' % (
            self._logprobs(event) if tokens else b"null",
            finish_json(event) if end else b"null",
            b',"token_ids":' + json_bytes(event.token_ids if tokens else ()) if self._token_ids else b"",
            versions_before(b"}]", event, shown=self._versions_shown) if end else b"}]",
        )

    def _logprobs(self, event: ChoiceEvent) -> bytes:
        if self._num_top is None:
            return b"null"
        entries = event.logprobs or ()
        content = chat_logprobs(self._tokenizer, entries, num_top=self._num_top, as_ids=self._as_ids)
        return json_bytes({"content": content, "refusal": None})

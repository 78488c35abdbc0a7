"""`POST /v1/chat/completions`: one prompt, n choices."""

from collections.abc import Sequence

import msgspec
from fastapi import APIRouter, Request, Response

from motet.api.generation.answer import GroupsWriter, TokenChunks, spans_before
from motet.api.generation.collect import LogprobFields, WholeChoice, WholeWriter, chat_usage_json, usage_shape
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
from motet.types import Usage


def chat_router(service: Service) -> APIRouter:
    router = new_router()

    async def chat_completions(request: Request) -> Response:
        passed = await pass_through(service, request)
        if passed is not None:  # the body's `model` is on a third-party text server, which reads the rest of the body
            return answer_from_texts(service, passed, route=TextRoute.CHAT, request=request)
        response = await answer_chat(service, await read_body(request, ChatRequest), request=request)
        drop_body(request)
        return response

    summary = "n answers to one conversation"
    router.routes.append(PostRoute("/v1/chat/completions", chat_completions, body=ChatRequest, summary=summary))
    return router


async def answer_chat(service: Service, body: ChatRequest, *, request: Request) -> Response:
    """Returns the answer of a model that takes tokens."""
    caller = caller_of(request, session=body.session_id)
    async with request_context(service, body, caller=caller, num_choices=body.n) as context:
        body = body.without_answer() if context.order else body
        plan = await plan_chat(service, body, context=context)

        def write(plan: Plan, stream: bool) -> GroupsWriter:
            return (ChatChunks if stream else ChatBody)(plan, body)

        return answer_plan(service, plan, writer=write(plan, body.stream), more=write)


class ChatBody(WholeWriter):
    """A chat answered in one piece."""

    def __init__(self, plan: Plan, body: ChatRequest) -> None:
        super().__init__(plan)
        self._tokenizer = plan.served.tokenizer
        self._body = body

    def close(self, usage: Usage) -> Sequence[bytes]:
        choices = map(self._choice, self._groups[0].choices)
        prompt: dict[str, object] = (
            {"prompt_token_ids": self._plan.groups[0].prompt} if self._body.return_token_ids else {}
        )
        prompt |= self.prompt_logprobs(0, self._body.prompt_logprobs)
        return self.whole("chat.completion", choices, usage=usage_shape(usage, reasoning=True), **prompt)

    def _logprobs_of(self, group: int, event: ChoiceEvent) -> LogprobFields | None:
        num_top = self._body.listed(self._body.num_logprobs)
        if num_top is None:
            return None
        as_ids = self._body.return_tokens_as_token_ids
        return {"content": chat_logprobs(self._tokenizer, event.logprobs or (), num_top=num_top, as_ids=as_ids)}

    def _choice(self, choice: WholeChoice) -> dict[str, object]:
        body = self._body
        logprobs = None if choice.logprobs is None else {**choice.logprob_fields(), "refusal": None}
        thought = choice.reasoning if body.include_reasoning else ""
        calls = []
        for call, arguments in choice.calls:
            function = {"name": call.name, "arguments": "".join(arguments)}
            calls.append({"id": call.id, "type": "function", "function": function})
        message = {
            "role": "assistant",
            "content": choice.content or (None if calls else ""),
            # Clients read one or the other.
            **({"reasoning_content": thought, "reasoning": thought} if thought else {}),
            **({"tool_calls": calls} if calls else {}),
            "refusal": None,
        }
        return {
            "index": choice.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
            **({"token_ids": choice.token_ids} | choice.span_fields() if body.return_token_ids else {}),
        }


NOTHING_BESIDE = b',"logprobs":null,"finish_reason":null}]'
AFTER_TEXT = b"}" + NOTHING_BESIDE
NOTHING = b"{}"
NO_TEXT = b'{"content":""}'


class ChatChunks(TokenChunks):
    """A streamed chat; a role chunk for each choice comes first.

    An event as plain text is one chunk, the end of its choice in it. An event read as parts is a chunk a part, and one
    for the end of its choice."""

    def __init__(self, plan: Plan, body: ChatRequest) -> None:
        self._plain = not body.logprobs and not body.return_token_ids
        """True if nothing stands beside a delta before the end of its choice."""
        super().__init__(
            plan,
            "chat.completion.chunk",
            usage_json=chat_usage_json,
            before=b',"delta":{"content":',
            after=AFTER_TEXT,
            plain=self._plain,
        )
        self._prompt = plan.groups[0].prompt
        self._tokenizer = plan.served.tokenizer
        self._num_top = body.listed(body.num_logprobs)
        self._as_ids = body.return_tokens_as_token_ids
        self._token_ids = body.return_token_ids
        self._reasoning = body.include_reasoning
        self._calls = body.tool_rules is not None
        """True if an answer may be calls."""
        self._undecided = {start.index for start in plan.groups[0].choices} if self._calls else set[int]()
        """Choices of which it is not known yet if their content is a string, or stays null beside calls."""

    def _openings(self, step: GroupStep, indices: Sequence[int], *, closing: bytes) -> list[bytes]:
        prompt = b',"prompt_token_ids":' + msgspec.json.encode(self._prompt) if self._token_ids else b""
        delta = b'{"role":"assistant","content":%b}' % (b"null" if self._calls else b'""')
        told = delta + NOTHING_BESIDE + prompt + closing
        return [self._chunk(index, told) for index in indices]

    def _chunks(self, event: ChoiceEvent, group: int, *, closing: bytes) -> list[bytes]:
        if event.parts is not None:
            return self._of_parts(event, closing)
        text = b'{"content":%b}' % msgspec.json.encode(event.text) if event.text or not event.finish else NOTHING
        told = text + self._beside(event, tokens=True, end=True) + closing
        return [self._chunk(event.index, told)]

    def _of_parts(self, event: ChoiceEvent, closing: bytes) -> list[bytes]:
        """Returns a chunk for each part; the first one has the event's tokens and log-probabilities."""
        deltas = self._deltas(event)
        if event.finish is not None:
            deltas.append(NO_TEXT if event.index in self._undecided else NOTHING)
        elif not deltas and not self._plain:
            deltas.append(NOTHING)
        if self._plain and event.finish is None:
            return [self._chunk(event.index, delta + NOTHING_BESIDE + closing) for delta in deltas]
        last = len(deltas) - 1
        return [
            self._chunk(event.index, delta + self._beside(event, tokens=place == 0, end=place == last) + closing)
            for place, delta in enumerate(deltas)
        ]

    def _deltas(self, event: ChoiceEvent) -> list[bytes]:
        """Returns the deltas of an event. All deltas of a choice, joined, are the message of a whole answer."""
        deltas = []
        for part in event.parts or ():
            match part:
                case Content(text) if text:
                    deltas.append(b'{"content":%b}' % msgspec.json.encode(text))
                    self._undecided.discard(event.index)
                case Reasoning(text) if text and self._reasoning:
                    deltas.append(b'{"reasoning_content":%b,"reasoning":%b}' % ((msgspec.json.encode(text),) * 2))
                case ToolCallBegin(number, id, name):
                    function = b'{"name":%b,"arguments":""}' % msgspec.json.encode(name)
                    told = (number, msgspec.json.encode(id), function)
                    deltas.append(b'{"tool_calls":[{"index":%d,"id":%b,"type":"function","function":%b}]}' % told)
                    self._undecided.discard(event.index)
                case ToolCallArguments(number, text):
                    arguments = msgspec.json.encode(text)
                    deltas.append(b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (number, arguments))
        return deltas

    def _chunk(self, index: int, told: bytes) -> bytes:
        """`told`: the chunk from its delta on."""
        return b'%b%d,"delta":%b' % (self._opening, index, told)

    def _beside(self, event: ChoiceEvent, *, tokens: bool, end: bool) -> bytes:
        """Returns the fields beside the delta: about tokens, and about the end of the choice, if it has come."""
        finish = event.finish if end else None
        return b',"logprobs":%b,"finish_reason":%b%b%b' % (
            self._logprobs(event) if tokens else b"null",
            b'"%b","stop_reason":%b' % (finish.encode(), msgspec.json.encode(event.stop_reason)) if finish else b"null",
            b',"token_ids":' + msgspec.json.encode(event.token_ids) if tokens and self._token_ids else b"",
            spans_before(b"}]", event) if end and self._token_ids else b"}]",
        )

    def _logprobs(self, event: ChoiceEvent) -> bytes:
        if self._num_top is None:
            return b"null"
        entries = event.logprobs or ()
        content = chat_logprobs(self._tokenizer, entries, num_top=self._num_top, as_ids=self._as_ids)
        return msgspec.json.encode({"content": content, "refusal": None})

"""`POST /v1/responses`: one answer, made as a chat is, in the shape of OpenAI's Responses. Nothing of it is kept.

A request for a Response becomes a request for a chat, which is what answers it:

    instructions, input      ─► messages: items that the model wrote in one turn are one message
    tools, tool_choice, text ─► the same, with one more layer around their names

`one_answer` does the rest. The text of the choice becomes items (`response_output`); the rest of a Response repeats the
request.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response

from motet.api.generation.answer import GroupsWriter
from motet.api.generation.plan import AnswerHead, Plan
from motet.api.http.failure import Names, error_body, invalid_value, names_table
from motet.api.http.routes import PostRoute, json_response, new_router, with_body
from motet.api.openai.chat_schema import ChatRequest, joined
from motet.api.openai.converted_chat import (
    PASSED_ON,
    RESPONSE_NAMES,
    ConvertedRequest,
    MakeNames,
    NamedEvent,
    WholeOutput,
)
from motet.api.openai.response_output import INCOMPLETE, ItemStatus, Members, ResponseOutput
from motet.api.openai.responses_schema import (
    NOT_KEPT,
    BuiltInTool,
    CallInput,
    CallOutputInput,
    FunctionTool,
    InputItem,
    MessageInput,
    NamespaceTool,
    PlacedTool,
    ReasoningInput,
    ResponsesRequest,
    told_name,
)
from motet.api.service import Service
from motet.errors import NotFoundError
from motet.text.text_group import GroupStep
from motet.text.tokenizer import Tokenizer
from motet.types import FinishReason, Usage

log = logging.getLogger("motet.api")

ID_PREFIX = "resp_"
OWN = {"include_reasoning", "parallel_tool_calls", "separate_reasoning"}
"""Members that are the same in a chat, beside those of messages too."""
KEPT_ELSEWHERE = (
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("GET", "/v1/responses/{response_id}/input_items"),
)
"""The routes that OpenAI's API has for responses that it keeps."""


def responses_router(service: Service) -> APIRouter:
    router = new_router()

    async def responses(body: ResponsesRequest, request: Request) -> Response:
        asked = as_chat(body)

        def writer(plan: Plan, chat: ChatRequest) -> GroupsWriter:
            if left_out := {tool.type for _, _, tool in body.placed_tools() if isinstance(tool, BuiltInTool)}:
                told = {"request_id": plan.groups[0].trace, "types": sorted(left_out)}
                log.info("built-in tools are left out", extra={"fields": told})
            kind = ResponseEvents if body.stream else ResponseBody
            tokenizer, echo = plan.served.tokenizer, echo_json(body)
            return kind(plan.head, echo, tokenizer=tokenizer, chat=chat, names=asked.names, origins=origins(body))

        return await asked.answer(service, request, prefix=ID_PREFIX, writer=writer)

    async def input_tokens(body: ResponsesRequest, _: Request) -> Response:
        count = await as_chat(body).num_tokens(service)
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    for path, answer, summary in (
        ("/v1/responses", responses, "One answer to one conversation"),
        ("/v1/responses/input_tokens", input_tokens, "The number of tokens of a conversation"),
    ):
        handle = with_body(ResponsesRequest, answer)
        router.routes.append(PostRoute(path, handle, body=ResponsesRequest, summary=summary))

    async def not_kept(response_id: str) -> Response:
        raise NotFoundError(
            f"Response with id '{response_id}' not found: {NOT_KEPT}.", param="response_id", code="not_found"
        )

    for method, path in KEPT_ELSEWHERE:
        router.add_api_route(path, not_kept, methods=[method], include_in_schema=False)
    return router


def as_chat(body: ResponsesRequest) -> ConvertedRequest:
    return ConvertedRequest(
        make=partial(chat_request, body),
        num_parts=len(body.input),
        names=partial(names_of, body),
        prompt_param="input",
    )


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """Raises what the chat's schema raises."""
    fields: Members = body.model_dump(include=PASSED_ON | OWN, exclude_unset=True, by_alias=True)
    fields["messages"] = messages(body.instructions, body.input)
    fields["max_completion_tokens"] = body.max_output_tokens
    fields["reasoning_effort"] = body.reasoning.effort
    fields["logprobs"], fields["top_logprobs"] = body.logprobs, body.top_logprobs
    fields["tools"] = [
        {"type": tool.type, "function": {**tool.model_dump(exclude={"type"}, exclude_unset=True), "name": name}}
        for name, (_, _, tool) in _functions(body)
    ]
    fields["tool_choice"] = _nested(body.tool_choice)
    if (form := body.text.format) is not None:
        inner = form.model_dump(exclude={"type"}, exclude_unset=True, by_alias=True)
        inner = {"json_schema": inner} if form.type == "json_schema" else inner
        fields["response_format"] = {"type": form.type, **inner}
    return ChatRequest.model_validate(fields)


def _functions(body: ResponsesRequest) -> list[tuple[str, PlacedTool]]:
    """Returns the functions that the chat behind the Response has, each with its name there."""
    return [
        (told_name(placed.tool.name, placed.namespace), placed)
        for placed in body.placed_tools()
        if isinstance(placed.tool, FunctionTool)
    ]


def origins(body: ResponsesRequest) -> Mapping[str, Members]:
    """Returns the name and the namespace of each function that has one, by its name in the chat."""
    return {
        name: {"name": placed.tool.name, "namespace": placed.namespace}
        for name, placed in _functions(body)
        if placed.namespace is not None and isinstance(placed.tool, FunctionTool)
    }


def names_of(body: ResponsesRequest) -> Names:
    """Returns what the fields of the chat behind a Response are called in its request."""
    places = enumerate(placed.param for _, placed in _functions(body))
    return [*names_table((rf"tools\[{number}\]\.function", place) for number, place in places), *RESPONSE_NAMES]


def messages(instructions: str | None, items: Sequence[InputItem]) -> list[Members]:
    """Joins thoughts, then text, then calls of the model into one turn, since they were one answer."""
    turns: list[Members] = [] if instructions is None else [{"role": "system", "content": instructions}]
    for item in items:
        match item:
            case MessageInput(role="assistant"):
                _own_turn(turns, before=("reasoning_content",))["content"] = joined(item.content)
            case MessageInput():
                turns.append({"role": item.role, "content": joined(item.content)})
            case ReasoningInput():
                _own_turn(turns, before=())["reasoning_content"] = item.text
            case CallInput():
                turn = _own_turn(turns, before=("reasoning_content", "content", "tool_calls"))
                calls = turn.setdefault("tool_calls", [])
                assert isinstance(calls, list)  # as it was set here
                function = {"name": told_name(item.name, item.namespace), "arguments": item.arguments}
                calls.append({"id": item.call_id, "type": "function", "function": function})
            case CallOutputInput():
                turns.append({"role": "tool", "tool_call_id": item.call_id, "content": joined(item.output)})
    return turns


def _own_turn(turns: list[Members], *, before: Sequence[str]) -> Members:
    """Returns the last turn if it is the model's and has only members that may come `before`, else a new one."""
    if not turns or turns[-1]["role"] != "assistant" or not turns[-1].keys() <= {"role", *before}:
        turns.append({"role": "assistant"})
    return turns[-1]


def _nested(flat: object, types: Sequence[str] = ("function", "allowed_tools")) -> object:
    """Returns a `tool_choice`, or a tool that it names, in the form of a chat, whose schema checks it."""
    if not isinstance(flat, dict) or flat.get("type") not in types:
        return flat
    inside = {name: value for name, value in flat.items() if name != "type"}
    if isinstance(name := inside.get("name"), str) and isinstance(inside.get("namespace"), str):
        inside["name"] = told_name(name, str(inside.pop("namespace")))
    if flat["type"] == "allowed_tools" and isinstance(tools := inside.get("tools"), list):
        inside["tools"] = [_nested(tool, ("function",)) for tool in tools]
    return {"type": flat["type"], flat["type"]: inside}


class ResponseBody(WholeOutput):
    """Writes a Response in one piece."""

    def __init__(
        self,
        head: AnswerHead,
        echo: bytes,
        *,
        tokenizer: Tokenizer,
        chat: ChatRequest,
        names: MakeNames,
        origins: Mapping[str, Members] | None = None,
    ) -> None:
        """`echo`: the members of the request that the Response repeats, a JSON object. `origins`: see `origins`."""
        self._head = head
        self._echo = echo
        self._output = ResponseOutput(head.id.removeprefix(ID_PREFIX), tokenizer, chat=chat, origins=origins or {})
        super().__init__(self._output, names)

    def close(self, usage: Usage) -> Sequence[bytes]:
        return [self._whole(usage)]

    def _whole(self, usage: Usage) -> bytes:
        reason = INCOMPLETE.get(self._output.finish or FinishReason.STOP)
        details: Members | None = None if reason is None else {"reason": reason}
        return self._json(self._end, incomplete_details=details, usage=response_usage(usage))

    @property
    def _end(self) -> ItemStatus:
        return ItemStatus.INCOMPLETE if self._output.finish in INCOMPLETE else ItemStatus.COMPLETED

    def _json(
        self,
        status: ItemStatus,
        *,
        error: Members | None = None,
        incomplete_details: Members | None = None,
        usage: Members | None = None,
    ) -> bytes:
        """Returns the Response in one of its states."""
        state = {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "model": self._head.model,
            "status": status,
            "error": error,
            "incomplete_details": incomplete_details,
            "output": self._output.items,
            "usage": usage,
        }
        return msgspec.json.encode(state)[:-1] + b"," + self._echo[1:]


class ResponseEvents(ResponseBody):
    """Writes a Response as events: created, in_progress, those of its items, completed | incomplete | error, failed."""

    content_type = GroupsWriter.content_type
    streams = True
    _sent = 0
    """Number of events sent so far."""

    def feed(self, steps: Sequence[GroupStep], usage: Callable[[], Usage]) -> bytes:
        events: list[NamedEvent] = []
        if not self._sent:
            begun = self._json(ItemStatus.IN_PROGRESS)
            events += (_of_response("created", begun), _of_response("in_progress", begun))
        return self._bytes(*events, *self._feed(steps))

    def close(self, usage: Usage) -> Sequence[bytes]:
        return [self._bytes(_of_response(self._end, self._whole(usage)))]

    def fail(self, error: Exception) -> bytes:
        """`server_error` is the only one of OpenAI's codes that fits; the `error` event before it has ours."""
        body = error_body(error)
        failed = self._json(ItemStatus.FAILED, error={"message": body.message, "code": "server_error"})
        told = NamedEvent("error", {"code": body.code, "message": body.message, "param": body.param})
        return self._bytes(told, _of_response(ItemStatus.FAILED, failed))

    def _bytes(self, *events: NamedEvent) -> bytes:
        first, self._sent = self._sent, self._sent + len(events)
        return b"".join(event.sent(sequence_number=number) for number, event in enumerate(events, start=first))


def _of_response(what: str, json: bytes) -> NamedEvent:
    return NamedEvent(f"response.{what}", {"response": msgspec.Raw(json)})


def response_usage(usage: Usage) -> Members:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def echo_json(body: ResponsesRequest) -> bytes:
    """Returns the members that a Response repeats of its request, and constants for fields that this server lacks.
    Raises `RequestError` for half a surrogate pair, which JSON can write and no answer can repeat."""
    form, choice = body.text.format, body.tool_choice
    text = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
    chosen = {name: value for name, value in (choice or {"type": "auto"}).items() if value is not None}
    fields = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning": {"effort": body.reasoning.effort, "summary": body.reasoning.summary},
        "temperature": body.temperature,
        "text": {"format": text, "verbosity": body.text.verbosity},
        "tool_choice": chosen if len(chosen) > 1 else chosen["type"],
        "tools": [
            tool.members() if isinstance(tool, NamespaceTool) else tool.model_dump()
            for tool in body.tools
            if not isinstance(tool, BuiltInTool)
        ],
        "top_logprobs": body.top_logprobs,
        "top_p": body.top_p,
        "background": False,
        "max_tool_calls": None,
        "previous_response_id": None,
        "service_tier": "default",
        "store": False,
        "truncation": "disabled",
    }
    for name, value in fields.items():
        try:
            msgspec.json.encode(value)
        except UnicodeEncodeError as error:
            raise invalid_value(name, f"it is not valid Unicode: {error.reason}") from error
    return msgspec.json.encode(fields)

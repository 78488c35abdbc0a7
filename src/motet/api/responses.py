"""`POST /v1/responses`: one answer, made as a chat is, in the shape of OpenAI's Responses. Nothing of it is kept.

A request for a Response becomes a request for a chat, which is what answers it:

    instructions, input      ─► messages: items that the model wrote in one turn are one message
    tools, tool_choice, text ─► the same, with one more layer around their names

Errors of the chat name the field as it is called in the request. The text of the choice becomes items
(`response_output`); the rest of a Response repeats the request.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response

from motet.api.answer import GroupsWriter, json_response
from motet.api.answer_plan import answer_plan
from motet.api.body import in_turn
from motet.api.caller import PostRoute, caller_of, new_router, with_body
from motet.api.chat import plan_chat
from motet.api.failure import Names, error_body, invalid_value, named_as_asked
from motet.api.kv_params import request_context
from motet.api.plan import Head, chat_prompt, check_reading
from motet.api.response_output import INCOMPLETE, Members, ResponseEvent, ResponseOutput, Status
from motet.api.schemas.chat import ChatRequest, joined
from motet.api.schemas.responses import (
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
from motet.api.schemas.shared import GeneratingFields, StructuredFields
from motet.api.service import Service
from motet.errors import NotFoundError
from motet.text.group import GroupStep
from motet.text.tokenizer import Tokenizer
from motet.types import FinishReason, Usage

log = logging.getLogger("motet.api")

ID_PREFIX = "resp_"
FEW_ITEMS = 50
"""More are made into messages in a thread: each takes 40 us."""

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
        with named_as_asked(partial(names_of, body)):
            chat = await chat_of(body)
            caller = caller_of(request, session=body.session_id)
            if left_out := {tool.type for _, _, tool in body.placed_tools() if isinstance(tool, BuiltInTool)}:
                told = {"request_id": caller.trace, "types": sorted(left_out)}
                log.info("built-in tools are left out", extra={"fields": told})
            async with request_context(service, chat, caller=caller, num_choices=1) as context:
                echo = echo_json(body)
                plan = await plan_chat(service, chat, context=context, prefix=ID_PREFIX, prompt_param="input")
                kind = ResponseEvents if body.stream else ResponseBody
                writer = kind(plan.head, echo, tokenizer=plan.served.tokenizer, chat=chat, origins=origins(body))
                return answer_plan(service, plan, writer=writer)

    async def input_tokens(body: ResponsesRequest, _: Request) -> Response:
        with named_as_asked(partial(names_of, body)):
            chat = await chat_of(body)
            served = service.served(chat.model)
            check_reading(served, chat)
            count = len(await chat_prompt(served.preparer, chat))
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


PASSED_ON = {*StructuredFields.model_fields, *GeneratingFields.model_fields} | {
    "chat_template_kwargs",
    "include_reasoning",
    "parallel_tool_calls",
    "separate_reasoning",
}
"""Members that are the same in a chat."""

NAMES: Names = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"messages.*", "input"),
        (r"max_(completion_)?tokens", "max_output_tokens"),
        (r"tool_choice\.function", "tool_choice"),
        (r"tool_choice\.allowed_tools\.tools\[(\d+)\]\.function", r"tool_choice.tools[\1]"),
        (r"tool_choice\.allowed_tools", "tool_choice"),
        (r"response_format(\.json_schema)?", "text.format"),
        (r"reasoning_effort", "reasoning.effort"),
    )
]
"""The names of a chat's fields, from their beginning, and what they are called here."""


async def chat_of(body: ResponsesRequest) -> ChatRequest:
    return chat_request(body) if len(body.input) <= FEW_ITEMS else await in_turn(partial(chat_request, body))


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """Raises what the chat's schema raises; see `named_as_asked`."""
    fields: Members = body.model_dump(include=PASSED_ON, exclude_unset=True, by_alias=True)
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
    places = [placed.param for _, placed in _functions(body)]
    return [*((re.compile(rf"tools\[{number}\]\.function"), place) for number, place in enumerate(places)), *NAMES]


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


class ResponseBody(GroupsWriter):
    """Writes a Response in one piece."""

    content_type = "application/json"
    streams = False

    def __init__(
        self,
        head: Head,
        echo: bytes,
        *,
        tokenizer: Tokenizer,
        chat: ChatRequest,
        origins: Mapping[str, Members] | None = None,
    ) -> None:
        """`echo`: the members of the request that the Response repeats, a JSON object. `origins`: see `origins`."""
        self._head = head
        self._echo = echo
        self._output = ResponseOutput(head.id.removeprefix(ID_PREFIX), tokenizer, chat=chat, origins=origins or {})

    def feed(self, steps: Sequence[GroupStep], usage: Callable[[], Usage]) -> bytes:
        self._feed(steps)
        return b""

    def close(self, usage: Usage) -> Sequence[bytes]:
        return [self._whole(usage)]

    def _whole(self, usage: Usage) -> bytes:
        reason = INCOMPLETE.get(self._output.finish or FinishReason.STOP)
        details: Members | None = None if reason is None else {"reason": reason}
        return self._json(self._end, incomplete_details=details, usage=response_usage(usage))

    @property
    def _end(self) -> Status:
        return Status.INCOMPLETE if self._output.finish in INCOMPLETE else Status.COMPLETED

    def _feed(self, steps: Sequence[GroupStep]) -> list[ResponseEvent]:
        return [told for step in steps for event in step.events for told in self._output.feed(event)]

    def _json(
        self,
        status: Status,
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
        events: list[ResponseEvent] = []
        if not self._sent:
            begun = self._json(Status.IN_PROGRESS)
            events += (_of_response("created", begun), _of_response("in_progress", begun))
        return self._bytes(*events, *self._feed(steps))

    def close(self, usage: Usage) -> Sequence[bytes]:
        return [self._bytes(_of_response(self._end, self._whole(usage)))]

    def fail(self, error: Exception) -> bytes:
        """`server_error` is the only one of OpenAI's codes that fits; the `error` event before it has ours."""
        body = error_body(error)
        failed = self._json(Status.FAILED, error={"message": body.message, "code": "server_error"})
        told = ResponseEvent("error", {"code": body.code, "message": body.message, "param": body.param})
        return self._bytes(told, _of_response(Status.FAILED, failed))

    def _bytes(self, *events: ResponseEvent) -> bytes:
        parts = []
        for event in events:
            data = msgspec.json.encode({"sequence_number": self._sent, "type": event.name, **event.fields})
            parts.append(b"event: %b\ndata: %b\n\n" % (event.name.encode(), data))
            self._sent += 1
        return b"".join(parts)


def _of_response(what: str, json: bytes) -> ResponseEvent:
    return ResponseEvent(f"response.{what}", {"response": msgspec.Raw(json)})


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

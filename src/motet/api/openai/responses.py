"""`POST /v1/responses`: one answer in the shape of OpenAI's Responses. The server does not store it.

A request for a Response becomes a request for a chat, which generates its answer (`converted_chat`):

    instructions, input      ─► messages: consecutive items of the model's turn are one message
    tools, tool_choice, text ─► the same fields, with their names one level deeper

The text of the choice becomes items (`response_output`). The rest of a Response repeats the request
(`response_writers`)."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial

from fastapi import APIRouter, Request, Response

from motet.api.generation.answer_writer import GroupsWriter
from motet.api.generation.plan import Plan
from motet.api.http.failure import Names, names_table
from motet.api.http.routes import json_response, new_router, post
from motet.api.openai.chat_schema import MAX_TOOLS, ChatRequest, joined
from motet.api.openai.converted_chat import PASSED_ON, RESPONSE_NAMES, ConvertedRequest
from motet.api.openai.response_output import Members, ResponseOutput
from motet.api.openai.response_writers import response_writer
from motet.api.openai.responses_schema import (
    NOT_KEPT,
    BuiltInTool,
    CallInput,
    CallOutputInput,
    ClientTool,
    CustomCallInput,
    CustomOutputInput,
    CustomTool,
    InputItem,
    MessageInput,
    PlacedTool,
    ReasoningInput,
    ResponsesRequest,
    chat_name,
    placed_tools,
)
from motet.api.service import Service
from motet.errors import NotFoundError

log = logging.getLogger("motet.api")

RESPONSES = "/v1/responses"
ID_PREFIX = "resp_"
OWN = {"include_reasoning", "parallel_tool_calls", "separate_reasoning"}
"""Members that are the same in a chat, in addition to `PASSED_ON`."""
STORED_RESPONSES = (
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("GET", "/v1/responses/{response_id}/input_items"),
)


def responses_router(service: Service) -> APIRouter:
    router = new_router()

    @post(router, RESPONSES, body=ResponsesRequest, summary="One answer to one conversation")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        def writer(plan: Plan, chat: ChatRequest) -> GroupsWriter:
            if left_out := {tool.type for _, _, tool in placed_tools(body) if isinstance(tool, BuiltInTool)}:
                fields = {"request_id": plan.groups[0].trace, "types": sorted(left_out)}
                log.info("built-in tools are left out", extra={"fields": fields})
            output = ResponseOutput(
                plan.head.id.removeprefix(ID_PREFIX),
                plan.served.tokenizer,
                num_top=chat.num_logprobs,
                reasoning_shown=chat.include_reasoning,
                origins=origins(body),
                custom=frozenset(name for name, tool, _ in _functions(body) if isinstance(tool, CustomTool)),
            )
            return response_writer(plan.head, body, sampling=plan.groups[0].sampling, output=output)

        return await as_chat(body).answer(service, request, prefix=ID_PREFIX, writer=writer)

    @post(router, f"{RESPONSES}/input_tokens", body=ResponsesRequest, summary="The number of tokens of a conversation")
    async def input_tokens(body: ResponsesRequest, request: Request) -> Response:
        count = await as_chat(body).num_tokens(service, request)
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    async def not_stored(response_id: str) -> Response:
        raise NotFoundError(
            f"Response with id '{response_id}' not found: {NOT_KEPT}.", param="response_id", code="not_found"
        )

    for method, path in STORED_RESPONSES:
        router.add_api_route(path, not_stored, methods=[method], include_in_schema=False)
    return router


def as_chat(body: ResponsesRequest) -> ConvertedRequest:
    return ConvertedRequest(make=partial(chat_request, body), names=partial(names_of, body), prompt_param="input")


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """Returns the chat that generates the answer. Raises the errors of the chat's schema."""
    fields: Members = body.model_dump(include=PASSED_ON | OWN, exclude_unset=True, by_alias=True)
    fields["messages"] = messages(body.instructions, body.input)
    fields["max_completion_tokens"] = body.max_output_tokens
    fields["reasoning_effort"] = body.reasoning.effort
    fields["logprobs"], fields["top_logprobs"] = body.logprobs, body.top_logprobs
    fields["tools"] = [
        {"type": "function", "function": _function(tool) | {"name": name}} for name, tool, _ in _functions(body)
    ]
    fields["tool_choice"] = _nested(body.tool_choice)
    if (form := body.text.format) is not None:
        inner = form.model_dump(exclude={"type"}, exclude_unset=True, by_alias=True)
        inner = {"json_schema": inner} if form.type == "json_schema" else inner
        fields["response_format"] = {"type": form.type, **inner}
    return ChatRequest.model_validate(fields)


def _function(tool: ClientTool) -> Members:
    """Returns the function that the model gets for a tool."""
    return tool.function() if isinstance(tool, CustomTool) else tool.model_dump(exclude={"type"}, exclude_unset=True)


def _functions(body: ResponsesRequest) -> list[tuple[str, ClientTool, PlacedTool]]:
    """Returns the client's tools, each with its name in the chat."""
    return [
        (chat_name(placed.tool.name, placed.namespace), placed.tool, placed)
        for placed in placed_tools(body)
        if isinstance(placed.tool, ClientTool)
    ]


def origins(body: ResponsesRequest) -> Mapping[str, Members]:
    """Returns the name and the namespace of each tool in a namespace, by the name that the model calls."""
    return {
        name: {"name": tool.name, "namespace": placed.namespace}
        for name, tool, placed in _functions(body)
        if placed.namespace is not None
    }


def names_of(body: ResponsesRequest) -> Names:
    """Returns the names that the chat's fields have in the request. Errors name none of too many tools."""
    places = enumerate(placed.param for _, _, placed in _functions(body)[:MAX_TOOLS])
    return [*names_table((rf"tools\[{number}\]\.function", place) for number, place in places), *RESPONSE_NAMES]


def messages(instructions: str | None, items: Sequence[InputItem]) -> list[Members]:
    """Returns the messages of the chat. The items of one answer (reasoning, then text, then calls) become one turn."""
    turns: list[Members] = [] if instructions is None else [{"role": "system", "content": instructions}]
    for item in items:
        match item:
            case MessageInput(role="assistant"):
                _own_turn(turns, before=("reasoning_content",))["content"] = joined(item.content)
            case MessageInput():
                turns.append({"role": item.role, "content": joined(item.content)})
            case ReasoningInput():
                _own_turn(turns, before=())["reasoning_content"] = item.text
            case CallInput() | CustomCallInput():
                turn = _own_turn(turns, before=("reasoning_content", "content", "tool_calls"))
                calls = turn.setdefault("tool_calls", [])
                assert isinstance(calls, list)  # as it was set here
                arguments = {"input": item.input} if isinstance(item, CustomCallInput) else item.arguments
                function = {"name": chat_name(item.name, item.namespace), "arguments": arguments}
                calls.append({"id": item.call_id, "type": "function", "function": function})
            case CallOutputInput() | CustomOutputInput():
                turns.append({"role": "tool", "tool_call_id": item.call_id, "content": joined(item.output)})
    return turns


def _own_turn(turns: list[Members], *, before: Sequence[str]) -> Members:
    """Returns the last turn if it is the model's and has no members except `before`, else a new turn."""
    if not turns or turns[-1]["role"] != "assistant" or not turns[-1].keys() <= {"role", *before}:
        turns.append({"role": "assistant"})
    return turns[-1]


def _nested(flat: object, types: Sequence[str] = ("function", "custom", "allowed_tools")) -> object:
    """Returns a `tool_choice`, or a tool that it names, in the format of a chat, whose schema checks it. A custom tool
    is a function there."""
    if not isinstance(flat, dict) or flat.get("type") not in types:
        return flat
    inside = {name: value for name, value in flat.items() if name != "type"}
    if isinstance(name := inside.get("name"), str) and isinstance(inside.get("namespace"), str):
        inside["name"] = chat_name(name, str(inside.pop("namespace")))
    if flat["type"] == "allowed_tools" and isinstance(tools := inside.get("tools"), list):
        inside["tools"] = [_nested(tool, ("function", "custom")) for tool in tools]
    kind = "function" if flat["type"] == "custom" else flat["type"]
    return {"type": kind, kind: inside}

"""`POST /v1/messages`: one answer, made as a chat is, in the shape of Anthropic's Messages.

A request for a message becomes a request for a chat, which is what answers it:

    system, messages               ─► messages: what the user or the model says in a row is one turn
    tools, tool_choice             ─► the same, under OpenAI's names
    thinking, output_config        ─► reasoning_effort, include_reasoning, response_format

Errors of the chat name the field as it is called in the request; `failure` gives all errors of these routes Anthropic's
shape. The text of the choice becomes blocks (`message_output`).
"""

import re
from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request, Response

from motet.api.answer import json_response
from motet.api.answer_plan import answer_plan
from motet.api.body import in_turn
from motet.api.caller import PostRoute, caller_of, new_router, with_body
from motet.api.chat import plan_chat
from motet.api.failure import MESSAGES, Names, named_as_asked
from motet.api.kv_params import request_context
from motet.api.message_output import MessageBody, MessageEvents
from motet.api.plan import chat_prompt, check_reading
from motet.api.schemas.chat import ChatRequest
from motet.api.schemas.messages import (
    Block,
    MessagePrompt,
    MessagesRequest,
    MessageTool,
    MessageToolChoice,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    TurnInput,
)
from motet.api.schemas.shared import GeneratingFields, StructuredFields
from motet.api.service import Service

ID_PREFIX = "msg_"
FEW_BLOCKS = 50
"""More are made into turns in a thread, as the items of a Response are."""

PASSED_ON = {*StructuredFields.model_fields, *GeneratingFields.model_fields} | {"chat_template_kwargs"}
"""Members that are the same in a chat."""

NAMES: Names = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"messages.*", "messages"),
        (r"continue_final_message", "messages"),
        (r"stop\b", "stop_sequences"),
        (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
        (r"tools\[(\d+)\]\.function", r"tools[\1]"),
        (r"tool_choice\.function", "tool_choice"),
        (r"response_format(\.json_schema)?", "output_config.format"),
        (r"reasoning_effort", "output_config.effort"),
    )
]
"""The names of a chat's fields, from their beginning, and what they are called here."""

TOOL_MODES = {"auto": "auto", "any": "required", "none": "none"}
MOST_EFFORT = {"max": "xhigh"}
"""Anthropic's most effort, in the words of a chat."""


def messages_router(service: Service) -> APIRouter:
    router = new_router()

    async def messages(body: MessagesRequest, request: Request) -> Response:
        with named_as_asked(lambda: NAMES):
            chat = await chat_of(body)
            caller = caller_of(request, session=body.session_id)
            async with request_context(service, chat, caller=caller, num_choices=1) as context:
                plan = await plan_chat(service, chat, context=context, prefix=ID_PREFIX)
                kind = MessageEvents if body.stream else MessageBody
                writer = kind(plan.head, request_id=caller.trace, thoughts_shown=chat.include_reasoning)
                return answer_plan(service, plan, writer=writer)

    async def count_tokens(body: MessagePrompt, _: Request) -> Response:
        with named_as_asked(lambda: NAMES):
            chat = await chat_of(body)
            served = service.served(chat.model)
            check_reading(served, chat)
            count = len(await chat_prompt(served.preparer, chat))
        return json_response({"input_tokens": count})

    answer = with_body(MessagesRequest, messages)
    router.routes.append(PostRoute(MESSAGES, answer, body=MessagesRequest, summary="One answer to one conversation"))
    count, summary = with_body(MessagePrompt, count_tokens), "The number of tokens of a conversation"
    router.routes.append(PostRoute(f"{MESSAGES}/count_tokens", count, body=MessagePrompt, summary=summary))
    return router


async def chat_of(body: MessagePrompt) -> ChatRequest:
    return chat_request(body) if body.num_blocks <= FEW_BLOCKS else await in_turn(partial(chat_request, body))


def chat_request(body: MessagePrompt) -> ChatRequest:
    """Raises what the chat's schema raises; see `named_as_asked`."""
    fields: dict[str, object] = body.model_dump(include=PASSED_ON, exclude_unset=True, by_alias=True)
    fields["model"] = body.model
    fields["messages"] = turns(body.system, body.messages)
    fields["tools"] = [{"type": "function", "function": _function(tool)} for tool in body.tools]
    if isinstance(body, MessagesRequest):
        fields["stop"] = body.stop_sequences
    if body.continues:
        fields["continue_final_message"], fields["add_generation_prompt"] = True, False
    if body.output_config.format is not None:
        form = {"name": "message", "schema": body.output_config.format.wanted}
        fields["response_format"] = {"type": "json_schema", "json_schema": form}
    return ChatRequest.model_validate(fields | _thinking(body) | _tool_choice(body.tool_choice))


def _function(tool: MessageTool) -> dict[str, object]:
    told = tool.model_dump(include={"name", "description", "strict"}, exclude_unset=True)
    return {**told, "parameters": tool.input_schema}


def _tool_choice(choice: MessageToolChoice | None) -> dict[str, object]:
    if choice is None:
        return {}
    told: object = TOOL_MODES.get(choice.type) or {"type": "function", "function": {"name": choice.name}}
    return {"tool_choice": told, "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _thinking(body: MessagePrompt) -> dict[str, object]:
    """Returns the fields of a chat that say if the model thinks, how much, and if the answer shows it."""
    thinking, effort = body.thinking, body.output_config.effort
    told: dict[str, object] = {"reasoning_effort": MOST_EFFORT.get(effort or "", effort)}
    if thinking is None:
        return told
    if thinking.type == "disabled":
        told["reasoning_effort"] = "none"
    elif thinking.type == "enabled":
        told["chat_template_kwargs"] = {"enable_thinking": True, **body.chat_template_kwargs}
    return {**told, "include_reasoning": thinking.shown}


def turns(system: Sequence[TextBlock], said: Sequence[TurnInput]) -> list[dict[str, object]]:
    """Returns the turns of a chat. As with Anthropic, what one side says in a row is one turn; a result is one of its
    own."""
    told: list[dict[str, object]] = [{"role": "system", "content": joined(system)}] if system else []
    for turn in said:
        if not turn.content:
            _turn(told, turn.role)
        for block in turn.content:
            _say(told, turn.role, block=block)
    return told


def _say(told: list[dict[str, object]], role: str, *, block: Block) -> None:
    match block:
        case TextBlock():
            _add(_turn(told, role), "content", text=block.text)
        case ThinkingBlock():
            _add(_turn(told, role), "reasoning_content", text=block.thinking)
        case ToolUseBlock():
            calls = _turn(told, role).setdefault("tool_calls", [])
            assert isinstance(calls, list)  # as it was set here
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        case ToolResultBlock():
            told.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": joined(block.content)})


def joined(blocks: Sequence[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


def _turn(told: list[dict[str, object]], role: str) -> dict[str, object]:
    """Returns the last turn if it is of this role, else a new one."""
    if not told or told[-1]["role"] != role:
        told.append({"role": role})
    return told[-1]


def _add(turn: dict[str, object], name: str, *, text: str) -> None:
    turn[name] = f"{turn[name]}\n{text}" if name in turn else text

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
from dataclasses import dataclass, field
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
    told: list[Turn] = []
    if system:
        told.append(Turn("system", texts=[block.text for block in system]))
    for turn in said:
        if not turn.content:
            _turn(told, turn.role)
        for block in turn.content:
            match block:
                case TextBlock():
                    _turn(told, turn.role).texts.append(block.text)
                case ThinkingBlock():
                    _turn(told, turn.role).thoughts.append(block.thinking)
                case ToolUseBlock():
                    _turn(told, turn.role).calls.append(block)
                case ToolResultBlock():
                    texts = [part.text for part in block.content] or [""]
                    told.append(Turn("tool", texts=texts, call_id=block.tool_use_id))
    return [turn.for_chat() for turn in told]


@dataclass
class Turn:
    """A turn of a chat while it is gathered."""

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolUseBlock] = field(default_factory=list)
    call_id: str | None = None
    """The call whose result it is."""

    def for_chat(self) -> dict[str, object]:
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in self.calls
        ]
        return {
            "role": self.role,
            **({"content": "\n".join(self.texts)} if self.texts else {}),
            **({"reasoning_content": "\n".join(self.thoughts)} if self.thoughts else {}),
            **({"tool_calls": calls} if calls else {}),
            **({} if self.call_id is None else {"tool_call_id": self.call_id}),
        }


def _turn(told: list[Turn], role: str) -> Turn:
    """Returns the last turn if it is of this role, else a new one."""
    if not told or told[-1].role != role:
        told.append(Turn(role))
    return told[-1]

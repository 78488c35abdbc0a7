"""`POST /v1/messages`: one answer in the shape of Anthropic's Messages.

A request for a message becomes a request for a chat, which generates its answer (`converted_chat`):

    system, messages               ─► messages: consecutive turns of the user or of the model are one turn
    tools, tool_choice             ─► the same fields, under OpenAI's names
    thinking, output_config        ─► reasoning_effort, include_reasoning, response_format

The text of the choice becomes blocks (`message_output`). `http.failure` gives all errors of these routes Anthropic's
shape."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from fastapi import APIRouter, Request, Response

from motet.api.anthropic.message_output import call_id_of, message_writer
from motet.api.anthropic.messages_schema import (
    MessagePrompt,
    MessagesRequest,
    MessageTool,
    MessageToolChoice,
    RedactedBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    TurnInput,
)
from motet.api.generation.answer_writer import GroupsWriter
from motet.api.generation.plan import Plan
from motet.api.http.dialect import MESSAGES
from motet.api.http.routes import json_response, new_router, post
from motet.api.openai.chat_schema import ChatRequest
from motet.api.openai.converted_chat import MESSAGE_NAMES, PASSED_ON, ConvertedRequest
from motet.api.service import Service

ID_PREFIX = "msg_"
TOOL_MODES = {"auto": "auto", "any": "required", "none": "none"}


def messages_router(service: Service) -> APIRouter:
    router = new_router()

    @post(router, MESSAGES, body=MessagesRequest, summary="One answer to one conversation")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        def writer(plan: Plan, chat: ChatRequest) -> GroupsWriter:
            trace, shown = plan.groups[0].trace, chat.include_reasoning
            return message_writer(plan.head, stream=body.stream, request_id=trace, reasoning_shown=shown)

        return await as_chat(body).answer(service, request, prefix=ID_PREFIX, writer=writer)

    @post(router, f"{MESSAGES}/count_tokens", body=MessagePrompt, summary="The number of tokens of a conversation")
    async def count_tokens(body: MessagePrompt, request: Request) -> Response:
        return json_response({"input_tokens": await as_chat(body).num_tokens(service, request)})

    return router


def as_chat(body: MessagePrompt) -> ConvertedRequest:
    return ConvertedRequest(
        make=partial(chat_request, body),
        names=lambda: MESSAGE_NAMES,
        prompt_param="messages",
    )


def chat_request(body: MessagePrompt) -> ChatRequest:
    """Returns the chat that generates the answer. Raises the errors of the chat's schema."""
    fields: dict[str, object] = body.model_dump(include=PASSED_ON, exclude_unset=True, by_alias=True)
    fields["model"] = body.model
    fields["messages"] = turns(body.system, body.messages)
    fields["tools"] = [{"type": "function", "function": _function(tool)} for tool in body.tools]
    if isinstance(body, MessagesRequest):
        fields["stop"] = body.stop_sequences
    if body.continues:
        fields["continue_final_message"], fields["add_generation_prompt"] = True, False
    if body.output_config.format is not None:
        form = {"name": "message", "schema": body.output_config.format.definition}
        fields["response_format"] = {"type": "json_schema", "json_schema": form}
    return ChatRequest.model_validate(fields | _thinking(body) | _tool_choice(body.tool_choice))


def _function(tool: MessageTool) -> dict[str, object]:
    fields = tool.model_dump(include={"name", "description", "strict"}, exclude_unset=True)
    return {**fields, "parameters": tool.input_schema}


def _tool_choice(choice: MessageToolChoice | None) -> dict[str, object]:
    if choice is None:
        return {}
    mode: object = TOOL_MODES.get(choice.type) or {"type": "function", "function": {"name": choice.name}}
    return {"tool_choice": mode, "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _thinking(body: MessagePrompt) -> dict[str, object]:
    """Returns the fields of a chat that control reasoning, and whether the answer includes it."""
    thinking, effort = body.thinking, body.output_config.effort
    fields: dict[str, object] = {"reasoning_effort": effort}
    if thinking is None:
        return fields
    if thinking.type == "disabled":
        fields["reasoning_effort"] = "none"
    elif thinking.type == "enabled":
        fields["chat_template_kwargs"] = {"enable_thinking": True, **body.chat_template_kwargs}
    return {**fields, "include_reasoning": thinking.shown}


def turns(system: Sequence[TextBlock], messages: Sequence[TurnInput]) -> list[dict[str, object]]:
    """Returns the turns of a chat. As in Anthropic's API, consecutive messages of one role are one turn. A tool
    result is a turn of its own."""
    chat: list[ChatTurn] = []
    if system:
        chat.append(ChatTurn("system", texts=[block.text for block in system]))
    for message in messages:
        if not message.content:
            _turn(chat, message.role)
        for block in message.content:
            match block:
                case TextBlock():
                    _turn(chat, message.role).texts.append(block.text)
                case RedactedBlock():
                    _turn(chat, message.role)  # only Anthropic's models can read it
                case ThinkingBlock():
                    _turn(chat, message.role).reasoning.append(block.thinking)
                case ToolUseBlock():
                    _turn(chat, message.role).calls.append(block)
                case ToolResultBlock():
                    texts = [part.text for part in block.content] or [""]
                    chat.append(ChatTurn("tool", texts=texts, call_id=call_id_of(block.tool_use_id)))
    return [turn.for_chat() for turn in chat]


@dataclass
class ChatTurn:
    """A turn of a chat while its blocks are collected."""

    role: str
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolUseBlock] = field(default_factory=list)
    call_id: str | None = None
    """The id of the call, for a turn with a tool result."""

    def for_chat(self) -> dict[str, object]:
        calls = [
            {"id": call_id_of(call.id), "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in self.calls
        ]
        return {
            "role": self.role,
            **({"content": "\n".join(self.texts)} if self.texts else {}),
            **({"reasoning_content": "\n".join(self.reasoning)} if self.reasoning else {}),
            **({"tool_calls": calls} if calls else {}),
            **({} if self.call_id is None else {"tool_call_id": self.call_id}),
        }


def _turn(chat: list[ChatTurn], role: str) -> ChatTurn:
    """Returns the last turn if it has this role, else a new one."""
    if not chat or chat[-1].role != role:
        chat.append(ChatTurn(role))
    return chat[-1]

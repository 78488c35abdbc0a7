"""`POST /v1/messages`: one answer, made as a chat is, in the shape of Anthropic's Messages.

A request for a message becomes a request for a chat, which is what answers it:

    system, messages               ─► messages: what the user or the model says in a row is one turn
    tools, tool_choice             ─► the same, under OpenAI's names
    thinking, output_config        ─► reasoning_effort, include_reasoning, response_format

`one_answer` does the rest, and `failure` gives all errors of these routes Anthropic's shape. The text of the choice
becomes blocks (`message_output`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from fastapi import APIRouter, Request, Response

from motet.api.anthropic.message_output import MessageBody, MessageEvents
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
from motet.api.generation.answer import GroupsWriter
from motet.api.generation.plan import Plan
from motet.api.http.dialect import MESSAGES
from motet.api.http.routes import PostRoute, json_response, new_router, with_body
from motet.api.openai.chat_schema import ChatRequest
from motet.api.openai.converted_chat import MESSAGE_NAMES, PASSED_ON, ConvertedRequest
from motet.api.service import Service

ID_PREFIX = "msg_"
TOOL_MODES = {"auto": "auto", "any": "required", "none": "none"}
MOST_EFFORT = {"max": "xhigh"}
"""Anthropic's most effort, in the words of a chat."""


def messages_router(service: Service) -> APIRouter:
    router = new_router()

    async def messages(body: MessagesRequest, request: Request) -> Response:
        asked = as_chat(body)

        def writer(plan: Plan, chat: ChatRequest) -> GroupsWriter:
            kind = MessageEvents if body.stream else MessageBody
            trace, shown = plan.groups[0].trace, chat.include_reasoning
            return kind(plan.head, request_id=trace, thoughts_shown=shown, names=asked.names)

        return await asked.answer(service, request, prefix=ID_PREFIX, writer=writer)

    async def count_tokens(body: MessagePrompt, _: Request) -> Response:
        return json_response({"input_tokens": await as_chat(body).num_tokens(service)})

    answer = with_body(MessagesRequest, messages)
    router.routes.append(PostRoute(MESSAGES, answer, body=MessagesRequest, summary="One answer to one conversation"))
    count, summary = with_body(MessagePrompt, count_tokens), "The number of tokens of a conversation"
    router.routes.append(PostRoute(f"{MESSAGES}/count_tokens", count, body=MessagePrompt, summary=summary))
    return router


def as_chat(body: MessagePrompt) -> ConvertedRequest:
    return ConvertedRequest(
        make=partial(chat_request, body),
        num_parts=body.num_blocks,
        names=lambda: MESSAGE_NAMES,
        prompt_param="messages",
    )


def chat_request(body: MessagePrompt) -> ChatRequest:
    """Raises what the chat's schema raises."""
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
    told: list[ChatTurn] = []
    if system:
        told.append(ChatTurn("system", texts=[block.text for block in system]))
    for turn in said:
        if not turn.content:
            _turn(told, turn.role)
        for block in turn.content:
            match block:
                case TextBlock():
                    _turn(told, turn.role).texts.append(block.text)
                case RedactedBlock():
                    _turn(told, turn.role)  # nobody but Anthropic's models can read them
                case ThinkingBlock():
                    _turn(told, turn.role).thoughts.append(block.thinking)
                case ToolUseBlock():
                    _turn(told, turn.role).calls.append(block)
                case ToolResultBlock():
                    texts = [part.text for part in block.content] or [""]
                    told.append(ChatTurn("tool", texts=texts, call_id=block.tool_use_id))
    return [turn.for_chat() for turn in told]


@dataclass
class ChatTurn:
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


def _turn(told: list[ChatTurn], role: str) -> ChatTurn:
    """Returns the last turn if it is of this role, else a new one."""
    if not told or told[-1].role != role:
        told.append(ChatTurn(role))
    return told[-1]

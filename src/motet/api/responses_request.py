"""A request for a Response as a request for a chat, which is what answers it.

    instructions, input      ─► messages: items that the model wrote in one turn are one message
    tools, tool_choice, text ─► the same, with one more layer around their names

What is at fault in the chat is named as it is called in the request.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pydantic import ValidationError

from motet.api.failure import validation_failure
from motet.api.schema_chat import ChatRequest
from motet.api.schema_parts import joined
from motet.api.schema_responses import FlatToolChoice, FunctionTool, ResponsesRequest, TextFormat
from motet.api.schema_responses_input import CallInput, CallOutputInput, InputItem, MessageInput, ReasoningInput
from motet.api.schema_shared import GeneratingFields
from motet.api.schema_structured import StructuredFields
from motet.errors import RequestError

Fields = dict[str, object]

PASSED_ON = {*StructuredFields.model_fields, *GeneratingFields.model_fields} | {
    "chat_template_kwargs",
    "include_reasoning",
    "parallel_tool_calls",
    "separate_reasoning",
}
"""Fields that are the same in a chat."""

NAMES: Sequence[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"messages.*", "input"),
        (r"max_(completion_)?tokens", "max_output_tokens"),
        (r"tools\[(\d+)\]\.function", r"tools[\1]"),
        (r"tool_choice\.function", "tool_choice"),
        (r"tool_choice\.allowed_tools\.tools\[(\d+)\]\.function", r"tool_choice.tools[\1]"),
        (r"tool_choice\.allowed_tools", "tool_choice"),
        (r"response_format(\.json_schema)?", "text.format"),
        (r"reasoning_effort", "reasoning.effort"),
    )
]
"""Of a chat's fields, from their beginning, to what they are called here."""


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """Raises what the chat's schema raises; see `in_its_own_words`."""
    fields: Fields = body.model_dump(include=PASSED_ON, exclude_unset=True, by_alias=True)
    fields["messages"] = messages(body.instructions, body.input)
    fields["max_completion_tokens"] = body.max_output_tokens
    fields["reasoning_effort"] = body.reasoning.effort
    fields["logprobs"], fields["top_logprobs"] = body.logprobs, body.top_logprobs
    fields["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(body.tool_choice)
    if body.text.format is not None:
        fields["response_format"] = _response_format(body.text.format)
    return ChatRequest.model_validate(fields)


@contextmanager
def in_its_own_words() -> Iterator[None]:
    """Errors of the chat that a Response is made of name the fields of the Response."""
    try:
        yield
    except ValidationError as error:
        problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]
        raise _renamed(validation_failure(problems)) from error
    except RequestError as error:
        raise _renamed(error) from error


def messages(instructions: str | None, items: Sequence[InputItem]) -> list[Fields]:
    """Thoughts, then text, then calls of the model are one turn, as they were one answer."""
    turns: list[Fields] = [] if instructions is None else [{"role": "system", "content": instructions}]
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
                calls.append(_call(item))
            case CallOutputInput():
                turns.append({"role": "tool", "tool_call_id": item.call_id, "content": joined(item.output)})
    return turns


def _own_turn(turns: list[Fields], *, before: Sequence[str]) -> Fields:
    """The last turn if it is the model's and has nothing but what may stand `before`, else a new one."""
    if not turns or turns[-1]["role"] != "assistant" or not turns[-1].keys() <= {"role", *before}:
        turns.append({"role": "assistant"})
    return turns[-1]


def _call(item: CallInput) -> Fields:
    return {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}


def _tool(tool: FunctionTool) -> Fields:
    return {"type": tool.type, "function": tool.model_dump(exclude={"type"}, exclude_unset=True)}


def _tool_choice(choice: FlatToolChoice) -> object:
    if choice.type == "function":
        return {"type": choice.type, "function": {"name": choice.name}}
    if choice.type == "allowed_tools":
        named = [{"type": tool.type, "function": {"name": tool.name}} for tool in choice.tools or ()]
        return {"type": choice.type, "allowed_tools": {"mode": choice.mode, "tools": named}}
    return choice.type


def _response_format(form: TextFormat) -> Fields:
    inner = form.model_dump(exclude={"type"}, exclude_unset=True, by_alias=True)
    return {"type": form.type, "json_schema": inner} if form.type == "json_schema" else {"type": form.type, **inner}


def _renamed(error: RequestError) -> RequestError:
    if error.param is None:
        return error
    for pattern, name in NAMES:
        found = pattern.match(error.param)
        if found is not None:
            param = found.expand(name) + error.param[found.end() :]
            begun = re.compile(rf"(?:^|(?<=')){re.escape(error.param)}\b")
            error.message = begun.sub(param.replace("\\", r"\\"), error.message)
            error.param = param
            break
    return error

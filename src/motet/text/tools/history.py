"""Earlier calls of tools in a conversation, as chat templates expect them.

Clients send arguments as OpenAI does, as a string of JSON; templates go through them as an object or write them with
`tojson`, which would quote a string once more. So, as in transformers and vLLM, templates get the object.
"""

import json
from collections.abc import Mapping, Sequence

from motet.errors import RequestError
from motet.text.messages import Message


class Arguments(dict[str, object]):
    """An object that is JSON where a template writes it as a string, as those of DeepSeek V3 do with `+`."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, behind: str) -> str:
        return f"{self}{behind}"

    def __radd__(self, before: str) -> str:
        return f"{before}{self}"


def with_arguments_read(messages: Sequence[Message]) -> list[Message]:
    """Messages whose calls have objects for arguments. Raises `RequestError` naming the field at fault.

    What a message says of its reasoning stands under both names that templates and clients use.
    """
    return [_with_reasoning(_read(message, f"messages[{i}]")) for i, message in enumerate(messages)]


def _read(message: Message, param: str) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not isinstance(calls, list | tuple):
        raise _wrong(f"{param}.tool_calls", "is no list")
    return {**message, "tool_calls": [_call(call, f"{param}.tool_calls[{j}]") for j, call in enumerate(calls)]}


def _call(call: object, param: str) -> dict[str, object]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise _wrong(f"{param}.function", "is missing, or no object")
    if not isinstance(function.get("name"), str):
        raise _wrong(f"{param}.function.name", "is missing, or no string")
    arguments = _arguments(function.get("arguments"), f"{param}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(written: object, param: str) -> Arguments:
    """An empty string, and none at all, are no arguments: models call so, and clients send it back."""
    if isinstance(written, Mapping):
        return Arguments(written)
    if written is None or (isinstance(written, str) and not written.strip()):
        return Arguments()
    if not isinstance(written, str):
        raise _wrong(param, "is neither a string of JSON nor an object")
    try:
        read = json.loads(written)
    except (ValueError, RecursionError) as exc:
        raise _wrong(param, f"is no valid JSON: {exc}") from exc
    if not isinstance(read, dict):
        raise _wrong(param, "is JSON, but not of an object")
    return Arguments(read)


def _with_reasoning(message: Message) -> Message:
    """Of earlier turns: Qwen's templates ask for `reasoning_content`, gpt-oss's and clients of vLLM for `reasoning`."""
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(reasoning, str):
        return message
    return {**message, "reasoning_content": reasoning, "reasoning": reasoning}


def _wrong(param: str, what: str) -> RequestError:
    return RequestError(f"{param} {what}", param=param)

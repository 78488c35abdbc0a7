"""Tools for a model whose chat template knows none: told in a system message, in the words that Hermes and Qwen use.

Earlier calls and results are written into messages the same way, so the template sees plain text alone.
"""

import json
from collections.abc import Mapping, Sequence

from motet.text.messages import Message
from motet.text.tools.hermes import BEGIN, END

INTRODUCTION = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
HOW_TO_CALL = f"""
</tools>

For each function call, return a json object with function name and arguments within {BEGIN}{END} XML tags:
{BEGIN}
{{"name": <function-name>, "arguments": <args-json-object>}}
{END}"""
RESULT, RESULT_END = "<tool_response>", "</tool_response>"


def told_in_messages(messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Messages without roles and fields for tools: these are in the first system message, or one made for them.

    `messages` as `for_template` leaves them (text content), with arguments as objects; `tools` as the client sent them.
    Results of calls become messages of the user, those that follow one another one message.
    """
    plain: list[dict[str, object]] = []
    for message in messages:
        if message.get("role") == "tool":
            _add_result(plain, message)
        else:
            plain.append(_with_calls(message))
    return _with_system(plain, _description(tools)) if tools else plain


def _description(tools: Sequence[Mapping[str, object]]) -> str:
    return INTRODUCTION + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + HOW_TO_CALL


def _with_system(messages: Sequence[dict[str, object]], text: str) -> list[dict[str, object]]:
    if messages and messages[0].get("role") in ("system", "developer"):
        first, rest = messages[0], messages[1:]
        return [{**first, "content": f"{first.get('content') or ''}\n\n{text}".lstrip()}, *rest]
    return [{"role": "system", "content": text}, *messages]


def _with_calls(message: Message) -> dict[str, object]:
    calls = message.get("tool_calls")
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    if isinstance(calls, Sequence) and calls:
        said = str(plain.get("content") or "")
        plain["content"] = "\n".join([said, *(_call(call["function"]) for call in calls)]).removeprefix("\n")
    return plain


def _call(function: Mapping[str, object]) -> str:
    call = {"name": function.get("name"), "arguments": function.get("arguments")}
    return f"{BEGIN}\n{json.dumps(call, ensure_ascii=False)}\n{END}"


def _add_result(messages: list[dict[str, object]], message: Message) -> None:
    text = f"{RESULT}\n{message.get('content') or ''}\n{RESULT_END}"
    last = messages[-1] if messages else {}
    if last.get("role") == "user" and str(last.get("content")).startswith(RESULT):
        last["content"] = f"{last['content']}\n{text}"
    else:
        messages.append({"role": "user", "content": text})

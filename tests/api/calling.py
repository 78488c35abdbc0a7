"""A server whose model has reasoning and tool calls, and functions that join its streamed answers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from openai.types.chat import ChatCompletionFunctionToolParam

from motet.testing.fake_engine import Script
from motet.text.formats import ModelFormats
from motet.text.reasoning import ReasoningTags
from motet.text.tokenizer import Tokenizer
from motet.text.tools.json_formats import HERMES
from motet.text.tools.tool_format import ToolFormat
from tests.api.serving import Served, Serving

THINK = ReasoningTags(
    names=("think",), opening_tags=("<think>",), closing_tags=("</think>",), template_marks=("<think>",)
)

WEATHER: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME: ChatCompletionFunctionToolParam = {"type": "function", "function": {"name": "get_time", "parameters": {}}}


def called(name: str, arguments: str) -> str:
    """Returns a tool call in the model's format."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


PARIS = called("get_weather", '{"city": "Paris"}')


TEMPLATE = """\
{% if tools %}{{ '<|im_start|>tools' + tools | tojson + '<|im_end|>' }}{% endif %}
{% for message in messages %}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' + ('<think>' if reasoning_effort == 'high' else '') }}
{%- endif %}
"""
"""Template of a model with reasoning and tool calls. With high effort the prompt opens the reasoning."""


@dataclass
class CallingServing:
    """Starts servers of a model with reasoning and tool calls."""

    serve: Serving
    tokenizer: Tokenizer

    async def __call__(
        self,
        script: Script,
        *,
        tools: ToolFormat | None = HERMES,
        reasoning: ReasoningTags | None = THINK,
        **settings: Any,
    ) -> Served:
        formats = ModelFormats(tokenizer=self.tokenizer, reasoning=reasoning, tools=tools)
        return await self.serve(script, tokenizer=self.tokenizer, formats=formats, **settings)


def unstreamed(answer: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Returns the choices of an unstreamed answer, without the ids of calls and the fields that a stream lacks."""
    choices = {}
    for choice in answer["choices"]:
        message = {name: value for name, value in choice["message"].items() if name != "refusal"}
        choices[choice["index"]] = {"message": _unnamed(message), "finish_reason": choice["finish_reason"]}
    return choices


def joined(chunks: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Joins the choices of a stream, in the same shape as `unstreamed`."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            so_far = choices.setdefault(choice["index"], {"message": {}, "finish_reason": None})
            assert so_far["finish_reason"] is None, "a choice went on after its end"
            so_far["finish_reason"] = choice["finish_reason"]
            _add(so_far["message"], choice["delta"])
    return {index: {**choice, "message": _unnamed(choice["message"])} for index, choice in choices.items()}


def _add(message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            for call in value:
                _add_call(message.setdefault("tool_calls", []), call)
        elif isinstance(message.get(name), str):
            message[name] += value
        else:
            message[name] = value


def _add_call(calls: list[dict[str, Any]], call: Mapping[str, Any]) -> None:
    if "id" in call:
        assert call["index"] == len(calls)
        assert call["function"]["arguments"] == ""
        calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
    else:
        calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]


def _unnamed(message: dict[str, Any]) -> dict[str, Any]:
    """Replaces the ids of calls by numbers. Calls with the same id have the same number."""
    calls = message.get("tool_calls")
    if calls is None:
        return message
    ids = [call["id"] for call in calls]
    assert all(ids)
    return {**message, "tool_calls": [{**call, "id": ids.index(call["id"])} for call in calls]}

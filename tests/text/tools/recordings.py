"""Recorded answers of models: the files in `recorded/`, one for each format. Their fields:

source       publication that contains the answer; "made up" if there is none
text         the answer
calls        [name, arguments] of each call
content      text outside the calls; left out if there is none
partly_sent  true if the last call was partly sent before the text turned out not to be a call
"""

import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import msgspec

from motet.text.answers import CallRules, tagged_format
from motet.text.parts import Content, Part, ToolCallArguments, ToolCallBegin
from motet.text.tools.tool_format import Tool, ToolFormat

FOLDER = Path(__file__).parent / "recorded"


class RecordedAnswer(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    source: str
    text: str
    calls: list[tuple[str, str]]
    content: str = ""
    partly_sent: bool = False


class _File(msgspec.Struct, forbid_unknown_fields=True):
    output: list[RecordedAnswer]


@cache
def recorded() -> list[tuple[str, RecordedAnswer]]:
    """Returns (name of the format, answer) for every recorded answer."""
    files = {path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.toml"))}
    return [(name, one) for name, file in files.items() for one in msgspec.convert(file, _File).output]


def tool(name: str, **properties: object) -> Tool:
    parameters = {"type": "object", "properties": properties}
    return Tool(name=name, parameters=parameters, strict=False)


STRING = {"type": "string"}
WEATHER = {"city": STRING, "state": STRING, "unit": {"$ref": "#/$defs/Unit"}, "days": {"type": "integer"}}
TOOLS = (
    Tool(
        name="get_current_weather",
        parameters={
            "type": "object",
            "properties": WEATHER,
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"Unit": {"type": "string", "enum": ["fahrenheit", "celsius"]}},
        },
        strict=True,
    ),
    tool("get_weather", city=STRING, days={"type": "integer"}),
    tool("get_time"),
    tool("calculate_area", shape=STRING, dimensions={"type": "object"}, precision={"type": "integer"}),
    tool(
        "test_types",
        int_param={"type": "integer"},
        float_param={"type": ["number", "null"]},
        bool_param={"type": "boolean"},
        str_param=STRING,
        obj_param={"type": "object"},
        null_param={"anyOf": [STRING, {"type": "null"}]},
        any_param={},
    ),
    tool("Glob", pattern=STRING),
    tool("search_web", query_tag={"type": "array"}, query_list={"type": "array"}),
    *map(tool, ("final_answer", "get_current_temperature", "get_stock_fundamentals", "get_db_config", "summary")),
    *map(tool, ("searchTool", "trending_songs", "getOpenIncidentsTool")),
    *map(tool, ("add", "multiply", "get_age", "register_user")),
)


def read(form: ToolFormat, pieces: Iterable[str], tools: tuple[Tool, ...] = TOOLS) -> tuple[str, list[tuple[str, str]]]:
    """Returns the content, and (name, arguments) of each call."""
    parser = tagged_format(None, CallRules(form, tools)).parser()
    parts: list[Part] = [part for piece in pieces for part in parser.feed(piece, [])]
    parts += parser.close(cut=False)
    content = "".join(part.text for part in parts if isinstance(part, Content))
    names = [part.name for part in parts if isinstance(part, ToolCallBegin)]
    arguments = [""] * len(names)
    for part in parts:
        if isinstance(part, ToolCallArguments):
            arguments[part.number] += part.text
    return content, list(zip(names, arguments, strict=True))

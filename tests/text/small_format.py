"""A small format of tool calls for tests, and helpers that compare the parts of answers."""

import re
from collections.abc import Sequence
from itertools import count

from motet.text.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from motet.text.tools.cursor import Cursor
from motet.text.tools.tool_format import ParsedCall, ParsedRegion, Tool, ToolFormat, ToolMode, ToolRules

CALL = re.compile(r'(?P<name>\w*)(?P<arguments>\{(?:[a-z0-9:, ]|"[^"]*"|"[^"]*\Z)*(?P<end>\})?)?\s*')


def parse_small(cursor: Cursor, tools: Sequence[Tool]) -> ParsedRegion:
    """Parses `name{...}`, with words, digits and strings between the braces."""
    found = CALL.fullmatch(cursor.text)
    names = {tool.name for tool in tools}
    if found is None or not any(name.startswith(found["name"]) for name in names):
        return ParsedRegion(malformed=True)
    if found["arguments"] is None:
        return ParsedRegion(malformed=cursor.final)
    if found["name"] not in names:
        return ParsedRegion(malformed=True)
    complete = found["end"] is not None
    call = ParsedCall(found["name"], found["arguments"], complete)
    return ParsedRegion((call,), num_parsed=len(cursor.text) if complete else 0)


def small_format(*, bare: str | None = None, closing_tags: tuple[str, ...] = ("</call>",)) -> ToolFormat:
    """Returns the format. The ids of calls are `id0`, `id1` and so on, across all choices."""
    numbers = count()
    return ToolFormat(
        name="small",
        opening_tags=("<call>",),
        closing_tags=closing_tags,
        bare=bare,
        parse=parse_small,
        grammar=lambda rules, special: "",
        template_marks=("<call>",),
        new_call_id=lambda: f"id{next(numbers)}",
    )


def tool(name: str) -> Tool:
    return Tool(name=name, parameters={}, strict=False)


def tool_rules(*names: str, parallel: bool = True) -> ToolRules:
    tools = tuple(map(tool, names))
    return ToolRules(callable=tools, mode=ToolMode.AUTO, parallel=parallel)


def joined(parts: Sequence[Part]) -> list[Part]:
    """Joins neighbouring parts of the same kind."""
    result: list[Part] = []
    for part in parts:
        match result[-1] if result else None, part:
            case Content(before), Content(text):
                result[-1] = Content(before + text)
            case Reasoning(before), Reasoning(text):
                result[-1] = Reasoning(before + text)
            case ToolCallArguments(number, before), ToolCallArguments(same, text) if number == same:
                result[-1] = ToolCallArguments(number, before + text)
            case _:
                result.append(part)
    return result


def call(number: int, name: str, arguments: str) -> list[Part]:
    return [ToolCallBegin(number, f"id{number}", name), ToolCallArguments(number, arguments)]

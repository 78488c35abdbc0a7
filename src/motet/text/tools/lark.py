"""Grammars of calls: the parts that all formats put theirs together from.

    required    calls and nothing else
    auto        any text up to a tag, then a call; text again, and so on

Each tool's arguments are a `%json` of their own, so that references in its schema are looked up from its own root. JSON
is written as chat templates show it, `", "` and `": "` and no other space: with any space allowed a model can write
line breaks until it runs out of tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence

from motet.text.tools.base import Tool, ToolMode, ToolRules

LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def tag(text: str, special: Mapping[str, int]) -> str:
    """A tag as the model writes it: one token, or text."""
    return f"<[{special[text]}]>" if text in special else quoted(text)


def json_rule(schema: Mapping[str, object]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': LAYOUT}, ensure_ascii=False)}"


def arguments_rule(tool: Tool) -> str:
    return json_rule({**tool.parameters, "type": "object"})


def repeated(rules: ToolRules, one: str, between: str = "") -> str:
    """`one`, or where calls may be parallel any number of it from 1."""
    return f"{one} ({between} {one})*" if rules.parallel else one


def alternatives(prefix: str, number: int) -> str:
    return " | ".join(f"{prefix}_{i}" for i in range(number))


def json_objects(tools: Sequence[Tool], key: str) -> list[str]:
    """Rule `object`: a call as a JSON object whose arguments are under `key`.

    It is written as `%json` is, string by string: the lexer is greedy, and else could not tell it from other JSON."""
    lines = [f"object: {alternatives('object', len(tools))}"]
    for i, tool in enumerate(tools):
        head = ("{", quoted("name"), ": ", quoted(tool.name), ", ", quoted(key), ": ")
        lines += [
            f"object_{i}: {' '.join(map(quoted, head))} arguments_{i} {quoted('}')}",
            f"arguments_{i}: {arguments_rule(tool)}",
        ]
    return lines


def named_arguments(tools: Sequence[Tool], line: Callable[[str, int], str]) -> list[str]:
    """Rule `call`: `line(name of the tool, i)` around its arguments, `arguments_i`, as one JSON object."""
    lines = [f"call: {alternatives('call', len(tools))}"]
    for i, tool in enumerate(tools):
        lines += [f"call_{i}: {line(tool.name, i)}", f"arguments_{i}: {arguments_rule(tool)}"]
    return lines


def tagged(
    rules: ToolRules, special: Mapping[str, int], *, begin: str, region: str, closed: bool = False, many: bool = False
) -> list[str]:
    """Rule `start`: regions that open with the tag `begin` and go on as `region` says.

    `closed`: a tag ends a region, so that text may follow; `many`: parallel calls are a region each.
    """
    if rules.mode is ToolMode.REQUIRED:
        one = f"{tag(begin, special)} {region}"
        return [f'start: {one} ("\\n"? {one})*' if many and rules.parallel else f"start: {one}"]
    start = f"start: (head {region})* TEXT" if closed and rules.parallel else f"start: TEXT | head {region}"
    lazy = "" if begin in special else "[lazy]"
    return [start, f"head{lazy}: TEXT {tag(begin, special)}", r"TEXT: /(.|\n)*/"]


def bare(rules: ToolRules, *, first: str, calls: str) -> list[str]:
    """Rule `start`: `calls` without a tag, known by their first character; other text in `auto` begins otherwise."""
    if rules.mode is ToolMode.REQUIRED:
        return [f"start: {calls}"]
    return [f"start: OTHER | {calls}", rf"OTHER: /[ \t\r\n]*([^ \t\r\n\{first}](.|\n)*)?/"]


def document(*rules: Sequence[str]) -> str:
    return "\n".join(("%llguidance {}", *(line for lines in rules for line in lines))) + "\n"

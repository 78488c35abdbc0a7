"""Grammars of calls: the functions from which each format composes its grammar.

    required    calls and nothing else
    auto        any text up to a tag, then a call, then text again, and so on

The arguments of each tool have their own `%json`, so that references in a schema are resolved from its own root. JSON
has the layout of chat templates, with `", "` and `": "` and no other white space: otherwise a model could generate line
breaks until it reaches `max_tokens`.
"""

import json
import keyword
from collections.abc import Callable, Mapping, Sequence

from motet.text.tools.argument_schema import arguments_of_tool, nameable
from motet.text.tools.tool_format import Tool, ToolMode, ToolRules
from motet.text.tools.typed import quoted

LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def tag(text: str, special: Mapping[str, int]) -> str:
    """Returns a tag in Lark: as a token if it is a special token, otherwise as a string."""
    return f"<[{special[text]}]>" if text in special else quoted(text)


def json_rule(schema: Mapping[str, object]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': LAYOUT}, ensure_ascii=False)}"


def repeated(rules: ToolRules, item: str, *, between: str = "") -> str:
    """Returns `item`, repeated any number of times if calls may be parallel."""
    return f"{item} ({between} {item})*" if rules.parallel else item


def json_arguments(tool: Tool, rule: str) -> list[str]:
    return [f"{rule}: {json_rule({**tool.parameters, 'type': 'object'})}"]


def call_rules(
    tools: Sequence[Tool],
    line: Callable[[str, str], str],
    *,
    arguments: Callable[[Tool, str], list[str]] = json_arguments,
) -> list[str]:
    """Returns the rule `call` with an alternative for each tool. `line` makes the alternative from the tool's name and
    the name of the rule of its arguments; `arguments` makes that rule."""
    lines = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for i, tool in enumerate(tools):
        lines += [f"call_{i}: {line(tool.name, f'arguments_{i}')}", *arguments(tool, f"arguments_{i}")]
    return lines


def json_objects(tools: Sequence[Tool], key: str) -> list[str]:
    """Returns the rule `call` for calls that are a JSON object with the arguments under `key`. The rule consists of
    single strings, like `%json`: otherwise the greedy lexer could not distinguish it from other JSON."""

    def line(name: str, arguments: str) -> str:
        head = ("{", quoted("name"), ": ", quoted(name), ", ", quoted(key), ": ")
        return f"{' '.join(map(quoted, head))} {arguments} {quoted('}')}"

    return call_rules(tools, line)


def tagged(
    rules: ToolRules,
    special: Mapping[str, int],
    *,
    opening: str,
    region: str,
    closed: bool = False,
    one_call: bool = False,
) -> list[str]:
    """Returns the rule `start` for regions that consist of the tag `opening` and `region`. `closed`: True if a tag ends
    the region, so that text can follow. `one_call`: True if a region has only one call, so that parallel calls have
    several regions."""
    if rules.mode is ToolMode.REQUIRED:
        complete = f"{tag(opening, special)} {region}"
        is_repeated = one_call and rules.parallel
        return [f'start: {complete} ("\\n"? {complete})*' if is_repeated else f"start: {complete}"]
    start = f"start: (head {region})* TEXT" if closed and rules.parallel else f"start: TEXT | head {region}"
    lazy = "" if opening in special else "[lazy]"
    return [start, f"head{lazy}: TEXT {tag(opening, special)}", r"TEXT: /(.|\n)*/"]


def bare(rules: ToolRules, special: Mapping[str, int], *, first: str, opening: str) -> list[str]:
    """Returns the rule `start` for calls without a tag (rule `calls`), which start with the character `first`. With
    `auto`, text starts with another character; calls can follow it after the tag `opening`, if this is a token."""
    if rules.mode is ToolMode.REQUIRED:
        return ["start: calls"]
    after_text = f" | OTHER {tag(opening, special)} calls" if opening in special else ""
    return [f"start: OTHER | calls{after_text}", rf"OTHER: /[ \t\r\n]*([^ \t\r\n\{first}](.|\n)*)?/"]


def document(*rules: Sequence[str]) -> str:
    return "\n".join(("%llguidance {}", *(line for lines in rules for line in lines))) + "\n"


# Grammars of separate arguments, in the order of the tool's schema. A tool whose schema names no arguments is called
# without arguments.
NEWLINE = "\n"


def keyword_arguments(tool: Tool, rule: str) -> list[str]:
    """Returns the rule `rule` for `name=value, ...` with values as JSON. Optional arguments whose names are not Python
    identifiers are left out. Raises `GrammarError` for other ones, and for a schema that cannot be enforced."""
    arguments = nameable(arguments_of_tool(tool), lambda name: name.isidentifier() and not keyword.iskeyword(name))
    last = len(arguments)
    lines = [f"{rule}: {rule}_first_0", f"{rule}_first_{last}: {quoted('')}", f"{rule}_rest_{last}: {quoted('')}"]
    for i, argument in enumerate(arguments):
        first = f"{rule}_{i} {rule}_rest_{i + 1}"
        rest = f"{quoted(', ')} {first}"
        lines += [
            f"{rule}_first_{i}: {first}" + ("" if argument.required else f" | {rule}_first_{i + 1}"),
            f"{rule}_rest_{i}: {rest}" + ("" if argument.required else f" | {rule}_rest_{i + 1}"),
            f"{rule}_{i}: {quoted(argument.name + '=')} {rule}_{i}_value",
            f"{rule}_{i}_value: {json_rule(argument.schema)}",
        ]
    return lines

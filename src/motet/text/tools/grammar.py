"""Grammars of calls: the functions from which each format composes its grammar.

    required    calls and nothing else
    auto        any text up to a tag, then a call, then text again, and so on

The arguments of each tool have their own `%json`, so that references in a schema are resolved from its own root. JSON
has the layout of chat templates, with `", "` and `": "` and no other white space: otherwise a model could generate line
breaks until it reaches `max_tokens`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from motet.errors import GrammarError
from motet.text.tools.tool_format import Tool, ToolMode, ToolRules
from motet.text.tools.typed import property_schema, quoted, types_of

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
# without arguments. A string extends to the tag that ends it, so only `enum` and `const` of its schema are enforced.
NEWLINE = "\n"
SHARED = ("$defs", "definitions")
"""Keywords of a schema with the schemas that references point to."""
MAX_REPEATED_CHARS = 256 * 1024
"""Maximum number of characters of shared schemas, counted once for each argument that refers to them: the maximum size
of a grammar."""


@dataclass(frozen=True)
class Argument:
    name: str
    schema: Mapping[str, object]
    """Schema of the argument, with the definitions that its references point to. No other references are supported."""
    types: frozenset[str]
    required: bool

    def texts(self) -> list[str] | None:
        """Returns all allowed strings if the schema lists them; None if it does not."""
        listed = [self.schema["const"]] if "const" in self.schema else self.schema.get("enum")
        if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
            return None
        return listed


def arguments_of_tool(tool: Tool) -> list[Argument]:
    """Returns the arguments of a tool. Raises `GrammarError` if the grammar would be much longer than the tool."""
    properties, required = tool.parameters.get("properties"), tool.parameters.get("required")
    shared = {key: tool.parameters[key] for key in SHARED if key in tool.parameters}
    chars_left = MAX_REPEATED_CHARS
    arguments = []
    for name in properties if isinstance(properties, Mapping) else ():
        schema = property_schema(tool, name)
        types = types_of(schema, tool.parameters)
        if shared and '"$ref"' in json.dumps(schema):
            schema = {**shared, **schema}
            chars_left -= len(json.dumps(shared))
            if chars_left < 0:
                raise GrammarError(f"too many parameters of function '{tool.name}' refer to shared definitions")
        arguments.append(Argument(name, schema, types, isinstance(required, Sequence) and name in required))
    return arguments


def keyword_arguments(tool: Tool, rule: str) -> list[str]:
    """Returns the rule `rule` for `name=value, ...` with values as JSON. Arguments whose names are not Python
    identifiers are left out."""
    arguments = [argument for argument in arguments_of_tool(tool) if argument.name.isidentifier()]
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

"""Grammars of calls: the parts of which each format makes its own.

    required    calls and nothing else
    auto        any text up to a tag, then a call; text again, and so on

Each tool's arguments are a `%json` of their own, so that references in its schema are looked up from its own root. JSON
is written as chat templates show it, with `", "` and `": "` and no other space: if any space were allowed, a model
could write line breaks until it runs out of tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from motet.errors import GrammarError
from motet.text.tools.tool_format import Tool, ToolMode, ToolRules
from motet.text.tools.typed import property_schema, quoted, types_of

LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def tag(text: str, special: Mapping[str, int]) -> str:
    """Returns a tag as the model writes it: one token, or text."""
    return f"<[{special[text]}]>" if text in special else quoted(text)


def json_rule(schema: Mapping[str, object]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': LAYOUT}, ensure_ascii=False)}"


def repeated(rules: ToolRules, one: str, *, between: str = "") -> str:
    """Returns `one`, repeated any number of times if calls may be parallel."""
    return f"{one} ({between} {one})*" if rules.parallel else one


def json_arguments(tool: Tool, rule: str) -> list[str]:
    return [f"{rule}: {json_rule({**tool.parameters, 'type': 'object'})}"]


def call_rules(
    tools: Sequence[Tool],
    line: Callable[[str, str], str],
    *,
    arguments: Callable[[Tool, str], list[str]] = json_arguments,
) -> list[str]:
    """Returns the rule `call`: `line(name, rule of its arguments)` for each tool. `arguments` makes that rule."""
    lines = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for i, tool in enumerate(tools):
        lines += [f"call_{i}: {line(tool.name, f'arguments_{i}')}", *arguments(tool, f"arguments_{i}")]
    return lines


def json_objects(tools: Sequence[Tool], key: str) -> list[str]:
    """Returns the rule `call` for calls that are a JSON object with the arguments under `key`.

    It is written string by string, as `%json` is: otherwise the greedy lexer could not tell it from other JSON.
    """

    def line(name: str, arguments: str) -> str:
        head = ("{", quoted("name"), ": ", quoted(name), ", ", quoted(key), ": ")
        return f"{' '.join(map(quoted, head))} {arguments} {quoted('}')}"

    return call_rules(tools, line)


def tagged(
    rules: ToolRules, special: Mapping[str, int], *, begin: str, region: str, closed: bool = False, many: bool = False
) -> list[str]:
    """Returns the rule `start` for regions that open with the tag `begin` and go on with `region`.

    `closed`: a tag ends a region, so that text may follow; `many`: parallel calls are a region each.
    """
    if rules.mode is ToolMode.REQUIRED:
        one = f"{tag(begin, special)} {region}"
        return [f'start: {one} ("\\n"? {one})*' if many and rules.parallel else f"start: {one}"]
    start = f"start: (head {region})* TEXT" if closed and rules.parallel else f"start: TEXT | head {region}"
    lazy = "" if begin in special else "[lazy]"
    return [start, f"head{lazy}: TEXT {tag(begin, special)}", r"TEXT: /(.|\n)*/"]


def bare(rules: ToolRules, special: Mapping[str, int], *, first: str, begin: str) -> list[str]:
    """Returns the rule `start` for calls without a tag (rule `calls`), which begin with the character `first`. In
    `auto` other text begins with another one, and calls may follow it after the tag `begin` if that is a token."""
    if rules.mode is ToolMode.REQUIRED:
        return ["start: calls"]
    behind = f" | OTHER {tag(begin, special)} calls" if begin in special else ""
    return [f"start: OTHER | calls{behind}", rf"OTHER: /[ \t\r\n]*([^ \t\r\n\{first}](.|\n)*)?/"]


def document(*rules: Sequence[str]) -> str:
    return "\n".join(("%llguidance {}", *(line for lines in rules for line in lines))) + "\n"


# Grammars of arguments that are written one by one, in the order of the tool's schema. A tool whose schema names no
# arguments is called without any. A text goes up to the tag that ends it, so of a string's schema only `enum` and
# `const` are enforced.
NEWLINE = "\n"
SHARED = ("$defs", "definitions")
"""Keys of a schema under which its references find what they point to."""
MAX_REPEATED_CHARS = 256 * 1024
"""Most characters of shared schemas, counted once for each argument that refers to them: a grammar's own limit."""


@dataclass(frozen=True)
class Argument:
    name: str
    schema: Mapping[str, object]
    """The schema, with the definitions that its references point to; they may not point anywhere else."""
    types: frozenset[str]
    required: bool

    def texts(self) -> list[str] | None:
        """Returns all values of a string, if the schema lists them."""
        listed = [self.schema["const"]] if "const" in self.schema else self.schema.get("enum")
        if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
            return None
        return listed


def arguments_of_tool(tool: Tool) -> list[Argument]:
    """Raises `GrammarError` for a tool whose grammar would be far longer than the tool itself."""
    properties, required = tool.parameters.get("properties"), tool.parameters.get("required")
    shared = {key: tool.parameters[key] for key in SHARED if key in tool.parameters}
    left = MAX_REPEATED_CHARS
    arguments = []
    for name in properties if isinstance(properties, Mapping) else ():
        schema = property_schema(tool, name)
        types = types_of(schema, tool.parameters)
        if shared and '"$ref"' in json.dumps(schema):
            schema = {**shared, **schema}
            left -= len(json.dumps(shared))
            if left < 0:
                raise GrammarError(f"too many parameters of function '{tool.name}' refer to what they share")
        arguments.append(Argument(name, schema, types, isinstance(required, Sequence) and name in required))
    return arguments


def keyword_arguments(tool: Tool, rule: str) -> list[str]:
    """Returns the rule `rule` for `name=value, ...` with values as JSON. Only Python names can be written so."""
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

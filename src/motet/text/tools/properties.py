"""Grammars of arguments that are written one by one, in the order of the tool's schema.

A tool whose schema names no arguments is called without any. Text goes up to the tag that ends it, so of what a schema
says of a string only `enum` and `const` are held to.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from motet.errors import GrammarError
from motet.text.tools.base import Tool
from motet.text.tools.lark import json_rule, quoted, tag
from motet.text.tools.typed import property_schema, types_of

NEWLINE = "\n"
SHARED = ("$defs", "definitions")
"""Where references of a schema point to."""
MAX_REPEATED_CHARS = 256 * 1024
"""Of what a tool's arguments share, which each that refers to it repeats: as long as a whole grammar may be."""


@dataclass(frozen=True)
class Argument:
    name: str
    schema: Mapping[str, object]
    """With what its references point to, if it has any; they may not point anywhere else."""
    types: frozenset[str]
    required: bool

    def texts(self) -> list[str] | None:
        """All that a string may be, where the schema lists it."""
        listed = [self.schema["const"]] if "const" in self.schema else self.schema.get("enum")
        if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
            return None
        return listed


def arguments_of_tool(tool: Tool) -> list[Argument]:
    """Raises `GrammarError` for a tool whose grammar would be longer by far than what it was made of."""
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


@dataclass(frozen=True)
class Around:
    """What stands around arguments that are written as text."""

    lead: Callable[[str], str]
    """Name of an argument -> Lark of what stands before its text."""
    end: str
    """The tag behind it."""
    special: Mapping[str, int]
    line: str = ""
    """What stands between a value and the tag."""

    def rule(self) -> str:
        """Rule `text`: any text up to the tag, and that."""
        lazy = "" if self.end in self.special else "[lazy]"
        return rf"text{lazy}: /(.|\n)*/ {tag(self.end, self.special)}"

    def value(self, lark: str) -> str:
        between = f"{quoted(self.line)} " if self.line else ""
        return f"{lark} {between}{tag(self.end, self.special)}"


def written_arguments(tool: Tool, rule: str, around: Around) -> list[str]:
    """Rule `rule`: arguments as text, a line break behind each."""
    arguments = arguments_of_tool(tool)
    optional = ("" if argument.required else "?" for argument in arguments)
    lines = [f"{rule}: {' '.join(f'{rule}_{i}{mark}' for i, mark in enumerate(optional)) or quoted('')}"]
    for i, argument in enumerate(arguments):
        texts = argument.texts()
        if "string" not in argument.types:
            lines.append(f"{rule}_{i}_value: {json_rule(argument.schema)}")
            value = around.value(f"{rule}_{i}_value")
        elif texts is not None:
            value = around.value(f"({' | '.join(map(quoted, texts))})")
        else:
            value = "text"
        lines.append(f"{rule}_{i}: {around.lead(argument.name)} {value} {quoted(NEWLINE)}")
    return lines


def keyword_arguments(tool: Tool, rule: str) -> list[str]:
    """Rule `rule`: `name=value, ...`, values as JSON; a name that is no Python name cannot be written so."""
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

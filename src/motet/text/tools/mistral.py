"""Mistral's models, three ways; the last two are of their newer tokenizers (v11 and v13):

[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]
[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]get_time{}
[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}
"""

from collections.abc import Iterator, Mapping, Sequence

from motet.text.tools.base import Reading, Tool, ToolFormat, ToolRules
from motet.text.tools.call_ids import mistral_call_id
from motet.text.tools.cursor import Cursor
from motet.text.tools.json_calls import arguments_of, listed_calls
from motet.text.tools.lark import document, json_objects, named_arguments, quoted, repeated, tag, tagged
from motet.text.tools.reading import Found, named, reading_of

BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def read(text: str, final: bool, tools: Sequence[Tool]) -> Reading:
    return reading_of(_calls(Cursor(text), tools, final=final), text, final=final)


def _calls(cursor: Cursor, tools: Sequence[Tool], *, final: bool) -> Iterator[Found]:
    while True:
        cursor.space()
        if cursor.peek() == "[":
            yield from listed_calls(cursor, tools, final=final)
        else:
            yield from _named_call(cursor, tools)
        cursor.space()
        cursor.literal(BEGIN)


def _named_call(cursor: Cursor, tools: Sequence[Tool]) -> Iterator[Found]:
    name = named(cursor, tools, "{", "[")
    if cursor.maybe(CALL_ID):
        cursor.until(ARGS)
    cursor.maybe(ARGS)
    yield from arguments_of(cursor, name)


def grammar(rules: ToolRules, special: Mapping[str, int]) -> str:
    """A model whose vocabulary has `[ARGS]` writes names before arguments, any other a list."""
    if ARGS in special:
        region = repeated(rules, "call", tag(BEGIN, special))
        start = tagged(rules, special, begin=BEGIN, region=region)
        return document(
            start, named_arguments(rules.callable, lambda name, i: f"{quoted(name)} {tag(ARGS, special)} arguments_{i}")
        )
    region = f'"[" {repeated(rules, "object", quoted(", "))} "]"'
    start = tagged(rules, special, begin=BEGIN, region=region)
    return document(start, json_objects(rules.callable, "arguments"))


MISTRAL = ToolFormat(
    name="mistral",
    begins=(BEGIN,),
    inner=(CALL_ID, ARGS),
    ends=(),
    read=read,
    grammar=grammar,
    known_by=(BEGIN,),
    new_call_id=mistral_call_id,
)

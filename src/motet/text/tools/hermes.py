"""Hermes 2 Pro and 3, Qwen 2.5 and 3, and with a list in the tag SmolLM2:

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from collections.abc import Iterator, Mapping, Sequence

from motet.text.tools.base import Reading, Tool, ToolFormat, ToolRules
from motet.text.tools.call_ids import call_id
from motet.text.tools.cursor import Cursor, NotACall
from motet.text.tools.json_calls import listed_calls, one_call
from motet.text.tools.lark import document, json_objects, tag, tagged
from motet.text.tools.reading import Found, reading_of

BEGIN, END = "<tool_call>", "</tool_call>"


def read(text: str, final: bool, tools: Sequence[Tool]) -> Reading:
    return reading_of(_calls(Cursor(text), tools, final=final), text, final=final)


def _calls(cursor: Cursor, tools: Sequence[Tool], *, final: bool) -> Iterator[Found]:
    """Objects one after the other, or a list of them. A closing brace too many is passed over."""
    cursor.space()
    if cursor.peek() == "[":
        yield from listed_calls(cursor, tools, final=final)
        cursor.space()
        if not cursor.at_end():
            raise NotACall
        return
    while True:
        yield from one_call(cursor, tools, final=final)
        while cursor.peek() in "} \t\r\n":
            cursor.place += 1
            yield Found(None, cursor.place)


def grammar(rules: ToolRules, special: Mapping[str, int]) -> str:
    region = f'"\\n" object "\\n" {tag(END, special)}'
    start = tagged(rules, special, begin=BEGIN, region=region, closed=True, many=True)
    return document(start, json_objects(rules.callable, "arguments"))


HERMES = ToolFormat(
    name="hermes",
    begins=(BEGIN,),
    ends=(END,),
    read=read,
    grammar=grammar,
    known_by=(BEGIN,),
    new_call_id=call_id,
)

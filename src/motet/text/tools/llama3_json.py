"""Llama 3 and 4 with tools of the user's own: bare JSON, at times behind a tag.

{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from motet.text.tools.base import Reading, Tool, ToolFormat, ToolMode, ToolRules
from motet.text.tools.call_ids import call_id
from motet.text.tools.cursor import Cursor, NotACall
from motet.text.tools.json_calls import one_call
from motet.text.tools.lark import bare, document, json_objects, quoted, repeated, tag
from motet.text.tools.reading import Found, reading_of

LLAMA3_TAG, LLAMA4_TAG, LLAMA4_END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"


def read(text: str, final: bool, tools: Sequence[Tool], *, begin: str) -> Reading:
    return reading_of(_calls(Cursor(text), tools, begin, final=final), text, final=final)


def _calls(cursor: Cursor, tools: Sequence[Tool], begin: str, *, final: bool) -> Iterator[Found]:
    """Objects with `;`, space or another tag between them, each all that a call is: other JSON may be an answer."""
    cursor.space()
    while True:
        yield from one_call(cursor, tools, final=final, exact=True)
        cursor.space()
        for between in (";", begin):
            cursor.maybe(between)
            cursor.space()
        if cursor.peek() != "{":
            raise NotACall


def grammar(rules: ToolRules, special: Mapping[str, int], *, begin: str) -> str:
    start = bare(rules, first="{", calls="calls")
    calls = [f"calls: {repeated(rules, 'object', quoted('; '))}"]
    if rules.mode is ToolMode.AUTO and begin in special:
        start[0] += f" | OTHER {tag(begin, special)} calls"
    return document(start, calls, json_objects(rules.callable, "parameters"))


LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    begins=(LLAMA3_TAG,),
    bare="{",
    ends=(),
    read=partial(read, begin=LLAMA3_TAG),
    grammar=partial(grammar, begin=LLAMA3_TAG),
    known_by=("<|start_header_id|>", '"parameters"'),
    new_call_id=call_id,
)
LLAMA4_JSON = ToolFormat(
    name="llama4_json",
    begins=(LLAMA4_TAG,),
    bare="{",
    ends=(LLAMA4_END,),
    read=partial(read, begin=LLAMA4_TAG),
    grammar=partial(grammar, begin=LLAMA4_TAG),
    known_by=("<|header_start|>", '"parameters"'),
    new_call_id=call_id,
)

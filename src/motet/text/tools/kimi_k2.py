"""Kimi K2; its tags are special tokens, and it numbers its calls:

<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}
<|tool_call_end|><|tool_calls_section_end|>
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from motet.text.tools.base import Reading, Tool, ToolFormat, ToolRules
from motet.text.tools.call_ids import call_id
from motet.text.tools.cursor import Cursor, NotACall
from motet.text.tools.json_calls import arguments_of
from motet.text.tools.lark import document, named_arguments, quoted, repeated, tag, tagged
from motet.text.tools.reading import Found, known, reading_of

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_NAME = re.compile(r"\s*(?:functions\.)?(?P<name>.+):\d+\s*")


def read(text: str, final: bool, tools: Sequence[Tool]) -> Reading:
    return reading_of(_calls(Cursor(text), tools), text, final=final)


def _calls(cursor: Cursor, tools: Sequence[Tool]) -> Iterator[Found]:
    while True:
        cursor.space()
        cursor.literal(CALL)
        match = _NAME.fullmatch(cursor.until(ARGUMENTS))
        if match is None:
            raise NotACall
        cursor.literal(ARGUMENTS)
        yield from arguments_of(cursor, known(match["name"], tools).name)
        cursor.space()
        cursor.literal(CALL_END)
        yield Found(None, cursor.place)


def grammar(rules: ToolRules, special: Mapping[str, int]) -> str:
    head, middle, after = (tag(text, special) for text in (CALL, ARGUMENTS, CALL_END))
    calls = named_arguments(
        rules.callable, lambda name, i: f"{head} {quoted(f'functions.{name}:')} NUMBER {middle} arguments_{i} {after}"
    )
    region = f"{repeated(rules, 'call')} {tag(END, special)}"
    return document(tagged(rules, special, begin=BEGIN, region=region, closed=True), calls, ["NUMBER: /[0-9]{1,4}/"])


KIMI_K2 = ToolFormat(
    name="kimi_k2",
    begins=(BEGIN,),
    inner=(CALL, ARGUMENTS, CALL_END),
    ends=(END,),
    read=read,
    grammar=grammar,
    known_by=(BEGIN,),
    new_call_id=call_id,
)

"""GLM 4.5 and 4.6:

<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
</tool_call>

Only the end of the region tells that a call has no more arguments.
"""

from collections.abc import Iterator, Mapping, Sequence

from motet.text.tools.base import Reading, Tool, ToolFormat, ToolRules
from motet.text.tools.call_ids import call_id
from motet.text.tools.cursor import Cursor, EndOfText
from motet.text.tools.lark import alternatives, document, quoted, tag, tagged
from motet.text.tools.properties import Around, written_arguments
from motet.text.tools.reading import Found, known, named, reading_of
from motet.text.tools.written import WrittenCall

BEGIN, END = "<tool_call>", "</tool_call>"
NEWLINE = "\n"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def read(text: str, final: bool, tools: Sequence[Tool]) -> Reading:
    return reading_of(_calls(Cursor(text), tools, final=final), text, final=final)


def _calls(cursor: Cursor, tools: Sequence[Tool], *, final: bool) -> Iterator[Found]:
    cursor.space()
    call = WrittenCall(known(_name(cursor, tools, final=final), tools))
    try:
        _read_arguments(cursor, call, final=final)
    except EndOfText:
        yield Found(call.call(whole=False), cursor.place)
        raise
    yield Found(call.call(whole=True), cursor.place)


def _name(cursor: Cursor, tools: Sequence[Tool], *, final: bool) -> str:
    """Without arguments it may be all that a region says."""
    start = cursor.place
    try:
        return named(cursor, tools, "\n", "<")
    except EndOfText:
        if not final:
            raise
        cursor.place = len(cursor.text)
        return cursor.text[start:].strip()


def _read_arguments(cursor: Cursor, call: WrittenCall, *, final: bool) -> None:
    cursor.space()
    while not (final and cursor.at_end()):
        cursor.literal(KEY)
        key = cursor.until(KEY_END)
        cursor.literal(KEY_END)
        cursor.space()
        cursor.literal(VALUE)
        call.argument(cursor, key.strip(), VALUE_END, own_lines=False)
        cursor.space()


def grammar(rules: ToolRules, special: Mapping[str, int]) -> str:
    key, key_end, value = (tag(text, special) for text in (KEY, KEY_END, VALUE))
    around = Around(lambda name: f"{key} {quoted(name)} {key_end} {quoted(NEWLINE)} {value}", VALUE_END, special)
    lines = [f"call: {alternatives('call', len(rules.callable))}", around.rule()]
    for i, tool in enumerate(rules.callable):
        lines.append(f"call_{i}: {quoted(tool.name + NEWLINE)} arguments_{i} {tag(END, special)}")
        lines += written_arguments(tool, f"arguments_{i}", around)
    return document(tagged(rules, special, begin=BEGIN, region="call", closed=True, many=True), lines)


GLM45 = ToolFormat(
    name="glm45",
    begins=(BEGIN,),
    inner=(KEY, KEY_END, VALUE, VALUE_END),
    ends=(END,),
    read=read,
    grammar=grammar,
    known_by=(BEGIN, KEY, VALUE),
    new_call_id=call_id,
)

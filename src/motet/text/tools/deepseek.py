"""DeepSeek's models. Their tags are special tokens, written here without the odd bars and blanks that are in them.

deepseek_v3, and R1:
    <tool calls begin><tool call begin>function<tool sep>get_weather
    ```json
    {"city": "Paris"}
    ```<tool call end><tool calls end>

deepseek_v31:
    <tool calls begin><tool call begin>get_weather<tool sep>{"city": "Paris"}<tool call end><tool calls end>
"""

from collections.abc import Iterator, Mapping, Sequence

from motet.text.tools.base import Reading, Tool, ToolFormat, ToolRules
from motet.text.tools.call_ids import call_id
from motet.text.tools.cursor import Cursor
from motet.text.tools.json_calls import arguments_of
from motet.text.tools.lark import document, named_arguments, quoted, repeated, tag, tagged
from motet.text.tools.reading import Found, named, reading_of


def _tag(words: str) -> str:
    """Between full-width bars, with U+2581 (sentencepiece's space) for blanks."""
    return f"<\uff5c{words.replace(' ', SPACE)}\uff5c>"


SPACE = "\u2581"
BEGIN, END = _tag("tool calls begin"), _tag("tool calls end")
CALL, SEPARATOR, CALL_END = _tag("tool call begin"), _tag("tool sep"), _tag("tool call end")
FENCE, FENCE_END = "```json", "```"
NEWLINE = "\n"


def read_v3(text: str, final: bool, tools: Sequence[Tool]) -> Reading:
    return reading_of(_calls(Cursor(text), tools, fenced=True), text, final=final)


def read_v31(text: str, final: bool, tools: Sequence[Tool]) -> Reading:
    return reading_of(_calls(Cursor(text), tools, fenced=False), text, final=final)


def _calls(cursor: Cursor, tools: Sequence[Tool], *, fenced: bool) -> Iterator[Found]:
    while True:
        cursor.space()
        cursor.literal(CALL)
        if fenced:
            cursor.literal(f"function{SEPARATOR}")
        name = named(cursor, tools, "\n" if fenced else SEPARATOR)
        cursor.space()
        cursor.literal(FENCE if fenced else SEPARATOR)
        yield from arguments_of(cursor, name)
        cursor.space()
        if fenced:
            cursor.literal(FENCE_END)
            cursor.space()
        cursor.literal(CALL_END)
        yield Found(None, cursor.place)


def grammar_v3(rules: ToolRules, special: Mapping[str, int]) -> str:
    head = f'{tag(CALL, special)} "function" {tag(SEPARATOR, special)}'
    after = f"{quoted(NEWLINE + FENCE_END)} {tag(CALL_END, special)}"
    lines = named_arguments(
        rules.callable,
        lambda name, i: f"{head} {quoted(name + NEWLINE + FENCE + NEWLINE)} arguments_{i} {after}",
    )
    return _document(rules, special, lines)


def grammar_v31(rules: ToolRules, special: Mapping[str, int]) -> str:
    head, middle, after = (tag(text, special) for text in (CALL, SEPARATOR, CALL_END))
    lines = named_arguments(rules.callable, lambda name, i: f"{head} {quoted(name)} {middle} arguments_{i} {after}")
    return _document(rules, special, lines)


def _document(rules: ToolRules, special: Mapping[str, int], calls: Sequence[str]) -> str:
    region = f"{repeated(rules, 'call', f'{quoted(NEWLINE)}?')} {tag(END, special)}"
    return document(tagged(rules, special, begin=BEGIN, region=region, closed=True), calls)


DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    begins=(BEGIN,),
    inner=(CALL, SEPARATOR, CALL_END),
    ends=(END,),
    read=read_v3,
    grammar=grammar_v3,
    known_by=(BEGIN, FENCE),
    new_call_id=call_id,
)
DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v31",
    begins=(BEGIN,),
    inner=(CALL, SEPARATOR, CALL_END),
    ends=(END,),
    read=read_v31,
    grammar=grammar_v31,
    known_by=(BEGIN,),
    new_call_id=call_id,
)

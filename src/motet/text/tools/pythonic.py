"""Calls as Python writes them. A call is told when it is whole.

pythonic: Llama 4 and Llama 3.2's small models, Gorilla, ToolACE
    [get_weather(city="Paris", unit="celsius"), get_time()]

olmo3
    <function_calls>get_weather(city="Paris", unit="celsius")
    get_time()</function_calls>
"""

from collections.abc import Iterator, Mapping, Sequence

from motet.text.tools.base import ReadCall, Reading, Tool, ToolFormat, ToolMode, ToolRules
from motet.text.tools.call_ids import call_id
from motet.text.tools.cursor import Cursor, NotACall
from motet.text.tools.lark import alternatives, bare, document, quoted, repeated, tag, tagged
from motet.text.tools.properties import keyword_arguments as keyword_rules
from motet.text.tools.python_literals import keyword_arguments
from motet.text.tools.reading import Found, named, reading_of

BEGIN, END = "<|python_start|>", "<|python_end|>"
LINES, LINES_END = "<function_calls>", "</function_calls>"
NEWLINE = "\n"


def read(text: str, final: bool, tools: Sequence[Tool]) -> Reading:
    return reading_of(_listed_calls(Cursor(text), tools), text, final=final)


def read_lines(text: str, final: bool, tools: Sequence[Tool]) -> Reading:
    return reading_of(_calls_on_lines(Cursor(text), tools), text, final=final)


def _listed_calls(cursor: Cursor, tools: Sequence[Tool]) -> Iterator[Found]:
    cursor.space()
    cursor.literal("[")
    while True:
        yield _call(cursor, tools)
        if cursor.maybe("]"):
            break
        cursor.literal(",")
    yield Found(None, cursor.place)
    cursor.space()
    if not cursor.at_end():
        raise NotACall


def _calls_on_lines(cursor: Cursor, tools: Sequence[Tool]) -> Iterator[Found]:
    while True:
        yield _call(cursor, tools)


def _call(cursor: Cursor, tools: Sequence[Tool]) -> Found:
    """A call, and space around it."""
    cursor.space()
    name = named(cursor, tools, "(")
    cursor.literal("(")
    call = ReadCall(name, keyword_arguments(cursor), whole=True)
    end = cursor.place
    cursor.space()
    return Found(call, end)


def grammar(rules: ToolRules, special: Mapping[str, int]) -> str:
    start = bare(rules, first="[", calls="calls")
    if rules.mode is ToolMode.AUTO and BEGIN in special:
        start[0] += f" | OTHER {tag(BEGIN, special)} calls"
    return document(start, [f'calls: "[" {repeated(rules, "call", quoted(", "))} "]"'], _call_rules(rules))


def grammar_of_lines(rules: ToolRules, special: Mapping[str, int]) -> str:
    region = f"{repeated(rules, 'call', quoted(NEWLINE))} {tag(LINES_END, special)}"
    return document(tagged(rules, special, begin=LINES, region=region, closed=True), _call_rules(rules))


def _call_rules(rules: ToolRules) -> list[str]:
    lines = [f"call: {alternatives('call', len(rules.callable))}"]
    for i, tool in enumerate(rules.callable):
        lines.append(f'call_{i}: {quoted(tool.name + "(")} arguments_{i} ")"')
        lines += keyword_rules(tool, f"arguments_{i}")
    return lines


PYTHONIC = ToolFormat(
    name="pythonic",
    begins=(BEGIN,),
    bare="[",
    ends=(END,),
    read=read,
    grammar=grammar,
    known_by=("[func_name1(",),
    new_call_id=call_id,
)
OLMO3 = ToolFormat(
    name="olmo3",
    begins=(LINES,),
    ends=(LINES_END,),
    read=read_lines,
    grammar=grammar_of_lines,
    known_by=(LINES,),
    new_call_id=call_id,
)

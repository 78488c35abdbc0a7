"""Formats that put each argument between tags of its own, as text that the tool's schema gives a type.

qwen3_coder                                     minimax_m2
    <tool_call>                                     <minimax:tool_call>
    <function=get_weather>                          <invoke name="get_weather">
    <parameter=city>                                <parameter name="city">Paris</parameter>
    Paris                                           </invoke>
    </parameter>                                    </minimax:tool_call>
    </function>
    </tool_call>

Qwen3-Coder leaves out `<tool_call>` at times, so its `<function=` opens a region as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from motet.text.tools.base import Reading, Tool, ToolFormat, ToolRules
from motet.text.tools.call_ids import call_id
from motet.text.tools.cursor import Cursor, EndOfText
from motet.text.tools.lark import alternatives, document, quoted, repeated, tag, tagged
from motet.text.tools.properties import Around, written_arguments
from motet.text.tools.reading import Found, known, named, reading_of
from motet.text.tools.written import WrittenCall


@dataclass(frozen=True, kw_only=True)
class Tags:
    """How calls and arguments are opened (up to a name, and after it) and closed."""

    begin: str
    end: str
    call: str
    argument: str
    named: str
    """After the name of a tool or of an argument."""
    argument_end: str
    call_end: str
    own_lines: bool
    """Whether an argument's text stands on lines of its own."""
    one_call: bool
    """Whether parallel calls are a region each."""


QWEN3_CODER_TAGS = Tags(
    begin="<tool_call>",
    end="</tool_call>",
    call="<function=",
    argument="<parameter=",
    named=">",
    argument_end="</parameter>",
    call_end="</function>",
    own_lines=True,
    one_call=True,
)
MINIMAX_M2_TAGS = Tags(
    begin="<minimax:tool_call>",
    end="</minimax:tool_call>",
    call='<invoke name="',
    argument='<parameter name="',
    named='">',
    argument_end="</parameter>",
    call_end="</invoke>",
    own_lines=False,
    one_call=False,
)


def read(text: str, final: bool, tools: Sequence[Tool], *, tags: Tags) -> Reading:
    return reading_of(_calls(Cursor(text), tools, tags), text, final=final)


def _calls(cursor: Cursor, tools: Sequence[Tool], tags: Tags) -> Iterator[Found]:
    cursor.space()
    opened = cursor.peek() != "<"  # the tag of the region was that of the call
    while True:
        cursor.space()
        if not opened:
            cursor.literal(tags.call)
        opened = False
        call = WrittenCall(known(named(cursor, tools, tags.named), tools))
        try:
            cursor.literal(tags.named)
            _read_arguments(cursor, call, tags)
        except EndOfText:
            yield Found(call.call(whole=False), cursor.place)
            raise
        yield Found(call.call(whole=True), cursor.place)


def _read_arguments(cursor: Cursor, call: WrittenCall, tags: Tags) -> None:
    cursor.space()
    while not cursor.maybe(tags.call_end):
        cursor.literal(tags.argument)
        key = cursor.until(tags.named)
        cursor.literal(tags.named)
        call.argument(cursor, key, tags.argument_end, own_lines=tags.own_lines)
        cursor.space()


def grammar(rules: ToolRules, special: Mapping[str, int], *, tags: Tags) -> str:
    line = "\n" if tags.own_lines else ""
    around = Around(
        lambda key: quoted(f"{tags.argument}{key}{tags.named}{line}"), tags.argument_end, special, line=line
    )
    lines = [f"call: {alternatives('call', len(rules.callable))}", around.rule()]
    for i, tool in enumerate(rules.callable):
        head, after = f"{tags.call}{tool.name}{tags.named}\n", f"{tags.call_end}\n"
        lines.append(f"call_{i}: {quoted(head)} arguments_{i} {quoted(after)}")
        lines += written_arguments(tool, f"arguments_{i}", around)
    region = f'"\\n" {"call" if tags.one_call else repeated(rules, "call")} {tag(tags.end, special)}'
    return document(tagged(rules, special, begin=tags.begin, region=region, closed=True, many=tags.one_call), lines)


QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    begins=(QWEN3_CODER_TAGS.begin, QWEN3_CODER_TAGS.call),
    ends=(QWEN3_CODER_TAGS.end,),
    read=partial(read, tags=QWEN3_CODER_TAGS),
    grammar=partial(grammar, tags=QWEN3_CODER_TAGS),
    known_by=("<tool_call>", "<function=", "<parameter="),
    new_call_id=call_id,
)
MINIMAX_M2 = ToolFormat(
    name="minimax_m2",
    begins=(MINIMAX_M2_TAGS.begin,),
    ends=(MINIMAX_M2_TAGS.end,),
    read=partial(read, tags=MINIMAX_M2_TAGS),
    grammar=partial(grammar, tags=MINIMAX_M2_TAGS),
    known_by=("minimax:tool_call", "<invoke name="),
    new_call_id=call_id,
)

"""Formats that put each argument between tags of its own, as text whose type the tool's schema gives (`typed`).

qwen3_coder                                     minimax_m2
    <tool_call>                                     <minimax:tool_call>
    <function=get_weather>                          <invoke name="get_weather">
    <parameter=city>                                <parameter name="city">Paris</parameter>
    Paris                                           </invoke>
    </parameter>                                    </minimax:tool_call>
    </function>
    </tool_call>

glm45: GLM 4.5 and 4.6, where only the end of the region shows that a call has no more arguments
    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from motet.text.stop_strings import StopMatcher, StopStrings
from motet.text.tools.cursor import Cursor, EndOfText, NotACall
from motet.text.tools.grammar import NEWLINE, arguments_of_tool, call_rules, document, json_rule, repeated, tag, tagged
from motet.text.tools.tool_format import ParsedCall, Tool, ToolFormat, ToolRules, region_reader, tool_named, tool_until
from motet.text.tools.typed import as_json, property_schema, quoted, types_of


@dataclass(frozen=True, kw_only=True)
class CallTags:
    """The texts around calls and arguments. Where one of them has white space, readers accept any or none."""

    begin: str
    end: str
    call: str
    """The text before the name of a tool; empty if only the region's tag precedes it."""
    named: str
    """The text after the name of a tool."""
    argument: str
    """The text before the name of an argument."""
    keyed: tuple[str, ...]
    """The texts between that name and the argument's text."""
    argument_end: str
    call_end: str
    """The text after a call; empty if the region ends there."""
    own_lines: bool
    """True if an argument's text has lines of its own."""
    one_call: bool
    """True if each of several calls is a region of its own."""

    def format(
        self, name: str, *, inner: tuple[str, ...] = (), begins: tuple[str, ...] = (), known_by: Sequence[str]
    ) -> ToolFormat:
        """`begins`: more tags that open a region."""
        return ToolFormat(
            name=name,
            begins=(self.begin, *begins),
            inner=inner,
            ends=(self.end,),
            read=region_reader(self._calls),
            grammar=self._grammar,
            known_by=known_by,
        )

    def _calls(self, cursor: Cursor, tools: Sequence[Tool]) -> Iterator[ParsedCall | None]:
        cursor.space()
        opened = cursor.peek() != "<"  # the tag of the region was that of the call
        while True:
            cursor.space()
            if not opened:
                cursor.literal(self.call)
            opened = False
            call = CallWriter(self._tool(cursor, tools))
            try:
                cursor.literal(self.named.strip())
                cursor.space()
                while not (cursor.maybe(self.call_end) if self.call_end else cursor.final and cursor.at_end()):
                    cursor.literal(self.argument)
                    key = cursor.until(self.keyed[0].strip())
                    cursor.pass_over(*self.keyed)
                    call.read_argument(cursor, key.strip(), end=self.argument_end, own_lines=self.own_lines)
                    cursor.space()
            except EndOfText:
                yield call.parsed(whole=False)
                raise
            yield call.parsed(whole=True)
            cursor.peek()

    def _tool(self, cursor: Cursor, tools: Sequence[Tool]) -> Tool:
        start = cursor.place
        try:
            return tool_until(cursor, tools, self.named.strip() or "\n", "<")
        except EndOfText:
            if self.call_end or not cursor.final:
                raise
            cursor.place = len(cursor.text)  # a call without arguments may be only a name
            return tool_named(cursor.text[start:].strip(), tools)

    def _grammar(self, rules: ToolRules, special: Mapping[str, int]) -> str:
        behind = quoted(self.call_end + NEWLINE) if self.call_end else ""
        one = call_rules(
            rules.callable,
            lambda name, arguments: f"{quoted(f'{self.call}{name}{self.named}')} {arguments} {behind}",
            arguments=lambda tool, rule: self._arguments(tool, rule, special=special),
        )
        line = quoted(NEWLINE) if self.call else ""
        region = f"{line} {'call' if self.one_call else repeated(rules, 'call')} {tag(self.end, special)}"
        start = tagged(rules, special, begin=self.begin, region=region, closed=True, many=self.one_call)
        lazy = "" if self.argument_end in special else "[lazy]"
        return document(start, one, [rf"text{lazy}: /(.|\n)*/ {tag(self.argument_end, special)}"])

    def _arguments(self, tool: Tool, rule: str, *, special: Mapping[str, int]) -> list[str]:
        """Returns the rule `rule` for the tool's arguments as text, with a line break after each."""
        arguments = arguments_of_tool(tool)
        optional = ("" if argument.required else "?" for argument in arguments)
        lines = [f"{rule}: {' '.join(f'{rule}_{i}{mark}' for i, mark in enumerate(optional)) or quoted('')}"]
        lead, end = tag(self.argument, special), tag(self.argument_end, special)
        keyed = " ".join(tag(text, special) for text in self.keyed)
        closed = f"{quoted(NEWLINE)} {end}" if self.own_lines else end
        for i, argument in enumerate(arguments):
            texts = argument.texts()
            value = "text"
            if "string" not in argument.types:
                lines.append(f"{rule}_{i}_value: {json_rule(argument.schema)}")
                value = f"{rule}_{i}_value {closed}"
            elif texts is not None:
                value = f"({' | '.join(map(quoted, texts))}) {closed}"
            lines.append(f"{rule}_{i}: {lead} {quoted(argument.name)} {keyed} {value} {quoted(NEWLINE)}")
        return lines


QWEN3_CODER = CallTags(
    begin="<tool_call>",
    end="</tool_call>",
    call="<function=",
    named=">\n",
    argument="<parameter=",
    keyed=(">\n",),
    argument_end="</parameter>",
    call_end="</function>",
    own_lines=True,
    one_call=True,
).format(
    "qwen3_coder",
    begins=("<function=",),  # the model sometimes leaves out `<tool_call>`
    known_by=("<tool_call>", "<function=", "<parameter="),
)
MINIMAX_M2 = CallTags(
    begin="<minimax:tool_call>",
    end="</minimax:tool_call>",
    call='<invoke name="',
    named='">\n',
    argument='<parameter name="',
    keyed=('">',),
    argument_end="</parameter>",
    call_end="</invoke>",
    own_lines=False,
    one_call=False,
).format("minimax_m2", known_by=("minimax:tool_call", "<invoke name="))
GLM45 = CallTags(
    begin="<tool_call>",
    end="</tool_call>",
    call="",
    named="\n",
    argument="<arg_key>",
    keyed=("</arg_key>", "\n", "<arg_value>"),
    argument_end="</arg_value>",
    call_end="",
    own_lines=False,
    one_call=True,
).format(
    "glm45",
    inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    known_by=("<tool_call>", "<arg_key>", "<arg_value>"),
)


class CallWriter:
    """Makes one JSON object of a call's arguments, which come one by one as text."""

    def __init__(self, tool: Tool) -> None:
        self.tool = tool
        self._arguments: dict[str, str] = {}
        """Name -> JSON text; the last one may be the beginning of a string."""

    def read_argument(self, cursor: Cursor, key: str, *, end: str, own_lines: bool) -> None:
        """Reads the argument `key`, whose text goes on to the tag `end`; `own_lines`: tags stand on lines of their own.

        At the end of the text the beginning of a string is added before `EndOfText` is raised.
        """
        if key in self._arguments:
            raise NotACall
        types = types_of(property_schema(self.tool, key), self.tool.parameters)
        start = cursor.place + (own_lines and cursor.text.startswith("\n", cursor.place))
        try:
            _pass_value(cursor, end, types=types)
        except EndOfText:
            if types == {"string"}:
                matcher = StopMatcher(StopStrings((end, f"\n{end}") if own_lines else (end,)))
                matcher.feed(cursor.text[start:][-len(end) :])  # its end may be the beginning of `end`
                self._arguments[key] = quoted(cursor.text[start : len(cursor.text) - matcher.num_held])[:-1]
            raise
        text = cursor.text[min(start, cursor.place) : cursor.place]
        self._arguments[key] = as_json(text.removesuffix("\n") if own_lines else text, types)
        cursor.literal(end)

    def parsed(self, *, whole: bool) -> ParsedCall:
        written = ", ".join(f"{quoted(name)}: {value}" for name, value in self._arguments.items())
        return ParsedCall(self.tool.name, f"{{{written}{'}' if whole else ''}", whole)


def _pass_value(cursor: Cursor, end: str, *, types: frozenset[str]) -> None:
    """Moves on to the tag `end`; a tag inside a JSON string does not count."""
    start = cursor.place
    if "string" not in types:
        try:
            if not cursor.value().whole:
                raise EndOfText
        except NotACall:
            cursor.place = start
    cursor.until(end)

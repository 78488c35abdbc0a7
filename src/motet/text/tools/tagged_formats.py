"""Formats with separate tags for each argument. The argument is plain text; its type follows from the tool's schema
(`typed`).

qwen3_coder                                     minimax_m2
    <tool_call>                                     <minimax:tool_call>
    <function=get_weather>                          <invoke name="get_weather">
    <parameter=city>                                <parameter name="city">Paris</parameter>
    Paris                                           </invoke>
    </parameter>                                    </minimax:tool_call>
    </function>
    </tool_call>

glm45: GLM 4.5 and 4.6. Only the end of the region shows that a call has no more arguments.
    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from motet.text.stop_strings import StopMatcher, StopStrings
from motet.text.tools.argument_schema import arguments_of_tool, nameable, types_of_argument
from motet.text.tools.cursor import Cursor, EndOfText, NotACall
from motet.text.tools.grammar import NEWLINE, call_rules, document, repeated, tag, tagged
from motet.text.tools.patterns import literal
from motet.text.tools.tagged_values import ValueEnd, free_text, value_rules
from motet.text.tools.tool_format import ParsedCall, Tool, ToolFormat, ToolRules, region_parser, tool_named, tool_until
from motet.text.tools.typed import as_json, quoted


@dataclass(frozen=True, kw_only=True)
class CallTags:
    """The texts around calls and arguments. Where they have white space, the parser accepts any white space or none.

    opening (before_name NAME after_name (before_key KEY after_key VALUE after_value)* after_call)* closing"""

    opening: str
    closing: str
    before_name: str
    """Text before NAME; empty if the name directly follows the opening tag."""
    after_name: str
    before_key: str
    after_key: tuple[str, ...]
    after_value: str
    after_call: str
    """Text after a call; empty if the region ends there."""
    on_own_lines: bool
    """True if the value of an argument is on separate lines."""
    one_call: bool
    """True if a region has only one call, so that several calls have several regions."""

    def format(
        self,
        name: str,
        *,
        inner_tags: tuple[str, ...] = (),
        opening_tags: tuple[str, ...] = (),
        template_marks: Sequence[str],
    ) -> ToolFormat:
        """Returns the format with these tags. `opening_tags`: additional tags that open a region."""
        return ToolFormat(
            name=name,
            opening_tags=(self.opening, *opening_tags),
            inner_tags=inner_tags,
            closing_tags=(self.closing,),
            parse=region_parser(self._calls),
            grammar=self._grammar,
            template_marks=template_marks,
        )

    def _calls(self, cursor: Cursor, tools: Sequence[Tool]) -> Iterator[ParsedCall | None]:
        cursor.skip_space()
        opened = cursor.peek() != "<"  # the tag that opened the region was the text before the name
        while True:
            cursor.skip_space()
            if not opened:
                cursor.expect(self.before_name)
            opened = False
            call = CallWriter(self._tool(cursor, tools))
            try:
                cursor.expect(self.after_name.strip())
                cursor.skip_space()
                while not (cursor.accept(self.after_call) if self.after_call else cursor.final and cursor.at_end()):
                    cursor.expect(self.before_key)
                    key = cursor.read_until(self.after_key[0].strip())
                    cursor.expect_all(*self.after_key)
                    call.read_argument(cursor, key.strip(), end=self.after_value, on_own_lines=self.on_own_lines)
                    cursor.skip_space()
            except EndOfText:
                yield call.parsed(complete=False)
                raise
            yield call.parsed(complete=True)
            cursor.peek()

    def _tool(self, cursor: Cursor, tools: Sequence[Tool]) -> Tool:
        start = cursor.position
        try:
            return tool_until(cursor, tools, self.after_name.strip() or "\n", "<")
        except EndOfText:
            if self.after_call or not cursor.final:
                raise
            cursor.position = len(cursor.text)  # a call without arguments can consist of its name alone
            return tool_named(cursor.text[start:].strip(), tools)

    def _grammar(self, rules: ToolRules, special: Mapping[str, int]) -> str:
        after_call = quoted(self.after_call + NEWLINE) if self.after_call else ""
        call = call_rules(
            rules.callable,
            lambda name, arguments: f"{quoted(f'{self.before_name}{name}{self.after_name}')} {arguments} {after_call}",
            arguments=lambda tool, rule: self._arguments(tool, rule, special=special),
        )
        line = quoted(NEWLINE) if self.before_name else ""
        region = f"{line} {'call' if self.one_call else repeated(rules, 'call')} {tag(self.closing, special)}"
        start = tagged(rules, special, opening=self.opening, region=region, closed=True, one_call=self.one_call)
        return document(start, call, [free_text(self.after_value, special)])

    def _arguments(self, tool: Tool, rule: str, *, special: Mapping[str, int]) -> list[str]:
        """Returns the rule `rule` for the tool's arguments as text, with a line break after each."""
        arguments = nameable(arguments_of_tool(tool), self._is_name)
        optional = ("" if argument.required else "?" for argument in arguments)
        lines = [f"{rule}: {' '.join(f'{rule}_{i}{mark}' for i, mark in enumerate(optional)) or quoted('')}"]
        before_key = tag(self.before_key, special)
        after_key = " ".join(tag(text, special) for text in self.after_key)
        end = ValueEnd(self.after_value, special, on_own_lines=self.on_own_lines)
        for i, argument in enumerate(arguments):
            rules, value = value_rules(argument, f"{rule}_{i}", end=end)
            name = f"/{literal(argument.name)}/" if argument.name in special else quoted(argument.name)
            lines += [*rules, f"{rule}_{i}: {before_key} {name} {after_key} {value} {quoted(NEWLINE)}"]
        return lines

    def _is_name(self, name: str) -> bool:
        """Returns True if the parser reads this name of an argument unchanged."""
        return name == name.strip() != "" and self.after_key[0].strip() not in name


QWEN3_CODER = CallTags(
    opening="<tool_call>",
    closing="</tool_call>",
    before_name="<function=",
    after_name=">\n",
    before_key="<parameter=",
    after_key=(">\n",),
    after_value="</parameter>",
    after_call="</function>",
    on_own_lines=True,
    one_call=True,
).format(
    "qwen3_coder",
    opening_tags=("<function=",),  # the model sometimes omits `<tool_call>`
    template_marks=("<tool_call>", "<function=", "<parameter="),
)
MINIMAX_M2 = CallTags(
    opening="<minimax:tool_call>",
    closing="</minimax:tool_call>",
    before_name='<invoke name="',
    after_name='">\n',
    before_key='<parameter name="',
    after_key=('">',),
    after_value="</parameter>",
    after_call="</invoke>",
    on_own_lines=False,
    one_call=False,
).format("minimax_m2", template_marks=("minimax:tool_call", "<invoke name="))
GLM45 = CallTags(
    opening="<tool_call>",
    closing="</tool_call>",
    before_name="",
    after_name="\n",
    before_key="<arg_key>",
    after_key=("</arg_key>", "\n", "<arg_value>"),
    after_value="</arg_value>",
    after_call="",
    on_own_lines=False,
    one_call=True,
).format(
    "glm45",
    inner_tags=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    template_marks=("<tool_call>", "<arg_key>", "<arg_value>"),
)


class CallWriter:
    """Combines the arguments of a call, each of which is text, in one JSON object."""

    def __init__(self, tool: Tool) -> None:
        self.tool = tool
        self._arguments: dict[str, str] = {}
        """Arguments in JSON by name. The last one can be the start of a string."""

    def read_argument(self, cursor: Cursor, key: str, *, end: str, on_own_lines: bool) -> None:
        """Adds the argument `key`, whose value extends to the tag `end`. `on_own_lines`: True if the value is on
        separate lines. If the text ends inside a string, adds the start of the string before it raises `EndOfText`."""
        if key in self._arguments:
            raise NotACall
        types = types_of_argument(self.tool, key)
        start = cursor.position + (on_own_lines and cursor.text.startswith("\n", cursor.position))
        try:
            _skip_to_end(cursor, end, types=types)
        except EndOfText:
            if types == {"string"}:
                matcher = StopMatcher(StopStrings((end, f"\n{end}") if on_own_lines else (end,)))
                matcher.feed(cursor.text[start:][-len(end) :])  # the text can end with the start of `end`
                self._arguments[key] = quoted(cursor.text[start : len(cursor.text) - matcher.num_held])[:-1]
            raise
        text = cursor.text[min(start, cursor.position) : cursor.position]
        self._arguments[key] = as_json(text.removesuffix("\n") if on_own_lines else text, types)
        cursor.expect(end)

    def parsed(self, *, complete: bool) -> ParsedCall:
        members = ", ".join(f"{quoted(name)}: {value}" for name, value in self._arguments.items())
        return ParsedCall(self.tool.name, f"{{{members}{'}' if complete else ''}", complete)


def _skip_to_end(cursor: Cursor, end: str, *, types: frozenset[str]) -> None:
    """Advances to the tag `end`. A tag inside a JSON string does not count."""
    start = cursor.position
    if "string" not in types or _starts_container(cursor.text[start:].lstrip()[:1], types):
        try:
            if not cursor.read_value().complete:
                raise EndOfText
            if "string" in types:
                cursor.skip_space()
                after = cursor.position
                cursor.expect(end)
                cursor.position = after
        except NotACall:
            cursor.position = start
        except EndOfText:
            if "string" not in types or not cursor.final:
                raise
            cursor.position = start  # a string that starts like JSON
    cursor.read_until(end)


def _starts_container(char: str, types: frozenset[str]) -> bool:
    return (char == "[" and "array" in types) or (char == "{" and "object" in types)

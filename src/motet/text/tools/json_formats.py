"""Formats whose arguments are JSON: calls as objects (Hermes, Llama, Mistral), or names before an object (Mistral, Kimi
K2, DeepSeek).

A call as an object is `{"name": ..., "arguments": {...}}`, in either order; `parameters` may stand for `arguments`.
Some mistakes of models can mean only one thing, and are read so:

    control characters inside strings (line breaks above all)     escaped
    arguments missing or null                                     {}
    arguments as a string that holds a JSON object                that object
    the text ends (tag or end of answer) before the last brace    a call, if its arguments are whole

Anything else is no call.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from motet.text.tokenizer import SENTENCEPIECE_SPACE
from motet.text.tools.cursor import Cursor, EndOfText, NotACall, TextSpan, can_be_sent, decoded, repaired
from motet.text.tools.grammar import NEWLINE, bare, call_rules, document, json_objects, repeated, tag, tagged
from motet.text.tools.tool_format import (
    ParsedCall,
    Tool,
    ToolFormat,
    ToolRules,
    call_id,
    region_reader,
    tool_named,
    tool_until,
)
from motet.text.tools.typed import quoted

ARGUMENTS = ("arguments", "parameters")
KEYS = frozenset({"name", "id", "type", *ARGUMENTS})

CallStream = Iterator[ParsedCall | None]


# Hermes 2 Pro and 3, Qwen 2.5 and 3, and with a list in the tag SmolLM2:
#
# <tool_call>
# {"name": "get_weather", "arguments": {"city": "Paris"}}
# </tool_call>
HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"


def _hermes_calls(cursor: Cursor, tools: Sequence[Tool]) -> CallStream:
    """Reads objects one after the other, or a list of them. Skips a closing brace too many."""
    cursor.space()
    if cursor.peek() == "[":
        yield from _listed_objects(cursor, tools)
        cursor.space()
        if not cursor.at_end():
            raise NotACall
        return
    while True:
        yield from _one_object(cursor, tools)
        while cursor.peek() in "} \t\r\n":
            cursor.place += 1
            yield None


def _hermes_grammar(rules: ToolRules, special: Mapping[str, int]) -> str:
    region = f'"\\n" call "\\n" {tag(HERMES_END, special)}'
    start = tagged(rules, special, begin=HERMES_BEGIN, region=region, closed=True, many=True)
    return document(start, json_objects(rules.callable, "arguments"))


HERMES = ToolFormat(
    name="hermes",
    begins=(HERMES_BEGIN,),
    ends=(HERMES_END,),
    read=region_reader(_hermes_calls),
    grammar=_hermes_grammar,
    known_by=(HERMES_BEGIN,),
)


# Llama 3 and 4 with tools of the user's own: bare JSON, at times behind a tag.
#
# {"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}
def _llama_format(name: str, *, begin: str, ends: tuple[str, ...], header: str) -> ToolFormat:
    def calls(cursor: Cursor, tools: Sequence[Tool]) -> CallStream:
        """Reads objects with `;`, space or a tag between. Each must be exactly a call: other JSON may be an answer."""
        cursor.space()
        while True:
            yield from _one_object(cursor, tools, exact=True)
            cursor.space()
            for between in (";", begin):
                cursor.maybe(between)
                cursor.space()
            if cursor.peek() != "{":
                raise NotACall

    def grammar(rules: ToolRules, special: Mapping[str, int]) -> str:
        start = bare(rules, special, first="{", begin=begin)
        several = [f"calls: {repeated(rules, 'call', between=quoted('; '))}"]
        return document(start, several, json_objects(rules.callable, "parameters"))

    return ToolFormat(
        name=name,
        begins=(begin,),
        bare="{",
        ends=ends,
        read=region_reader(calls),
        grammar=grammar,
        known_by=(header, '"parameters"'),
    )


LLAMA3_JSON = _llama_format("llama3_json", begin="<|python_tag|>", ends=(), header="<|start_header_id|>")
LLAMA4_JSON = _llama_format(
    "llama4_json", begin="<|python_start|>", ends=("<|python_end|>",), header="<|header_start|>"
)


# Mistral's models, three ways; the last two are of their newer tokenizers (v11 and v13):
#
# [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]
# [TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]get_time{}
# [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}
MISTRAL_BEGIN, MISTRAL_ID, MISTRAL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def _mistral_calls(cursor: Cursor, tools: Sequence[Tool]) -> CallStream:
    while True:
        cursor.space()
        if cursor.peek() == "[":
            yield from _listed_objects(cursor, tools)
        else:
            tool = tool_until(cursor, tools, "{", "[")
            if cursor.maybe(MISTRAL_ID):
                cursor.until(MISTRAL_ARGS)
            cursor.maybe(MISTRAL_ARGS)
            yield from json_arguments_of(cursor, tool)
        cursor.space()
        cursor.literal(MISTRAL_BEGIN)


def _mistral_grammar(rules: ToolRules, special: Mapping[str, int]) -> str:
    """A model whose vocabulary has `[ARGS]` writes names before arguments, any other writes a list."""
    if MISTRAL_ARGS in special:
        args = tag(MISTRAL_ARGS, special)
        region = repeated(rules, "call", between=tag(MISTRAL_BEGIN, special))
        one = call_rules(rules.callable, lambda name, arguments: f"{quoted(name)} {args} {arguments}")
    else:
        region = f'"[" {repeated(rules, "call", between=quoted(", "))} "]"'
        one = json_objects(rules.callable, "arguments")
    return document(tagged(rules, special, begin=MISTRAL_BEGIN, region=region), one)


MISTRAL = ToolFormat(
    name="mistral",
    begins=(MISTRAL_BEGIN,),
    inner=(MISTRAL_ID, MISTRAL_ARGS),
    ends=(),
    read=region_reader(_mistral_calls),
    grammar=_mistral_grammar,
    known_by=(MISTRAL_BEGIN,),
    new_call_id=partial(call_id, "", 9),  # the templates refuse any other kind
)


def _named_format(
    name: str,
    begin: str,
    *,
    end: str,
    call: tuple[tuple[str, ...], ...],
    known_by: Sequence[str],
    numbered: bool = False,
) -> ToolFormat:
    """Makes a format of calls as a name and a JSON object.

    `call`: the tags and texts before the name, between it and the object, and after the object; any white space may
    surround each. `numbered`: names are written `functions.NAME:NUMBER`.
    """
    before, between, after = call

    def calls(cursor: Cursor, tools: Sequence[Tool]) -> CallStream:
        while True:
            cursor.pass_over(*before)
            if numbered:
                tool = _numbered_tool(cursor.until(between[0]), tools)
            else:
                tool = tool_until(cursor, tools, between[0][0])
            cursor.pass_over(*between)
            yield from json_arguments_of(cursor, tool)
            cursor.pass_over(*after)
            yield None

    def grammar(rules: ToolRules, special: Mapping[str, int]) -> str:
        lead, middle, behind = (" ".join(tag(text, special) for text in texts) for texts in call)

        def line(name: str, arguments: str) -> str:
            written = f"{quoted(f'functions.{name}:')} NUMBER" if numbered else quoted(name)
            return f"{lead} {written} {middle} {arguments} {behind}"

        region = f"{repeated(rules, 'call', between=f'{quoted(NEWLINE)}?')} {tag(end, special)}"
        start = tagged(rules, special, begin=begin, region=region, closed=True)
        return document(start, call_rules(rules.callable, line), ["NUMBER: /[0-9]{1,4}/"] if numbered else [])

    return ToolFormat(
        name=name,
        begins=(begin,),
        inner=tuple(text for texts in call for text in texts if text.startswith("<")),
        ends=(end,),
        read=region_reader(calls),
        grammar=grammar,
        known_by=known_by,
    )


def _numbered_tool(written: str, tools: Sequence[Tool]) -> Tool:
    match = re.fullmatch(r"\s*(?:functions\.)?(?P<name>.+):\d+\s*", written)
    if match is None:
        raise NotACall
    return tool_named(match["name"], tools)


# Kimi K2; its tags are special tokens, and it numbers its calls:
#
# <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}
# <|tool_call_end|><|tool_calls_section_end|>
KIMI_K2 = _named_format(
    "kimi_k2",
    "<|tool_calls_section_begin|>",
    end="<|tool_calls_section_end|>",
    call=(("<|tool_call_begin|>",), ("<|tool_call_argument_begin|>",), ("<|tool_call_end|>",)),
    numbered=True,
    known_by=("<|tool_calls_section_begin|>",),
)


# DeepSeek's models. Their tags are special tokens, shown here without the unusual bars and blanks in them.
#
# deepseek_v3, and R1:
#     <tool calls begin><tool call begin>function<tool sep>get_weather
#     ```json
#     {"city": "Paris"}
#     ```<tool call end><tool calls end>
#
# deepseek_v31:
#     <tool calls begin><tool call begin>get_weather<tool sep>{"city": "Paris"}<tool call end><tool calls end>
DEEPSEEK_BEGIN, DEEPSEEK_END, CALL, SEPARATOR, CALL_END = (
    f"<\uff5c{words.replace(' ', SENTENCEPIECE_SPACE)}\uff5c>"  # the bars are full-width
    for words in ("tool calls begin", "tool calls end", "tool call begin", "tool sep", "tool call end")
)
FENCE, FENCE_END = "\n```json\n", "\n```"
DEEPSEEK_V3 = _named_format(
    "deepseek_v3",
    DEEPSEEK_BEGIN,
    end=DEEPSEEK_END,
    call=((CALL, "function", SEPARATOR), (FENCE,), (FENCE_END, CALL_END)),
    known_by=(DEEPSEEK_BEGIN, FENCE.strip()),
)
DEEPSEEK_V31 = _named_format(
    "deepseek_v31",
    DEEPSEEK_BEGIN,
    end=DEEPSEEK_END,
    call=((CALL,), (SEPARATOR,), (CALL_END,)),
    known_by=(DEEPSEEK_BEGIN,),
)


# Calls, and arguments that are JSON, are read from an object.
def _one_object(cursor: Cursor, tools: Sequence[Tool], *, exact: bool = False) -> CallStream:
    """Reads the object that begins here as a call.

    `exact`: it must have arguments and only the keys of calls, since no tag says that it is a call.
    """
    cursor.literal("{")
    members: dict[str, TextSpan] = {}
    try:
        _read_members(cursor, members, exact=exact)
        closed = True
    except EndOfText:
        cursor.place = len(cursor.text)
        closed = False
    call = _call_of(cursor, members, tools=tools, closed=closed, exact=exact)
    if call is not None:
        yield call
    if call is None or not call.whole:
        raise EndOfText


def _read_members(cursor: Cursor, members: dict[str, TextSpan], *, exact: bool) -> None:
    """Reads keys and values into `members` up to the closing brace. Raises `EndOfText` if the text ends before."""
    cursor.space()
    while not cursor.maybe("}"):
        if members:
            cursor.literal(",")
        key = cursor.value()
        if not key.whole:
            raise EndOfText
        name = decoded(repaired(cursor.text[key.start : key.end]))
        if not isinstance(name, str) or name in members or (exact and name not in KEYS):
            raise NotACall
        cursor.space()
        cursor.literal(":")
        cursor.space()
        cursor.peek()
        members[name] = cursor.value()
        if not members[name].whole:
            raise EndOfText
        cursor.space()


def _call_of(
    cursor: Cursor, members: Mapping[str, TextSpan], *, tools: Sequence[Tool], closed: bool, exact: bool
) -> ParsedCall | None:
    """Returns the call of an object, `closed` or begun; None before its name and its arguments have begun."""
    named = members.get("name")
    if named is None or not named.whole:
        if closed:
            raise NotACall
        return None
    tool = tool_named(decoded(cursor.text[named.start : named.end]), tools)
    spans = [members[key] for key in ARGUMENTS if key in members]
    if len(spans) > 1 or (closed and exact and not spans):
        raise NotACall
    if spans:
        return _from_value(cursor.text, tool.name, span=spans[0], closed=closed or cursor.final)
    return ParsedCall(tool.name, "{}", whole=True) if closed else None


def _listed_objects(cursor: Cursor, tools: Sequence[Tool]) -> CallStream:
    """Reads a list of such objects, from its `[` to its `]`."""
    cursor.literal("[")
    while True:
        cursor.space()
        yield from _one_object(cursor, tools)
        cursor.space()
        if cursor.maybe("]"):
            yield None
            return
        cursor.literal(",")


def json_arguments_of(cursor: Cursor, tool: Tool) -> CallStream:
    """Reads a call whose tool is known already: the object that begins here is its arguments."""
    cursor.space()
    if cursor.peek() != "{":
        raise NotACall
    span = cursor.value()
    call = _from_object(cursor.text, tool.name, span=span, closed=True)
    if call is not None:
        yield call
    if not span.whole:
        raise EndOfText


def _from_value(text: str, name: str, *, span: TextSpan, closed: bool) -> ParsedCall | None:
    """Returns a call with the arguments in `span`; `closed`: whole arguments make it whole."""
    start = text[span.start]
    if start == "{":
        return _from_object(text, name, span=span, closed=closed)
    if start not in '"n':
        raise NotACall
    if not span.whole:
        return None
    value = "{}" if start == "n" else decoded(repaired(text[span.start : span.end]))
    if not isinstance(value, str) or not isinstance(decoded(value), dict) or not can_be_sent(value):
        raise NotACall
    return ParsedCall(name, value.strip(), whole=True) if closed else None


def _from_object(text: str, name: str, *, span: TextSpan, closed: bool) -> ParsedCall | None:
    """Returns None while there is only a brace: the next character shows if it is JSON."""
    written = repaired(text[span.start : span.end])
    if span.whole and closed:
        return ParsedCall(name, written, whole=True)
    begun = written[:-1] if span.whole else written
    return ParsedCall(name, begun, whole=False) if begun.strip() != "{" else None

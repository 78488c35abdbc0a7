"""Formats with arguments in JSON. A call is an object with a name and arguments (Hermes, Llama, Mistral), or a name
before an object (Mistral, Kimi K2, DeepSeek).

A call as an object is `{"name": ..., "arguments": {...}}`, in either order; the key can also be `parameters`. Some
errors of models have only one possible meaning, and are accepted:

    control characters inside strings (mostly line breaks)        escaped
    arguments missing or null                                     {}
    arguments as a string that contains a JSON object             that object
    the text ends (tag or end of answer) before the last brace    a call, if its arguments are complete

Any other text is not a call.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from motet.text.tokenizer import SENTENCEPIECE_SPACE
from motet.text.tools.cursor import Cursor, EndOfText, NotACall, TextSpan, decoded, is_encodable, repaired
from motet.text.tools.grammar import NEWLINE, bare, call_rules, document, json_objects, repeated, tag, tagged
from motet.text.tools.tool_format import (
    ParsedCall,
    Tool,
    ToolFormat,
    ToolRules,
    call_id,
    region_parser,
    tool_named,
    tool_until,
)
from motet.text.tools.typed import quoted

ARGUMENTS = ("arguments", "parameters")
KEYS = frozenset({"name", "id", "type", *ARGUMENTS})
CallStream = Iterator[ParsedCall | None]


# Hermes 2 Pro and 3, Qwen 2.5 and 3, and, with a list in the tag, SmolLM2:
#
# <tool_call>
# {"name": "get_weather", "arguments": {"city": "Paris"}}
# </tool_call>
HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"


def _hermes_calls(cursor: Cursor, tools: Sequence[Tool]) -> CallStream:
    """Parses consecutive objects, or a list of objects. Skips surplus closing braces."""
    cursor.skip_space()
    if cursor.peek() == "[":
        yield from _listed_objects(cursor, tools)
        cursor.skip_space()
        if not cursor.at_end():
            raise NotACall
        return
    while True:
        yield from _one_object(cursor, tools)
        while cursor.peek() in "} \t\r\n":
            cursor.position += 1
            yield None


def _hermes_grammar(rules: ToolRules, special: Mapping[str, int]) -> str:
    region = f'"\\n" call "\\n" {tag(HERMES_END, special)}'
    start = tagged(rules, special, opening=HERMES_BEGIN, region=region, closed=True, one_call=True)
    return document(start, json_objects(rules.callable, "arguments"))


HERMES = ToolFormat(
    name="hermes",
    opening_tags=(HERMES_BEGIN,),
    closing_tags=(HERMES_END,),
    parse=region_parser(_hermes_calls),
    grammar=_hermes_grammar,
    template_marks=(HERMES_BEGIN,),
)


# Llama 3 and 4 with the client's tools: bare JSON, sometimes after a tag.
#
# {"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}
def _llama_format(name: str, *, opening: str, closing_tags: tuple[str, ...], header: str) -> ToolFormat:
    def calls(cursor: Cursor, tools: Sequence[Tool]) -> CallStream:
        """Parses objects with `;`, white space or a tag between them. Each object must be exactly a call, since other
        JSON can be content."""
        cursor.skip_space()
        while True:
            yield from _one_object(cursor, tools, exact=True)
            cursor.skip_space()
            for between in (";", opening):
                cursor.accept(between)
                cursor.skip_space()
            if cursor.peek() != "{":
                raise NotACall

    def grammar(rules: ToolRules, special: Mapping[str, int]) -> str:
        start = bare(rules, special, first="{", opening=opening)
        several = [f"calls: {repeated(rules, 'call', between=quoted('; '))}"]
        return document(start, several, json_objects(rules.callable, "parameters"))

    return ToolFormat(
        name=name,
        opening_tags=(opening,),
        bare="{",
        closing_tags=closing_tags,
        parse=region_parser(calls),
        grammar=grammar,
        template_marks=(header, '"parameters"'),
    )


LLAMA3_JSON = _llama_format("llama3_json", opening="<|python_tag|>", closing_tags=(), header="<|start_header_id|>")
LLAMA4_JSON = _llama_format(
    "llama4_json", opening="<|python_start|>", closing_tags=("<|python_end|>",), header="<|header_start|>"
)


# Mistral's models, in three forms; the last two belong to their newer tokenizers (v11 and v13):
#
# [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]
# [TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]get_time{}
# [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}
MISTRAL_BEGIN, MISTRAL_ID, MISTRAL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def _mistral_calls(cursor: Cursor, tools: Sequence[Tool]) -> CallStream:
    while True:
        cursor.skip_space()
        if cursor.peek() == "[":
            yield from _listed_objects(cursor, tools)
        else:
            tool = tool_until(cursor, tools, "{", "[")
            if cursor.accept(MISTRAL_ID):
                cursor.read_until(MISTRAL_ARGS)
            cursor.accept(MISTRAL_ARGS)
            yield from json_arguments_of(cursor, tool)
        cursor.skip_space()
        cursor.expect(MISTRAL_BEGIN)


def _mistral_grammar(rules: ToolRules, special: Mapping[str, int]) -> str:
    """Returns a grammar with names before arguments if the vocabulary has `[ARGS]`, otherwise with a list of calls."""
    if MISTRAL_ARGS in special:
        args = tag(MISTRAL_ARGS, special)
        region = repeated(rules, "call", between=tag(MISTRAL_BEGIN, special))
        call = call_rules(rules.callable, lambda name, arguments: f"{quoted(name)} {args} {arguments}")
    else:
        region = f'"[" {repeated(rules, "call", between=quoted(", "))} "]"'
        call = json_objects(rules.callable, "arguments")
    return document(tagged(rules, special, opening=MISTRAL_BEGIN, region=region), call)


MISTRAL = ToolFormat(
    name="mistral",
    opening_tags=(MISTRAL_BEGIN,),
    inner_tags=(MISTRAL_ID, MISTRAL_ARGS),
    parse=region_parser(_mistral_calls),
    grammar=_mistral_grammar,
    template_marks=(MISTRAL_BEGIN,),
    new_call_id=partial(call_id, "", 9),  # Mistral's templates reject ids of another form
)


def _named_format(
    name: str,
    opening: str,
    *,
    closing: str,
    call: tuple[tuple[str, ...], ...],
    template_marks: Sequence[str],
    numbered: bool = False,
) -> ToolFormat:
    """Makes a format in which a call is a name before a JSON object. `call`: three tuples of tags and texts: before the
    name, between the name and the object, and after the object. Any white space can surround each text. `numbered`:
    True if names have the form `functions.NAME:NUMBER`."""
    before, between, after = call

    def calls(cursor: Cursor, tools: Sequence[Tool]) -> CallStream:
        while True:
            cursor.expect_all(*before)
            if numbered:
                tool = _numbered_tool(cursor.read_until(between[0]), tools)
            else:
                tool = tool_until(cursor, tools, between[0][0])
            cursor.expect_all(*between)
            yield from json_arguments_of(cursor, tool)
            cursor.expect_all(*after)
            yield None

    def grammar(rules: ToolRules, special: Mapping[str, int]) -> str:
        start_tags, middle_tags, end_tags = (" ".join(tag(text, special) for text in texts) for texts in call)

        def line(tool_name: str, arguments: str) -> str:
            called = f"{quoted(f'functions.{tool_name}:')} NUMBER" if numbered else quoted(tool_name)
            return f"{start_tags} {called} {middle_tags} {arguments} {end_tags}"

        region = f"{repeated(rules, 'call', between=f'{quoted(NEWLINE)}?')} {tag(closing, special)}"
        start = tagged(rules, special, opening=opening, region=region, closed=True)
        return document(start, call_rules(rules.callable, line), ["NUMBER: /[0-9]{1,4}/"] if numbered else [])

    return ToolFormat(
        name=name,
        opening_tags=(opening,),
        inner_tags=tuple(text for texts in call for text in texts if text.startswith("<")),
        closing_tags=(closing,),
        parse=region_parser(calls),
        grammar=grammar,
        template_marks=template_marks,
    )


def _numbered_tool(text: str, tools: Sequence[Tool]) -> Tool:
    if (match := re.fullmatch(r"\s*(?:functions\.)?(?P<name>.+):\d+\s*", text)) is None:
        raise NotACall
    return tool_named(match["name"], tools)


# Kimi K2. Its tags are special tokens, and its calls have numbers:
#
# <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}
# <|tool_call_end|><|tool_calls_section_end|>
KIMI_K2 = _named_format(
    "kimi_k2",
    "<|tool_calls_section_begin|>",
    closing="<|tool_calls_section_end|>",
    call=(("<|tool_call_begin|>",), ("<|tool_call_argument_begin|>",), ("<|tool_call_end|>",)),
    numbered=True,
    template_marks=("<|tool_calls_section_begin|>",),
)


# DeepSeek's models. Their tags are special tokens, which contain unusual bars and blanks that are left out here.
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
    closing=DEEPSEEK_END,
    call=((CALL, "function", SEPARATOR), (FENCE,), (FENCE_END, CALL_END)),
    template_marks=(DEEPSEEK_BEGIN, FENCE.strip()),
)
DEEPSEEK_V31 = _named_format(
    "deepseek_v31",
    DEEPSEEK_BEGIN,
    closing=DEEPSEEK_END,
    call=((CALL,), (SEPARATOR,), (CALL_END,)),
    template_marks=(DEEPSEEK_BEGIN,),
)


# Parsing of objects as calls, and of arguments in JSON.
def _one_object(cursor: Cursor, tools: Sequence[Tool], *, exact: bool = False) -> CallStream:
    """Parses the object that starts here as a call. `exact`: the object must have arguments and only the keys of calls,
    because no tag shows that it is a call."""
    cursor.expect("{")
    members: dict[str, TextSpan] = {}
    closed = True
    try:
        _read_members(cursor, members, exact=exact)
    except EndOfText:
        cursor.position, closed = len(cursor.text), False
    if (call := _call_of(cursor, members, tools=tools, closed=closed, exact=exact)) is not None:
        yield call
    if call is None or not call.complete:
        raise EndOfText


def _read_members(cursor: Cursor, members: dict[str, TextSpan], *, exact: bool) -> None:
    """Adds keys and values to `members` up to the closing brace. Raises `EndOfText` if the text ends before."""
    cursor.skip_space()
    while not cursor.accept("}"):
        if members:
            cursor.expect(",")
        if not (key := cursor.read_value()).complete:
            raise EndOfText
        name = decoded(repaired(cursor.text[key.start : key.end]))
        if not isinstance(name, str) or name in members or (exact and name not in KEYS):
            raise NotACall
        cursor.expect_all(":")
        cursor.skip_space()
        cursor.peek()
        members[name] = cursor.read_value()
        if not members[name].complete:
            raise EndOfText
        cursor.skip_space()


def _call_of(
    cursor: Cursor, members: Mapping[str, TextSpan], *, tools: Sequence[Tool], closed: bool, exact: bool
) -> ParsedCall | None:
    """Returns the call of an object; None before its name and the start of its arguments are known. `closed`: True if
    the object is complete."""
    named = members.get("name")
    if named is None or not named.complete:
        if closed:
            raise NotACall
        return None
    tool = tool_named(decoded(cursor.text[named.start : named.end]), tools)
    spans = [members[key] for key in ARGUMENTS if key in members]
    if len(spans) > 1 or (closed and exact and not spans):
        raise NotACall
    if spans:
        return _from_value(cursor.text, tool.name, span=spans[0], closed=closed or cursor.final)
    return ParsedCall(tool.name, "{}", complete=True) if closed else None


def _listed_objects(cursor: Cursor, tools: Sequence[Tool]) -> CallStream:
    """Parses a list of objects as calls, from its `[` to its `]`."""
    cursor.expect("[")
    while True:
        cursor.skip_space()
        yield from _one_object(cursor, tools)
        cursor.skip_space()
        if cursor.accept("]"):
            yield None
            return
        cursor.expect(",")


def json_arguments_of(cursor: Cursor, tool: Tool) -> CallStream:
    """Parses a call whose tool is known: the object that starts here contains its arguments."""
    cursor.skip_space()
    if cursor.peek() != "{":
        raise NotACall
    span = cursor.read_value()
    if (call := _from_object(cursor.text, tool.name, span=span, closed=True)) is not None:
        yield call
    if not span.complete:
        raise EndOfText


def _from_value(text: str, name: str, *, span: TextSpan, closed: bool) -> ParsedCall | None:
    """Returns a call with the arguments in `span`, or None until they are known. `closed`: True if the call is complete
    as soon as its arguments are."""
    start = text[span.start]
    if start == "{":
        return _from_object(text, name, span=span, closed=closed)
    if start not in '"n':
        raise NotACall
    if not span.complete:
        return None
    value = "{}" if start == "n" else decoded(repaired(text[span.start : span.end]))
    if not (isinstance(value, str) and isinstance(decoded(value), dict) and is_encodable(value)):
        raise NotACall
    return ParsedCall(name, value.strip(), complete=True) if closed else None


def _from_object(text: str, name: str, *, span: TextSpan, closed: bool) -> ParsedCall | None:
    """Returns a call with the object in `span` as its arguments; None while there is only the opening brace, since only
    the next character shows if the text is JSON."""
    arguments = repaired(text[span.start : span.end])
    if span.complete and closed:
        return ParsedCall(name, arguments, complete=True)
    start = arguments[:-1] if span.complete else arguments
    return ParsedCall(name, start, complete=False) if start.strip() != "{" else None

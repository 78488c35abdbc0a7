"""The grammar of a format allows only calls that its parser accepts."""

import json
import random
from collections.abc import Sequence

import jsonschema
import pytest

from motet.errors import GrammarError
from motet.text.formats import FORMATS
from motet.text.tools.cursor import Cursor
from motet.text.tools.tool_format import Tool, ToolFormat, ToolMode, ToolRules
from tests.pairwise import pairwise
from tests.text.tools.recordings import read
from tests.text.tools.walks import Walker

UNIT = {"type": "string", "enum": ["celsius", "fahrenheit"]}
PROPERTIES = {
    "city": {"type": "string"},
    "unit": {"$ref": "#/$defs/Unit"},
    "days": {"type": "integer"},
    "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
    "near": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 90}, {"type": "null"}]},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["city", "days"], "additionalProperties": False}
WEATHER = Tool(name="get_weather", parameters={**PARAMETERS, "$defs": {"Unit": UNIT}}, strict=True)
TIME = Tool(name="get_time", parameters={"type": "object", "properties": {}}, strict=False)
TOOLS = (WEATHER, TIME)
PREFERRED = ['"', '"}', "}", "]", ")", "</parameter>", "</arg_value>", "\\n", "é🙂", "</", "<", "\n", "celsius", "a b"]
FORMS = [pytest.param(form, id=name) for name, form in FORMATS.items()]
SPECIALS = [pytest.param(False, id="tags are text"), pytest.param(True, id="tags are tokens")]
NUMBERS = [pytest.param(False, id="one"), pytest.param(True, id="many")]
FORMAT, SPECIAL = pytest.mark.parametrize("form", FORMS), pytest.mark.parametrize("special", SPECIALS)
IN_ANY_WAY = pytest.mark.parametrize(("form", "special", "parallel"), pairwise(FORMS, SPECIALS, NUMBERS))
DEEPSEEK = FORMATS["deepseek_v3"]
CALL, SEPARATOR, CALL_END = DEEPSEEK.inner_tags
FENCED = "get_time\n```json\n{}\n```"
KIMI = "<|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
CALLS = {
    "deepseek_v3": (DEEPSEEK.opening_tags[0], f"{CALL}function{SEPARATOR}{FENCED}{CALL_END}", DEEPSEEK.closing_tags[0]),
    "deepseek_v31": (DEEPSEEK.opening_tags[0], f"{CALL}get_time{SEPARATOR}{{}}{CALL_END}", DEEPSEEK.closing_tags[0]),
    "qwen3_coder": ("", "<tool_call>\n<function=get_time>\n</function>\n</tool_call>", ""),
    "glm45": ("", "<tool_call>get_time\n</tool_call>", ""),
    "hermes": ("", '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>', ""),
    "kimi_k2": ("<|tool_calls_section_begin|>", KIMI, "<|tool_calls_section_end|>"),
    "olmo3": ("<function_calls>", "get_time()", "</function_calls>"),
    "minimax_m2": ("<minimax:tool_call>\n", '<invoke name="get_time">\n</invoke>\n', "</minimax:tool_call>"),
}
"""For each format: the text before calls, one call, and the text after calls."""


def tags_of(form: ToolFormat) -> list[str]:
    """Returns the tags that end with a bracket. `<function=` is never a token."""
    return [tag for tag in (*form.opening_tags, *form.inner_tags, *form.closing_tags) if tag[-1] in ">]"]


def walker(form: ToolFormat, mode: ToolMode, *, parallel: bool, special: bool, tools: Sequence[Tool] = TOOLS) -> Walker:
    tags = tags_of(form) if special else []
    rules = ToolRules(callable=tuple(tools), mode=mode, parallel=parallel)
    return Walker(form.grammar(rules, {tag: 257 + i for i, tag in enumerate(tags)}), tags)


def parsed(form: ToolFormat, text: str) -> tuple[str, list[tuple[str, dict[str, object]]]]:
    content, calls = read(form, [text], TOOLS)
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


def check(calls: Sequence[tuple[str, dict[str, object]]]) -> None:
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    for name, arguments in calls:
        jsonschema.validate(arguments, schemas[name])


@pytest.mark.slow
@IN_ANY_WAY
def test_if_calls_are_required_a_grammar_allows_only_calls(form: ToolFormat, special: bool, parallel: bool) -> None:
    rng, num_texts = random.Random(1), 0
    allowed = walker(form, ToolMode.REQUIRED, parallel=parallel, special=special)
    for _ in range(8):
        text = allowed.walk(rng, preferred=PREFERRED)
        if text is not None:
            num_texts += 1
            content, calls = parsed(form, text)
            assert content == "" and (len(calls) >= 1 if parallel else len(calls) == 1)
            check(calls)
    assert num_texts >= 4


@FORMAT
@SPECIAL
def test_if_calls_are_required_there_is_no_other_text(form: ToolFormat, special: bool) -> None:
    allowed = walker(form, ToolMode.REQUIRED, parallel=True, special=special)
    call = allowed.walk(random.Random(2), preferred=PREFERRED)
    assert call is not None
    assert allowed.allows(call)
    for wrong in ("", "It is late.", f"Let me see. {call}", f"{call} Done.", call.replace("get_", "put_"), call[:-1]):
        assert not allowed.allows(wrong)


@FORMAT
@SPECIAL
def test_text_without_a_tag_is_free_if_the_model_decides(form: ToolFormat, special: bool) -> None:
    allowed = walker(form, ToolMode.AUTO, parallel=True, special=special)
    for text in ("", "It is late.", "Is 3 < 4?\n\n{x} [y] 🙂", "  \n later"):
        assert allowed.allows(text)
        assert parsed(form, text) == (text, [])


@pytest.mark.slow
@IN_ANY_WAY
def test_only_a_call_can_follow_a_tag(form: ToolFormat, special: bool, parallel: bool) -> None:
    rng = random.Random(3)
    allowed = walker(form, ToolMode.AUTO, parallel=parallel, special=special)
    start = form.bare or f"Let me see.{form.opening_tags[0]}"
    texts = [text for _ in range(8) if (text := allowed.walk(rng, start=start, preferred=PREFERRED)) is not None]
    assert len(texts) >= 3
    for text in texts:
        content, calls = parsed(form, text)
        assert len(calls) >= 1 if parallel else len(calls) == 1
        assert content.startswith("" if form.bare else "Let me see.")
        check(calls)
    for wrong in ("", "and so on", "get_date"):
        assert not allowed.allows(start + wrong)


@pytest.mark.parametrize("name", CALLS)
@SPECIAL
def test_only_parallel_calls_can_be_several(name: str, special: bool) -> None:
    before, call, after = CALLS[name]
    between = "\n" if name == "olmo3" else ""
    for mode in (ToolMode.REQUIRED, ToolMode.AUTO):
        one = walker(FORMATS[name], mode, parallel=False, special=special)
        many = walker(FORMATS[name], mode, parallel=True, special=special)
        assert one.allows(before + call + after)
        assert many.allows(before + call + after)
        two = f"{before}{call}{between}{call}{after}"
        assert not one.allows(two)
        assert many.allows(two)


@pytest.mark.parametrize("special", [False, True])
def test_mistral_s_calls_start_with_names_if_the_vocabulary_has_the_tag(special: bool) -> None:
    allowed = walker(FORMATS["mistral"], ToolMode.REQUIRED, parallel=True, special=special)
    assert allowed.allows('[TOOL_CALLS]get_time[ARGS]{}[TOOL_CALLS]get_time[ARGS]{"a": 1}') is special
    assert allowed.allows('[TOOL_CALLS][{"name": "get_time", "arguments": {}}]') is not special


@FORMAT
def test_a_named_tool_is_the_only_one_that_may_be_called(form: ToolFormat) -> None:
    rng = random.Random(4)
    rules = ToolRules(callable=(TIME,), mode=ToolMode.REQUIRED, parallel=False)
    text = Walker(form.grammar(rules, {})).walk(rng, preferred=PREFERRED)
    assert text is not None
    assert [name for name, _ in parsed(form, text)[1]] == ["get_time"]


@pytest.mark.parametrize("form", [FORMATS["qwen3_coder"], FORMATS["glm45"], FORMATS["pythonic"]])
def test_a_shared_schema_is_repeated_only_for_its_arguments_and_within_a_limit(form: ToolFormat) -> None:
    """The bug: a request of a hundred kilobytes became a grammar of hundreds of megabytes."""

    def grammar(referring: int) -> str:
        plain = {f"p{i}": {"type": "integer"} for i in range(1000)}
        properties = plain | {f"r{i}": {"type": "array", "items": {"$ref": "#/$defs/Unit"}} for i in range(referring)}
        parameters = {"type": "object", "properties": properties, "$defs": {"Unit": {**UNIT, "title": "x" * 50_000}}}
        tool = Tool(name="f", parameters=parameters, strict=False)
        return form.grammar(ToolRules(callable=(tool,), mode=ToolMode.REQUIRED), {})

    assert grammar(4).count("x" * 50_000) == 4
    with pytest.raises(GrammarError, match="'f'"):
        grammar(6)


@FORMAT
def test_names_and_keys_can_have_any_letters(form: ToolFormat) -> None:
    parameters = {"type": "object", "properties": {"größe": {"type": "integer"}}, "required": ["größe"]}
    umlauts = Tool(name="mäße-2", parameters=parameters, strict=True)
    allowed = walker(form, ToolMode.REQUIRED, parallel=False, special=False, tools=[umlauts])
    text = allowed.walk(random.Random(5), preferred=PREFERRED)
    assert text is not None
    region = text.removeprefix(form.opening_tags[0]).removesuffix(form.closing_tags[0] if form.closing_tags else "")
    assert [call.name for call in form.parse(Cursor(region, final=True), [umlauts]).calls] == ["mäße-2"]

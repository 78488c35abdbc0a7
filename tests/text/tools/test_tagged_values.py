"""A grammar of arguments between tags allows exactly the calls whose arguments follow the schema, or is refused."""

import json
import random
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import jsonschema
import pytest

from motet.errors import GrammarError
from motet.text.formats import FORMATS
from motet.text.tools.tool_format import Tool, ToolFormat, ToolMode, ToolRules
from tests.grammar.models import TOKENIZER, allowed, grammars_of, lark
from tests.text.tools.recordings import read
from tests.text.tools.walks import Walker

TAGGED = {name: FORMATS[name] for name in ("qwen3_coder", "glm45", "minimax_m2")}
FORM = pytest.mark.parametrize("form", TAGGED.values(), ids=TAGGED)
SPECIAL = pytest.mark.parametrize("special", [False, True], ids=["tags are text", "tags are tokens"])
ENDS = {"qwen3_coder": "</parameter>", "glm45": "</arg_value>", "minimax_m2": "</parameter>"}
OPTIONAL_COLOUR = {"anyOf": [{"type": "string", "enum": ["red", "green"]}, {"type": "null"}]}
CODE = {"type": "string", "pattern": "^[A-Z]{2}<?[0-9]*$"}
UNIT = {"type": "string", "enum": ["c", "f"]}
Cases = dict[str, tuple[Mapping[str, object], list[object], list[object]]]

# For each schema: values that a call can have, and values that no call has.
CASES: Cases = {
    "nullable enum": ({"type": ["string", "null"], "enum": ["red", None]}, ["red", None], ["", "blue", "rednull"]),
    "optional literal": (OPTIONAL_COLOUR, ["red", "green", None], ["blue", ""]),
    "mixed enum": ({"enum": ["a", 5, True, None, 2.5]}, ["a", 5, True, None, 2.5], ["b", 6, False, "aa"]),
    "const": ({"const": "a b\nc"}, ["a b\nc"], ["a b", "a b\nc\n"]),
    "empty text": ({"enum": ["", "x"]}, ["", "x"], ["y"]),
    "pattern": ({"type": "string", "pattern": "^[0-9]{4}$"}, ["2024", "0001"], ["24", "20240", "a2024"]),
    "part of a pattern": ({"type": "string", "pattern": "b+|^c"}, ["abba", "c", "c\n"], ["ac", "", "a"]),
    "pattern with a tag's start": (CODE, ["AB", "AB<12"], ["AB<<", "ab", "AB</parameter>"]),
    "escapes": ({"type": "string", "pattern": r"^\w\/\d\.\u0041[\]\-&~[]$"}, ["x/1.A]", "_/0.A["], ["x/1.A", "x/1xA]"]),
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é🙂\n", "\n\n"], ["a", "abcd", ""]),
    "pattern and length": ({"type": "string", "pattern": "^a*$", "maxLength": 3}, ["", "aaa"], ["aaaa", "b"]),
    "enum and length": ({"enum": ["a", "bbb"], "maxLength": 2}, ["a"], ["bbb"]),
    "all of": ({"allOf": [{"$ref": "#/$defs/Short"}, {"pattern": "^x"}]}, ["x", "xyz"], ["xyzz", "y"]),
    "reference": ({"$ref": "#/$defs/Unit"}, ["c", "f"], ["k"]),
    "reference and more": ({"$ref": "#/$defs/Unit", "maxLength": 1}, ["c"], ["cc"]),
    "optional reference": ({"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]}, ["c", None], ["k"]),
    "integer or list of texts": (
        {"anyOf": [{"type": "integer", "minimum": 5, "maximum": 9}, {"type": "string", "enum": ["x", "y"]}]},
        [5, 9, "x"],
        [4, 10, "z"],
    ),
    "integer or short text": (
        {"anyOf": [{"type": "integer", "minimum": 5, "maximum": 9}, {"type": "string", "maxLength": 4}]},
        [5, 9, "abc", "", "xyz1"],
        [4, 55, 10.0, "abcde"],
    ),
    "optional short text": ({"type": ["string", "null"], "maxLength": 3}, ["abc", "1", "(a)", None], ["abcd", "[abc"]),
    "optional long text": ({"type": ["string", "null"], "minLength": 5}, ["abcde", "nullify", None], ["abcd"]),
    "number or code": (
        {"anyOf": [{"type": "number"}, {"type": "string", "pattern": "^[a-z]+$"}]},
        [1.5, -3, "abc"],
        ["1a", "A"],
    ),
    "text or list": (
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
        ["a", "", "{x", "5", [1, 2], []],
        [["a"], [None]],
    ),
    "short text or object": (
        {"anyOf": [{"type": "string", "maxLength": 3}, {"$ref": "#/$defs/Point"}]},
        ["a", {"x": 1}],
        [{"x": "a"}, {}, "abcd"],
    ),
    "boolean or text": ({"anyOf": [{"const": True}, {"type": "string", "maxLength": 5}]}, [True, "a", "tru"], [False]),
    "contradictions in parts": (
        {
            "anyOf": [
                {"type": "number", "anyOf": [{"maxLength": 2, "type": "string"}]},
                {"type": "string", "maxLength": 1},
            ]
        },
        ["a"],
        ["ab", 12],
    ),
    "one of": ({"oneOf": [{"enum": ["a", "b"]}, {"const": "c"}, {"type": "null"}]}, ["a", "c", None], ["d"]),
    "date": ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "2024-2-1", ""]),
    "date and time": ({"type": "string", "format": "date-time"}, ["2024-02-29T10:00:00Z"], ["2024-02-29", "x"]),
    "time": ({"type": "string", "format": "time"}, ["10:00:00.5+02:00"], ["25:00:00Z"]),
    "e-mail": ({"type": "string", "format": "email"}, ["a.b+c@example.org"], ["a@", "a b@c.de"]),
    "host": ({"type": "string", "format": "hostname"}, ["example.org"], ["-a.b", "a_b", "xn--a"]),
    "ipv4": ({"type": "string", "format": "ipv4"}, ["192.168.0.1"], ["256.1.1.1", "1.2.3"]),
    "ipv6": (
        {"type": "string", "format": "ipv6"},
        ["::1", "1:2:3:4:5:6:7:8", "fe80::1:2", "::"],
        ["1:2", ":::", "1::2::3"],
    ),
    "uuid": ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    "uri": ({"type": "string", "format": "uri"}, ["https://example.org/a?b=c#d", "mailto:a@b.c"], ["a b", "//x", "x"]),
    "duration": ({"type": "string", "format": "duration"}, ["P1Y2M3D", "PT1H", "P2W"], ["P", "1D", "PT"]),
    "list of texts with tags": (
        {"type": "array", "items": {"type": "string"}},
        [["</parameter>", "</arg_value>"]],
        ["a"],
    ),
    "text or list with tags": (
        {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "array", "items": {"type": "string"}}]},
        [["</parameter>", "</arg_value>\n</tool_call>"], "abc"],
        [[1]],
    ),
    "alias": ({"type": "string", "format": "idn-email"}, ["a@example.org"], ["a"]),
    "annotation": ({"type": "string", "format": "password", "maxLength": 3}, ["abc"], ["abcd"]),
    "anything": ({}, ["a", "{", "[1", 5, None, [1], {"a": 1}], []),
    "free text or number": ({"type": ["string", "integer"]}, ["a", "1.5", "v1", 12, " a "], []),
}
DEFS = {
    "Unit": UNIT,
    "Short": {"type": "string", "maxLength": 3},
    "Point": {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    },
}
CASE = pytest.mark.parametrize(("schema", "valid", "invalid"), CASES.values(), ids=CASES)
PREFERRED = [
    "red",
    "null",
    "None",
    "12",
    "5",
    "[",
    "]",
    "(1)",
    '"',
    "a",
    "x",
    "\n",
    "</",
    "</parameter>",
    "true",
    "{",
    "}",
]


def tool(schema: object, **fields: object) -> Tool:
    parameters = {"type": "object", "properties": {"p": schema}, "required": ["p"], "additionalProperties": False}
    return Tool(name="f", parameters={**parameters, "$defs": DEFS, **fields}, strict=True)


def walker(form: ToolFormat, called: Tool, *, special: bool = False) -> Walker:
    tags = [ENDS[form.name]] if special else []
    rules = ToolRules(callable=(called,), mode=ToolMode.REQUIRED, parallel=False)
    return Walker(form.grammar(rules, {tag: 257 + i for i, tag in enumerate(tags)}), tags)


def call(form: ToolFormat, value: object) -> str:
    """Returns a call with this value in the model's format."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    match form.name:
        case "qwen3_coder":
            inner = f"<function=f>\n<parameter=p>\n{text}\n</parameter>\n</function>\n"
            return f"<tool_call>\n{inner}</tool_call>"
        case "glm45":
            return f"<tool_call>f\n<arg_key>p</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    inner = f'<invoke name="f">\n<parameter name="p">{text}</parameter>\n</invoke>\n'
    return f"<minimax:tool_call>\n{inner}</minimax:tool_call>"


def arguments(form: ToolFormat, text: str, called: Tool) -> Any:
    content, calls = read(form, [text], (called,))
    assert content == "", text
    ((name, encoded),) = calls
    assert name == "f"
    return json.loads(encoded)


@FORM
@SPECIAL
@CASE
def test_the_values_of_the_schema_and_no_others_can_be_arguments(
    form: ToolFormat, special: bool, schema: Mapping[str, object], valid: list[object], invalid: list[object]
) -> None:
    called = tool(schema)
    allowed = walker(form, called, special=special)
    for value in valid:
        if not (special and ENDS[form.name] in json.dumps(value)):  # the walker would make it the token
            assert allowed.allows(call(form, value)), value
        assert arguments(form, call(form, value), called) == {"p": value}
    for value in invalid:
        assert not allowed.allows(call(form, value)), value


@pytest.mark.slow
@FORM
@CASE
def test_every_text_that_the_grammar_allows_is_a_valid_call(
    form: ToolFormat, schema: Mapping[str, object], valid: list[object], invalid: list[object]
) -> None:
    called, rng = tool(schema), random.Random(1)
    allowed, num_texts = walker(form, called), 0
    for _ in range(12):
        text = allowed.walk(rng, preferred=[*PREFERRED, ENDS[form.name]], max_tokens=400)
        if text is not None:
            num_texts += 1
            jsonschema.validate(arguments(form, text, called), called.parameters)
    assert num_texts or schema in ({}, {"type": ["string", "integer"]}) or "anyOf" in schema


@FORM
@SPECIAL
def test_no_text_contains_the_tag_that_ends_an_argument(form: ToolFormat, special: bool) -> None:
    """The bug: a model whose tag is a token could spell the tag in the text, which cut the argument."""
    end = ENDS[form.name]
    for schema in ({"type": "string"}, {"type": "string", "maxLength": 40}):
        allowed = walker(form, tool(schema), special=special)
        for value in (f"{end[:-1]} {end[:-1]}", end[:4] * 3, "<" * 9):
            assert allowed.allows(call(form, value)), value
        spelled = call(form, "@").replace("@", f"a{end}b") if not special else None
        if spelled is not None:
            assert not allowed.allows(spelled)
        else:
            rng = random.Random(3)
            texts = [allowed.walk(rng, start=call(form, "@").partition("@")[0], max_tokens=60) for _ in range(20)]
            for text in filter(None, texts):
                assert text.count(end) == 1


REFUSED: dict[str, tuple[object, str, str]] = {
    "tag": ({"enum": ["a", "a</parameter></arg_value>"]}, "properties.p.enum", "ends an argument"),
    "tag in a constant": ({"const": "</parameter></arg_value>"}, "properties.p.const", "ends an argument"),
    "text like a number": ({"enum": ["5", 5]}, "properties.p.enum", "would be read as 5"),
    "text like null": ({"anyOf": [{"enum": ["null"]}, {"type": "null"}]}, "properties.p.anyOf[0].enum", "read as null"),
    "look-ahead": ({"type": "string", "pattern": "^(?=a)"}, "properties.p.pattern", "'(?=' is not supported"),
    "reference to a group": ({"type": "string", "pattern": r"^(a)\1$"}, "properties.p.pattern", "not supported"),
    "anchor in a group": ({"type": "string", "pattern": "(^a$)"}, "properties.p.pattern", "start of a pattern"),
    "broken pattern": ({"type": "string", "pattern": "("}, "properties.p.pattern", "does not end"),
    "format": ({"type": "string", "format": "json-pointer"}, "properties.p.format", "'json-pointer' is not supported"),
    "not": ({"type": "string", "not": {"const": "a"}}, "properties.p.not", "'not' is not supported"),
    "one of": ({"oneOf": [{"type": "string"}, {"const": "a"}]}, "properties.p.oneOf", "use 'anyOf'"),
    "in a definition": ({"$ref": "#/$defs/Not"}, "properties.p", "'not' is not supported"),
    "length": ({"type": "string", "maxLength": -1}, "properties.p.maxLength", "non-negative"),
    "never": (False, "properties.p", "no value is valid"),
    "contradiction": ({"allOf": [{"type": "string"}, {"type": "null"}]}, "properties.p", "no value is valid"),
    "empty": ({"type": "string", "minLength": 3, "maxLength": 2}, "properties.p", "no value is valid"),
    "reference": ({"type": "array", "items": {"$ref": "#/properties/p"}}, "properties.p.$ref", "refer to '#/$defs/"),
}


@FORM
@pytest.mark.parametrize(("schema", "place", "why"), REFUSED.values(), ids=REFUSED)
def test_what_a_format_cannot_express_is_refused_by_its_place(
    form: ToolFormat, schema: object, place: str, why: str
) -> None:
    called = tool(schema, **{"$defs": {"Not": {"type": "string", "not": {"const": "a"}}}})
    with pytest.raises(GrammarError) as caught:
        walker(form, called)
    assert caught.value.message.startswith(f"at {place}")
    assert why in caught.value.message


AT_TOP: dict[str, tuple[Mapping[str, object], str]] = {
    "any of": ({"anyOf": [{"required": ["p"]}]}, "at anyOf: the keyword 'anyOf' is not supported"),
    "dependent": ({"dependentRequired": {"p": ["q"]}}, "at dependentRequired: "),
    "too few": ({"minProperties": 2}, "at minProperties: "),
    "pattern of names": ({"patternProperties": {"(p+)+$": {}}}, "at patternProperties.(p+)+$: "),
    "too many": ({"maxProperties": 0}, "at maxProperties: "),
    "name with a space": (
        {"required": ["p", " q"], "additionalProperties": True},
        'at required: the name " q" is not possible',
    ),
    "unknown name": ({"required": ["p", "q"]}, "at required: no value is valid"),
}


@FORM
@pytest.mark.parametrize(("fields", "message"), AT_TOP.values(), ids=AT_TOP)
def test_keywords_about_all_arguments_are_enforced_or_refused(
    form: ToolFormat, fields: Mapping[str, object], message: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        walker(form, tool({"type": "integer"}, **fields))
    assert caught.value.message.startswith(message)


@FORM
def test_the_arguments_of_parts_and_references_are_arguments(form: ToolFormat) -> None:
    parts = [{"properties": {"p": {"enum": ["a", "b"]}}}, {"properties": {"p": {"enum": ["b", "c"]}}}]
    for parameters in (
        {"type": "object", "allOf": parts, "required": ["p"]},
        {"$ref": "#/$defs/All", "$defs": {"All": {"allOf": parts, "required": ["p"]}}},
        {"type": "object", "properties": {}, "required": ["p"], "additionalProperties": {"const": "b"}},
        {
            "type": "object",
            "properties": {"p": {"enum": ["a", "b"]}},
            "patternProperties": {"^p": {"const": "b"}, "^p$": True, "p$": True, "x": {"const": "z"}, "^pp$": False},
            "required": ["p"],
        },
    ):
        called = Tool(name="f", parameters=parameters, strict=True)
        allowed = walker(form, called)
        assert allowed.allows(call(form, "b"))
        assert not allowed.allows(call(form, "a"))
        assert not allowed.allows(call(form, "c"))


def test_a_name_that_is_a_special_token_is_spelled() -> None:
    parameters = {"type": "object", "properties": {"<|im_end|>": {"type": "integer"}}, "required": ["<|im_end|>"]}
    called = Tool(name="f", parameters=parameters, strict=True)
    form = TAGGED["glm45"]
    rules = ToolRules(callable=(called,), mode=ToolMode.REQUIRED, parallel=False)
    source = form.grammar(rules, {"<|im_end|>": 257})
    assert '"<|im_end|>"' not in source
    assert Walker(source).allows(call(form, 5).replace("<arg_key>p", "<arg_key><|im_end|>"))


@pytest.mark.parametrize("name", ["pythonic", "olmo3"])
def test_arguments_in_python_have_names_that_python_allows(name: str) -> None:
    optional = {"type": "object", "properties": {"class": {"type": "integer"}, "a-b": {"type": "integer"}}}
    rules = ToolRules(callable=(Tool(name="f", parameters=optional, strict=True),), mode=ToolMode.REQUIRED)
    text = Walker(FORMATS[name].grammar(rules, {})).walk(random.Random(1))
    assert text is not None and "class" not in text and "a-b" not in text
    required = {**optional, "required": ["class"]}
    rules = ToolRules(callable=(Tool(name="f", parameters=required, strict=True),), mode=ToolMode.REQUIRED)
    with pytest.raises(GrammarError, match=r'at properties\.class: the name "class"'):
        FORMATS[name].grammar(rules, {})


@pytest.mark.slow
def test_many_texts_and_many_arguments_fit_in_a_grammar() -> None:
    form = TAGGED["qwen3_coder"]
    texts = [f"text number {number}" for number in range(2_000)]
    for schema in ({"enum": texts}, {"anyOf": [{"const": text} for text in texts]}, {"enum": [*texts, None]}):
        allowed = walker(form, tool(schema))
        assert allowed.allows(call(form, texts[-1]))
        assert not allowed.allows(call(form, "text number 2000"))
    properties = {f"p{number}": OPTIONAL_COLOUR for number in range(150)}
    many = Tool(name="f", parameters={"type": "object", "properties": properties}, strict=True)
    source = form.grammar(ToolRules(callable=(many,), mode=ToolMode.REQUIRED), {})
    assert source.count("\n") < 170  # one rule for each argument, since a grammar can have 500


@pytest.mark.slow
@pytest.mark.parametrize("circular", [False, True])
def test_a_schema_with_exponentially_many_parts_is_refused(circular: bool) -> None:
    names = [f"A{number}" for number in range(40)]
    ends: list[Any] = [{"$ref": "#/$defs/A0"} if circular else {"type": "string"}] * 2
    defs = {name: {"anyOf": [{"$ref": f"#/$defs/{after}"}] * 2} for name, after in pairwise(names)}
    parameters = {"properties": {"p": {"$ref": "#/$defs/A0"}}, "$defs": {**defs, names[-1]: {"anyOf": ends}}}
    called = Tool(name="f", parameters=parameters, strict=True)
    for form in TAGGED.values():
        with pytest.raises(GrammarError, match="too large, or refers to itself"):
            walker(form, called)


LONG_OR_LIST = {"anyOf": [{"type": "string", "maxLength": 5_000}, {"type": "array", "items": {"type": "string"}}]}
LONG: dict[str, tuple[object, object]] = {
    "length": ({"type": "string", "maxLength": 5_000}, "a <b>c</b>\nd"),
    "pattern and length": ({"type": "string", "pattern": "a.*b", "maxLength": 5_000}, "xxxaxxb\ny"),
    "text or list, as text": (LONG_OR_LIST, "- [x]"),
    "text or list, as list": (LONG_OR_LIST, ["a", "b"]),
    "text or number": ({"anyOf": [{"type": "string", "maxLength": 5_000}, {"type": "integer", "minimum": 3}]}, "- a"),
    "text or listed": ({"anyOf": [{"type": "string", "maxLength": 5_000}, {"enum": [1, None, True]}]}, "nul"),
}


@FORM
@pytest.mark.parametrize(("schema", "value"), LONG.values(), ids=LONG)
def test_a_long_text_stays_within_the_limits_of_an_engine(form: ToolFormat, schema: object, value: object) -> None:
    """The bug: llguidance tried all lengths of a text to find that none could follow the tag, and gave up."""
    rules = ToolRules(callable=(tool(schema),), mode=ToolMode.REQUIRED, parallel=False)
    matcher = grammars_of().get(lark(form.grammar(rules, {}))).matcher()
    for token_id in TOKENIZER.encode(call(form, value), add_special_tokens=False):
        assert token_id in allowed(matcher)
        matcher.forced()
        matcher.consume(token_id)
    assert matcher.accepting

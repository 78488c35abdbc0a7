"""Schemas of schemas: anyOf, oneOf, allOf, lists of types, and deep nesting."""

from functools import reduce

from tests.structured.schemas.case import Schema, SchemaCase, closed, of_value, text

DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
CIRCLE = closed(kind={"const": "circle"}, radius=DIGIT)
BOX = closed(kind={"const": "box"}, width=DIGIT, height=DIGIT)


def wrapped(inner: Schema, name: str) -> Schema:
    return closed(**{name: inner})


CASES = (
    of_value(
        "any_of_several_types",
        {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 999}, {"type": "string", "pattern": "^[A-Z]{3}$"}]},
        ("12", '"ABC"'),
        ('"12"', "0", "null"),
        message="An id, please.",
    ),
    SchemaCase(
        "any_of_several_objects",
        {"anyOf": [closed(name=text(10)), closed(number=DIGIT, street=text(10))]},
        good=('{"name":"a"}', '{"number":1,"street":"b"}'),
        bad=('{"number":1}', '{"name":"a","number":1,"street":"b"}', "{}"),
    ),
    SchemaCase(
        "one_of_objects_with_a_kind",
        closed(shape={"oneOf": [CIRCLE, BOX]}),
        good=('{"shape":{"kind":"circle","radius":1}}', '{"shape":{"kind":"box","width":1,"height":2}}'),
        bad=('{"shape":{"kind":"circle","width":1,"height":2}}', '{"shape":{"kind":"oval","radius":1}}'),
        message="A shape, please.",
    ),
    SchemaCase(
        "one_of_types_that_exclude_each_other",
        closed(v={"oneOf": [{"type": "boolean"}, DIGIT, {"type": "null"}]}),
        good=('{"v":true}', '{"v":5}', '{"v":null}'),
        bad=('{"v":"5"}', '{"v":55}'),
        few_answers=True,
    ),
    SchemaCase(
        "all_of_two_objects",
        {
            "allOf": [
                {"type": "object", "properties": {"a": DIGIT}, "required": ["a"]},
                {"type": "object", "properties": {"b": text(6)}, "required": ["b"]},
            ],
            "properties": {"a": True, "b": True},
            "additionalProperties": False,
        },
        good=('{"a":1,"b":"x"}',),
        bad=('{"a":1}', '{"b":"x"}', '{"a":"1","b":"x"}', '{"a":1,"b":"x","c":1}'),
    ),
    SchemaCase(
        "all_of_several_bounds",
        closed(v={"type": "integer", "allOf": [{"minimum": 10}, {"maximum": 99}, {"multipleOf": 3}]}),
        good=('{"v":12}', '{"v":99}'),
        bad=('{"v":9}', '{"v":13}', '{"v":102}'),
    ),
    SchemaCase(
        "any_of_with_other_keywords",
        {
            "type": "object",
            "properties": {"name": text(8), "mail": text(8), "phone": text(8)},
            "additionalProperties": False,
            "anyOf": [{"required": ["name", "mail"]}, {"required": ["name", "phone"]}],
        },
        good=('{"name":"a","mail":"b"}', '{"name":"a","phone":"c"}', '{"name":"a","mail":"b","phone":"c"}'),
        bad=('{"name":"a"}', '{"mail":"b","phone":"c"}', '{"name":"a","fax":"b"}'),
    ),
    SchemaCase(
        "string_or_null",
        closed(v={"type": ["string", "null"], "maxLength": 10}),
        good=('{"v":"a"}', '{"v":null}'),
        bad=('{"v":1}', '{"v":"12345678901"}', "{}"),
        few_answers=True,
    ),
    SchemaCase(
        "several_types_with_bounds_of_their_own",
        closed(v={"type": ["integer", "string", "boolean"], "minimum": 1, "maximum": 9, "maxLength": 4}),
        good=('{"v":9}', '{"v":"abcd"}', '{"v":false}'),
        bad=('{"v":10}', '{"v":"abcde"}', '{"v":null}'),
        few_answers=True,
    ),
    SchemaCase(
        "array_or_null",
        closed(v={"type": ["array", "null"], "items": DIGIT, "maxItems": 3}),
        good=('{"v":null}', '{"v":[1,2]}'),
        bad=('{"v":[1,2,3,4]}', '{"v":[null]}', '{"v":1}'),
        few_answers=True,
    ),
    SchemaCase(
        "one_of_several_words_or_null",
        closed(v={"type": ["string", "null"], "enum": ["low", "high", None]}),
        good=('{"v":"low"}', '{"v":null}'),
        bad=('{"v":"null"}', '{"v":"medium"}'),
        few_answers=True,
    ),
    SchemaCase(
        "any_value",
        closed(v=True),
        good=('{"v":null}', '{"v":[{}]}', '{"v":"x"}'),
        bad=('{"v":}', "{}", '{"v":nul}'),
        message="A number, please.",
    ),
    SchemaCase(
        "objects_sixteen_deep",
        reduce(wrapped, reversed("abcdefghijklmnop"), DIGIT),
        good=("".join(f'{{"{name}":' for name in "abcdefghijklmnop") + "7" + "}" * 16,),
        bad=("".join(f'{{"{name}":' for name in "abcdefghijklmno") + "7" + "}" * 15,),
        few_answers=True,
    ),
    SchemaCase(
        "arrays_eight_deep",
        reduce(lambda inner, _: {"type": "array", "items": inner, "minItems": 1, "maxItems": 2}, range(8), DIGIT),
        good=("[" * 8 + "1" + "]" * 8, "[" * 8 + "1,2],[3" + "]" * 8),
        message="Repeat this: [[[[[[[[1]]]]]]]]",
        bad=("[" * 7 + "1" + "]" * 7, "[" * 9 + "1" + "]" * 9),
    ),
)

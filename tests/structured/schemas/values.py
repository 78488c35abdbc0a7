"""Values that a schema lists one by one: `enum`, `const`, booleans and null."""

from tests.structured.schemas.case import SchemaCase, closed, of_value

CASES = (
    SchemaCase(
        "one_of_several_words",
        closed(colour={"type": "string", "enum": ["red", "green", "blue"]}),
        good=('{"colour":"red"}',),
        bad=('{"colour":"pink"}', '{"colour":"Red"}', '{"colour":"re"}'),
        message="Your favourite colour?",
        few_answers=True,
    ),
    SchemaCase(
        "words_with_a_common_start",
        closed(size={"enum": ["x", "xl", "xxl", "x-small"]}),
        good=('{"size":"x"}', '{"size":"x-small"}'),
        bad=('{"size":"xx"}', '{"size":"x-"}'),
        few_answers=True,
    ),
    of_value(
        "one_of_several_numbers",
        {"enum": [80, 443, -1, 2.5]},
        ("443", "-1", "2.5"),
        ("8", '"80"', "4430"),
        few_answers=True,
    ),
    SchemaCase(
        "one_of_several_values_of_all_types",
        closed(value={"enum": ["a", 1, None, True, [1, 2], {"k": "v"}]}),
        good=('{"value":null}', '{"value":[1,2]}', '{"value":{"k":"v"}}'),
        bad=('{"value":false}', '{"value":[2,1]}', '{"value":{"k":"w"}}'),
        few_answers=True,
    ),
    SchemaCase(
        "words_that_must_be_escaped",
        closed(text={"enum": ['say "hi"', "back\\slash", "two\nlines", "a/b", "\ttab"]}),
        good=(r'{"text":"say \"hi\""}', r'{"text":"back\\slash"}', r'{"text":"two\nlines"}', '{"text":"a/b"}'),
        bad=('{"text":"say hi"}', r'{"text":"back\slash"}', '{"text":"two\nlines"}'),
        few_answers=True,
    ),
    of_value("constant_word", {"const": "circle"}, ('"circle"',), ('"x"',), few_answers=True),
    of_value("constant_number", {"const": 1.5}, ("1.5",), ("1", "1.55"), few_answers=True),
    of_value("constant_null", {"const": None}, ("null",), ("0", '"null"'), few_answers=True),
    SchemaCase(
        "constant_object",
        closed(v={"const": {"a": [1, {"b": False}], "c": ""}}),
        good=('{"v":{"a":[1,{"b":false}],"c":""}}',),
        bad=('{"v":{"a":[1,{"b":true}],"c":""}}', '{"v":{}}'),
        few_answers=True,
    ),
    of_value("boolean", {"type": "boolean"}, ("true", "false"), ('"true"', "1", "null"), few_answers=True),
    SchemaCase("null", closed(v={"type": "null"}), good=('{"v":null}',), bad=('{"v":false}', "{}"), few_answers=True),
    SchemaCase(
        "word_as_the_complete_answer",
        {"type": "string", "enum": ["yes", "no", "perhaps"]},
        good=('"yes"', '"perhaps"'),
        bad=("yes", '"maybe"'),
        message="Will it rain?",
        few_answers=True,
    ),
    SchemaCase(
        "words_that_a_type_makes_fewer",
        closed(v={"type": "integer", "enum": [1, 2, "three", None]}),
        good=('{"v":1}', '{"v":2}'),
        bad=('{"v":"three"}', '{"v":null}'),
        few_answers=True,
    ),
)

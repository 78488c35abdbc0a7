"""Values that are told one by one: `enum`, `const`, booleans and null."""

from tests.structured.schemas.case import SchemaCase, closed

CASES = (
    SchemaCase(
        "one_of_several_words",
        closed(colour={"type": "string", "enum": ["red", "green", "blue"]}),
        good=('{"colour":"red"}',),
        bad=('{"colour":"pink"}', '{"colour":"Red"}', '{"colour":"re"}'),
        ask="Your favourite colour?",
        few=True,
    ),
    SchemaCase(
        "words_that_begin_alike",
        closed(size={"enum": ["x", "xl", "xxl", "x-small"]}),
        good=('{"size":"x"}', '{"size":"x-small"}'),
        bad=('{"size":"xx"}', '{"size":"x-"}'),
        few=True,
    ),
    SchemaCase(
        "one_of_several_numbers",
        closed(port={"enum": [80, 443, -1, 2.5]}),
        good=('{"port":443}', '{"port":-1}', '{"port":2.5}'),
        bad=('{"port":8}', '{"port":"80"}', '{"port":4430}'),
        few=True,
    ),
    SchemaCase(
        "one_of_several_values_of_all_types",
        closed(value={"enum": ["a", 1, None, True, [1, 2], {"k": "v"}]}),
        good=('{"value":null}', '{"value":[1,2]}', '{"value":{"k":"v"}}'),
        bad=('{"value":false}', '{"value":[2,1]}', '{"value":{"k":"w"}}'),
        few=True,
    ),
    SchemaCase(
        "words_that_must_be_escaped",
        closed(text={"enum": ['say "hi"', "back\\slash", "two\nlines", "a/b", "\ttab"]}),
        good=(r'{"text":"say \"hi\""}', r'{"text":"back\\slash"}', r'{"text":"two\nlines"}', '{"text":"a/b"}'),
        bad=('{"text":"say hi"}', r'{"text":"back\slash"}', '{"text":"two\nlines"}'),
        few=True,
    ),
    SchemaCase(
        "constant_word", closed(kind={"const": "circle"}), good=('{"kind":"circle"}',), bad=('{"kind":"x"}',), few=True
    ),
    SchemaCase(
        "constant_number", closed(v={"const": 1.5}), good=('{"v":1.5}',), bad=('{"v":1}', '{"v":1.55}'), few=True
    ),
    SchemaCase(
        "constant_null", closed(v={"const": None}), good=('{"v":null}',), bad=('{"v":0}', '{"v":"null"}'), few=True
    ),
    SchemaCase(
        "constant_object",
        closed(v={"const": {"a": [1, {"b": False}], "c": ""}}),
        good=('{"v":{"a":[1,{"b":false}],"c":""}}',),
        bad=('{"v":{"a":[1,{"b":true}],"c":""}}', '{"v":{}}'),
        few=True,
    ),
    SchemaCase(
        "boolean",
        closed(yes={"type": "boolean"}),
        good=('{"yes":true}', '{"yes":false}'),
        bad=('{"yes":"true"}', '{"yes":1}', '{"yes":null}'),
        few=True,
    ),
    SchemaCase("null", closed(v={"type": "null"}), good=('{"v":null}',), bad=('{"v":false}', "{}"), few=True),
    SchemaCase(
        "word_as_the_whole_answer",
        {"type": "string", "enum": ["yes", "no", "perhaps"]},
        good=('"yes"', '"perhaps"'),
        bad=("yes", '"maybe"'),
        ask="Will it rain?",
        few=True,
    ),
    SchemaCase(
        "words_that_a_type_makes_fewer",
        closed(v={"type": "integer", "enum": [1, 2, "three", None]}),
        good=('{"v":1}', '{"v":2}'),
        bad=('{"v":"three"}', '{"v":null}'),
        few=True,
    ),
)

"""Strings by pattern and by length."""

from tests.structured.schemas.case import SchemaCase, closed, of_value

CASES = (
    SchemaCase(
        "string_of_any_text",
        closed(v={"type": "string"}),
        good=('{"v":""}', r'{"v":"a \"b\" \\ \n ü"}'),
        bad=('{"v":a}', '{"v":"a\nb"}', r'{"v":"\x"}'),
        message="Say hello in one word.",
    ),
    SchemaCase(
        "pattern_of_the_complete_string",
        closed(phone={"type": "string", "pattern": r"^\([0-9]{3}\) [0-9]{3}-[0-9]{4}$"}),
        good=('{"phone":"(555) 010-4477"}',),
        bad=('{"phone":"555 010-4477"}', '{"phone":"(555) 010-44771"}'),
        message="Your phone number?",
    ),
    SchemaCase(
        "pattern_with_alternatives",
        closed(code={"type": "string", "pattern": "^(AB|CD)-([1-9][0-9]{0,3}|none)$"}),
        good=('{"code":"AB-12"}', '{"code":"CD-none"}'),
        bad=('{"code":"AB-0"}', '{"code":"EF-12"}', '{"code":"AB-none1"}'),
    ),
    SchemaCase(
        "pattern_anywhere_in_the_string",
        closed(v={"type": "string", "pattern": "cat", "maxLength": 24}),
        good=('{"v":"cat"}', '{"v":"a cat sat"}'),
        bad=('{"v":"dog"}', '{"v":"ca t"}'),
        message="Tell me about a cat.",
    ),
    SchemaCase(
        "pattern_anchored_at_its_end_only",
        closed(file={"type": "string", "pattern": r"\.(txt|md)$", "maxLength": 20}),
        good=('{"file":"a.txt"}', '{"file":".md"}'),
        bad=('{"file":"a.txt.gz"}', '{"file":"atxt"}'),
        message="The name of a text file?",
    ),
    SchemaCase(
        "pattern_with_classes",
        closed(v={"type": "string", "pattern": r"^\w{2,8}\s\d{1,3}$"}),
        good=('{"v":"room 101"}',),
        bad=('{"v":"room101"}', '{"v":"room 1011"}', '{"v":"a-b 1"}'),
    ),
    of_value("string_that_is_not_empty", {"type": "string", "minLength": 1, "maxLength": 30}, ('"a"',), ('""',)),
    SchemaCase(
        "string_of_at_most_five_characters",
        closed(v={"type": "string", "maxLength": 5}),
        good=('{"v":""}', '{"v":"abcde"}', r'{"v":"\n\n\n\n\n"}'),
        bad=('{"v":"abcdef"}', r'{"v":"\n\n\n\n\n\n"}'),
    ),
    SchemaCase(
        "string_of_exactly_four_characters",
        closed(pin={"type": "string", "minLength": 4, "maxLength": 4}),
        good=('{"pin":"1234"}', '{"pin":"äöü✓"}', '{"pin":"😀😀😀😀"}'),
        bad=('{"pin":"123"}', '{"pin":"12345"}', '{"pin":"😀😀"}'),
    ),
    SchemaCase(
        "pattern_and_length",
        closed(v={"type": "string", "pattern": "^[a-f]+$", "minLength": 3, "maxLength": 6}),
        good=('{"v":"abc"}', '{"v":"abcdef"}'),
        bad=('{"v":"ab"}', '{"v":"abcdefa"}', '{"v":"abg"}'),
    ),
)

"""Keywords that are replaced by others, and the notations of older drafts."""

from tests.structured.schemas.case import SchemaCase, closed, of_value, text

DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}

CASES = (
    SchemaCase(
        "a_condition_on_a_kind",
        {
            **closed(kind={"enum": ["car", "bike"]}, wheels=DIGIT),
            "if": {"properties": {"kind": {"const": "car"}}},
            "then": {"properties": {"wheels": {"const": 4}}},
            "else": {"properties": {"wheels": {"const": 2}}},
        },
        good=('{"kind":"car","wheels":4}', '{"kind":"bike","wheels":2}'),
        bad=('{"kind":"car","wheels":2}', '{"kind":"bike","wheels":4}', '{"kind":"bike"}'),
        message="A vehicle, please.",
        few_answers=True,
    ),
    of_value(
        "no_constant",
        {"type": "integer", "minimum": 1, "maximum": 3, "not": {"const": 2}},
        ("1", "3"),
        ("2", "0", "4"),
        few_answers=True,
    ),
    of_value("no_text", {"not": {"type": "string"}, "maxItems": 2, "maxProperties": 0}, ("1", "null"), ('"a"', '""')),
    SchemaCase(
        "a_property_that_requires_another",
        {
            "type": "object",
            "properties": {"card": DIGIT, "address": text(8)},
            "additionalProperties": False,
            "dependentRequired": {"card": ["address"]},
        },
        good=("{}", '{"address":"a"}', '{"card":1,"address":"a"}'),
        bad=('{"card":1}', '{"card":"1","address":"a"}'),
        message="How do you pay, and where do you live?",
        few_answers=True,
    ),
    SchemaCase(
        "a_property_with_a_schema_for_the_others",
        {
            "type": "object",
            "properties": {"card": {"const": True}, "limit": {"enum": [10, 20, 30]}},
            "required": ["limit"],
            "additionalProperties": False,
            "dependentSchemas": {"card": {"properties": {"limit": {"const": 30}}}},
        },
        good=('{"limit":10}', '{"card":true,"limit":30}'),
        bad=('{"card":true,"limit":10}', '{"limit":40}'),
        few_answers=True,
    ),
    SchemaCase(
        "names_of_properties",
        {
            "type": "object",
            "propertyNames": {"pattern": "^[a-z]{2,4}$"},
            "additionalProperties": DIGIT,
            "minProperties": 1,
            "maxProperties": 2,
        },
        good=('{"ab":1}', '{"ab":1,"abcd":2}'),
        bad=("{}", '{"a":1}', '{"AB":1}', '{"abcde":1}', '{"ab":"1"}'),
    ),
    of_value(
        "different_words",
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 2},
        ('["a","b"]', '["c","a","b"]'),
        ('["a","a"]', '["a"]', '["a","b","c","a"]'),
        message="Some letters, please.",
        few_answers=True,
    ),
    of_value(
        "one_of_several_ranges",
        {"oneOf": [{"type": "integer", "maximum": 3, "minimum": 0}, {"type": "integer", "minimum": 7, "maximum": 99}]},
        ("0", "3", "7", "99"),
        ("5", "-1", "100", "3.5"),
    ),
    SchemaCase(
        "one_of_objects_with_different_required_properties",
        {
            "type": "object",
            "properties": {"name": text(6), "number": DIGIT},
            "additionalProperties": False,
            "oneOf": [{"required": ["name"]}, {"required": ["number"]}],
        },
        good=('{"name":"a"}', '{"number":1}'),
        bad=("{}", '{"name":"a","number":1}'),
        few_answers=True,
    ),
    of_value(
        "a_format_of_numbers",
        {"type": "integer", "format": "int32", "minimum": 10, "maximum": 99},
        ("10", "99"),
        ("9", "100", "10.5", '"10"'),
    ),
    of_value(
        "a_pattern_without_quotation_marks",
        {"type": "string", "pattern": '^[^"]{2,6}$'},
        ('"ab"', r'"a\\c"'),
        (r'"a\"b"', r'"\"\"\""', '"a"'),
    ),
    SchemaCase(
        "references_by_name_and_with_escapes",
        {
            **closed(first={"$ref": "#digit"}, second={"$ref": "#/$defs/a~1b"}, third={"$ref": "#/$defs/c%20d"}),
            "$defs": {"one": {**DIGIT, "$anchor": "digit"}, "a/b": {"enum": ["x", "y"]}, "c d": {"type": "boolean"}},
        },
        good=('{"first":1,"second":"x","third":true}',),
        bad=('{"first":"1","second":"x","third":true}', '{"first":1,"second":"z","third":true}', '{"first":1}'),
        few_answers=True,
    ),
)

"""Objects: properties that are required, optional or forbidden."""

from tests.structured.schemas.case import SchemaCase, closed, text

INTEGER = {"type": "integer"}

CASES = (
    SchemaCase("object_without_properties", closed(), good=("{}",), bad=('{"a":1}', "[]"), few_answers=True),
    SchemaCase(
        "object_of_anything",
        {"type": "object"},
        good=("{}", '{"a":[1,{"b":null}],"c":"d"}'),
        bad=('["a"]', '{"a":}', '{"a":1'),
        message="Give me an object with one key.",
    ),
    SchemaCase(
        "properties_that_are_required",
        closed(name=text(), age={"type": "integer", "minimum": 0, "maximum": 150}),
        good=('{"name":"Ada","age":36}',),
        bad=('{"name":"Ada"}', '{"name":"Ada","age":36,"x":1}'),
        message="Name a person and their age.",
    ),
    SchemaCase(
        "property_that_may_be_left_out",
        closed(name=text(), nickname=text()) | {"required": ["name"]},
        good=('{"name":"Ada"}', '{"name":"Ada","nickname":"A"}'),
        bad=('{"nickname":"A"}', '{"name":"Ada","nickname":1}'),
    ),
    SchemaCase(
        "properties_that_may_all_be_left_out",
        closed(a=INTEGER, b={"type": "boolean"}, c=text(5)) | {"required": []},
        good=("{}", '{"b":true}', '{"a":1,"c":"x"}'),
        bad=('{"d":1}', '{"b":"true"}'),
        few_answers=True,
    ),
    SchemaCase(
        "other_properties_by_default",
        {"type": "object", "properties": {"id": INTEGER}, "required": ["id"], "maxProperties": 2},
        good=('{"id":1}', '{"id":1,"more":["x"]}'),
        bad=('{"more":1}', '{"id":"1"}'),
    ),
    SchemaCase(
        "other_properties_that_are_allowed",
        {"type": "object", "properties": {"id": INTEGER}, "required": ["id"], "additionalProperties": True},
        good=('{"id":1}', '{"id":1,"more":null}'),
        bad=("{}", '{"id":1.5}'),
    ),
    SchemaCase(
        "other_properties_of_one_type",
        {
            "type": "object",
            "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 99},
            "maxProperties": 3,
        },
        good=("{}", '{"apples":3}', '{"apples":3,"pears":4}'),
        bad=('{"apples":"3"}', '{"a":1,"b":2,"c":3,"d":4}'),
        message="How many of which fruit?",
        few_answers=True,
    ),
    SchemaCase(
        "other_properties_in_addition_to_named_ones",
        {
            "type": "object",
            "properties": {"id": INTEGER},
            "required": ["id"],
            "additionalProperties": {"type": "boolean"},
            "maxProperties": 3,
        },
        good=('{"id":7}', '{"id":7,"open":true}'),
        bad=('{"id":7,"open":1}', '{"id":true}'),
    ),
    SchemaCase(
        "properties_by_pattern",
        {
            "type": "object",
            "patternProperties": {"^x_[a-z]{1,6}$": {"type": "integer", "minimum": 0, "maximum": 9}},
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 2,
        },
        good=('{"x_a":1}', '{"x_a":1,"x_b":2}'),
        bad=('{"y_a":1}', '{"x_a":"1"}', '{"x_A":1}', "{}"),
    ),
    SchemaCase(
        "properties_by_name_and_by_two_patterns",
        {
            "type": "object",
            "properties": {"name": text(8)},
            "patternProperties": {"^n_[a-z]$": INTEGER, "^b_[a-z]$": {"type": "boolean"}},
            "required": ["name"],
            "additionalProperties": False,
            "maxProperties": 3,
        },
        good=('{"name":"x","n_a":1,"b_a":true}', '{"name":"x"}'),
        bad=('{"name":"x","n_a":true}', '{"name":"x","b_a":1}', '{"name":"x","c":1}'),
    ),
    SchemaCase(
        "at_least_two_and_at_most_three_properties",
        {"type": "object", "additionalProperties": INTEGER, "minProperties": 2, "maxProperties": 3},
        good=('{"a":1,"b":2}', '{"a":1,"b":2,"c":3}'),
        bad=('{"a":1}', '{"a":1,"b":2,"c":3,"d":4}'),
    ),
    SchemaCase(
        "at_least_one_of_several_properties",
        closed(phone=text(12), mail=text(12)) | {"required": [], "minProperties": 1},
        good=('{"phone":"1"}', '{"mail":"a@b"}', '{"phone":"1","mail":"a@b"}'),
        bad=("{}", '{"fax":"1"}'),
    ),
    SchemaCase(
        "property_that_is_required_and_has_no_schema_of_its_own",
        {"type": "object", "required": ["key"], "additionalProperties": text(10), "maxProperties": 2},
        good=('{"key":"v"}', '{"key":"v","other":"w"}'),
        bad=("{}", '{"key":1}'),
    ),
    SchemaCase(
        "objects_inside_an_object",
        closed(user=closed(name=text(12), home=closed(city=text(12), zip={"type": "string", "pattern": "^[0-9]{5}$"}))),
        good=('{"user":{"name":"Ada","home":{"city":"Rome","zip":"00118"}}}',),
        bad=(
            '{"user":{"name":"Ada","home":{"city":"Rome"}}}',
            '{"user":{"name":"Ada","home":{"city":"Rome","zip":"118"}}}',
        ),
        message="Who lives where?",
    ),
)

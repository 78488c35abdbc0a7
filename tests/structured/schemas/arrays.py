"""Arrays: types of items, their number and their places."""

from tests.structured.schemas.case import SchemaCase, closed, of_value, text

DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
PAIR = {"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 2}

CASES = (
    SchemaCase(
        "array_of_strings",
        closed(tags={"type": "array", "items": text(10), "maxItems": 4}),
        good=('{"tags":[]}', '{"tags":["a","b"]}'),
        bad=('{"tags":["a",1]}', '{"tags":["a","b","c","d","e"]}', '{"tags":"a"}'),
        message="Which tags?",
    ),
    SchemaCase(
        "array_as_the_complete_answer",
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 5},
        good=("[1]", "[1,2,3]"),
        bad=("[]", "[1,]", '{"a":[1]}'),
        message="Some numbers, please.",
    ),
    SchemaCase(
        "two_to_four_items",
        closed(scores={"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 4}),
        good=('{"scores":[1,2]}', '{"scores":[1,2,3,4]}'),
        bad=('{"scores":[1]}', '{"scores":[1,2,3,4,5]}'),
    ),
    of_value(
        "exactly_three_items",
        {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}, "minItems": 3, "maxItems": 3},
        ("[0,128,255]",),
        ("[0,128]", "[0,128,256]", "[0,1,2,3]"),
        message="A colour, please.",
    ),
    of_value(
        "array_that_must_be_empty",
        {"type": "array", "items": DIGIT, "maxItems": 0},
        ("[]",),
        ("[1]",),
        few_answers=True,
    ),
    of_value(
        "places_with_types_of_their_own",
        {"type": "array", "prefixItems": [text(10), DIGIT, {"type": "boolean"}], "items": False, "minItems": 3},
        ('["a",1,true]',),
        ('[1,"a",true]', '["a",1,true,2]', '["a",1]'),
    ),
    SchemaCase(
        "places_with_types_of_their_own_and_others_behind",
        closed(row={"type": "array", "prefixItems": [text(10)], "items": DIGIT, "minItems": 2, "maxItems": 4}),
        good=('{"row":["a",1]}', '{"row":["a",1,2,3]}'),
        bad=('{"row":["a","b"]}', '{"row":["a"]}', '{"row":["a",1,2,3,4]}'),
    ),
    SchemaCase(
        "places_that_may_be_left_out",
        {"type": "array", "prefixItems": [{"const": "go"}, DIGIT, {"type": "boolean"}], "items": False},
        good=("[]", '["go"]', '["go",1]', '["go",1,false]'),
        bad=("[1]", '["go",true]', '["go",1,false,1]'),
        few_answers=True,
    ),
    SchemaCase(
        "arrays_inside_arrays",
        closed(matrix={"type": "array", "items": PAIR, "minItems": 2, "maxItems": 2}),
        good=('{"matrix":[[1,2],[3,4]]}',),
        bad=('{"matrix":[[1,2],[3]]}', '{"matrix":[1,2,3,4]}', '{"matrix":[[1,2],[3,4],[5,6]]}'),
    ),
    SchemaCase(
        "array_of_objects",
        closed(items={"type": "array", "items": closed(name=text(12), n=DIGIT), "minItems": 1, "maxItems": 3}),
        good=('{"items":[{"name":"nail","n":3}]}',),
        bad=('{"items":[{"name":"nail"}]}', '{"items":[]}', '{"items":[{"name":"nail","n":33}]}'),
        message="A shopping list, please.",
    ),
    of_value(
        "array_of_some_of_several_words",
        {"type": "array", "items": {"enum": ["mon", "tue", "wed", "thu", "fri"]}, "minItems": 2, "maxItems": 5},
        ('["mon","fri"]',),
        ('["mon","sat"]', '["mon"]'),
        message="On which days?",
    ),
    of_value(
        "array_of_several_types",
        {"type": "array", "items": {"anyOf": [DIGIT, text(6), {"type": "null"}]}, "minItems": 2, "maxItems": 4},
        ('[1,"a",null]',),
        ("[1,true]", "[10,1]"),
    ),
)

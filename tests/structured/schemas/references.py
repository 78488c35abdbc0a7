"""`$ref` into the schema itself, also recursive."""

from tests.structured.schemas.case import Schema, SchemaCase, closed, text

POINT = closed(x={"type": "integer", "minimum": 0, "maximum": 99}, y={"type": "integer", "minimum": 0, "maximum": 99})


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


CASES = (
    SchemaCase(
        "definition_that_is_used_twice",
        closed(start=ref("point"), end=ref("point")) | {"$defs": {"point": POINT}},
        good=('{"start":{"x":1,"y":2},"end":{"x":3,"y":4}}',),
        bad=('{"start":{"x":1,"y":2},"end":{"x":3}}', '{"start":{"x":1,"y":2},"end":[3,4]}'),
    ),
    SchemaCase(
        "definitions_by_their_older_name",
        closed(p={"$ref": "#/definitions/point"}) | {"definitions": {"point": POINT}},
        good=('{"p":{"x":1,"y":2}}',),
        bad=('{"p":{"x":1,"y":200}}',),
    ),
    SchemaCase(
        "definition_of_a_definition",
        closed(line={"type": "array", "items": ref("place"), "minItems": 2, "maxItems": 2})
        | {"$defs": {"place": {"$ref": "#/$defs/point"}, "point": POINT}},
        good=('{"line":[{"x":1,"y":2},{"x":3,"y":4}]}',),
        bad=('{"line":[{"x":1,"y":2},{"x":3,"z":4}]}',),
    ),
    SchemaCase(
        "reference_with_other_keywords",
        closed(v={"$ref": "#/$defs/word", "maxLength": 3})
        | {"$defs": {"word": {"type": "string", "pattern": "^[a-z]*$"}}},
        good=('{"v":"abc"}', '{"v":""}'),
        bad=('{"v":"abcd"}', '{"v":"ABC"}'),
    ),
    SchemaCase(
        "list_that_is_linked",
        closed(head=or_null(ref("node")))
        | {"$defs": {"node": closed(value={"enum": [1, 2, 3]}, next=or_null(ref("node")))}},
        good=('{"head":null}', '{"head":{"value":1,"next":{"value":2,"next":null}}}'),
        bad=('{"head":{"value":1}}', '{"head":{"value":1,"next":{"value":4,"next":null}}}'),
        message='Repeat this: {"head": {"value": 1, "next": null}}',
        few_answers=True,
    ),
    SchemaCase(
        "tree_that_is_its_own_root",
        closed(name=text(8), children={"type": "array", "items": {"$ref": "#"}, "maxItems": 2}),
        good=('{"name":"a","children":[{"name":"b","children":[]}]}',),
        bad=('{"name":"a","children":[{"name":"b"}]}', '{"name":"a","children":["b"]}'),
        message='Repeat this: {"name": "Ada", "children": []}',
    ),
    SchemaCase(
        "expressions_that_contain_each_other",
        closed(value=ref("expression"))
        | {
            "$defs": {
                "expression": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, ref("operation")]},
                "operation": closed(op={"enum": ["+", "-", "*"]}, left=ref("expression"), right=ref("expression")),
            }
        },
        good=('{"value":1}', '{"value":{"op":"+","left":1,"right":{"op":"*","left":2,"right":3}}}'),
        bad=('{"value":{"op":"/","left":1,"right":2}}', '{"value":{"op":"+","left":1}}'),
        message='Repeat this: {"value": 1}',
        few_answers=True,
    ),
    SchemaCase(
        "values_of_json_as_a_definition",
        closed(data=ref("json"))
        | {
            "$defs": {
                "json": {
                    "anyOf": [
                        {"type": ["null", "boolean", "integer"]},
                        text(6),
                        {"type": "array", "items": ref("json"), "maxItems": 2},
                        {"type": "object", "additionalProperties": ref("json"), "maxProperties": 2},
                    ]
                }
            }
        },
        good=('{"data":null}', '{"data":{"a":[1,{"b":"c"}]}}'),
        bad=('{"data":1.5}', '{"data":[1,2,3]}', '{"data":{"a":[1.5]}}'),
    ),
)

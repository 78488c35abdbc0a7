"""Schemas that clients send: from OpenAI's documentation, and for arguments of tools."""

from tests.structured.schemas.case import Schema, SchemaCase, closed, text

STEP = closed(explanation=text(40), output=text(30))
UI: Schema = closed(
    type={"type": "string", "description": "The type of the UI component", "enum": ["div", "button", "field", "form"]},
    label={"type": "string", "description": "The label of the UI component", "maxLength": 12},
    children={"type": "array", "description": "Nested UI components", "items": {"$ref": "#"}, "maxItems": 2},
    attributes={
        "type": "array",
        "description": "Arbitrary attributes for the UI component",
        "maxItems": 1,
        "items": closed(name=text(8), value=text(8)),
    },
)
LINKED_LIST: Schema = {
    "$defs": {
        "linked_list_node": closed(
            value={"type": "integer", "minimum": 0, "maximum": 99},
            next={"anyOf": [{"$ref": "#/$defs/linked_list_node"}, {"type": "null"}]},
        )
    }
} | closed(linked_list={"$ref": "#/$defs/linked_list_node"})

CASES = (
    SchemaCase(
        "calendar_event",
        closed(
            name=text(40),
            date={"type": "string", "format": "date"},
            participants={"type": "array", "items": text(16), "maxItems": 4},
        ),
        good=('{"name":"Science Fair","date":"2026-05-08","participants":["Alice","Bob"]}',),
        bad=('{"name":"Science Fair","date":"Friday","participants":[]}', '{"name":"Science Fair","participants":[]}'),
        message="Extract the event: Alice and Bob are going to a science fair on Friday.",
    ),
    SchemaCase(
        "steps_of_mathematics",
        closed(steps={"type": "array", "items": STEP, "minItems": 1, "maxItems": 2}, final_answer=text(20)),
        good=('{"steps":[{"explanation":"minus 7","output":"8x = -30"}],"final_answer":"x = -3.75"}',),
        bad=('{"steps":[{"explanation":"minus 7"}],"final_answer":"x"}', '{"steps":[],"final_answer":"x"}'),
        message="How can I solve 8x + 7 = -23?",
    ),
    SchemaCase(
        "tree_of_a_user_interface",
        UI,
        good=(
            '{"type":"form","label":"Login","children":[{"type":"button","label":"OK","children":[],"attributes":[]}],'
            '"attributes":[{"name":"id","value":"f"}]}',
        ),
        bad=(
            '{"type":"form","label":"Login","children":[{"type":"link","label":"","children":[],"attributes":[]}],"attributes":[]}',
            '{"type":"form","label":"Login","children":[]}',
        ),
        message='Repeat this: {"type": "button", "label": "OK", "children": [], "attributes": []}',
    ),
    SchemaCase(
        "linked_list_of_the_documentation",
        LINKED_LIST,
        good=('{"linked_list":{"value":1,"next":{"value":2,"next":null}}}',),
        bad=('{"linked_list":null}', '{"linked_list":{"value":1,"next":2}}'),
        message='Repeat this: {"linked_list": {"value": 1, "next": null}}',
    ),
    SchemaCase(
        "arguments_of_a_weather_tool",
        closed(
            location={"type": "string", "description": "City and country e.g. Bogotá, Colombia", "maxLength": 30},
            units={"type": ["string", "null"], "enum": ["celsius", "fahrenheit", None]},
        ),
        good=('{"location":"Paris, France","units":"celsius"}', '{"location":"Paris","units":null}'),
        bad=('{"location":"Paris","units":"kelvin"}', '{"location":"Paris"}'),
        message="What is the weather in Paris?",
    ),
    SchemaCase(
        "moderation_of_content",
        closed(
            is_violating={"type": "boolean"},
            category={"type": ["string", "null"], "enum": ["violence", "sexual", "self_harm", None]},
            explanation_if_violating={"type": ["string", "null"], "maxLength": 30},
        ),
        good=('{"is_violating":false,"category":null,"explanation_if_violating":null}',),
        bad=('{"is_violating":"no","category":null,"explanation_if_violating":null}', '{"is_violating":false}'),
        message="How do I prepare for a job interview?",
    ),
    SchemaCase(
        "item_that_is_a_user_or_an_address",
        closed(item={"anyOf": [{"$ref": "#/$defs/user"}, {"$ref": "#/$defs/address"}]})
        | {
            "$defs": {
                "user": closed(name=text(16), age={"type": "integer", "minimum": 0, "maximum": 130}),
                "address": closed(number=text(5), street=text(16), city=text(16)),
            }
        },
        good=('{"item":{"name":"Ada","age":36}}', '{"item":{"number":"1","street":"Main","city":"Rome"}}'),
        bad=('{"item":{"name":"Ada","age":360}}', '{"item":{"number":"1","street":"Main"}}'),
        message="Ada is 36 years old.",
    ),
    SchemaCase(
        "arguments_of_an_order_tool",
        closed(
            sku={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
            quantity={"type": "integer", "minimum": 1, "maximum": 20},
            price={"type": "number", "minimum": 0, "exclusiveMaximum": 1000},
            gift={"type": "boolean"},
        ),
        good=('{"sku":"AB-0001","quantity":3,"price":9.99,"gift":false}',),
        bad=(
            '{"sku":"AB-0001","quantity":0,"price":9.99,"gift":false}',
            '{"sku":"ab-0001","quantity":1,"price":9,"gift":true}',
        ),
        message="Order three hammers.",
    ),
)

"""Schemas are checked: errors name the place, constraints that are not enforced are refused, limits hold."""

import json
import time
from collections.abc import Mapping

import pytest

from motet.errors import GrammarError
from motet.grammar.compiled_grammar import MAX_TRIES, find_invalid_part
from motet.grammar.limits import MAX_LEVELS, MAX_NESTING, MAX_OPTIONAL, MAX_SOURCE_CHARS, MAX_TEXT_CHARS
from motet.grammar.schema.client_schema import read_schema
from motet.grammar.schema.keywords import NOT_ENFORCED
from tests.grammar import models
from tests.grammar.models import follows, grammars_of


def refusal(schema: object) -> str:
    with pytest.raises(GrammarError) as refused:
        grammars_of().get(models.json(json.dumps(schema)))
    return refused.value.message


def obj(**properties: object) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": list(properties)}


@pytest.mark.parametrize(
    ("keyword", "value"),
    [("not", {"pattern": "a"}), ("if", {"multipleOf": 2}), ("uniqueItems", True), ("contains", {"type": "null"})],
)
def test_a_keyword_that_cannot_be_enforced_is_refused_with_its_place(keyword: str, value: object) -> None:
    part = {keyword: value} | ({"then": False} if keyword == "if" else {})
    message = refusal(obj(a={"anyOf": [{"type": "null"}, part]}))
    assert message.startswith(f"at properties.a.anyOf[1].{keyword}: the keyword '{keyword}' is supported only ")
    assert message.endswith("; leave it out, and check the answer for it instead")


@pytest.mark.parametrize("keyword", sorted(NOT_ENFORCED))
def test_the_constraints_of_draft_3_are_refused(keyword: str) -> None:
    assert refusal({keyword: {}}) == f"at {keyword}: the keyword '{keyword}' is not supported"


def test_a_property_can_have_the_name_of_a_keyword() -> None:
    schema = json.dumps(obj(**{"not": {"type": "integer"}, "$ref": {"const": 1}}))
    assert follows(grammars_of(), models.json(schema), '{"not":5,"$ref":1}')


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"minLength": "5"}, 'at minLength: expected an integer of 0 or more, got "5"'),
        ({"minLength": True}, "at minLength: expected an integer of 0 or more, got true"),
        ({"minItems": -1}, "at minItems: expected an integer of 0 or more, got -1"),
        ({"maximum": "x"}, 'at maximum: expected a number, got "x"'),
        ({"multipleOf": 0}, "at multipleOf: expected a number greater than 0, got 0"),
        ({"enum": []}, "at enum: expected a non-empty array, got []"),
        ({"anyOf": []}, "at anyOf: expected a non-empty array of schemas, got []"),
        ({"anyOf": [3]}, "at anyOf[0]: expected a schema (an object or a boolean)"),
        ({"required": "a"}, 'at required: expected an array of strings, got "a"'),
        ({"properties": []}, "at properties: expected an object, got []"),
        ({"type": []}, "at type: the array of types is empty, so no value is valid"),
        ({"patternProperties": {"^k": False}}, "at patternProperties.^k: forbidden keys are not supported"),
        (
            {"minLength": 3, "maxLength": 2},
            "at minLength: 'minLength' 3 is greater than 'maxLength' 2, so no value is valid",
        ),
        ({"minimum": 3, "maximum": 2}, "at minimum: 'minimum' 3 is greater than 'maximum' 2, so no value is valid"),
        ({"$ref": "#/$defs/a"}, "at $ref: '#/$defs/a' does not exist"),
        ({"$ref": "https://a/b"}, "at $ref: 'https://a/b' is not in this schema; others are not loaded"),
        ({"$ref": "#/other", "other": [3]}, "at $ref: '#/other' is not a schema"),
        ({"x-guidance": {"lenient": True}}, "at x-guidance: expected no value, because this keyword is not supported"),
        (
            {"$ref": "#/other/a", "other": {"a": {"contains": {"type": "null"}}}},
            "at other.a.contains: the keyword 'contains' is supported only if it has the schema of 'items', or "
            "allows everything; leave it out",
        ),
        # The errors below come from llguidance.
        (
            obj(a={"anyOf": [{"type": "string"}, {"pattern": "(?=a)b"}]}),
            "at properties.a.anyOf[1].pattern: look-around",
        ),
        (obj(a={"type": "integer", "minimum": 3.2, "maximum": 3.4}), "at properties.a: Unsatisfiable schema"),
        (obj(a=False), "at the top: Unsatisfiable schema: required property 'a'"),
        (
            {"$defs": {"n": obj(q={"pattern": "("})}, **obj(a={"$ref": "#/$defs/n"})},
            "at $defs.n.properties.q.pattern: unclosed",
        ),
        (obj(a={"patternProperties": {"^s": True, "e$": True}}), "at properties.a.patternProperties: patternProperty"),
        ({"$ref": "#"}, "at the top: no value is valid"),
    ],
)
def test_an_invalid_schema_is_refused_with_the_place_of_the_error(schema: object, message: str) -> None:
    assert refusal(schema).startswith(message)


def test_all_keywords_are_enforced_whatever_draft_the_schema_names() -> None:
    """llguidance alone ignores keywords that the named draft does not have, such as `const` in draft 4."""
    schema = {"$schema": "http://json-schema.org/draft-04/schema#", **obj(a={"const": 1})}
    assert not follows(grammars_of(), models.json(json.dumps(schema)), '{"a":2}')
    schema["if"], schema["then"] = {"required": ["a"]}, False
    assert refusal(schema).startswith("at the top: Unsatisfiable schema")


def chain(number: int) -> dict[str, object]:
    parts = {f"n{i}": {"$ref": f"#/$defs/n{i + 1}"} for i in range(number)}
    return {"$ref": "#/$defs/n0", "$defs": {**parts, f"n{number}": {"type": "integer"}}}


def nested(number: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "integer"}
    for _ in range(number):
        schema = {"type": "array", "items": schema}
    return schema


def of_optional(number: int) -> dict[str, object]:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(number)}}


@pytest.mark.parametrize(
    ("allowed", "too_much"),
    [
        (chain(MAX_LEVELS - 3), chain(MAX_LEVELS)),
        (nested(MAX_NESTING - 1), nested(MAX_NESTING)),
        (of_optional(MAX_OPTIONAL), of_optional(MAX_OPTIONAL + 1)),
        ({"const": "a" * MAX_TEXT_CHARS}, {"const": "a" * (MAX_TEXT_CHARS + 1)}),
        ({"title": "a" * (MAX_SOURCE_CHARS - 100)}, {"title": "a" * MAX_SOURCE_CHARS}),
    ],
)
def test_schemas_are_limited_and_compile_up_to_the_limit(allowed: object, too_much: object) -> None:
    """Beyond such limits llguidance overflows its stack, which ends the process."""
    grammars_of().get(models.json(json.dumps(allowed)))
    assert "allowed" in refusal(too_much) or "deeper" in refusal(too_much)


@pytest.mark.parametrize("levels", [MAX_NESTING + 1, 5000, 25_000])
def test_a_schema_that_is_nested_too_deeply_is_refused_whether_or_not_json_can_be_read(levels: int) -> None:
    """Python versions differ in the depth up to which JSON can be read."""
    with pytest.raises(GrammarError, match=f"the schema is nested deeper than {MAX_NESTING} levels"):
        read_schema('{"items":' * levels + "{}" + "}" * levels)


def test_the_search_for_the_invalid_part_ends_after_the_maximum_number_of_tries() -> None:
    compiled: list[Mapping[str, object]] = []

    def error_in(part: Mapping[str, object]) -> str | None:
        compiled.append(part)
        return None

    schema = {"anyOf": [{"const": i} for i in range(3 * MAX_TRIES)]}
    assert find_invalid_part(schema, "bad", error_in=error_in) == ((), "bad")
    assert len(compiled) == MAX_TRIES


def test_references_still_resolve_while_parts_are_compiled_alone() -> None:
    schema = {"$defs": {"b": obj(d={"pattern": "("}, c={"$ref": "#"})}, **obj(a={"$ref": "#/$defs/b"})}
    assert refusal(schema).startswith("at $defs.b.properties.d.pattern: unclosed")


def test_the_search_for_the_invalid_part_takes_a_second_at_most() -> None:
    times = iter(range(10))
    schema: dict[str, object] = {"items": {"items": {"items": {}}}}
    path, _ = find_invalid_part(schema, "bad", error_in=lambda _: "bad", clock=lambda: next(times))
    assert path == ("items",)


def integer(multiple_of: float) -> dict[str, object]:
    return {"type": "integer", "multipleOf": multiple_of}


@pytest.mark.parametrize("number", [10_001, 999_983, 1e300, 2**64 - 1, 1.00003, 1e-9, 0.123456789])
def test_a_multiple_with_too_many_remainders_is_refused_before_it_is_compiled(number: float) -> None:
    """The bug: 999,983 took 25 s, and 390 MB that were never freed."""
    assert refusal(obj(a=integer(number))).startswith(f"at properties.a.multipleOf: {number} is too much work: without")


@pytest.mark.parametrize(
    ("schema", "where", "total"),
    [
        # 101 * 103 = 10,403
        ({"anyOf": [integer(101), {"type": "null"}, integer(103)]}, "anyOf[2]", 10_403),
        # 997 * 996 * 995 took minutes; 997 * 996 exceeds the limit already.
        ({"anyOf": [integer(997 - i) for i in range(399)]}, "anyOf[1]", 993_012),
        ({"allOf": [integer(101), {"anyOf": [integer(103)]}]}, "allOf[1].anyOf[0]", 10_403),
        ({"multipleOf": 101, "$ref": "#/$defs/a", "$defs": {"a": integer(103)}}, "$defs.a", 10_403),
        # Different values add up: 6000 + 4001.
        (obj(a=integer(6000), b=integer(4001)), "properties.b", 10_001),
        # 0.25 and 99.97 have 25 and 9997 in common hundredths: 249,925.
        ({"anyOf": [{"multipleOf": 0.25}, {"multipleOf": 99.97}]}, "anyOf[1]", 249_925),
    ],
)
def test_the_multiple_that_exceeds_the_limit_is_refused(schema: object, where: str, total: int) -> None:
    message = f"the sum of this 'multipleOf' and the preceding ones is {total}; at most 10000 is allowed"
    assert refusal(schema).startswith(f"at {where}.multipleOf: {message}")


def test_schemas_inside_one_lark_grammar_count_together() -> None:
    lark = "start: a | b\na: %json {0}\nb: %json {1}"
    parts = [json.dumps(integer(number)) for number in (6000, 4001)]
    with pytest.raises(GrammarError, match="is 10001; at most 10000 is allowed"):
        grammars_of().get(models.lark(lark.format(*parts)))
    grammars_of().get(models.lark(lark.format(parts[0], parts[0])))  # equal numbers count once


def test_everyday_multiples_are_allowed() -> None:
    everyday = obj(
        price={"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 1000},
        share={"type": "number", "multipleOf": 0.125},
        minutes=integer(15),
        seconds=integer(3600),
        pages=integer(4096),
        many={"type": "array", "items": {"anyOf": [integer(6), integer(10), {"type": "string"}]}},
        same=integer(3600),
    )
    schema = models.json(json.dumps(everyday))
    good = '{"price":9.99,"share":0.375,"minutes":45,"seconds":-7200,"pages":8192,"many":[12,20],"same":3600}'
    assert follows(grammars_of(), schema, good)
    assert not follows(grammars_of(), schema, good.replace("12", "13"))


def test_the_largest_allowed_multiples_compile_in_a_moment() -> None:
    grammars = grammars_of()
    grammars.get(models.json("{}"))
    started_s = time.process_time()
    grammars.get(models.json(json.dumps({"anyOf": [integer(100), integer(9999 // 101), {"type": "null"}]})))
    grammars.get(models.json(json.dumps(obj(a=integer(9973)))))
    assert time.process_time() - started_s < 1.0  # 0.1 s; 10 times the number takes 1 to 2 s


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"café": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        {"type": "object", "properties": {"café": {"type": "integer"}}, "patternProperties": {"^.{4}$": {}}},
    ],
)
def test_an_escape_cannot_spell_the_name_of_a_property_in_another_way(schema: object) -> None:
    grammar = models.json(json.dumps(schema))
    assert follows(grammars_of(), grammar, '{"café":1}')
    assert not follows(grammars_of(), grammar, r'{"caf\u00e9":"open"}')


@pytest.mark.parametrize("ref", ["#/$defs/a~1b", "#/%24defs/a~1b", "#anchor", "https://e/x#anchor"])
def test_work_behind_a_reference_of_any_kind_counts(ref: str) -> None:
    inner = {"$id": "https://e/x", "$anchor": "anchor", **integer(300_007)}
    if ref == "#anchor":
        del inner["$id"]
    assert "300007 is too much work" in refusal(obj(a={"$ref": ref}) | {"$defs": {"a/b": inner}})


def test_objects_with_the_maximum_number_of_optional_properties_can_be_answered() -> None:
    grammar = models.json(json.dumps(of_optional(MAX_OPTIONAL)))
    assert follows(grammars_of(), grammar, f'{{"p0":1,"p{MAX_OPTIONAL - 1}":2}}')

"""Small random schemas with all keywords that are enforced, or replaced by others that are."""

from hypothesis import strategies as st

from motet.grammar.schema import formats
from motet.text.tools.patterns import ALIASES
from tests.structured.schemas.case import Schema

# Steps that a double can represent exactly, because the reference implementation divides doubles.
STEPS = (2, 3, 10, 0.5, 0.25)
PATTERNS = ("^a+$", "^.{0,2}b", "^[0-9]{2,4}$", "^(x|yz)*$", r"^\w-\d$", "^é", "^[^[&]b]?$", "^[a&&b]|é$")
FORMATS = (*formats.PATTERNS, *formats.LLGUIDANCE, *ALIASES)
SHORT_FORMATS = ("date", "date-time", "time", "ipv4", "uuid")
"""Formats so short that a walk ends with any additional pattern."""
NAMES = ("a", "b", "kind", "with space", "é")

counts = st.integers(0, 4)
bounds = st.integers(-20, 20) | st.integers(-400, 400).map(lambda number: number / 100)
scalars = st.none() | st.booleans() | bounds | bounds.map(float) | st.text('ab"\\[é😀', max_size=3)
values = scalars | st.lists(scalars, max_size=2) | st.dictionaries(st.sampled_from(NAMES), scalars, max_size=2)


def keywords(**strategies: st.SearchStrategy[object]) -> st.SearchStrategy[Schema]:
    """Generates schemas with any of these keywords, or none."""
    return st.fixed_dictionaries({}, optional=dict(strategies))


def of_type(name: str, **strategies: st.SearchStrategy[object]) -> st.SearchStrategy[Schema]:
    return keywords(**strategies).map(lambda found: {"type": name, **found})


NUMERIC = {
    "minimum": bounds,
    "exclusiveMinimum": bounds,
    "maximum": bounds,
    "exclusiveMaximum": bounds,
    "multipleOf": st.sampled_from(STEPS),
}
leaves: st.SearchStrategy[Schema] = st.one_of(
    st.just({}),
    st.sampled_from(("null", "boolean")).map(lambda name: {"type": name}),
    of_type("integer", **NUMERIC),
    of_type("number", **NUMERIC),
    of_type("string", minLength=counts, maxLength=counts),
    of_type("string", pattern=st.sampled_from(PATTERNS), maxLength=st.integers(4, 9)),
    of_type("string", format=st.sampled_from(FORMATS)),
    st.fixed_dictionaries(
        {"format": st.sampled_from(SHORT_FORMATS), "pattern": st.sampled_from(("0", "^[0-9a-f]+"))}
    ).map(lambda found: {"type": "string", **found}),
    values.map(lambda value: {"const": value}),
    st.lists(values, min_size=1, max_size=3).map(lambda found: {"enum": found}),
    keywords(**NUMERIC),
)


constants = st.lists(values, min_size=1, max_size=3).map(lambda found: {"enum": found})
required = st.lists(st.sampled_from(NAMES), max_size=2, unique=True)
simple_objects = of_type(
    "object", properties=st.dictionaries(st.sampled_from(NAMES), constants, max_size=2), required=required
)
name_schemas: st.SearchStrategy[Schema] = st.one_of(
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map(lambda found: {"enum": found}),
    st.sampled_from(({"pattern": "^[ab]"}, {"maxLength": 1}, {"minLength": 2}, {"const": "a"}, {"type": "string"})),
)


def arrays(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return of_type(
        "array",
        items=inner | st.booleans(),
        prefixItems=st.lists(inner, min_size=1, max_size=2),
        minItems=st.integers(0, 2),
        maxItems=counts,
    )


def objects(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    """Generates schemas of objects. They have no `minProperties`, because a repeated key is not refused. Schemas for
    patterns of keys always allow a value: otherwise llguidance would allow the start of a key that can never end."""
    return of_type(
        "object",
        properties=st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
        required=st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
        additionalProperties=inner | st.booleans(),
        patternProperties=leaves.map(lambda found: {"^k": found}),
    )


def combined(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    parts = st.lists(inner, min_size=1, max_size=3)
    return st.builds(combination, st.just({}) | leaves, st.sampled_from(("anyOf", "oneOf", "allOf")), parts)


def combination(schema: Schema, keyword: str, parts: list[Schema]) -> Schema:
    return {**schema, keyword: parts}


def conditional(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    """Generates schemas with keywords that are replaced. Many of them are refused, because they have a complement that
    cannot be expressed."""
    condition = inner | simple_objects
    return st.one_of(
        st.fixed_dictionaries({"if": condition}, optional={"then": inner, "else": inner}),
        st.builds(lambda schema, part: {**schema, "not": part}, leaves, condition),
        of_type(
            "object",
            properties=st.dictionaries(st.sampled_from(NAMES), leaves, max_size=2),
            dependentRequired=st.dictionaries(st.sampled_from(NAMES), required, max_size=2),
            dependentSchemas=st.dictionaries(st.sampled_from(NAMES), inner, max_size=1),
            additionalProperties=st.booleans(),
        ),
        of_type(
            "object",
            properties=st.dictionaries(st.sampled_from(NAMES), leaves, max_size=2),
            propertyNames=name_schemas,
            additionalProperties=leaves | st.booleans(),
            required=required,
        ),
        of_type(
            "object",
            properties=st.dictionaries(st.sampled_from(NAMES), leaves, max_size=2),
            allOf=st.lists(simple_objects, min_size=1, max_size=2),
            unevaluatedProperties=leaves | st.booleans(),
        ),
        of_type(
            "array",
            items=constants,
            uniqueItems=st.booleans(),
            contains=st.just(True) | constants,
            minContains=st.integers(0, 2),
            maxItems=counts,
        ),
        st.builds(
            lambda schema, part, keyword: {keyword: [{"not": schema}, part]},
            condition,
            condition,
            st.sampled_from(("anyOf", "oneOf", "allOf")),
        ),
        st.builds(
            lambda parts, value: {"allOf": [*parts], "unevaluatedProperties": value},
            st.lists(condition | simple_objects.map(lambda found: {"not": found}), min_size=1, max_size=2),
            st.booleans(),
        ),
    )


def nested(leaf: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.recursive(
        leaf, lambda inner: arrays(inner) | objects(inner) | combined(inner) | conditional(inner), max_leaves=5
    )


REFERENCES = ("#/$defs/part", "#/%24defs/part", "#part", "https://a/b", "https://a/b#/$defs/c", "https://a/b#c")


def complete(schema: Schema, part: Schema, other: Schema, last: Schema) -> Schema:
    """Returns a schema with the definitions that references of `REFERENCES` lead to."""
    inner = {**other, "$id": "https://a/b", "$defs": {"c": {**last, "$anchor": "c"}}}
    return {**schema, "$defs": {"part": {**part, "$anchor": "part"}, "other": inner}}


references: st.SearchStrategy[Schema] = st.sampled_from(REFERENCES).map(lambda reference: {"$ref": reference})
schemas = st.builds(complete, nested(leaves | references), nested(leaves), nested(leaves), leaves)
"""Complete schemas, and many of them refer to parts."""


def with_arguments(*arguments: Schema) -> Schema:
    properties = dict(zip(NAMES, arguments, strict=False))
    return {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}


arguments = nested(leaves | references)
parameters = st.builds(
    complete, st.builds(with_arguments, arguments, arguments), nested(leaves), nested(leaves), leaves
)
"""Parameters of a tool with two arguments."""

"""Generates docs/schemas.md: which keywords and formats of JSON Schema are enforced. The names and limits come from
`motet.grammar`; a keyword without a text here, or a text without a keyword, is an error.

Run: python tools/schemas_page.py          writes the page
     python tools/schemas_page.py --check  fails if the page is out of date
"""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from motet.grammar.limits import MAX_DECIMALS, MAX_LEVELS, MAX_MULTIPLES, MAX_NESTING, MAX_OPTIONAL, MAX_SOURCE_CHARS
from motet.grammar.schema.disjoint import MAX_STEPS
from motet.grammar.schema.drafts import KEPT
from motet.grammar.schema.formats import LLGUIDANCE, PATTERNS
from motet.grammar.schema.keywords import NARROWED, NOT_ENFORCED
from motet.grammar.schema.lowering import CONDITIONS, MAX_ARRAYS, MAX_LOWERED_CHARS
from motet.grammar.schema.negation import MAX_COMPLEMENTS
from motet.text.tools.patterns import ALIASES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "schemas.md"
ALWAYS = "yes"
HEAD = """\
# JSON Schemas

This page lists which parts of a JSON Schema are enforced in [structured output](api.md#structured-output) and in the
parameters of tools. `python tools/schemas_page.py` generates it from `motet.grammar`.

Schemas can have any draft from 4 to 2020-12. `$schema` names it; without `$schema`, a schema has draft 2020-12, and the
keywords of earlier drafts are understood too. Keywords of later drafts are enforced in all drafts. A reference can
lead to any place in the schema by a pointer, an `$anchor` or an `$id`, and to the metaschemas of the drafts. Other
documents are not loaded.

Whatever is not enforced is refused with a 400 that names the place and the keyword, because the schema would promise
something that the answer might not have. Titles, descriptions, defaults and keywords that no draft has are annotations:
they have no effect.

An answer uses one notation of each value, so some valid texts are never generated: properties have the order of the
schema, strings escape only what must be escaped, and numbers with bounds have no exponent.

Parts of `oneOf` must exclude one another in the schema as it was sent, in which objects are open. Two parts with
different optional properties do not: an object with the properties of one part follows the other part too. Require a
property with a different constant in each part, use `additionalProperties: false`, or use `anyOf`.
"""
TAIL = f"""\
## Limits

| limit | |
|---|---|
| characters of a schema | {MAX_SOURCE_CHARS} |
| nested arrays and objects | {MAX_NESTING} |
| depths of a schema and of the schemas that it refers to, added up | {MAX_LEVELS} |
| properties of an object that are not required | {MAX_OPTIONAL} |
| sum of all different numbers in `multipleOf`, without their decimal points | {MAX_MULTIPLES} |
| decimal places of `multipleOf` | {MAX_DECIMALS} |
| characters after keywords such as `not` and `uniqueItems` were replaced, about | {MAX_LOWERED_CHARS} |
| schemas in all complements, for `not`, `if` and `oneOf` | {MAX_COMPLEMENTS} |
| schemas, constants and patterns that are compared for `oneOf` | {MAX_STEPS} |

`python -m bench.schemas FOLDER` tries a folder of schemas and instances ([benchmarks](benchmarks.md)).
"""


def enforced_condition(keyword: str) -> str:
    """Returns the condition that the error for a keyword names, with code in place of quoted words."""
    return re.sub(r"'([^']*)'", r"`\1`", CONDITIONS[keyword])


KEYWORDS: Mapping[str, Mapping[str, str]] = {
    "Any value": {
        "type": ALWAYS,
        "const": "yes. A number with a fraction can have 15 digits, and an integer must be exact as a 64-bit float",
        "enum": "as `const`",
        "allOf": ALWAYS,
        "anyOf": ALWAYS,
        "oneOf": (
            "if its parts exclude one another: by types, constants, numbers, lengths, or properties and items that "
            "exclude one another, also through references; or if the complements of overlapping parts can be expressed"
        ),
        "not": enforced_condition("not"),
        "if": enforced_condition("if"),
        "then": "as `if`",
        "else": "as `if`",
        "$ref": ALWAYS,
        "$dynamicRef": "if only one schema has the anchor",
        "$recursiveRef": "as `$dynamicRef`",
    },
    "Objects": {
        "properties": ALWAYS,
        "required": ALWAYS,
        "additionalProperties": "yes. Objects are closed without it ([why](api.md#structured-output))",
        "patternProperties": "if the patterns exclude one another, and none of their schemas is `false`",
        "minProperties": "if all of `properties` are required; a duplicate key of an open object counts twice",
        "maxProperties": "as `minProperties`",
        "propertyNames": enforced_condition("propertyNames"),
        "dependentRequired": enforced_condition("dependentRequired"),
        "dependentSchemas": enforced_condition("dependentSchemas"),
        "dependencies": "as `dependentRequired` and `dependentSchemas`",
        "unevaluatedProperties": enforced_condition("unevaluatedProperties"),
    },
    "Arrays": {
        "items": ALWAYS,
        "prefixItems": ALWAYS,
        "additionalItems": ALWAYS,
        "minItems": ALWAYS,
        "maxItems": ALWAYS,
        "uniqueItems": (
            f"{enforced_condition('uniqueItems')}. If there are more than {MAX_ARRAYS} arrays, the constants have the "
            "order of the schema"
        ),
        "contains": enforced_condition("contains"),
        "minContains": "as `contains`",
        "maxContains": "as `contains`",
        "unevaluatedItems": enforced_condition("unevaluatedItems"),
    },
    "Strings": {
        "minLength": ALWAYS,
        "maxLength": ALWAYS,
        "pattern": (
            "without look-around, backreferences, U+0000, and classes with several meanings (`[]a]`, `[[:alpha:]]`, "
            "`--`). The look-ahead that Pydantic generates for `Decimal`, and zod for `email` and `iso.duration`, is "
            "replaced"
        ),
        "format": "as [below](#formats)",
    },
    "Numbers": {
        "minimum": (
            "up to 2\\*\\*63 - 1024. From 2\\*\\*53 on, the bound is the next 64-bit float inside the range. A minimum "
            "below -2\\*\\*63 + 1024 counts as this number"
        ),
        "maximum": "as `minimum`, with the opposite sign",
        "exclusiveMinimum": "yes. With 0, the smallest number is 1e-20",
        "exclusiveMaximum": "yes. With 0, the largest number is -1e-20",
        "multipleOf": "within [limits](#limits)",
    },
}
FORMATS = {
    "date": "days of the calendar, years 0001 to 9999",
    "time": "seconds up to 59 with at most 9 digits of a fraction, and an offset: `Z` or `+01:00`",
    "date-time": "a date, `T` and a time",
    "uri-reference": "hosts are names",
    "iri-reference": "hosts are names, and letters up to U+D7FF",
    "hostname": "at most 253 characters in labels of 63, none in Punycode (`xn--`)",
}


def page() -> str:
    """Returns the text of the page."""
    described = {keyword for section in KEYWORDS.values() for keyword in section}
    if difference := described ^ (KEPT - {NARROWED, "x-guidance", *NOT_ENFORCED}):
        raise ValueError(f"these keywords have a text or are enforced, but not both: {', '.join(sorted(difference))}")
    return "\n".join([HEAD, *_keywords(), *_formats(), TAIL])


def _keywords() -> Iterator[str]:
    for title, section in KEYWORDS.items():
        yield f"## {title}\n"
        yield "| keyword | enforced |"
        yield "|---|---|"
        yield from (f"| `{keyword}` | {text} |" for keyword, text in section.items())
        yield ""


def _formats() -> Iterator[str]:
    yield "## Formats\n"
    yield "| format | enforced |"
    yield "|---|---|"
    for name in sorted({*PATTERNS, *LLGUIDANCE, *ALIASES}):
        yield f"| `{name}` | {f'as `{ALIASES[name]}`' if name in ALIASES else FORMATS.get(name, ALWAYS)} |"
    yield "| `int32`, `int64`, `float`, `double` | no. Without `minimum` and `maximum`, numbers can have any length |"
    yield "| others, and every format next to a type other than `string` | no: an annotation, as the standard allows |"
    yield ""


def main() -> None:
    if "--check" not in sys.argv:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        sys.exit("docs/schemas.md is out of date: run python tools/schemas_page.py")


if __name__ == "__main__":
    main()

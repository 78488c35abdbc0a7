"""Divides the schema of an argument into the strings and the other values that it allows.

Formats with tags around each argument have strings as plain text, and all other values as JSON. Their grammars
therefore need the constraints of strings as regular expressions (`StringForm`), and the rest as a schema.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from motet.errors import GrammarError
from motet.text.tools.patterns import (
    ALIASES,
    FORMATS,
    MAX_CHARS,
    ONLY_IN_JSON,
    StringRegex,
    Unsupported,
    regex_of_pattern,
)
from motet.text.tools.tool_format import Tool
from motet.text.tools.typed import ANY, Schema, TypesOf, as_json, quoted, referred, types_of

MAX_FORMS: Final = 100
"""Maximum number of alternatives of one string."""
MAX_STEPS: Final = 10_000
"""Maximum number of schemas that apply to the strings of one argument, counted at each of their references."""
MAX_DEPTH: Final = 100
"""Maximum depth of these schemas."""
SHARED: Final = ("$defs", "definitions")
"""Keywords of a schema with the schemas that references point to."""
MAX_REPEATED_CHARS: Final = 256 * 1024
"""Maximum number of characters of shared schemas, counted once for each argument that refers to them: the maximum size
of a grammar."""
ANNOTATIONS: Final = frozenset(
    ["title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", *SHARED]
)
OF_STRINGS: Final = ("pattern", "minLength", "maxLength", "format")
NOT_ENFORCED: Final = ("$dynamicRef", "$recursiveRef", "disallow", "extends", "if", "not")
NOT_ENFORCED_AT_TOP: Final = (
    *(*NOT_ENFORCED, "anyOf", "oneOf", "const", "enum", "propertyNames"),
    *("dependencies", "dependentRequired", "dependentSchemas"),
)
"""Keywords that the grammar of separate arguments cannot enforce in the schema of all arguments."""
IN_THIS_FORMAT: Final = "in the arguments of this model's tool calls"
ONE_OF: Final = "it is not certain that the strings of its parts exclude one another; use 'anyOf'"
_SIMPLE_PATTERN = re.compile(r"(\^?)([A-Za-z0-9_-]*)(\$?)")
"""A pattern without signs of regular expressions, whose matching cannot take long."""
_REFERENCE = re.compile(r'"\$ref": "(?P<place>#(?:[^"\\]|\\.)*)"')


def refused(path: str, why: str) -> GrammarError:
    return GrammarError(f"at {path or 'the top'}: {why}")


@dataclass(frozen=True)
class StringForm:
    """Strings that satisfy all of these constraints."""

    texts: tuple[str, ...] | None = None
    """All strings, if the schema lists them."""
    regexes: tuple[StringRegex, ...] = ()
    minimum: int = 0
    maximum: int | None = None

    @property
    def is_free(self) -> bool:
        return self == StringForm()

    def both(self, other: "StringForm") -> "StringForm":
        """Returns the strings that satisfy both forms."""
        texts = self.texts if other.texts is None else other.texts
        if self.texts is not None and other.texts is not None:
            others = frozenset(other.texts)
            texts = tuple(text for text in self.texts if text in others)
        maximums = [maximum for maximum in (self.maximum, other.maximum) if maximum is not None]
        regexes = tuple(dict.fromkeys((*self.regexes, *other.regexes)))
        both = StringForm(texts, regexes, max(self.minimum, other.minimum), min(maximums, default=None))
        if both.texts is None:
            return both
        fits = tuple(text for text in both.texts if both.minimum <= len(text) <= (both.maximum or len(text)))
        return replace(both, texts=fits, minimum=0, maximum=None)

    @property
    def is_empty(self) -> bool:
        return self.texts == () or (self.maximum is not None and self.minimum > self.maximum)


@dataclass(frozen=True)
class Argument:
    name: str
    schema: Schema
    """Schema of the argument, with the definitions that its references point to. No other references are supported."""
    types: frozenset[str]
    required: bool
    path: str
    """Place of the schema in the schema of the tool."""

    def strings(self, *, end: str) -> list[StringForm]:
        """Returns the alternative forms of the strings that the schema allows, as plain text that ends before the tag
        `end`. Raises `GrammarError` for constraints that cannot be enforced."""
        return _Strings(self, end).of(self.schema, self.path)

    def other_values(self) -> list[Schema]:
        """Returns alternative schemas that allow all values except strings, without shared definitions."""
        own = {key: value for key, value in self.schema.items() if key not in SHARED}
        rest, types_of_part = _OtherValues(self).of(own), TypesOf(self.schema)
        return [] if rest is None else [part for part in _alternatives(rest) if types_of_part(part)]


def types_of_argument(tool: Tool, name: str) -> frozenset[str]:
    """Returns the types of an argument; all types if the schema does not have it, or is invalid."""
    properties, root = tool.parameters.get("properties"), tool.parameters
    is_simple = root.keys().isdisjoint(("allOf", "$ref", "patternProperties"))
    if is_simple and isinstance(properties, Mapping) and name in properties:
        return types_of(properties[name], root)
    try:
        return next((argument.types for argument in arguments_of_tool(tool) if argument.name == name), ANY) or ANY
    except GrammarError:
        return ANY


def arguments_of_tool(tool: Tool) -> list[Argument]:
    """Returns the arguments of a tool, in the order of its schema. Raises `GrammarError` if a grammar of separate
    arguments cannot enforce the schema, or would be much longer than the schema."""
    root = tool.parameters
    found = _Parameters(root)
    found.add(root, "", depth=0)
    shared = {key: root[key] for key in SHARED if key in root}
    chars_left = MAX_REPEATED_CHARS
    arguments = []
    for name, schemas in found.schemas().items():
        path, schema = schemas[0]
        if len(schemas) > 1:
            schema = {"allOf": [each for _, each in schemas]}
        if schema is False and name not in found.required:
            continue
        if schema is not True and not isinstance(schema, Mapping):
            raise refused(path, "no value is valid" if schema is False else "expected a schema")
        schema = _resolved({} if schema is True else schema, root)
        types = TypesOf(root)(schema)
        if '"$ref"' in (source := json.dumps(schema)):
            _check_references(source, path)
            schema = {**shared, **schema}
            chars_left -= len(json.dumps(shared))
            if chars_left < 0:
                raise GrammarError(f"too many parameters of function '{tool.name}' refer to shared definitions")
        arguments.append(Argument(name, schema, types, name in found.required, path))
    found.check_number(arguments)
    return arguments


def nameable(arguments: Sequence[Argument], is_name: Callable[[str], bool]) -> list[Argument]:
    """Returns the arguments whose names a format can have. Raises `GrammarError` if any other one is required."""
    for argument in arguments:
        if argument.required and not is_name(argument.name):
            raise refused(argument.path, f"the name {quoted(argument.name)} is not possible {IN_THIS_FORMAT}")
    return [argument for argument in arguments if is_name(argument.name)]


class _Parameters:
    """Collects the properties of the schema of all arguments, and of its parts."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._schemas: dict[str, list[tuple[str, object]]] = {}
        self._counts: list[tuple[str, str, int]] = []
        """Limits of the number of arguments: place, keyword and number."""
        self.required: dict[str, str] = {}
        """Names of required arguments, with the place of the keyword."""
        self._others: object = {}
        """Schema of arguments without a name in the schema."""

    def add(self, schema: Schema, path: str, *, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise refused(path, "the schema is nested too deeply, or refers to itself")
        _check_keywords(schema, path, unsupported=NOT_ENFORCED_AT_TOP)
        self._add_own(schema, path)
        for number, part in enumerate(_list_at(schema, "allOf")):
            if isinstance(part, Mapping):
                self.add(part, joined(path, f"allOf[{number}]"), depth=depth + 1)
        if "$ref" in schema:
            self.add(referred(schema["$ref"], self._root), _place_of(schema["$ref"]), depth=depth + 1)

    def _add_own(self, schema: Schema, path: str) -> None:
        """Adds the properties of a schema without the schemas that apply to the same object."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping):
            raise refused(joined(path, "properties"), "expected an object")
        for name, inner in properties.items():
            self._schemas.setdefault(name, []).append((joined(path, f"properties.{name}"), inner))
        if not isinstance(required, Sequence) or not all(isinstance(name, str) for name in required):
            raise refused(joined(path, "required"), "expected an array of strings")
        self.required |= {name: joined(path, "required") for name in required}
        if "additionalProperties" in schema:
            self._others = schema["additionalProperties"]
        self._add_patterns(schema, path)
        for key in ("minProperties", "maxProperties"):
            if isinstance(number := schema.get(key), int):
                self._counts.append((joined(path, key), key, number))

    def _add_patterns(self, schema: Schema, path: str) -> None:
        patterns = schema.get("patternProperties")
        for pattern, inner in patterns.items() if isinstance(patterns, Mapping) else ():
            place = joined(path, f"patternProperties.{pattern}")
            simple = _SIMPLE_PATTERN.fullmatch(pattern)
            if simple is None and self._schemas:
                raise refused(place, f"next to 'properties', this pattern is not supported {IN_THIS_FORMAT}")
            for name, schemas in self._schemas.items():
                if simple and _matches(simple, name):
                    schemas.append((place, inner))

    def schemas(self) -> Mapping[str, list[tuple[str, object]]]:
        """Returns the schemas of each argument, with their places. Required names that have no schema are last."""
        for name, path in self.required.items():
            self._schemas.setdefault(name, [(path, self._others)])
        # `closed` objects name the properties of their parts with the schema `true`.
        return {
            name: [each for each in schemas if each[1] is not True] or schemas[:1]
            for name, schemas in self._schemas.items()
        }

    def check_number(self, arguments: Sequence[Argument]) -> None:
        required = sum(argument.required for argument in arguments)
        for path, key, number in self._counts:
            if (key == "minProperties" and number > required) or (key == "maxProperties" and number < len(arguments)):
                raise refused(path, f"the keyword '{key}' is not supported {IN_THIS_FORMAT}")


def _matches(simple: re.Match[str], name: str) -> bool:
    """Returns True if a name matches a pattern that `_SIMPLE_PATTERN` has matched."""
    starts, text, ends = simple.groups()
    if starts and ends:
        return name == text
    return name.startswith(text) if starts else name.endswith(text) if ends else text in name


class _Strings:
    """Collects the forms of the strings of one argument."""

    def __init__(self, argument: Argument, end: str) -> None:
        self._root = argument.schema
        self._types = argument.types
        self._types_of = TypesOf(self._root)
        self._end = end
        self._steps_left = MAX_STEPS

    def of(self, schema: object, path: str, *, depth: int = 0) -> list[StringForm]:
        """Returns the forms of the strings that `schema`, at `path`, allows."""
        if isinstance(schema, bool):
            return [StringForm()] if schema else []
        if not isinstance(schema, Mapping):
            raise refused(path, "expected a schema (an object or a boolean)")
        self._steps_left -= 1
        if depth > MAX_DEPTH or self._steps_left < 0:
            raise refused(path, "the schema is too large, or refers to itself")
        if "string" not in self._types_of(schema):
            return []
        _check_keywords(schema, path, unsupported=NOT_ENFORCED)
        forms = [self._own(schema, path)]
        for alternatives in self._parts(schema, path, depth=depth):
            forms = _product(forms, alternatives, path=path)
        return [form for form in forms if not form.is_empty]

    def _parts(self, schema: Schema, path: str, *, depth: int) -> Iterator[list[StringForm]]:
        """Yields the forms of the schemas that apply to the same value. A string must satisfy one form of each list."""
        for key in ("anyOf", "oneOf", "allOf"):
            parts = [
                self.of(part, joined(path, f"{key}[{number}]"), depth=depth + 1)
                for number, part in enumerate(_list_at(schema, key))
            ]
            if key == "oneOf" and not _exclude_one_another(parts):
                raise refused(joined(path, key), ONE_OF)
            if key == "allOf":
                yield from parts
            elif parts:
                yield _with_joined_lists([form for part in parts for form in part])
        if "$ref" in schema:
            yield self.of(referred(schema["$ref"], self._root), _place_of(schema["$ref"]), depth=depth + 1)

    def _own(self, schema: Schema, path: str) -> StringForm:
        """Returns the form of a schema without the schemas in it."""
        form = self._listed(schema, path)
        for key in ("minLength", "maxLength"):
            if key in schema:
                form = form.both(_length(schema[key], joined(path, key)))
        if "pattern" in schema:
            try:
                form = form.both(StringForm(None, (regex_of_pattern(str(schema["pattern"])),)))
            except Unsupported as error:
                raise refused(joined(path, "pattern"), f"{error} {IN_THIS_FORMAT}") from None
        name = str(schema.get("format"))
        name = ALIASES.get(name, name)
        if name in ONLY_IN_JSON:
            raise refused(joined(path, "format"), f"the format '{name}' is not supported {IN_THIS_FORMAT}")
        if name in FORMATS:
            form = form.both(StringForm(None, (FORMATS[name],), 0, MAX_CHARS.get(name)))
        return form

    def _listed(self, schema: Schema, path: str) -> StringForm:
        """Returns the strings that `enum` and `const` allow."""
        form = StringForm()
        for key, values in (("enum", schema.get("enum")), ("const", [schema.get("const")])):
            if key in schema and isinstance(values, list):
                texts = tuple(value for value in values if isinstance(value, str))
                form = form.both(StringForm(texts))
                for text in texts:
                    self._check_text(text, joined(path, key))
        return form

    def _check_text(self, text: str, path: str) -> None:
        """Raises `GrammarError` for a text that the parser would not read as this string."""
        if self._end in text:
            raise refused(path, f"the text {quoted(text)} contains {quoted(self._end)}, which ends an argument")
        if (read := as_json(text, self._types)) != quoted(text):
            raise refused(path, f"the text {quoted(text)} would be read as {read} {IN_THIS_FORMAT}")


def joined(path: str, step: str) -> str:
    return f"{path}.{step}" if path else step


def _place_of(reference: object) -> str:
    return str(reference).removeprefix("#/").replace("/", ".")


def _check_keywords(schema: Schema, path: str, *, unsupported: Sequence[str]) -> None:
    for key in unsupported:
        if key in schema:
            raise refused(joined(path, key), f"the keyword '{key}' is not supported {IN_THIS_FORMAT}")


def _length(value: object, path: str) -> StringForm:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
        raise refused(path, "expected a non-negative integer")
    number = int(value)
    return StringForm(minimum=number) if path.endswith("minLength") else StringForm(maximum=number)


def _product(forms: Sequence[StringForm], others: Sequence[StringForm], *, path: str) -> list[StringForm]:
    """Returns the strings that satisfy one of `forms` and one of `others`."""
    if len(forms) * len(others) > MAX_FORMS:
        raise refused(path, f"its parts have more than {MAX_FORMS} combinations")
    return list(dict.fromkeys(form.both(other) for form in forms for other in others))


def _with_joined_lists(forms: Sequence[StringForm]) -> list[StringForm]:
    """Returns alternative forms with one form for all forms that only list strings."""
    others = [form for form in forms if form.texts is None or form.regexes]
    texts = [text for form in forms if not form.regexes for text in form.texts or ()]
    return [*dict.fromkeys(others), *([StringForm(tuple(dict.fromkeys(texts)))] if texts else [])]


def _exclude_one_another(parts: Sequence[Sequence[StringForm]]) -> bool:
    """Returns True if no string is in two of the parts: they are lists without a common text."""
    with_strings = [part for part in parts if part]
    texts = [text for part in with_strings for form in part for text in form.texts or ()]
    return len(with_strings) < 2 or (
        len(set(texts)) == len(texts) and all(form.texts is not None for part in with_strings for form in part)
    )


class _OtherValues:
    """Removes strings from the schema of one argument."""

    def __init__(self, argument: Argument) -> None:
        self._root, self._path = argument.schema, argument.path
        self._types_of = TypesOf(self._root)
        self._steps_left = MAX_STEPS

    def of(self, schema: object, *, depth: int = 0) -> Schema | None:
        """Returns the schema of the values that are not strings. None if there are no such values."""
        self._steps_left -= 1
        if depth > MAX_DEPTH or self._steps_left < 0:
            raise refused(self._path, "the schema is too large, or refers to itself")
        schema = {} if schema is True else schema
        types = self._types_of(schema) if isinstance(schema, Mapping) else frozenset[str]()
        if not isinstance(schema, Mapping) or types <= {"string"}:
            return None
        if "string" not in types:
            return schema
        rest = {key: value for key, value in schema.items() if key not in (*OF_STRINGS, "$ref")}
        if not self._remove_from_parts(rest, depth=depth + 1):
            return None
        if "$ref" in schema:
            target = referred(schema["$ref"], self._root)
            found = self.of(target, depth=depth + 1) if "string" in self._types_of(target) else None
            if rest.keys() <= ANNOTATIONS and found is not None:
                return found
            rest["allOf"] = [*_list_at(rest, "allOf"), {"$ref": schema["$ref"]} if found is None else found]
        if "enum" in rest:
            rest["enum"] = [value for value in _list_at(rest, "enum") if not isinstance(value, str)]
        if isinstance(named := rest.get("type"), list):
            rest["type"] = sorted(set(map(str, named)) - {"string"})
        elif rest.keys().isdisjoint(("anyOf", "oneOf", "allOf", "enum", "const")):
            rest["type"] = sorted(types - {"string"} - ({"integer"} if "number" in types else set()))
        return rest

    def _remove_from_parts(self, schema: dict[str, object], *, depth: int) -> bool:
        """Replaces the parts of a schema by parts without strings. Returns False if they then allow nothing."""
        for key in ("anyOf", "oneOf", "allOf"):
            if key in schema:
                parts = [self.of(part, depth=depth) for part in _list_at(schema, key)]
                shown = [part for part in parts if part is not None]
                schema[key] = shown
                if not shown or (key == "allOf" and len(shown) < len(parts)):
                    return False
        return True


def _alternatives(schema: Schema) -> list[Schema]:
    """Returns the parts of a schema that only combines alternatives, and an own alternative for null and booleans."""
    keys = schema.keys() - ANNOTATIONS
    if keys == {"anyOf"} or (keys == {"oneOf"} and len(_list_at(schema, "oneOf")) == 1):
        parts = (part for key in keys for part in _list_at(schema, key))
        return [each for part in parts if isinstance(part, Mapping) for each in _alternatives(part)]
    named = schema.get("type")
    if isinstance(named, list) and keys.isdisjoint(("enum", "const", "anyOf", "oneOf", "allOf", "$ref")):
        scalars = [name for name in named if name in ("null", "boolean")]
        others = [name for name in named if name not in scalars]
        return [*({"type": name} for name in scalars), *({**schema, "type": name} for name in others)]
    return [schema]


def _resolved(schema: Schema, root: Schema) -> Schema:
    """Returns a schema, or the schema that it only refers to. References to other places than the shared definitions
    are thus supported at the top of an argument."""
    for _ in range(MAX_DEPTH):
        if "$ref" not in schema or not schema.keys() - {"$ref"} <= ANNOTATIONS:
            return schema
        schema = referred(schema["$ref"], root)
    return schema


def _check_references(source: str, path: str) -> None:
    for found in _REFERENCE.finditer(source):
        if not found["place"].startswith(tuple(f"#/{key}/" for key in SHARED)):
            why = f"'{found['place']}' is not supported {IN_THIS_FORMAT}; refer to '#/$defs/...'"
            raise refused(joined(path, "$ref"), why)


def _list_at(schema: Schema, key: str) -> list[object]:
    value = schema.get(key)
    return value if isinstance(value, list) else []

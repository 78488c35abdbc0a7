"""The base of all request bodies: strict types, and no field that is accepted and then not honoured.

A field whose value is null counts as absent. Any other field is read; or ignored (listed in docs/api.md); or accepted
only with a value that has no effect; or refused with a 400 that names it. Inside messages, items and tools
(`OpenSchema`) unknown fields are ignored."""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from motet.api.http.failure import FieldError, invalid_type, invalid_value, unknown_parameter, unsupported_parameter

MAX_VALUES = 40_000
"""Maximum number of values in JSON without token ids."""
MAX_FIELDS = 256
"""Maximum number of fields of an object. No schema has more, so an object with more is not read to its end."""

T = TypeVar("T")
Neutral = Mapping[str, tuple[object, ...]]


def as_integer(value: object) -> object:
    """Returns 2 for 2.0, which JSON Schema counts as an integer and some clients send, and other values unchanged."""
    return int(value) if type(value) is float and value.is_integer() else value


def _adapted(core: CoreSchema) -> CoreSchema:
    """Makes integers accept 2.0, and the check of a list stop at the first error, the only one that is reported: a list
    can have millions of values."""
    parts: list[object] = [core]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            if part.get("type") == "function-before" and part["function"]["function"] is as_integer:
                continue  # an inner schema, which is adapted already
            if part.get("type") == "int":
                inner = dict(part)
                part.clear()
                part |= core_schema.no_info_before_validator_function(as_integer, core_schema.int_schema())
                part["schema"] = inner
                continue
            if part.get("type") == "list":
                part["fail_fast"] = True
            parts += part.values()
        elif isinstance(part, list | tuple):
            parts += part
    return core


DESCRIBING = ("title", "description", "default")
"""Members of a JSON schema that allow and refuse no values."""


def _or_null(schema: JsonSchemaValue) -> JsonSchemaValue:
    """Returns the schema of an optional field, whose value can be null."""
    variants = schema.get("anyOf", [])
    if {"type": "null"} in variants:
        return schema
    about: JsonSchemaValue = {name: value for name, value in schema.items() if name in DESCRIBING}
    rest = {name: value for name, value in schema.items() if name not in DESCRIBING}
    others = variants if rest.keys() == {"anyOf"} else [rest] if rest else []
    return {**about, "anyOf": [*others, {"type": "null"}]} if others else schema


class Schema(BaseModel):
    """A JSON object of a request: exact types, no unknown names, nulls dropped."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    has_token_ids: ClassVar[bool] = False
    """True for a body with token ids, which can have more values (`body.MAX_TOKEN_IDS`)."""
    ignored: ClassVar[frozenset[str]] = frozenset()
    aliases: ClassVar[Mapping[str, str]] = {}
    """Other names of fields, from other servers, and the names of these fields."""
    neutral: ClassVar[Neutral] = {}
    """Unsupported fields, and the values with which they have no effect."""
    refused: ClassVar[frozenset[str]] = frozenset()
    """Unsupported fields that are refused whatever their value is."""
    former: ClassVar[frozenset[str]] = frozenset()
    """Unsupported fields that a validator refuses with the name that replaces them."""
    lenient: ClassVar[Mapping[str, type["Schema"]]] = {}
    """Fields whose unknown members are ignored and reported, and the schemas of their values."""
    known_entries: ClassVar[Mapping[str, frozenset[str]]] = {}
    """Fields with lists of names, and the names that have an effect, in a schema of `lenient`. Other names are ignored
    and reported."""
    advice: ClassVar[Mapping[str, str]] = {}
    """The end of the error for an unsupported field, if a list of the accepted values is not enough."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        return _adapted(handler(source))

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Adds the fields that are accepted although the model does not have them, and null, which counts as absent."""
        schema = handler(core)
        described = handler.resolve_ref_schema(schema)
        properties = described.setdefault("properties", {})
        for name in properties.keys() - set(described.get("required", ())):
            properties[name] = _or_null(properties[name])
        for name in sorted(cls.ignored):
            properties[name] = {"description": "Accepted, and not used."}
        for name, values in cls.neutral.items():
            properties[name] = {"enum": [*values, None], "description": "Another value is refused."}
        for name, field in cls.aliases.items():
            properties[name] = {**properties.get(field, {}), "description": f"Another name of `{field}`."}
        return schema

    @model_validator(mode="before")
    @classmethod
    def drop_fields_without_effect(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:
            raise FieldError(unknown_parameter, next(name for name in data if name not in cls.model_fields))
        given = {
            name: value for name, value in data.items() if value is not None and not cls._has_no_effect(name, value)
        }
        for name in cls.aliases.keys() & given.keys():
            field, value = cls.aliases[name], given.pop(name)
            if given.setdefault(field, value) != value:
                why = f"it is another name of '{field}', which has another value"
                raise FieldError(invalid_value, name, why, field)
        return given

    @classmethod
    def _has_no_effect(cls, name: str, value: object) -> bool:
        if name in cls.ignored:
            return True
        if name not in cls.neutral and name not in cls.refused:
            return False
        passing = cls.neutral.get(name, ())
        if any(_equal(value, allowed) for allowed in passing):
            return True
        except_for = f" (other than {' or '.join(map(repr, passing))})" if passing else ""
        why = f": {cls.advice[name]}" if name in cls.advice else except_for
        raise FieldError(unsupported_parameter, name, f"is not supported by this server{why}")


def _equal(value: object, allowed: object) -> bool:
    """Returns True for equal JSON values. Numbers can be written as 1 or 1.0."""
    return type(as_integer(value)) is type(as_integer(allowed)) and value == allowed


class OpenSchema(Schema):
    """A message, an item, a tool, or a part of one. Clients add their own fields, which are ignored."""

    model_config = ConfigDict(extra="ignore")


def ignored_paths(given: object, body: object, *, path: str = "") -> Iterator[str]:
    """Yields the paths of the fields in a request's JSON that its checked body ignores or an `OpenSchema` lacks."""
    if isinstance(given, dict) and isinstance(body, Schema):
        for name, value in given.items():
            inner, field = f"{path}.{name}" if path else name, body.aliases.get(name, name)
            if field in type(body).model_fields:
                yield from ignored_paths(value, getattr(body, field), path=inner)
            elif value is not None and (isinstance(body, OpenSchema) or name in body.ignored):
                yield inner
    elif isinstance(given, list) and isinstance(body, list):
        for number, (value, checked) in enumerate(zip(given, body, strict=False)):
            yield from ignored_paths(value, checked, path=f"{path}[{number}]")


def schema_text(schema: object) -> str:
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def check_num_values(value: T) -> T:
    """Raises FieldError if there are more than `MAX_VALUES` values. In a body with token ids, a schema can have a
    million numbers. Encoding them with json takes a quarter of a second, in which no other thread runs."""
    parts: list[object] = [value]
    left = MAX_VALUES
    while parts:
        part = parts.pop()
        if isinstance(part, dict | list):
            left -= len(part)
            if left < 0:
                raise FieldError(invalid_value, None, f"it can have at most {MAX_VALUES} values")
            parts += part.values() if isinstance(part, dict) else part
    return value


def check_unicode(value: T) -> T:
    check_num_values(value)
    try:
        (value if isinstance(value, str) else schema_text(value)).encode()
    except UnicodeEncodeError as exc:
        raise FieldError(invalid_value, None, "it is not valid Unicode") from exc
    except (RecursionError, ValueError) as exc:
        raise FieldError(invalid_value, None, f"it cannot be read: {exc}") from exc
    return value


UNICODE = AfterValidator(check_unicode)
"""Refuses a lone surrogate, which JSON can escape but UTF-8 cannot encode, in fields that are not checked further."""

JsonObject = Annotated[dict[str, object], UNICODE]


def _text_or_object(value: object) -> object:
    if not isinstance(value, str | dict):
        raise FieldError(invalid_type, None, "a string or an object")
    return check_unicode(value)


TextOrObject = Annotated[str | dict[str, object], PlainValidator(_text_or_object)]

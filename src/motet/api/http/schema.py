"""The base of all request bodies: strict types, and no field that is accepted and then not honoured.

A field whose value is null counts as absent. Any other is either a field of the model, or ignored (listed in
docs/api.md), or accepted only with a value that asks for nothing, or refused with a 400 that names it. Inside messages,
items and tools (`OpenSchema`) a field that the model lacks is ignored.
"""

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
from pydantic_core import CoreSchema

from motet.api.http.failure import FieldError, invalid_type, invalid_value, unknown_parameter, unsupported_parameter

MAX_FIELDS = 256
"""More than any schema has: an object with more has unknown ones, and is not read to its end."""

T = TypeVar("T")


def _failing_fast(core: CoreSchema) -> CoreSchema:
    """Makes lists stop at their first error, the only one that is told: a list may have millions."""
    parts: list[object] = [core]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            if part.get("type") == "list":
                part["fail_fast"] = True
            parts += part.values()
        elif isinstance(part, list | tuple):
            parts += part
    return core


class Schema(BaseModel):
    """A JSON object of a request: exact types, no unknown names, nulls dropped."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    ignored: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Fields not supported, and the values with which they ask for nothing."""
    refused: ClassVar[frozenset[str]] = frozenset()
    """Fields not supported, whatever their value."""
    advice: ClassVar[Mapping[str, str]] = {}
    """The end of the error for such a field, if naming the accepted values is not enough."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        return _failing_fast(handler(source))

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Adds the fields that are no field of the model, and yet accepted."""
        told = handler(core)
        inside = handler.resolve_ref_schema(told).setdefault("properties", {})
        for name in sorted(cls.ignored):
            inside[name] = {"description": "Accepted, and not used."}
        for name, values in cls.neutral.items():
            inside[name] = {"enum": list(values), "description": "Another value is refused."}
        return told

    @model_validator(mode="before")
    @classmethod
    def drop_what_asks_for_nothing(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:
            raise FieldError(unknown_parameter, next(name for name in data if name not in cls.model_fields))
        return {name: value for name, value in data.items() if value is not None and not cls._asks_nothing(name, value)}

    @classmethod
    def _asks_nothing(cls, name: str, value: object) -> bool:
        if name in cls.ignored:
            return True
        if name not in cls.neutral and name not in cls.refused:
            return False
        passing = cls.neutral.get(name, ())
        if any(type(value) is type(allowed) and value == allowed for allowed in passing):
            return True
        others = f" (other than {' or '.join(map(repr, passing))})" if passing else ""
        why = f": {cls.advice[name]}" if name in cls.advice else others
        raise FieldError(unsupported_parameter, name, f"is not supported by this server{why}")


class OpenSchema(Schema):
    """A message, an item, a tool, or a part of one. Clients add fields of their own, which are ignored."""

    model_config = ConfigDict(extra="ignore")


def ignored_paths(given: object, body: object, *, path: str = "") -> Iterator[str]:
    """Yields where the JSON of a request has fields that its checked body ignores, or that an `OpenSchema` lacks."""
    if isinstance(given, dict) and isinstance(body, Schema):
        for name, value in given.items():
            inner = f"{path}.{name}" if path else name
            if name in type(body).model_fields:
                yield from ignored_paths(value, getattr(body, name), path=inner)
            elif value is not None and (isinstance(body, OpenSchema) or name in body.ignored):
                yield inner
    elif isinstance(given, list) and isinstance(body, list):
        for number, (value, read) in enumerate(zip(given, body, strict=False)):
            yield from ignored_paths(value, read, path=f"{path}[{number}]")


def schema_text(schema: object) -> str:
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def check_unicode(value: T) -> T:
    try:
        (value if isinstance(value, str) else schema_text(value)).encode()
    except UnicodeEncodeError as exc:
        raise FieldError(invalid_value, None, "it is not valid Unicode") from exc
    except (RecursionError, ValueError) as exc:
        raise FieldError(invalid_value, None, f"it cannot be read: {exc}") from exc
    return value


UNICODE = AfterValidator(check_unicode)
"""Refuses a field with half a surrogate pair in a string, which JSON can write and no engine can be sent: for fields
that somebody else reads, so that no schema looks at the strings inside them."""

JsonObject = Annotated[dict[str, object], UNICODE]


def _text_or_object(value: object) -> object:
    if not isinstance(value, str | dict):
        raise FieldError(invalid_type, None, "a string or an object")
    return check_unicode(value)


TextOrObject = Annotated[str | dict[str, object], PlainValidator(_text_or_object)]

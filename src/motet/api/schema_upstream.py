"""What is checked of a body that goes on to a text upstream: what we have to understand. The server checks the rest."""

from typing import ClassVar

import msgspec
from pydantic import ConfigDict, Field, ValidationError

from motet.api.failure import validation_failure
from motet.api.schema_shared import MAX_SEED, MIN_SEED, StreamingFields, StreamOptions
from motet.engines.upstream.base import Fields, TextRoute


class UpstreamStreamOptions(StreamOptions):
    model_config = ConfigDict(extra="ignore")


class UpstreamFields(StreamingFields):
    model_config = ConfigDict(extra="ignore")

    n: int = Field(1, ge=1)
    best_of: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=MIN_SEED, le=MAX_SEED)
    stream_options: UpstreamStreamOptions | None = None

    read: ClassVar[tuple[str, ...]] = ("n", "best_of", "seed", "stream", "stream_options")


def read_fields(body: bytes) -> Fields | None:
    """None: it is no JSON object."""
    try:
        return msgspec.json.decode(body, type=Fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def name_in(fields: Fields) -> str | None:
    """What it says of `model`, if that is a name."""
    try:
        return msgspec.json.decode(fields.get("model", b"null"), type=str | None)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def check_fields(fields: Fields) -> UpstreamFields:
    """Raises RequestError, in the words of our own schemas."""
    values = {name: msgspec.json.decode(fields[name]) for name in UpstreamFields.read if name in fields}
    try:
        return UpstreamFields.model_validate(values)
    except ValidationError as error:
        raise validation_failure(
            [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]
        ) from None


def prompts_in(fields: Fields, route: TextRoute) -> tuple[msgspec.Raw, ...]:
    """Each by itself: an array is one prompt if it holds token ids, else one for each entry. What is neither is left
    to the server, as one."""
    if route is TextRoute.CHAT:
        return ()
    prompt = fields.get("prompt", msgspec.Raw(b"null"))
    if not bytes(prompt).startswith(b"["):
        return (prompt,)
    entries = msgspec.json.decode(prompt, type=list[msgspec.Raw])
    each = entries and all(bytes(entry)[:1] in (b'"', b"[") for entry in entries)
    return tuple(entries) if each else (prompt,)

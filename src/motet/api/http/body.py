"""Limits the size of bodies, and turns JSON into an object of its schema, without delaying other streams:

    1. count    the parts of a long body (objects, arrays, members, strings, values), before decoding: the time to
                check a schema grows with their number
    2. decode   with json if the body is short; with msgspec, which is several times as fast, if it is long
    3. check    the schema

For a long body, all three are done in the thread for long work, so that the event loop continues.

Token ids and the characters of strings take little time, so their limits are high. Other numbers are slower: decoding
or encoding one takes up to a microsecond, in which no other thread runs. JSON in strings of a body has the same limits
as JSON without token ids."""

import json
import re
from bisect import bisect_right
from collections.abc import Mapping
from functools import partial
from itertools import accumulate
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from motet.api.http.failure import ErrorResponse, FieldError, body_too_large, invalid_value, schema_failure
from motet.api.http.long_work import in_thread
from motet.api.http.schema import MAX_VALUES, Schema
from motet.api.http.unknown_fields import IgnoredFields
from motet.engines.wire import TENSORS
from motet.errors import BodyEncodingError, RequestError

Body = TypeVar("Body", bound=Schema)
Marks = npt.NDArray[np.bool_]

MAX_CONTAINERS = 10_000
"""Maximum number of objects and arrays: 2000 turns with a call each, and 128 tools. Checking one takes 20 to 40 us."""
MAX_LEVELS = 500
"""Maximum number of levels of objects and arrays. Python versions differ in the depth that they can read."""
MAX_MEMBERS = 40_000
"""Maximum number of members of objects, four for each object and array."""
MAX_STRINGS = 100_000
"""Maximum number of strings, including the names of members."""
MAX_TOKEN_IDS = 1_000_000
"""Maximum number of values in a body that can have token ids: enough for 256 prompts of 3900 token ids."""
MAX_DIGITS = 100
"""Maximum number of digits of a number. Parsing is quadratic and holds the GIL."""
LONG_DIGITS, MAX_LONG_NUMBERS = 20, 10_000
"""Maximum number of numbers with more digits than a 64-bit integer. Each takes as long as 50 others."""
JSON_TYPE = re.compile(r"application/([^;\s]+\+)?json\s*(;|$)", re.IGNORECASE)
SHORT_BYTES, SHORT_CONTAINERS = 64 * 1024, 100
"""Maximum number of bytes, and of objects and arrays, of a body that is read on the event loop. This takes at most 2 to
4 ms, less than a thread would delay the streams."""
_DIGITS = bytes(ord("0") if ord("0") <= byte <= ord("9") else byte for byte in range(256))
_TOO_LONG, _LONG = b"0" * (MAX_DIGITS + 1), b"0" * (LONG_DIGITS + 1)
_NAME = re.compile(rb'"([^"]*)"\s*$')

SMALL_BODY_BYTES = 64 * 1024
"""Number of bytes of a body that uvicorn reads before the app requests any."""
MAX_ENCODING_CHARS = 100
NO_MEMORY = "The requests in progress use all memory that this server has for bodies. Try again later."
UPLOAD_ROUTE, FORM = "/v1/files", "multipart/form-data"
"""Route and content type of uploads, which are written to a file while they arrive and have a limit of their own."""
TENSOR_ROUTES = ("/update_weights", "/load_lora_adapter", "/engine/checkpoint")
"""Routes whose bodies can be tensors, as large as a model. Such bodies do not count against the limits."""


class BodyLimit:
    """ASGI middleware that refuses a body that is compressed, and one that is too large; if its length is announced,
    before it is read. All bodies together can have `max_open_bytes`. The first `SMALL_BODY_BYTES` of each body do not
    count, so that short requests are accepted while other clients send long requests."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, max_open_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._free_bytes = max_open_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if (encoding := headers.get("content-encoding", "").strip().lower()) not in ("", "identity"):
            await ErrorResponse(BodyEncodingError(_unsupported(encoding)))(scope, receive, send)
            return
        if scope["path"].endswith(TENSOR_ROUTES) and is_tensors(headers):
            await self._app(scope, receive, send)  # the tensors are written to separate memory while they arrive
            return
        if scope["path"].endswith(UPLOAD_ROUTE) and content_type_of(headers) == FORM:
            await self._app(scope, receive, send)
            return
        announced = headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await ErrorResponse(body_too_large(self._max_bytes))(scope, receive, send)
            return
        num_read = num_held = 0

        async def receive_counted() -> Message:
            """Receives a message. Raises HTTPException, since the framework turns other errors into a 400."""
            nonlocal num_read, num_held
            message = await receive()
            num_read += len(message.get("body", b""))
            if num_read > self._max_bytes:
                raise HTTPException(413, body_too_large(self._max_bytes).message)
            if (more := num_read - SMALL_BODY_BYTES - num_held) > 0:
                if more > self._free_bytes:
                    raise HTTPException(503, NO_MEMORY)
                self._free_bytes -= more
                num_held += more
            return message

        def release() -> None:
            nonlocal num_held
            self._free_bytes += num_held
            num_held = 0

        scope["state"]["release_body"] = release
        try:
            await self._app(scope, receive_counted, send)
        finally:
            release()


def _unsupported(encoding: str) -> str:
    return f"Unsupported content encoding {encoding[:MAX_ENCODING_CHARS]!r}: send the body without compression."


def is_tensors(headers: Headers) -> bool:
    return content_type_of(headers) == TENSORS


def content_type_of(headers: Headers) -> str:
    """Returns the content type without its parameters, in lower case."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_json(raw: bytes, schema: type[Body], *, client: str, ignored: IgnoredFields) -> Body:
    """Returns the checked body. `client`: client in whose turn a long body is checked (`long_work`). `ignored`: removes
    and names the fields that are ignored. Raises RequestError for a body that does not match its schema or has too many
    parts, ValueError and RecursionError if it is not JSON."""
    work = partial(_checked, raw, schema, ignored=ignored)
    return work() if is_short(raw) else await in_thread(work, client=client)


def is_short(raw: bytes) -> bool:
    """Returns True for JSON that is decoded on the event loop, with json, and without limits on its parts."""
    return len(raw) <= SHORT_BYTES and raw.count(b"{") + raw.count(b"[") <= SHORT_CONTAINERS


def _checked(raw: bytes, schema: type[Body], *, ignored: IgnoredFields) -> Body:
    if not is_short(raw):
        check_counts(raw, max_values=MAX_TOKEN_IDS if schema.has_token_ids else MAX_VALUES)
    value = json_value(raw)
    ignored.remove_from(value, schema)
    try:
        return schema.model_validate(value)
    except ValidationError as error:  # it can contain thousands of errors, and the client gets the first one
        raise schema_failure(error) from error


def json_value(raw: bytes) -> object:
    """Parses JSON: with msgspec, which is faster but strict, if it is long."""
    return json.loads(raw) if len(raw) <= SHORT_BYTES else msgspec.json.decode(raw)


def check_counts(raw: bytes, *, max_values: int) -> None:
    """Raises RequestError for more parts than a request can have. The error names the field with the first part that
    exceeds a limit. `max_values`: `MAX_VALUES`, or `MAX_TOKEN_IDS` if the body can have token ids."""
    if _is_small(raw, max_values):
        return
    text = _without_escapes(raw)
    if (excess := _excess(text, max_values)) is not None:
        why = f"the body can have at most {excess.limit}"
        field = _field_at(text, excess.place)
        raise invalid_value(field, why) if field else RequestError(f"Invalid body: {why}.", code="invalid_value")


def check_json_strings(texts: Mapping[str, str]) -> None:
    """Raises FieldError if JSON in strings of a body has more parts, all strings together, than a body can have.
    `texts`: the strings by the names of their fields. The error names the field that exceeds the limit."""
    raw = "\n".join(texts.values()).encode()
    if is_short(raw) or _is_small(raw, MAX_VALUES):
        return
    # A text with an odd number of quotes is not JSON, which is noticed later. It must not hide the texts after it.
    pieces = [
        piece + b'"' * (piece.count(b'"') % 2) for piece in map(_without_escapes, map(str.encode, texts.values()))
    ]
    if (excess := _excess(b"\n".join(pieces), MAX_VALUES)) is not None:
        ends = list(accumulate(len(piece) + 1 for piece in pieces))
        field = list(texts)[bisect_right(ends, excess.place)]
        raise FieldError(invalid_value, field, f"JSON in strings can have at most {excess.limit} in one request")


def _is_small(raw: bytes, max_values: int) -> bool:
    """Returns True if JSON is within all limits, even if all marks in its strings are counted."""
    digits = raw.translate(_DIGITS)
    return (
        raw.count(b"{") + raw.count(b"[") <= MAX_LEVELS
        and all(raw.count(mark) <= limit for mark, (limit, _) in _limits(max_values).items())
        and _TOO_LONG not in digits
        and digits.count(_LONG) <= MAX_LONG_NUMBERS
    )


def _limits(max_values: int) -> Mapping[bytes, tuple[int, str]]:
    """Returns the maximum number and the name of each kind of part, by the character that ends or follows it."""
    return {b":": (MAX_MEMBERS, "members"), b'"': (MAX_STRINGS, "strings"), b",": (max_values, "values")}


def _without_escapes(raw: bytes) -> bytes:
    """Returns JSON without the escapes of quotes and backslashes, so that each quote starts or ends a string."""
    return raw.replace(b"\\\\", b"").replace(b'\\"', b"")


class _Excess(NamedTuple):
    place: int
    """Position of the first part that exceeds the limit."""
    limit: str


def _excess(text: bytes, max_values: int) -> _Excess | None:
    """Returns the limit that JSON `_without_escapes` exceeds, if any."""
    structure = _Structure.of(text)
    letters, outside, opening = structure.letters, structure.outside, structure.opening
    too_deep = opening & (structure.depths > MAX_LEVELS)
    found = [
        (_place_of(opening, MAX_CONTAINERS), f"{MAX_CONTAINERS} objects and arrays"),
        (_place_of(too_deep, 0), f"{MAX_LEVELS} levels of objects and arrays"),
        *(
            (_place_of(outside & (letters == ord(mark)), limit), f"{limit} {what}")
            for mark, (limit, what) in _limits(max_values).items()
        ),
    ]
    if _LONG in text.translate(_DIGITS):
        # The end of each number, and the place of each other character that follows no digit.
        ends = np.append(np.flatnonzero(~(outside & (letters >= ord("0")) & (letters <= ord("9")))), len(text))
        num_digits = np.diff(ends, prepend=-1) - 1
        for maximum, number, limit in (
            (MAX_DIGITS, 0, f"{MAX_DIGITS} digits in a number"),
            (LONG_DIGITS, MAX_LONG_NUMBERS, f"{MAX_LONG_NUMBERS} numbers with more than {LONG_DIGITS} digits"),
        ):
            place = _place_of(num_digits > maximum, number)
            found.append((None if place is None else int(ends[place]) - 1, limit))
    return next((_Excess(place, limit) for place, limit in found if place is not None), None)


def _place_of(marks: Marks, number: int) -> int | None:
    """Returns the position of the mark with this number, counted from 0; None if there are fewer marks."""
    places = np.flatnonzero(marks)
    return int(places[number]) if len(places) > number else None


class _Structure(NamedTuple):
    """The structure of JSON `_without_escapes`, byte by byte."""

    letters: npt.NDArray[np.uint8]
    outside: Marks
    """True outside strings, and at the quote that ends one."""
    opening: Marks
    """True at the first byte of an object or an array."""
    depths: npt.NDArray[np.int32]
    """Number of objects and arrays that are open after each byte."""

    @classmethod
    def of(cls, text: bytes) -> "_Structure":
        letters = np.frombuffer(text, np.uint8)
        outside = ~np.logical_xor.accumulate(letters == ord('"'))
        opening = outside & ((letters == ord("{")) | (letters == ord("[")))
        closing = outside & ((letters == ord("}")) | (letters == ord("]")))
        depths = np.cumsum(opening.astype(np.int32) - closing.astype(np.int32), dtype=np.int32)
        return cls(letters, outside, opening, depths)


def _field_at(text: bytes, place: int) -> str:
    """Returns the name of the body's field that contains the byte at `place`; empty if it is in no field."""
    before = _Structure.of(text[: place + 1])
    names = np.flatnonzero(before.outside & (before.letters == ord(":")) & (before.depths == 1))
    found = _NAME.search(text[max(0, int(names[-1]) - 200) : int(names[-1])]) if len(names) else None
    return found[1].decode(errors="replace") if found else ""

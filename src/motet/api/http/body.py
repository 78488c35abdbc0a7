"""Limits the size of bodies, and turns JSON into an object of its schema, without delaying other streams:

    1. count    objects, arrays and members, before decoding: the time to check a schema grows with their number
    2. decode   with json if the body is short; with msgspec, which is several times as fast, if it is long
    3. check    the schema; for a long body in the one thread for long work, so that the event loop continues

Token ids, numbers and letters are cheap, so only the size of the body limits them."""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import anyio
import msgspec
import numpy as np
import numpy.typing as npt
from anyio import to_thread
from anyio.lowlevel import RunVar
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from motet.api.http.failure import ErrorResponse, body_too_large, invalid_value
from motet.engines.wire import TENSORS
from motet.errors import RequestError

Body = TypeVar("Body", bound=BaseModel)
T = TypeVar("T")
Marks = npt.NDArray[np.bool_]

MAX_CONTAINERS = 10_000
"""Maximum number of objects and arrays: 2000 turns with a call each, and 128 tools. Checking one takes 20 to 40 us."""
MAX_LEVELS = 500
"""Maximum number of levels of objects and arrays. Python versions differ in the depth that they can read."""
MAX_MEMBERS = 40_000
"""Maximum number of members of objects, four for each object and array."""
MAX_STRINGS = 100_000
"""Maximum number of strings, including the names of members."""
MAX_VALUES = 1_000_000
"""Maximum number of values: enough for 256 prompts of 3900 token ids. Strings cost several times as much as numbers."""
MAX_DIGITS = 100
"""Maximum number of digits of a number. Parsing is quadratic and holds the GIL."""
JSON_TYPE = re.compile(r"application/([^;\s]+\+)?json\s*(;|$)", re.IGNORECASE)
SHORT_BYTES, SHORT_CONTAINERS = 64 * 1024, 100
"""Maximum number of bytes, and of objects and arrays, of a body that is read on the event loop. This takes at most 2 to
4 ms, less than a thread would delay the streams."""
_LIMITS = {b":": (MAX_MEMBERS, "members"), b'"': (MAX_STRINGS, "strings"), b",": (MAX_VALUES, "values")}
"""Maximum number and name of each kind of part, by the character that ends or follows each such part."""
_DIGITS = bytes(ord("0") if ord("0") <= byte <= ord("9") else byte for byte in range(256))
_TOO_LONG = b"0" * (MAX_DIGITS + 1)
_NAME = re.compile(rb'"([^"]*)"\s*$')
_ONE_THREAD: RunVar[anyio.CapacityLimiter] = RunVar("one_thread")

SMALL_BODY_BYTES = 64 * 1024
"""Number of bytes of a body that uvicorn reads before the app requests any."""
NO_MEMORY = "The requests in progress use all memory that this server has for bodies. Try again later."
TENSOR_ROUTES = ("/update_weights", "/engine/checkpoint")
"""Routes whose bodies can be tensors, as large as a model. Such bodies do not count against the limits."""


class BodyLimit:
    """ASGI middleware that refuses a body that is too large; if its length is announced, before it is read. All
    bodies together can have `max_open_bytes`. The first `SMALL_BODY_BYTES` of each body do not count, so that short
    requests are accepted while other clients send long requests."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, max_open_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._free_bytes = max_open_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if scope["path"].endswith(TENSOR_ROUTES) and is_tensors(headers):
            await self._app(scope, receive, send)  # the tensors are written to separate memory while they arrive
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


def is_tensors(headers: Headers) -> bool:
    return headers.get("content-type", "").partition(";")[0].strip().lower() == TENSORS


async def read_json(raw: bytes, schema: type[Body]) -> Body:
    """Returns the checked body. Raises ValidationError, RequestError for too many parts, ValueError and RecursionError
    if it is not JSON."""
    if len(raw) <= SHORT_BYTES and raw.count(b"{") + raw.count(b"[") <= SHORT_CONTAINERS:
        return schema.model_validate(json.loads(raw))
    return await in_thread(partial(_read_long, raw, schema))


async def in_thread(work: Callable[[], T]) -> T:
    """Runs long work in a thread, one call at a time: each thread that competes for the GIL delays the event loop."""
    if (limiter := _ONE_THREAD.get(None)) is None:
        _ONE_THREAD.set(limiter := anyio.CapacityLimiter(1))
    return await to_thread.run_sync(work, limiter=limiter)


def _read_long(raw: bytes, schema: type[Body]) -> Body:
    check_counts(raw)
    return schema.model_validate(json.loads(raw) if len(raw) <= SHORT_BYTES else msgspec.json.decode(raw))


def check_counts(raw: bytes) -> None:
    """Raises RequestError for more objects, arrays, levels or members than a request may have. The error names their
    field."""
    num_containers = raw.count(b"{") + raw.count(b"[")
    few = num_containers <= MAX_LEVELS and all(raw.count(mark) <= limit for mark, (limit, _) in _LIMITS.items())
    long_number = _TOO_LONG in raw.translate(_DIGITS)
    if few and not long_number:
        return
    # The counts above include marks inside strings.
    text = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    letters = np.frombuffer(text, np.uint8)
    quotes = letters == ord('"')
    outside = ~np.logical_xor.accumulate(quotes)
    opening = outside & ((letters == ord("{")) | (letters == ord("[")))
    members = outside & (letters == ord(":"))
    too_deep = opening & (_depths(letters, outside=outside, opening=opening) > MAX_LEVELS)
    wrong = [
        (_place_of(opening, MAX_CONTAINERS), f"the body may have {MAX_CONTAINERS} objects and arrays"),
        (_place_of(too_deep, 0), f"the body may have {MAX_LEVELS} levels of objects and arrays"),
        *(
            (_place_of(outside & (letters == ord(mark)), limit), f"the body may have {limit} {what}")
            for mark, (limit, what) in _LIMITS.items()
        ),
        (_long_number(letters, outside) if long_number else None, f"a number has more than {MAX_DIGITS} digits"),
    ]
    for place, why in wrong:
        if place is not None:
            field = _field_at(text, place, outside=outside, opening=opening, members=members)
            raise invalid_value(field, why) if field else RequestError(f"Invalid body: {why}.", code="invalid_value")


def _place_of(marks: Marks, number: int) -> int | None:
    """Returns the position of the mark with this number, counted from 0; None if there are fewer marks."""
    places = np.flatnonzero(marks)
    return int(places[number]) if len(places) > number else None


def _long_number(letters: npt.NDArray[np.uint8], outside: Marks) -> int | None:
    """Returns the position of the first digit above the limit; None if no number is too long."""
    between = np.flatnonzero(~(outside & (letters >= ord("0")) & (letters <= ord("9"))))
    num_digits = np.diff(between, prepend=-1, append=len(letters)) - 1
    found = _place_of(num_digits > MAX_DIGITS, 0)
    return None if found is None else (int(between[found - 1]) if found else -1) + MAX_DIGITS + 1


def _depths(letters: npt.NDArray[np.uint8], *, outside: Marks, opening: Marks) -> npt.NDArray[np.int32]:
    """Returns the number of objects and arrays that are open after each byte."""
    closing = outside & ((letters == ord("}")) | (letters == ord("]")))
    return np.cumsum(opening.astype(np.int32) - closing.astype(np.int32), dtype=np.int32)


def _field_at(text: bytes, place: int, *, outside: Marks, opening: Marks, members: Marks) -> str:
    """Returns the name of the body's field that contains the byte at `place`; empty if it is in no field."""
    letters = np.frombuffer(text, np.uint8)[: place + 1]
    depths = _depths(letters, outside=outside[: place + 1], opening=opening[: place + 1])
    names = np.flatnonzero(members[: place + 1] & (depths == 1))
    found = _NAME.search(text[max(0, int(names[-1]) - 200) : int(names[-1])]) if len(names) else None
    return found[1].decode(errors="replace") if found else ""

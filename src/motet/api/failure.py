"""Errors on the wire: `{"error": {"message", "type", "param", "code"}}`, always, with OpenAI's words and status codes.

    MotetError (raised anywhere)        its own status, type and code
    validation (schemas)                400, the first offending field named
    routing (unknown path, method)      404, 405
    anything else                       500; the reason is in the log, not on the wire

After the first byte of a stream the same object goes out as an event; see `stream`.
"""

from collections.abc import Mapping, Sequence

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from motet.errors import (
    BodyTooLargeError,
    MethodNotAllowedError,
    MotetError,
    NotFoundError,
    RequestError,
)


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    error: ErrorBody


INTERNAL = ErrorBody("The server had an error while processing your request.", MotetError.type, code="internal_error")

MAX_WORDS = 2000
"""Characters of a message, or of a field's name, that are sent back: what is wrong may be 32 MB long."""


def error_json(error: Exception) -> bytes:
    """The object a client sees."""
    return msgspec.json.encode(ErrorEnvelope(error_body(error)))


def error_body(error: Exception) -> ErrorBody:
    """Of an error that is not ours a client learns nothing but that it happened."""
    if not isinstance(error, MotetError):
        return INTERNAL
    param = error.param if isinstance(error, RequestError) else None
    return ErrorBody(_encodable(error.message), error.type, None if param is None else _encodable(param), error.code)


def _encodable(text: str) -> str:
    """What a client wrote may be quoted: cut where it is long, and halves of surrogate pairs, which JSON can write and
    UTF-8 cannot, escaped."""
    if len(text) > MAX_WORDS:
        text = f"{text[: MAX_WORDS // 2]} ... {text[-MAX_WORDS // 2 :]}"
    return text.encode(errors="backslashreplace").decode()


def error_response(error: Exception) -> Response:
    headers = {}
    if isinstance(error, MotetError) and error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    status = error.status if isinstance(error, MotetError) else 500
    return Response(error_json(error), status, headers, media_type="application/json")


def add_error_handlers(app: FastAPI) -> None:
    async def on_motet_error(_: Request, error: Exception) -> Response:
        return error_response(error)

    async def on_validation_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # what it is registered for
        return error_response(validation_failure(error.errors()))

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # what it is registered for
        return error_response(http_failure(request, error))

    app.add_exception_handler(MotetError, on_motet_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_exception)


def http_failure(request: Request, error: HTTPException) -> MotetError:
    """What the web framework refuses by itself, in OpenAI's words."""
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return NotFoundError(f"Invalid URL ({where})", code="unknown_url")
    if error.status_code == 405:
        return MethodNotAllowedError(
            f"Not allowed to {request.method} on {request.url.path}. "
            "(HINT: Perhaps you meant to use a different HTTP method?)"
        )
    if error.status_code == 413:
        return BodyTooLargeError(error.detail)
    return RequestError(error.detail)


def body_too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The request body is larger than {max_bytes} bytes, the most this server takes.")


Problem = Mapping[str, object]
"""One entry of pydantic's `errors()`: type, loc, msg, input and ctx."""

_EXPECTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "a boolean",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}

_BOUNDS = {
    "greater_than_equal": ("below_min_value", "below minimum value", ">=", "ge"),
    "greater_than": ("below_min_value", "below minimum value", ">", "gt"),
    "less_than_equal": ("above_max_value", "above maximum value", "<=", "le"),
    "less_than": ("above_max_value", "above maximum value", "<", "lt"),
}

_LENGTHS = {
    "too_short": ("below_min_length", "too short", "minimum", "min_length"),
    "string_too_short": ("below_min_length", "too short", "minimum", "min_length"),
    "too_long": ("above_max_length", "too long", "maximum", "max_length"),
    "string_too_long": ("above_max_length", "too long", "maximum", "max_length"),
}


def validation_failure(problems: Sequence[Problem]) -> RequestError:
    """OpenAI's message, param and code for the first thing that is wrong."""
    problem = problems[0]
    kind, param, value = str(problem["type"]), _param(problem), problem.get("input")
    context = problem.get("ctx")
    bounds = context if isinstance(context, dict) else {}
    if kind == "json_invalid" or param is None:
        return RequestError(
            "We could not parse the JSON body of your request. "
            "(HINT: This likely means you aren't using your HTTP library correctly. "
            "The API expects a JSON object as the payload.)"
        )
    if kind == "missing":
        return RequestError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    if kind == "extra_forbidden":
        return RequestError(f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    if kind in _EXPECTED:
        message = f"Invalid type for '{param}': expected {_EXPECTED[kind]}, but got {_named(value)} instead."
        return RequestError(message, param=param, code="invalid_type")
    if kind in _BOUNDS:
        return _out_of_bounds(kind, param, value, bounds)
    if kind in _LENGTHS:
        return _wrong_length(kind, param, value, bounds)
    if kind == "literal_error":
        message = f"Invalid value: {value!r}. Supported values are: {bounds.get('expected')}."
        return RequestError(message, param=param, code="invalid_value")
    return RequestError(f"Invalid '{param}': {problem.get('msg')}.", param=param, code="invalid_value")


def _out_of_bounds(kind: str, param: str, value: object, bounds: Mapping[str, object]) -> RequestError:
    suffix, what, sign, key = _BOUNDS[kind]
    noun = "integer" if isinstance(value, int) and isinstance(bounds[key], int) else "decimal"
    limit = bounds[key]
    shown = f"{limit:g}" if isinstance(limit, float) else limit
    message = f"Invalid '{param}': {noun} {what}. Expected a value {sign} {shown}, but got {value} instead."
    return RequestError(message, param=param, code=f"{noun}_{suffix}")


def _wrong_length(kind: str, param: str, value: object, bounds: Mapping[str, object]) -> RequestError:
    suffix, what, extreme, key = _LENGTHS[kind]
    noun = "string" if isinstance(value, str) else "array"
    length = len(value) if isinstance(value, str | list) else None
    message = f"Invalid '{param}': {noun} {what}. Expected {extreme} length {bounds[key]}, but got length {length}."
    return RequestError(message, param=param, code=f"{noun}_{suffix}")


def _param(problem: Problem) -> str | None:
    """`messages[0].role` of ("body", "messages", 0, "role"); None when it is the body itself."""
    where = problem["loc"]
    steps = where[1:] if isinstance(where, tuple) else ()
    if not steps:
        return None
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")


def _named(value: object) -> str:
    names = {
        str: "a string",
        bool: "a boolean",
        int: "an integer",
        float: "a decimal",
        list: "an array",
        dict: "an object",
    }
    return names.get(type(value), "null")

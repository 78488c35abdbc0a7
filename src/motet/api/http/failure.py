"""Errors in responses: `{"error": {"message", "type", "param", "code"}}`, with OpenAI's messages and status codes.

    MotetError (raised anywhere)        its own status, type and code
    validation (schemas)                400; the message names the first wrong field
    routing (unknown path, method)      404, 405
    any other exception                 500; the reason is in the log, not in the response

In Anthropic's dialect (`dialect`) the same errors are `{"type": "error", "error": {"type", "message"}, "request_id"}`.
If a request is converted to a chat, an error of the chat names the fields of the request (`renamed`). After the first
byte of a stream the same object is sent as an event (`AnswerWriter.fail`)."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from motet.api.http.dialect import speaks_anthropic
from motet.errors import (
    BodyTooLargeError,
    ContextLengthError,
    MethodNotAllowedError,
    MotetError,
    NotFoundError,
    OverloadedError,
    RequestError,
    TokenNeed,
)


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


INTERNAL = ErrorBody("The server had an error while processing your request.", MotetError.type, code="internal_error")

ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""Anthropic's type of an error by its status. `message_error` has the types of all other errors."""

WORKER_HEADER = "x-motet-worker"
"""Names the worker that generates a response, or that failed before the response started."""
PREFILL_HEADER = "x-motet-prefill-worker"
"""Names the worker that computed the prompt, if it is another one."""
CLIENT_GONE = 499
"""nginx's status for a request whose client has left. It is logged and counted, but never sent."""
HEADERS = {401: {"www-authenticate": 'Bearer realm="Motet"'}, 415: {"accept-encoding": "identity"}}
"""Headers that an error with this status must have (RFC 9110, 15.5.2 and 15.5.16)."""
MAX_MESSAGE_CHARS = 2000
"""Maximum number of characters of a message or a field's name. The wrong value in it can be megabytes long."""


def missing_parameter(param: str) -> RequestError:
    return RequestError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")


def unknown_parameter(param: str) -> RequestError:
    return RequestError(f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")


def invalid_value(param: str, why: str, *others: str) -> RequestError:
    """`why`: the end of a sentence, without the full stop. `others`: fields that it names in quotes and that can have
    other names in the client's request."""
    return RequestError(f"Invalid '{param}': {why}.", param=param, code="invalid_value", others=others)


def above_maximum(param: str, value: int, *, maximum: int, flag: str) -> RequestError:
    """`flag`: the server's setting that determines the maximum."""
    return RequestError(
        f"Invalid '{param}': integer above maximum value. Expected a value <= {maximum}, but got {value} instead. "
        f"The server's {flag} sets the maximum.",
        param=param,
        code="integer_above_max_value",
    )


def invalid_type(param: str, expected: str) -> RequestError:
    return RequestError(f"Invalid type for '{param}': expected {expected}.", param=param, code="invalid_type")


def unsupported_parameter(param: str, why: str) -> RequestError:
    """`why`: the end of a sentence that starts with the parameter, without the full stop."""
    return RequestError(f"Unsupported parameter: '{param}' {why}.", param=param, code="unsupported_parameter")


Names = Sequence[tuple[re.Pattern[str], str]]
"""A pattern for the start of a field's name, and the name of that field in the client's request."""
MakeNames = Callable[[], Names]


def names_table(names: Iterable[tuple[str, str]]) -> Names:
    """`names`: pairs of a regular expression for the start of a name, up to a word's end, and the client's name."""
    return [(re.compile(rf"(?:{pattern})(?!\w)"), client_name) for pattern, client_name in names]


def renamed(error: RequestError, names: Names) -> RequestError:
    """Returns a new error with the client's names of the fields."""
    message = error.message
    for name in error.others if error.param is None else (error.param, *error.others):
        # Quotes can also hold text of the client, so only names of fields that the error lists are replaced.
        named = re.compile(rf"(?:^|(?<=')|(?<=\bfor )){re.escape(name)}(?!\w)")
        message = named.sub(_client_name(name, names).replace("\\", r"\\"), message)
    param = error.param and _client_name(error.param, names)
    return error.reworded(message, param=param, others=tuple(_client_name(name, names) for name in error.others))


def _client_name(name: str, names: Names) -> str:
    for pattern, client_name in names:
        if (found := pattern.match(name)) is not None:
            return found.expand(client_name) + name[found.end() :]
    return name


class FieldError(ValueError):
    """An error of a check in a schema. The check knows its object or field, and pydantic knows the path of both in the
    body: `validation_failure` makes the error that names the complete path."""

    def __init__(self, refusal: Callable[..., RequestError], field: str | int | None, *texts: str) -> None:
        """`refusal`: makes the error from the path and `texts`. `field`: a field of the object; None for the object."""
        super().__init__(texts)
        self._refusal = refusal
        self._inner = () if field is None else (field,)
        self._texts = texts

    def at(self, steps: Sequence[str | int]) -> RequestError:
        return self._refusal(_param((*steps, *self._inner)), *self._texts)


def error_json(error: Exception) -> bytes:
    """Returns the object that a client receives."""
    return msgspec.json.encode({"error": error_body(error)})


def error_body(error: Exception) -> ErrorBody:
    """Returns the error that a client receives. It has no details of an error that is not a MotetError."""
    if not isinstance(error, MotetError):
        return INTERNAL
    param = error.param if isinstance(error, RequestError) else None
    message = error.message if error.client_message is None else error.client_message
    return ErrorBody(_encodable(message), error.type, param and _encodable(param), error.code)


def _encodable(text: str) -> str:
    """Shortens a long message, which can quote the client, and escapes lone surrogates, which are not valid UTF-8."""
    if len(text) > MAX_MESSAGE_CHARS:
        text = f"{text[: MAX_MESSAGE_CHARS // 2]} ... {text[-MAX_MESSAGE_CHARS // 2 :]}"
    return text.encode(errors="backslashreplace").decode()


def message_error(error: Exception, request_id: str) -> dict[str, object]:
    """Returns the object that a client of Anthropic's API receives. Only its message can name the wrong field."""
    status = error.status if isinstance(error, MotetError) else 500
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    kind = OverloadedError.type if isinstance(error, OverloadedError) else kind
    body = error_body(error)
    message, param = body.message, body.param
    if isinstance(error, ContextLengthError) and error.need is not None:
        message = _too_long(error.need)
    elif not (param is None or message.startswith((param, f"Invalid schema for {param}")) or f"'{param}'" in message):
        message = f"{param}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def _too_long(need: TokenNeed) -> str:
    """Returns Anthropic's own message. Clients parse its numbers to request fewer tokens or to shorten the turns."""
    if need.prompt >= need.maximum:
        return f"prompt is too long: {need.prompt} tokens > {need.maximum - 1} maximum"
    needs = f"{need.prompt} + {need.answer} > {need.maximum}"
    advice = "decrease input length or `max_tokens` and try again"
    return f"input length and `max_tokens` exceed context limit: {needs}, {advice}"


class ErrorResponse(Response):
    """An error in the dialect of the route. Stores it in the request's state for the log line of `RequestIds`."""

    def __init__(self, error: Exception) -> None:
        status = error.status if isinstance(error, MotetError) else 500
        headers = dict(HEADERS.get(status, {}))
        if isinstance(error, MotetError) and error.retry_after_s is not None:
            headers["retry-after"] = str(error.retry_after_s)
        if isinstance(error, MotetError) and error.worker:
            headers[WORKER_HEADER] = error.worker
        super().__init__(error_json(error), status, headers, media_type="application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["error"] = self._error
        if speaks_anthropic(scope):
            self.body = msgspec.json.encode(message_error(self._error, scope["state"].get("trace", "")))
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def add_error_handlers(app: FastAPI) -> None:
    async def on_error(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestValidationError):
            error = validation_failure(error.errors())
        elif isinstance(error, HTTPException):
            error = http_failure(request, error)
        response = ErrorResponse(error)
        if isinstance(error, MethodNotAllowedError):  # RFC 9110, 15.5.6
            response.headers["allow"] = ", ".join(sorted(_methods_of(request)))
        return response

    for kind in (MotetError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, on_error)


def http_failure(request: Request, error: HTTPException) -> MotetError:
    """Returns an error of the web framework with OpenAI's message."""
    if error.status_code == 404:
        path = request.url.path
        lacks_v1 = any(getattr(route, "path", None) == f"/v1{path}" for route in request.app.routes)
        hint = " (HINT: the base URL of an OpenAI client ends in /v1.)" if lacks_v1 else ""
        return NotFoundError(f"Invalid URL ({request.method} {path}){hint}", code="unknown_url")
    if error.status_code == 405:
        hint = "(HINT: Perhaps you meant to use a different HTTP method?)"
        return MethodNotAllowedError(f"Not allowed to {request.method} on {request.url.path}. {hint}")
    other: dict[int, type[MotetError]] = {413: BodyTooLargeError, 503: OverloadedError}
    return other.get(error.status_code, RequestError)(error.detail)


def _methods_of(request: Request) -> set[str]:
    """Returns the methods of all routes with the path of a request."""
    routes = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
    methods = {method for route in routes for method in route.methods}
    return methods | {"HEAD"} if "GET" in methods else methods


def body_too_large(max_bytes: int) -> BodyTooLargeError:
    why = f"is larger than {max_bytes} bytes, the maximum of this server (--max-body-bytes)"
    return BodyTooLargeError(f"The request body {why}.")


Problem = Mapping[str, Any]
"""One entry of pydantic's `errors()`: type, loc, msg, input and ctx."""

_EXPECTED = {
    "string_type": "a string",
    "float_type": "a number",
    "bool_type": "a boolean",
    "list_type": "an array",
    **dict.fromkeys(("int_type", "int_from_float"), "an integer"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object"),
}

_BOUNDS = {
    "greater_than_equal": ("below_min_value", "below minimum value", ">=", "ge"),
    "greater_than": ("below_min_value", "below minimum value", ">", "gt"),
    "less_than_equal": ("above_max_value", "above maximum value", "<=", "le"),
    "less_than": ("above_max_value", "above maximum value", "<", "lt"),
}

_LENGTHS = {
    "too_short": ("below_min_length", "too short", "minimum", "min_length"),
    "too_long": ("above_max_length", "too long", "maximum", "max_length"),
}


def schema_failure(error: ValidationError) -> RequestError:
    return validation_failure([{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()])


def validation_failure(problems: Sequence[Problem]) -> RequestError:
    """Returns an error with OpenAI's message, param and code for the first problem."""
    problem = problems[0]
    steps, bounds = problem["loc"][1:], problem.get("ctx") or {}
    if isinstance(field_error := bounds.get("error"), FieldError):
        return field_error.at(steps)
    kind, param, value = problem["type"], _param(steps), problem.get("input")
    if kind == "json_invalid" or not param:
        return RequestError(
            "We could not parse the JSON body of your request. "
            "(HINT: This likely means you aren't using your HTTP library correctly. "
            "The API expects a JSON object as the payload.)"
        )
    if kind == "missing":
        return missing_parameter(param)
    if kind == "extra_forbidden":
        return unknown_parameter(param)
    if kind in _EXPECTED:
        return invalid_type(param, f"{_EXPECTED[kind]}, but got {_NAMES.get(type(value), 'null')} instead")
    if kind in _BOUNDS:
        return _out_of_bounds(kind, param, value=value, bounds=bounds)
    if (length_kind := kind.removeprefix("string_")) in _LENGTHS:
        return _wrong_length(length_kind, param, value=value, bounds=bounds)
    if kind in ("literal_error", "enum"):
        message = f"Invalid value: {value!r}. Supported values are: {bounds.get('expected')}."
        return RequestError(message, param=param, code="invalid_value")
    return invalid_value(param, str(bounds["error"] if kind == "value_error" else problem.get("msg")))


def _out_of_bounds(kind: str, param: str, *, value: object, bounds: Mapping[str, Any]) -> RequestError:
    suffix, what, sign, key = _BOUNDS[kind]
    limit = bounds[key]
    noun = "integer" if isinstance(value, int) and isinstance(limit, int) else "decimal"
    shown = f"{limit:g}" if isinstance(limit, float) else limit
    message = f"Invalid '{param}': {noun} {what}. Expected a value {sign} {shown}, but got {value} instead."
    return RequestError(message, param=param, code=f"{noun}_{suffix}")


def _wrong_length(kind: str, param: str, *, value: object, bounds: Mapping[str, Any]) -> RequestError:
    suffix, what, extreme, key = _LENGTHS[kind]
    noun = "string" if isinstance(value, str) else "object" if isinstance(value, dict) else "array"
    length = len(value) if isinstance(value, Sized) else None
    message = f"Invalid '{param}': {noun} {what}. Expected {extreme} length {bounds[key]}, but got length {length}."
    return RequestError(message, param=param, code=f"{noun}_{suffix}")


def _param(steps: Sequence[str | int]) -> str:
    """Returns `messages[0].role` for ("messages", 0, "role")."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")


_NAMES = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a decimal",
    list: "an array",
    dict: "an object",
}

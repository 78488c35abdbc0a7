"""The exceptions of `motet.errors` for the errors of a server's responses."""

from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Final

import msgspec

from motet import errors
from motet.errors import EngineError, MotetError, OverloadedError, RateLimitedError, RequestError, StartupError

QUOTED_CHARS: Final = 300
"""Maximum number of characters of a body that is quoted because it is not an error of Motet."""
SAMPLING_PREFIX: Final = "sampling_params."
"""Prefix of the names of sampling fields in errors of `/inference/v1/generate`."""


class ServerError(msgspec.Struct, frozen=True):
    """The object `error` in the body of a response."""

    message: str
    type: str = MotetError.type
    param: str | None = None
    code: str | int | None = None


class ErrorResponseBody(msgspec.Struct, frozen=True):
    """The body of a response with an error, or an event of a stream that ends with an error."""

    error: ServerError


def error_of(status: int, body: bytes, *, retry_after: str | None = None) -> MotetError:
    """Returns the exception for a response with an error status. `retry_after`: the value of its header.

    The class is the class of `motet.errors` that has the code of the error, or else its status. Fields of
    `sampling_params` are named without the prefix, as `SamplingParams` names them.

    >>> error = error_of(400, b'{"error": {"message": "Invalid \\'n\\'.", "param": "n", "code": "invalid_value"}}')
    >>> type(error).__name__, error.param, error.code
    ('RequestError', 'n', 'invalid_value')
    """
    try:
        sent = msgspec.json.decode(body, type=ErrorResponseBody).error
    except msgspec.MsgspecError:
        quoted = " ".join(body[: 4 * QUOTED_CHARS].decode(errors="replace").split())[:QUOTED_CHARS]
        sent = ServerError(f"The server responded with status {status}: {quoted}")
    seconds = int(retry_after) if retry_after and retry_after.isdecimal() and len(retry_after) < 6 else None
    return exception_of(sent, status, retry_after_s=seconds)


def exception_of(sent: ServerError, status: int, *, retry_after_s: int | None = None) -> MotetError:
    """Returns the exception for an error that a server has sent."""
    code = None if sent.code is None else str(sent.code)
    kind = _BY_CODE.get(code) if code is not None else None
    if kind is None:
        kind = _BY_STATUS.get(status, RequestError if status < HTTPStatus.INTERNAL_SERVER_ERROR else EngineError)
    error: MotetError
    if issubclass(kind, RequestError):
        param = sent.param and sent.param.removeprefix(SAMPLING_PREFIX)
        error = kind(sent.message.replace(f"'{SAMPLING_PREFIX}", "'"), param=param, code=code)
    else:
        error = kind(sent.message)
        error.code = code or error.code
    error.status, error.type = status, sent.type
    error.retry_after_s = error.retry_after_s if retry_after_s is None else retry_after_s
    return error


def _classes(base: type[MotetError]) -> Iterator[type[MotetError]]:
    """Yields the classes that a response can stand for, the more general ones first."""
    yield base
    for kind in base.__subclasses__():
        if kind not in (StartupError, errors.UpstreamRefusalError):
            yield from _classes(kind)


_BY_CODE: Final[Mapping[str, type[MotetError]]] = {
    kind.code: kind for kind in reversed([*_classes(MotetError)]) if kind.code is not None
}
_BY_STATUS: Final[Mapping[int, type[MotetError]]] = {
    401: errors.UnauthorizedError,
    403: errors.ForbiddenError,
    404: errors.NotFoundError,
    405: errors.MethodNotAllowedError,
    413: errors.BodyTooLargeError,
    415: errors.BodyEncodingError,
    429: RateLimitedError,
    503: OverloadedError,
}

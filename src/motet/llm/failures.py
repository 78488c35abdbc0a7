"""The exceptions of `motet.errors` for the errors of a server's responses."""

from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Final

from motet import errors
from motet.engines.refusals import OpenAIError, error_in, quoted, seconds_in
from motet.errors import EngineError, MotetError, OverloadedError, RateLimitedError, RequestError, StartupError

SAMPLING_PREFIX: Final = "sampling_params."
"""Prefix of the names of sampling fields in errors of `/inference/v1/generate`."""


def error_of(status: int, body: bytes, *, retry_after: str | None = None) -> MotetError:
    """Returns the exception for a response with an error status. `retry_after`: the value of its header.

    The class is the class of `motet.errors` that has the code of the error, or else its status. Fields of
    `sampling_params` are named without the prefix, as `SamplingParams` names them.

    >>> error = error_of(400, b'{"error": {"message": "Invalid \\'n\\'.", "param": "n", "code": "invalid_value"}}')
    >>> type(error).__name__, error.param, error.code
    ('RequestError', 'n', 'invalid_value')
    """
    sent = error_in(body) or OpenAIError()
    message = sent.message or f"The server responded with status {status}: {quoted(body)}"
    code = None if sent.code is None else str(sent.code)
    kind = _BY_CODE.get(code) if code is not None else None
    if kind is None:
        kind = _BY_STATUS.get(status, RequestError if status < HTTPStatus.INTERNAL_SERVER_ERROR else EngineError)
    error: MotetError
    if issubclass(kind, RequestError):
        param = sent.param and sent.param.removeprefix(SAMPLING_PREFIX)
        error = kind(message.replace(f"'{SAMPLING_PREFIX}", "'"), param=param, code=code)
    else:
        error = kind(message)
        error.code = code or error.code
    error.status, error.type = status, sent.type or MotetError.type
    retry_after_s = seconds_in(retry_after)
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

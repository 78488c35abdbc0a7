"""Every error Motet raises on purpose.

    MotetError
    ├── RequestError              400  the client's fault; `param` names the field
    │   ├── ContextLengthError    400  context_length_exceeded
    │   ├── GrammarError          400  a grammar that cannot be compiled or followed
    │   ├── UnauthorizedError     401
    │   ├── ForbiddenError        403
    │   ├── NotFoundError         404
    │   │   ├── ModelNotFoundError     model_not_found
    │   │   └── NoSingleModelError     this server cannot be a worker: it has several models, or none
    │   ├── MethodNotAllowedError 405
    │   ├── BodyTooLargeError     413
    │   ├── RateLimitedError      429
    │   └── UpstreamRefusalError  4xx  another server's refusal, with its own status and message
    ├── OverloadedError           503  try again after `retry_after_s`
    │   └── DrainingError              this server takes no new groups any more
    ├── EngineError               500  the engine failed this group
    │   ├── EngineDiedError       503  the engine's process is gone: the group may be resumed elsewhere
    │   │   ├── EngineSilentError      the engine gives no sign of life
    │   │   ├── WorkerFaultError       a server elsewhere sent what cannot be right; it is left alone for a while
    │   │   └── NoWorkerError          there is no worker that could take the group
    │   ├── WorkerLeavingError    503  the worker is leaving: the group may be resumed elsewhere
    │   ├── OtherServerError      500  a server elsewhere is of another kind than expected
    │   ├── AnswerParserError     500  the text of a choice could not be parsed; the message names the choice
    │   └── EngineClosedError     503  closed by us (shutting down)
    ├── DirectoryError            503  the directory of workers, or a replica, cannot be asked now
    └── StartupError              --   the server cannot start; the command line prints it and exits with `exit_code`
        ├── ConfigError
        │   └── PortTakenError         another program listens there
        ├── ModelLoadError
        ├── UnsupportedModelError
        └── KVMemoryError

A class knows its HTTP status, its code, and if the same group may be tried elsewhere; the API maps it in one place.
A dependency's errors are translated in the file that imports it.
"""

from typing import ClassVar, NamedTuple, Self


class MotetError(Exception):
    """Base of the tree. `message` says what, which value, what is allowed and what to do."""

    status: int = 500
    type: str = "server_error"
    code: str | None = None
    may_retry: ClassVar[bool] = False
    retry_after_s: int | None = None
    """The client gets it as `Retry-After`, if trying again may help."""

    def __init_subclass__(cls, **facts: int | str) -> None:
        """`facts`: the attributes above in which the class differs from its base."""
        for name, value in facts.items():
            setattr(cls, name, value)

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestError(MotetError, status=400, type="invalid_request_error"):
    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, others: tuple[str, ...] = ()
    ) -> None:
        """`others`: fields that the message names beside `param`."""
        super().__init__(message)
        self.param = param
        self.code = code or self.code
        self.others = others

    def reworded(self, message: str, *, param: str | None, others: tuple[str, ...]) -> Self:
        """Returns a new error with these words. The old one may be raised again, for another client."""
        error = type(self).__new__(type(self), message)
        vars(error).update(vars(self), message=message, param=param, others=others)
        return error


class TokenNeed(NamedTuple):
    """The tokens of a request that is too long for the model."""

    prompt: int
    """At least so many."""
    answer: int
    """Asked for; 0 if the request does not say."""
    most: int
    """What the model has room for, both together."""


class ContextLengthError(RequestError, code="context_length_exceeded"):
    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        others: tuple[str, ...] = (),
        need: TokenNeed | None = None,
    ) -> None:
        """`need`: None if only an engine knows the numbers."""
        super().__init__(message, param=param, code=code, others=others)
        self.need = need


class GrammarError(RequestError, code="invalid_grammar"):
    """The API sets `param`, since it knows the field."""


class UnauthorizedError(RequestError, status=401, type="authentication_error", code="invalid_api_key"): ...


class ForbiddenError(RequestError, status=403, type="permission_error"): ...


class NotFoundError(RequestError, status=404, type="not_found_error"): ...


class ModelNotFoundError(NotFoundError, code="model_not_found"): ...


class NoSingleModelError(NotFoundError, code="no_single_model"): ...


class MethodNotAllowedError(RequestError, status=405, code="method_not_allowed"): ...


class BodyTooLargeError(RequestError, status=413, code="request_too_large"): ...


class RateLimitedError(
    RequestError, status=429, type="rate_limit_error", code="rate_limit_exceeded", retry_after_s=1
): ...


class UpstreamRefusalError(RequestError):
    """A text upstream refuses a client's request."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        type: str,
        param: str | None,
        code: str | None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status
        self.type = type
        self.retry_after_s = retry_after_s

    def of(self, part: str) -> "UpstreamRefusalError":
        """Returns the same error for a part of what the client wants."""
        return self.reworded(f"{part}: {self.message}", param=self.param, others=self.others)


class OverloadedError(MotetError, status=503, type="overloaded_error", code="overloaded", may_retry=True):
    """No room for the group now. Raised before the first byte of an answer, never after."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DrainingError(OverloadedError, code="draining"): ...


class EngineError(MotetError, code="engine_error"): ...


class EngineDiedError(EngineError, status=503, code="engine_died", may_retry=True): ...


class EngineSilentError(EngineDiedError, code="engine_silent"): ...


class WorkerFaultError(EngineDiedError, code="worker_fault"): ...


class NoWorkerError(EngineDiedError, code="no_worker", retry_after_s=2): ...


class WorkerLeavingError(EngineError, status=503, code="worker_leaving", may_retry=True): ...


class OtherServerError(EngineError, code="other_server"): ...


class AnswerParserError(EngineError, code="parser_error"): ...


class EngineClosedError(EngineError, status=503, code="engine_closed"): ...


class DirectoryError(MotetError, status=503): ...


class StartupError(MotetError):
    exit_code: ClassVar[int] = 1


class ConfigError(StartupError, exit_code=2): ...


class PortTakenError(ConfigError):
    """Another program listens on the port; it may have taken it a moment ago."""


class ModelLoadError(StartupError, exit_code=3): ...


class UnsupportedModelError(StartupError, exit_code=4): ...


class KVMemoryError(StartupError, exit_code=5): ...

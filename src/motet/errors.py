"""Every error that Motet raises on purpose.

    MotetError
    ├── RequestError              400  an error of the client; `param` names the field
    │   ├── ContextLengthError    400  context_length_exceeded
    │   ├── GrammarError          400  a grammar that cannot be compiled or followed
    │   ├── UnauthorizedError     401
    │   ├── ForbiddenError        403
    │   ├── NotFoundError         404
    │   │   ├── ModelNotFoundError     model_not_found
    │   │   └── NoSingleModelError     this server cannot be a worker: it does not have exactly one model
    │   ├── MethodNotAllowedError 405
    │   ├── BodyTooLargeError     413
    │   ├── BodyEncodingError     415  a compressed body
    │   ├── RateLimitedError      429
    │   └── UpstreamRefusalError  4xx  refusal of a text upstream, with its own status and message
    ├── OverloadedError           503  no capacity; the client can retry after `retry_after_s`
    │   ├── DrainingError              this server takes no new groups
    │   └── PausedError                a trainer has paused this server
    ├── EngineError               500  the engine failed this group
    │   ├── EngineDiedError       503  the engine process is gone: the group can continue on another worker
    │   │   ├── EngineSilentError      the engine sends no heartbeats
    │   │   └── WorkerFaultError       a remote server sent an impossible answer; it gets no groups for a while
    │   ├── NoWorkerError         503  there is no worker that could take the group; the client can retry
    │   ├── WorkerLeavingError    503  the worker is leaving: the group can continue on another worker
    │   ├── OtherServerError      500  a remote server is of another kind than expected
    │   ├── AnswerParserError     500  the text of a choice could not be parsed; the message names the choice
    │   └── EngineClosedError     503  this server closed the engine: it is shutting down
    ├── DirectoryError            503  the directory of workers, or a replica, does not answer
    ├── BatchStoppedError         --   a batch cannot continue; its results so far are in the output file
    └── StartupError              --   the server cannot start; the command line prints it and exits with `exit_code`
        ├── ConfigError
        │   └── PortTakenError         another program listens on the port
        ├── ModelLoadError
        ├── UnsupportedModelError
        └── KVMemoryError

Each class declares its HTTP status, its code, and whether the same group may be retried elsewhere; the API maps errors
to responses in one place (`api.http.failure`). The file that imports a dependency translates the dependency's errors.
"""

from typing import ClassVar, NamedTuple, Self


class MotetError(Exception):
    """Base of the tree. `message` says what happened, which value caused it, what is allowed and what to do."""

    status: int = 500
    type: str = "server_error"
    code: str | None = None
    may_retry: ClassVar[bool] = False
    retry_after_s: int | None = None
    """Value of the `Retry-After` header; None if a retry cannot help."""
    worker: str = ""
    """Id of the worker that failed or refused the group. Empty if no worker did, or if it is not known."""
    client_message: str | None = None
    """Message for clients if `message` is for the log only, since it can have the addresses of workers."""
    remote_message: ClassVar[str] = "A worker failed to answer the request. The log of the server has the reason."
    """`client_message` of an error of a worker on another server."""

    def __init_subclass__(cls, **facts: int | str) -> None:
        """Sets `facts`, the attributes above in which the class differs from its base."""
        for name, value in facts.items():
            setattr(cls, name, value)

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def of_worker(self, worker: str, *, remote: bool) -> Self:
        """Returns a copy that names the worker. `remote`: True if the worker is on another server. The original can be
        raised again, for another group."""
        error = type(self).__new__(type(self), *self.args)
        vars(error).update(vars(self), worker=worker)
        if remote and error.client_message is None:
            error.client_message = self.remote_message
        error.__cause__ = self.__cause__
        return error


class RequestError(MotetError, status=400, type="invalid_request_error"):
    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, others: tuple[str, ...] = ()
    ) -> None:
        """`others` lists the fields that the message names in addition to `param`."""
        super().__init__(message)
        self.param = param
        self.code = code or self.code
        self.others = others

    def reworded(self, message: str, *, param: str | None, others: tuple[str, ...]) -> Self:
        """Returns a copy with another message. The original can be raised again, for another client."""
        error = type(self).__new__(type(self), message)
        vars(error).update(vars(self), message=message, param=param, others=others)
        return error

    def of_worker(self, worker: str, *, remote: bool) -> Self:
        """Returns the error unchanged: the request is wrong, and not the worker."""
        return self


class TokenNeed(NamedTuple):
    """The tokens of a request that is too long for the model."""

    prompt: int
    """Number of prompt tokens, or a lower bound of it."""
    answer: int
    """Number of output tokens requested; 0 if the request does not say."""
    maximum: int
    """Maximum of the model for both together."""


class ContextLengthError(RequestError, code="context_length_exceeded"):
    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, need: TokenNeed | None = None
    ) -> None:
        """`need` is None if only an engine knows the numbers."""
        super().__init__(message, param=param, code=code)
        self.need = need


class GrammarError(RequestError, code="invalid_grammar"):
    """A grammar that cannot be compiled or followed. The API sets `param`, since only it knows the field."""


class UnauthorizedError(RequestError, status=401, type="authentication_error", code="invalid_api_key"): ...


class ForbiddenError(RequestError, status=403, type="permission_error"): ...


class NotFoundError(RequestError, status=404, type="not_found_error"): ...


class ModelNotFoundError(NotFoundError, code="model_not_found"): ...


class NoSingleModelError(NotFoundError, code="no_single_model"): ...


class MethodNotAllowedError(RequestError, status=405, code="method_not_allowed"): ...


class BodyTooLargeError(RequestError, status=413, code="request_too_large"): ...


class BodyEncodingError(RequestError, status=415, code="unsupported_content_encoding"): ...


class RateLimitedError(
    RequestError, status=429, type="rate_limit_error", code="rate_limit_exceeded", retry_after_s=1
): ...


class UpstreamRefusalError(RequestError):
    """The refusal of a client's request by a text upstream."""

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
        """Returns the same error with `part`, a part of the client's request, named in its message."""
        return self.reworded(f"{part}: {self.message}", param=self.param, others=self.others)


class OverloadedError(
    MotetError,
    status=503,
    type="overloaded_error",
    code="overloaded",
    may_retry=True,
    remote_message="No worker has the capacity for the request. Try again later.",
):
    """The server has no capacity for the group now. Raised only before the first byte of an answer."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ModelGoneError(OverloadedError, remote_message="The worker no longer has the model. Try again later."):
    """A worker had the model at its last report. Another worker can still have it."""


class DrainingError(OverloadedError, code="draining"): ...


class PausedError(OverloadedError, code="paused"): ...


class EngineError(MotetError, code="engine_error"): ...


class EngineDiedError(
    EngineError,
    status=503,
    code="engine_died",
    may_retry=True,
    remote_message="The worker with the request was lost, and no other worker could continue it. Try again.",
): ...


class EngineSilentError(EngineDiedError, code="engine_silent"): ...


class WorkerFaultError(EngineDiedError, code="worker_fault"): ...


class NoWorkerError(EngineError, status=503, code="no_worker", may_retry=True, retry_after_s=2): ...


class WorkerLeavingError(
    EngineError,
    status=503,
    code="worker_leaving",
    may_retry=True,
    remote_message="The worker with the request left, and no other worker could continue it. Try again.",
): ...


class OtherServerError(EngineError, code="other_server"): ...


class AnswerParserError(EngineError, code="parser_error"): ...


class EngineClosedError(EngineError, status=503, code="engine_closed", remote_message="The server is closing."):
    def of_worker(self, worker: str, *, remote: bool) -> Self:
        """Returns a copy without the worker, which has not failed."""
        return super().of_worker("", remote=remote)


class DirectoryError(MotetError, status=503): ...


class BatchStoppedError(MotetError): ...


class StartupError(MotetError):
    exit_code: ClassVar[int] = 1


class ConfigError(StartupError, exit_code=2): ...


class PortTakenError(ConfigError):
    """Another program listens on the port. It can have taken the port just after a check that the port is free."""


class ModelLoadError(StartupError, exit_code=3): ...


class UnsupportedModelError(StartupError, exit_code=4): ...


class KVMemoryError(StartupError, exit_code=5): ...

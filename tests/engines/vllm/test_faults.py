"""vLLM's refusals, in the bodies it writes, as errors of ours."""

import pytest

from motet.engines.refusal import Refusal
from motet.engines.vllm.faults import refused
from motet.errors import (
    ContextLengthError,
    EngineDiedError,
    EngineError,
    ModelNotFoundError,
    MotetError,
    OtherServerError,
    OverloadedError,
    RequestError,
)


def error_of(status: int, body: str = "", *, retry_after: str = "") -> MotetError:
    return refused(Refusal(status, "Phrase", body.encode(), retry_after), "the server")


def body(message: str, kind: str = "BadRequestError", *, param: str | None = None, code: int = 400) -> str:
    quoted = "null" if param is None else f'"{param}"'
    return f'{{"error":{{"message":"{message}","type":"{kind}","param":{quoted},"code":{code}}}}}'


@pytest.mark.parametrize(("told", "ours"), [("top_p", "top_p"), ("body.prompt", "prompt"), (None, None)])
def test_a_request_that_is_refused_is_the_clients(told: str | None, ours: str | None) -> None:
    error = error_of(400, body("no", param=told))
    assert isinstance(error, RequestError)
    assert (type(error), error.message, error.param) == (RequestError, "The engine refused the request: no", ours)


def test_a_prompt_that_is_too_long_is_told_as_such() -> None:
    error = error_of(400, body("maximum context length is 10", param="input_tokens"))
    assert (type(error), error.code) == (ContextLengthError, "context_length_exceeded")


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (404, body("The model `x` does not exist.", "NotFoundError", code=404), ModelNotFoundError),
        (404, body("Not Found", "Not Found", code=404), OtherServerError),
        (404, '{"detail":"Not Found"}', OtherServerError),
        (405, "", OtherServerError),
        (501, body("no completions", "NotImplementedError", code=501), OtherServerError),
        (401, '{"error":"Unauthorized"}', EngineError),
        (403, body("no", "Forbidden", code=403), EngineError),
        (409, body("no", "Conflict", code=409), EngineError),
        (429, "", OverloadedError),
        (503, body("busy", "Service Unavailable", code=503), OverloadedError),
        (503, '{"error":"The model is currently scaling."}', OverloadedError),
        (503, "", EngineDiedError),
        (502, "<html>", EngineDiedError),
        (500, body("broke", "InternalServerError", code=500), EngineError),
        (302, "", EngineError),
        (400, "<html>", EngineError),
    ],
)
def test_each_refusal_has_its_error(status: int, text: str, kind: type[MotetError]) -> None:
    assert type(error_of(status, text)) is kind


def test_a_refusal_is_quoted_with_who_said_it_and_what_to_do() -> None:
    assert error_of(401, '{"error":"Unauthorized"}').message == (
        "the server answered 401: Unauthorized. Give the gateway a key that this server knows."
    )
    assert error_of(502).message == "the server answered 502: Phrase"


def test_a_busy_server_says_when_to_come_again() -> None:
    assert error_of(503, body("busy"), retry_after="7").retry_after_s == 7

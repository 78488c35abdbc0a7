"""What the responses of servers mean for a request, and the errors in their bodies."""

from collections.abc import Iterator
from http import HTTPStatus

import msgspec
import pytest

from motet.api.http.failure import error_json
from motet.engines.refusals import UNAVAILABLE, OpenAIError, ReplyVerdict, error_in, seconds_in, verdict_on
from motet.errors import DirectoryError, MotetError, OverloadedError

COMPLETED, FAILED, UNAUTHORIZED = ReplyVerdict.COMPLETED, ReplyVerdict.FAILED, ReplyVerdict.UNAUTHORIZED
BUSY, AWAY, BROKEN = ReplyVerdict.BUSY, ReplyVerdict.AWAY, ReplyVerdict.BROKEN


@pytest.mark.parametrize(
    ("status", "code", "verdict", "of_motet"),
    [
        (200, None, COMPLETED, COMPLETED),
        (302, None, FAILED, FAILED),
        (400, None, FAILED, FAILED),
        (401, None, UNAUTHORIZED, UNAUTHORIZED),
        (408, None, BROKEN, FAILED),
        (429, "a_code_of_another_server", BUSY, BUSY),
        (500, "engine_error", BROKEN, FAILED),
        (501, None, FAILED, FAILED),
        (502, None, BROKEN, FAILED),
        (503, None, BUSY, BUSY),
        (503, 503, BUSY, BUSY),
        (503, "paused", BUSY, BUSY),
        (503, "draining", AWAY, AWAY),
        (503, "worker_leaving", BROKEN, BROKEN),
        (504, None, BROKEN, FAILED),
    ],
)
def test_a_status_and_a_code_say_if_a_request_is_sent_again(
    status: int, code: str | int | None, verdict: ReplyVerdict, of_motet: ReplyVerdict
) -> None:
    body = msgspec.json.encode({"error": {"message": "no", "code": code}})
    assert verdict_on(status, body, repeat_faults=True) is verdict
    assert verdict_on(status, body, repeat_faults=False) is of_motet


def test_every_error_of_an_unavailable_server_is_in_the_table_or_a_refusal_because_of_load() -> None:
    def classes(base: type[MotetError]) -> Iterator[type[MotetError]]:
        yield base
        for kind in base.__subclasses__():
            yield from classes(kind)

    unavailable = [kind for kind in classes(MotetError) if kind.status == HTTPStatus.SERVICE_UNAVAILABLE]
    for kind in unavailable:
        is_busy = verdict_on(kind.status, error_json(kind("no")), repeat_faults=False) is BUSY
        assert is_busy is (issubclass(kind, OverloadedError | DirectoryError) and kind.code != "draining"), kind
    assert UNAVAILABLE.keys() <= {kind.code for kind in unavailable}


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b'{"error":{"message":"no","code":7,"other":[]}}', OpenAIError("no", code=7)),
        (b'{"error":"no"}', OpenAIError("no")),
        (b'{"error":null}', None),
        (b"<html>", None),
        (b"[" * 10**5, None),
        (b'{"error":{"message":"\xff"}}', None),
    ],
)
def test_an_error_is_read_from_any_body(body: bytes, error: OpenAIError | None) -> None:
    assert error_in(body) == error


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7), ("9" * 5000, None), ("-1", None), ("\u0663", None), ("Wed, 21 Oct", None), (None, None)],
)
def test_only_a_number_of_seconds_is_a_time_to_wait(header: str | None, seconds: int | None) -> None:
    assert seconds_in(header) == seconds

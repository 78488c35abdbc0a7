"""A comparison of errors names the request, the fields that differ, and the body."""

import httpx
import pytest

from tests.error_response import assert_error

REQUEST = httpx.Request("POST", "http://server/v1/completions")
ERROR = {"message": "Too many.", "type": "invalid_request_error", "param": "n", "code": None}
REFUSED = httpx.Response(400, json={"error": ERROR}, headers={"retry-after": "2"}, request=REQUEST)


def test_only_the_given_fields_are_compared() -> None:
    assert_error(REFUSED, status=400)
    assert_error(REFUSED, status=400, param="n", code=None)
    assert_error(REFUSED, status=400, type="invalid_request_error", message="Too many.", retry_after="2")


def test_a_difference_is_shown_with_the_request_and_the_body() -> None:
    with pytest.raises(AssertionError) as raised:
        assert_error(REFUSED, status=503, param="n", code="overloaded")
    lines = str(raised.value).splitlines()
    assert lines[:3] == [
        "POST http://server/v1/completions",
        "expected status=503, param='n', code='overloaded'",
        "received status=400, param='n', code=None",
    ]
    assert "Too many." in lines[3]


@pytest.mark.parametrize("body", ["hello", "[]", "{}", '{"error": "no"}', '{"error": {}}'])
def test_a_field_that_is_absent_is_not_none(body: str) -> None:
    with pytest.raises(AssertionError, match="received status=400\n"):
        assert_error(httpx.Response(400, text=body, request=REQUEST), status=400, code=None)

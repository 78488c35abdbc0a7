"""Compares the error in an HTTP response with expected values, field by field."""

from typing import Any, TypedDict, Unpack

import httpx


class ErrorFields(TypedDict, total=False):
    """Fields of the body's `error` object, and the Retry-After header."""

    type: str
    code: str | None
    param: str | None
    message: str
    retry_after: str


def assert_error(response: httpx.Response, *, status: int, **expected: Unpack[ErrorFields]) -> None:
    """Asserts that a response has this status and an error with the expected fields. Other fields are not compared."""
    __tracebackhide__ = True
    fields = error_fields(response)
    found = {"status": response.status_code, **{name: fields[name] for name in expected if name in fields}}
    assert found == {"status": status, **expected}, (
        f"{response.request.method} {response.request.url}\n"
        f"expected {shown({'status': status, **expected})}\n"
        f"received {shown(found)}\n"
        f"{response.text[:2000]}"
    )


def error_fields(response: httpx.Response) -> dict[str, Any]:
    """Returns the fields of a response's error. If the body is not an error, only the header's field is set."""
    headers: dict[str, Any] = (
        {"retry_after": response.headers["retry-after"]} if "retry-after" in response.headers else {}
    )
    try:
        return {**response.json()["error"], **headers}
    except (ValueError, KeyError, TypeError):
        return headers


def shown(fields: dict[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())

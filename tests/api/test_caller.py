"""The client's ids go along with its groups, to the engine and from there to other servers."""

import logging

import pytest

from tests.api.serving import Served

pytestmark = pytest.mark.anyio


async def session_of(served: Served, *headers: tuple[str, str]) -> str:
    await served.http.post("/v1/completions", json={"prompt": "hi"}, headers=list(headers))
    return served.engine.requests[-1].session_id


@pytest.mark.parametrize("name", ["x-session-id", "X-Session-ID", "x_session_id", "X_SESSION_ID", "X-Session_Id"])
async def test_session_id_counts_in_any_spelling(served: Served, name: str) -> None:
    assert await session_of(served, (name, "s-1/a")) == "s-1/a"


async def test_what_is_no_session_id_counts_as_not_given(served: Served) -> None:
    assert await session_of(served) == ""
    assert await session_of(served, ("x-session-id", "two words")) == ""
    assert await session_of(served, ("x-session-id", "s" * 201)) == ""
    assert await session_of(served, ("x-session-id", "s" * 200)) == "s" * 200
    assert await session_of(served, ("x-session-id", "two words"), ("x_session_id", "one")) == "one"
    assert await session_of(served, ("y-session-id", "other")) == ""


async def test_every_group_carries_the_requests_id(served: Served) -> None:
    headers = {"x-request-id": "mine"}
    await served.http.post("/v1/completions", json={"prompt": ["x", "y"]}, headers=headers)
    await served.http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}, headers=headers
    )
    assert [request.trace for request in served.engine.requests] == ["mine"] * 3


async def test_without_one_the_id_in_the_answer_goes_along(served: Served) -> None:
    response = await served.complete()
    assert served.engine.requests[0].trace == response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("headers", "named", "trace"),
    [
        ({"x-request-id": "header"}, "body", "header"),
        ({}, "body", "body"),
        ({"x-request-id": "two words"}, "body", "body"),
    ],
)
async def test_on_generate_the_bodys_id_is_second_to_the_headers(
    served: Served, caplog: pytest.LogCaptureFixture, headers: dict[str, str], named: str, trace: str
) -> None:
    caplog.set_level(logging.INFO, logger="motet.api")
    body = {"token_ids": [5], "sampling_params": {}, "request_id": named}
    response = await served.http.post("/inference/v1/generate", json=body, headers=headers)
    assert response.json()["request_id"] == named
    assert served.engine.requests[0].trace == trace
    assert [vars(record)["fields"]["request_id"] for record in caplog.records if record.message == "group ended"] == [
        trace
    ]


async def test_a_name_that_fits_no_header_does_not_go_along(served: Served) -> None:
    """It would break the call to the next server, and the log line."""
    body = {"token_ids": [5], "sampling_params": {}, "request_id": "two\nlines"}
    response = await served.http.post("/inference/v1/generate", json=body)
    assert response.json()["request_id"] == "two\nlines"
    assert served.engine.requests[0].trace == response.headers["x-request-id"]

"""Each group has one log line and counts once in the metrics, however it ends. The client's ids are passed on with
it."""

import logging
import re

import pytest

from motet.errors import EngineError
from tests.api.serving import ROUTES, Served, Serving, WatchedEngine, every_route, group_lines
from tests.error_response import assert_error
from tests.tiny_tokenizer import fake_answer

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="motet.api")


@pytest.mark.slow
async def test_a_group_is_logged_once_with_the_clients_request_id(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"prompt": ["x", "yy"], "n": 3}
    await served.http.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
    first, second = group_lines(caplog)
    assert (first["request_id"], second["request_id"]) == ("mine", "mine")
    assert first["group"] != second["group"]
    assert [(line["model"], line["adapter"], line["worker"]) for line in (first, second)] == 2 * [
        ("tiny", None, "engine-0")
    ]
    assert (first["status"], first["n"], first["finished"]) == (200, 3, 3)
    assert (first["prompt_tokens"], second["prompt_tokens"]) == (1, 2)
    assert first["completion_tokens"] == 3 * len(fake_answer("hello 0"))
    assert first["total_s"] >= first["last_choice_first_token_s"] >= first["first_token_s"] >= 0


async def test_a_failed_group_is_logged_with_its_status(serve: Serving, caplog: pytest.LogCaptureFixture) -> None:
    served = await serve(engine=WatchedEngine(fail_after={1: EngineError("broke")}))
    await served.complete(stream=True)  # after the first byte: the client saw a 200
    (line,) = group_lines(caplog)
    assert (line["status"], line["finished"], line["completion_tokens"]) == (500, 0, 1)


async def test_a_scrape_shows_the_figures_of_ended_groups(served: Served) -> None:
    await served.chat(n=4)
    text = await served.metrics()
    assert 'motet:request_success_total{finished_reason="stop",model_name="tiny"} 4.0' in text
    assert 'motet:groups_total{model_name="tiny",status="200"} 1.0' in text
    assert 'motet:time_to_first_token_last_choice_seconds_count{model_name="tiny"} 1.0' in text
    assert 'motet:generation_tokens_total{model_name="tiny",role="both",worker="engine-0"} 16.0' in text
    assert 'handler="/v1/chat/completions",method="POST",status="200"' in text


async def test_unknown_routes_are_counted_together(served: Served) -> None:
    for path in ("/a", "/b"):
        await served.http.get(path)
    text = await served.metrics()
    assert 'motet:http_requests_total{handler="none",method="GET",status="404"} 2.0' in text


async def session_of(served: Served, *headers: tuple[str, str]) -> str:
    await served.http.post("/v1/completions", json={"prompt": "hi"}, headers=list(headers))
    return served.engine.requests[-1].session_id


@pytest.mark.parametrize("name", ["x-session-id", "X-Session-ID", "x_session_id", "X_SESSION_ID", "X-Session_Id"])
async def test_session_id_counts_in_any_spelling(served: Served, name: str) -> None:
    assert await session_of(served, (name, "s-1/a")) == "s-1/a"


async def test_an_invalid_session_id_counts_as_not_given(served: Served) -> None:
    assert await session_of(served) == ""
    assert await session_of(served, ("x-session-id", "two words")) == ""
    assert await session_of(served, ("x-session-id", "s" * 201)) == ""
    assert await session_of(served, ("x-session-id", "s" * 200)) == "s" * 200
    assert await session_of(served, ("x-session-id", "two words"), ("x_session_id", "one")) == "one"
    assert await session_of(served, ("y-session-id", "other")) == ""


async def test_sessions_of_other_clients_and_of_the_operator_s_headers_are_read(serve: Serving) -> None:
    served = await serve(session_headers=("X-Correlation-ID",))
    names = ("x-session-id", "x-correlation-id", "x-dynamo-session-id", "x-claude-code-session-id", "session_id")
    headers = [(name, name) for name in reversed(names)]
    for name in names:  # each takes precedence over the next ones
        assert await session_of(served, *headers) == name
        headers.pop()


async def test_every_group_carries_the_request_s_id(served: Served) -> None:
    headers = {"x-request-id": "mine"}
    await served.http.post("/v1/completions", json={"prompt": ["x", "y"]}, headers=headers)
    await served.http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}, headers=headers
    )
    assert [request.trace for request in served.engine.requests] == ["mine"] * 3


@every_route
async def test_a_client_s_id_is_a_part_of_the_answer_s(served: Served, path: str) -> None:
    """Clients of vLLM find a request by this in the logs. Unlike there, ids are unique if a client repeats its own."""
    headers = {"x-request-id": "order-4711_a.b:c~"}
    answers = [(await served.http.post(path, json=ROUTES[path], headers=headers)).json() for _ in range(2)]
    ids = [answer.get("id") or answer["request_id"] for answer in answers]
    assert len(set(ids)) == 2
    assert all("-order-4711_a.b:c~-" in id for id in ids)
    assert ids == [request.request_id for request in served.engine.requests]


@pytest.mark.parametrize("given", ["a/b", "a?b", "a%2f", "../x", "x" * 129, "ä", ""])
async def test_an_id_that_cannot_be_in_the_path_of_a_group_is_no_part_of_it(served: Served, given: str) -> None:
    headers = {b"x-request-id": given.encode()}
    answer = await served.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert re.fullmatch("cmpl-[0-9a-f]{32}", answer.json()["id"])


async def test_a_group_is_found_by_an_id_with_a_client_s_own(served: Served) -> None:
    body = {"prompt": "x", "keep_s": 60}
    answer = await served.http.post("/v1/completions", json=body, headers={"x-request-id": "y" * 128})
    group = await served.http.get(f"/v1/groups/{answer.json()['id']}")
    assert (group.status_code, len(group.json()["id"])) == (200, len("cmpl--") + 128 + 32)


async def test_without_a_client_s_id_the_id_in_the_answer_is_passed_on(served: Served) -> None:
    assert (await served.complete()).headers["x-request-id"] == served.engine.requests[0].trace


@pytest.mark.parametrize(
    ("headers", "named", "trace"),
    [
        ({"x-request-id": "header"}, "body", "header"),
        ({}, "body", "body"),
        ({"x-request-id": "two words"}, "body", "body"),
    ],
)
async def test_on_generate_the_header_s_id_wins_over_the_body_s(
    served: Served, caplog: pytest.LogCaptureFixture, headers: dict[str, str], named: str, trace: str
) -> None:
    body = {"token_ids": [5], "sampling_params": {}, "request_id": named}
    assert (await served.http.post("/inference/v1/generate", json=body, headers=headers)).json()["request_id"] == named
    assert served.engine.requests[0].trace == trace
    assert [line["request_id"] for line in group_lines(caplog)] == [trace]


async def test_an_id_that_fits_no_header_is_not_passed_on(served: Served) -> None:
    """Other characters would break the request to the next server, and the log line."""
    body = {"token_ids": [5], "sampling_params": {}, "request_id": "two\nlines"}
    response = await served.http.post("/inference/v1/generate", json=body)
    assert response.json()["request_id"] == "two\nlines"
    assert served.engine.requests[0].trace == response.headers["x-request-id"]


@pytest.mark.parametrize(("given", "known"), [("s-1", "s-1"), (7, "7"), (0, "0"), (-1, ""), (None, "")])
async def test_a_session_in_the_body_counts_as_one_in_the_header(served: Served, given: object, known: str) -> None:
    """LMDeploy's clients send the session in the body; -1 means none."""
    generate = {"token_ids": [5], "sampling_params": {}, "session_id": given}
    for answer in (
        await served.chat(session_id=given),
        await served.complete(session_id=given),
        await served.http.post("/v1/responses", json={"input": "hi", "session_id": given}),
        await served.http.post("/inference/v1/generate", json=generate),
    ):
        assert answer.status_code == 200, answer.text
        assert served.engine.requests[-1].session_id == known


async def test_a_session_in_the_header_wins(served: Served) -> None:
    body = {"prompt": "hi", "session_id": "body"}
    await served.http.post("/v1/completions", json=body, headers={"x-session-id": "header"})
    assert served.engine.requests[-1].session_id == "header"


async def test_a_session_in_the_body_that_cannot_be_one_is_refused(served: Served) -> None:
    for wrong in ("two words", "s" * 201, 1.5, ["s"]):
        assert_error(await served.chat(session_id=wrong), status=400, param="session_id")

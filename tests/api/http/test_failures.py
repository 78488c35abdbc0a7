"""Errors that do not concern a field: routes, keys, sizes, overload, ids, browsers."""

import asyncio
import logging

import openai
import pytest
import uvicorn
from uvicorn.lifespan.on import LifespanOn

from motet.api.http.request_ids import RefusalLog
from motet.errors import EngineDiedError
from tests.api.serving import MODEL, Served, Serving, WatchedEngine
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio

KEYS = ("first", "sécond")


async def test_unknown_route_has_an_error_body(served: Served) -> None:
    response = await served.http.post("/v1/unheard/of")
    assert response.status_code == 404
    assert response.json() == {
        "error": {
            "message": "Invalid URL (POST /v1/unheard/of)",
            "type": "not_found_error",
            "param": None,
            "code": "unknown_url",
        }
    }


async def test_an_unknown_route_that_lacks_v1_has_a_hint(served: Served) -> None:
    """A client whose base URL lacks /v1 only got "Invalid URL"."""
    response = await served.http.post("/messages")
    assert_error(response, status=404, code="unknown_url")
    assert response.json()["error"]["message"].endswith("the base URL of an OpenAI client ends in /v1.)")


async def test_wrong_method_has_an_error_body(served: Served) -> None:
    response = await served.http.get("/v1/chat/completions")
    assert response.status_code == 405
    assert response.json()["error"]["message"].startswith("Not allowed to GET on /v1/chat/completions.")


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/status", "/unheard/of"])
async def test_with_keys_a_route_needs_one_of_them(serve: Serving, path: str) -> None:
    served = await serve(api_keys=KEYS)
    missing = await served.http.get(path)
    assert_error(missing, status=401, code="invalid_api_key")
    assert "You didn't provide an API key" in missing.json()["error"]["message"]
    for wrong in ("Bearer other", "Bearer firs", "Bearer first2", "Basic first", "Bearer", "first"):
        assert (await served.http.get(path, headers={"authorization": wrong})).status_code == 401
    for right in ("Bearer first", "bearer first", "Bearer sécond"):
        assert (await served.http.get(path, headers={b"authorization": right.encode()})).status_code != 401


async def test_wrong_key_is_an_authentication_error_of_the_client(serve: Serving) -> None:
    served = await serve(api_keys=KEYS)
    with pytest.raises(openai.AuthenticationError):
        await served.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    assert (await served.openai.with_options(api_key="first").models.list()).data[0].id == MODEL


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/health/ready", "/version"])
async def test_health_ready_and_version_stay_open(serve: Serving, path: str) -> None:
    served = await serve(api_keys=KEYS)
    assert (await served.http.get(path)).status_code == 200


async def test_announced_body_over_the_limit_is_refused(serve: Serving) -> None:
    served = await serve(max_body_bytes=200)
    assert (await served.complete("x")).status_code == 200
    assert_error(await served.complete("x" * 300), status=413, code="request_too_large")


async def test_unannounced_body_is_refused_when_the_limit_is_passed(serve: Serving) -> None:
    served = await serve(max_body_bytes=200)
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
    writer.write(b"80\r\n" + b"x" * 128 + b"\r\n")
    writer.write(b"80\r\n" + b"x" * 128 + b"\r\n")  # the answer comes before the end of the request
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    assert b"request_too_large" in await reader.readuntil(b"}}")
    writer.close()
    await writer.wait_closed()


async def test_request_id_of_the_client_is_returned(served: Served) -> None:
    assert (await served.http.get("/health", headers={"x-request-id": "abc-123"})).headers["x-request-id"] == "abc-123"


async def test_every_answer_has_a_request_id_errors_too(served: Served) -> None:
    first, second = (await served.http.get("/unheard/of")), (await served.chat(stream=True))
    assert first.headers["x-request-id"] != second.headers["x-request-id"]


@pytest.mark.parametrize("odd", ["", "two words", "x" * 201])
async def test_odd_request_ids_are_replaced(served: Served, odd: str) -> None:
    assert (await served.http.get("/health", headers={"x-request-id": odd})).headers["x-request-id"] not in ("", odd)


async def test_same_request_id_twice_at_once_is_two_groups(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(gated=True))
    headers = {"x-request-id": "same"}
    body = {"prompt": "x"}
    both = [asyncio.create_task(served.http.post("/v1/completions", json=body, headers=headers)) for _ in range(2)]
    for _ in both:
        await served.engine.submitted.acquire()
    assert len(served.engine.open) == 2
    served.engine.go(40)
    assert [(await task).status_code for task in both] == [200, 200]


async def test_one_group_too_many_is_a_503_with_retry_after(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(gated=True), max_waiting_groups=2)
    waiting = [asyncio.create_task(served.chat(n=4)) for _ in range(2)]
    for _ in waiting:
        await served.engine.submitted.acquire()
    for refused in (await served.chat(), await served.chat(stream=True)):
        assert_error(refused, status=503, retry_after="1", code="overloaded")
    assert len(served.engine.requests) == 2
    served.engine.go(60)
    assert [(await task).status_code for task in waiting] == [200, 200]
    assert (await served.chat()).status_code == 200


async def test_prompts_of_a_request_are_admitted_all_or_none(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(gated=True), max_waiting_groups=2)
    waiting = await served.engine.start_request(served.complete("x"))
    assert (await served.complete(["x", "y"])).status_code == 503
    assert len(served.engine.requests) == 1
    assert served.service.admission.open == 1
    served.engine.go(60)
    assert (await waiting).status_code == 200
    assert (await served.complete(["x", "y"])).status_code == 200


async def test_more_prompts_than_can_ever_wait_are_a_400_without_retry(serve: Serving) -> None:
    served = await serve(max_waiting_groups=2)
    refused = await served.complete(["x", "y", "z"])
    assert_error(refused, status=400, param="prompt", code="too_many_prompts")
    assert "retry-after" not in refused.headers


async def test_groups_with_a_first_token_do_not_count_as_waiting(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(gated=True), max_waiting_groups=1)
    served.engine.steps.release()
    async with served.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as first:
        assert first.status_code == 200
        assert served.service.admission.waiting == 0
        second = await served.engine.start_request(served.complete("y"))
        await served.engine.submitted.acquire()
        served.engine.go(60)
        assert (await second).status_code == 200
        await first.aread()


async def test_failing_submission_leaves_no_place_taken(serve: Serving) -> None:
    class Refusing(WatchedEngine):
        def generate(self, request: object) -> object:  # type: ignore[override]  # it never returns
            raise EngineDiedError("the engine's process is gone")

    served = await serve(engine=Refusing())
    for stream in (False, True):
        assert (await served.complete(["x", "y"], stream=stream)).status_code == 503
    assert served.service.admission.waiting == 0


async def test_browsers_of_a_listed_origin_can_send_requests(serve: Serving) -> None:
    served = await serve(cors_origins=("https://a.example",), api_keys=("k",))
    preflight = await served.http.options(
        "/v1/chat/completions",
        headers={"origin": "https://a.example", "access-control-request-method": "POST"},
    )
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    refused = await served.http.get("/v1/models", headers={"origin": "https://a.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example"
    exposed = refused.headers["access-control-expose-headers"]
    assert "x-request-id" in exposed and "x-motet-worker" in exposed
    other = await served.http.get("/health", headers={"origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


async def test_bug_is_a_500_without_its_reason(serve: Serving) -> None:
    class Broken(WatchedEngine):
        async def stats(self) -> object:  # type: ignore[override]  # it never returns
            raise ZeroDivisionError("secret")

    served = await serve(engine=Broken())
    response = await served.http.get("/health")
    assert_error(response, status=500, code="internal_error")
    assert "secret" not in response.text
    assert response.headers["x-request-id"]


def refusals(caplog: pytest.LogCaptureFixture) -> list[tuple[object, ...]]:
    """Returns the fields of the log lines about refused requests, without the ids."""
    lines = [vars(record)["fields"] for record in caplog.records if record.message == "request refused"]
    assert all(line["request_id"] for line in lines)
    return [tuple(line[name] for name in ("route", "status", "code", "param")) for line in lines]


async def test_whatever_is_refused_has_a_line_in_the_log(serve: Serving, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "motet.api")
    served = await serve(api_keys=KEYS, max_body_bytes=200, key_max_choices=2)
    await served.http.get("/v1/models")
    served.http.headers["authorization"] = "Bearer first"
    assert (await served.chat()).status_code == 200
    await served.chat(**{"a\nb": 1})
    await served.http.post("/tokenize", json={"prompt": 5})
    await served.complete("hi", model="x\x1b[2J")
    await served.complete("x" * 300)
    await served.complete(n=3)
    await served.http.get("/v1/completions")
    await served.http.get("/" + "é" * 50 + "?key=secret")
    served.service.start_drain()
    await served.complete()
    assert refusals(caplog) == [
        ("GET /v1/models", 401, "invalid_api_key", None),
        ("POST /v1/chat/completions", 400, "unknown_parameter", "a\nb"),
        ("POST /tokenize", 400, "invalid_type", "prompt"),
        ("POST /v1/completions", 404, "model_not_found", "model"),
        ("POST /v1/completions", 413, "request_too_large", None),
        ("POST /v1/completions", 429, "rate_limit_exceeded", None),
        ("GET /v1/completions", 405, "method_not_allowed", None),
        ("GET /" + "é" * 50, 404, "unknown_url", None),
        ("POST /v1/completions", 503, "draining", None),
    ]


async def test_long_names_are_cut_in_the_line_about_a_refusal(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "motet.api")
    await served.http.post("/" + "x" * 5_000)
    await served.chat(**{"x" * 100_000: 1})
    (route, *_), (*_, param) = refusals(caplog)
    assert max(len(str(route)), len(str(param))) < 200


async def test_a_flood_of_refusals_has_a_few_lines_and_their_number(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "motet.api")
    refused = RefusalLog(max_lines=2, window_s=0.0)
    for flood in (5, 2, 3):
        caplog.clear()
        for number in range(flood):
            refused.write({"number": number})
        for _ in range(10):
            await asyncio.sleep(0)  # the window ends
        logged = [vars(record)["fields"] for record in caplog.records]
        assert logged == [{"number": 0}, {"number": 1}, *([{"requests": flood - 2}] if flood > 2 else [])]


async def test_a_server_that_mounts_the_app_can_run_its_lifespan(served: Served) -> None:
    """Ray Serve does this, and starts no replica if it fails."""
    lifespan = LifespanOn(uvicorn.Config(served.app, lifespan="on", log_config=None))
    await lifespan.startup()
    await lifespan.shutdown()
    assert not (lifespan.error_occurred or lifespan.should_exit)

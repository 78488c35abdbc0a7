"""The routes that pause: what they pass on, and what they refuse by name."""

import pytest

from motet.types import PauseMode
from tests.api.noted_control import NotedControl
from tests.api.serving import ROUTES, Served, Serving, chunks, every_route, streamed_or_not
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("query", "mode"),
    [
        ("", "abort"),
        ("?mode=wait", "wait"),
        ("?wait_for_inflight_requests=true", "wait"),
        ("?mode=keep&clear_cache=false", "keep"),
    ],
)
async def test_a_pause_has_the_requested_mode(trained: Served, control: NotedControl, query: str, mode: str) -> None:
    assert (await trained.http.post(f"/pause{query}")).json() == {"status": "paused"}
    assert control.calls == [PauseMode(mode)]
    assert (await trained.http.get("/is_paused")).json() == {"is_paused": True}
    assert (await trained.http.post("/resume")).json() == {"status": "resumed"}
    assert (await trained.http.get("/is_paused")).json() == {"is_paused": False}


@every_route
@streamed_or_not
@pytest.mark.parametrize(
    ("query", "refused"),
    [
        ("", True),
        ("?mode=wait", True),
        ("?mode=keep", False),
        ("?new_requests=wait", False),
        ("?mode=wait&new_requests=wait", False),
        ("?mode=keep&new_requests=refuse", True),
    ],
)
async def test_new_requests_are_refused_at_once_or_wait(
    trained: Served, control: NotedControl, path: str, stream: bool, query: str, refused: bool
) -> None:
    body = ROUTES[path] | {"stream": stream}
    assert (await trained.http.post(f"/pause{query}")).status_code == 200
    answer = await trained.http.post(path, json=body)
    if refused:
        assert_error(answer, status=503, code="paused")
        assert answer.headers["retry-after"]
    else:  # the fake engine generates in a pause too: only the queue of a router would make it wait
        assert answer.status_code == 200
    trained.service.admission.check()
    assert trained.service.admission.open == 0
    await trained.http.post("/resume")
    assert (await trained.http.post(path, json=body)).status_code == 200


async def test_the_body_of_a_pause_can_say_what_happens_to_new_requests(trained: Served, control: NotedControl) -> None:
    path = "/v1/completions"
    for body, status in (
        ({"options": {"new_requests": "wait"}}, 200),
        ({"mode": "keep"}, 200),
        ({"mode": "keep", "new_requests": "refuse"}, 503),
        ({"wait_for_inflight_requests": True}, 503),
    ):
        assert (await trained.http.post("/pause", json=body)).status_code == 200
        assert (await trained.http.post(path, json=ROUTES[path])).status_code == status
    assert control.calls[-1] is PauseMode.WAIT
    assert_error(await trained.http.post("/pause", json={"new_requests": "later"}), status=400, param="new_requests")


async def test_a_later_pause_decides_anew_about_new_requests(trained: Served, control: NotedControl) -> None:
    for query, status in (("", 503), ("?new_requests=wait", 200), ("", 503)):
        await trained.http.post(f"/pause{query}")
        path = "/v1/completions"
        assert (await trained.http.post(path, json=ROUTES[path])).status_code == status


async def test_ready_reports_a_pause_and_is_503_after_the_time_that_the_settings_allow(
    serve: Serving, control: NotedControl
) -> None:
    for limit_s, statuses in ((None, [200, 200]), (30.0, [200, 503]), (0.0, [503, 503])):
        served = await serve(rl=True, max_ready_pause_s=limit_s)
        served.service.control = control
        assert (await served.http.get("/ready")).json() == {"status": "ready"}
        assert (await served.http.post("/pause")).status_code == 200
        for passed_s, status in zip((2.5, 30.0), statuses, strict=True):
            control.now_s += passed_s - (control.engines.pause_s or 0)
            answer = await served.http.get("/ready")
            if status == 200:
                assert answer.json() == {"status": "paused", "paused_s": passed_s}
            else:
                assert_error(answer, status=503, code="paused")
                assert f"paused for {passed_s:g} s (--max-ready-pause {limit_s:g})" in answer.text
            assert (await served.http.get("/health")).status_code == 200
        assert (await served.http.post("/resume")).status_code == 200
        assert (await served.http.get("/ready")).json() == {"status": "ready"}


async def test_a_pause_lasts_from_the_moment_at_which_new_groups_wait(control: NotedControl) -> None:
    """`/pause?mode=wait` then waits for running groups. A gateway holds the engines of a worker directly."""
    engines = control.engines
    engines.hold_new_groups(True)
    control.now_s = 2.0
    await engines.hold(True)
    control.now_s = 3.0
    assert engines.pause_s == 3.0
    engines.hold_new_groups(False)
    assert engines.pause_s == 3.0
    await engines.hold(False)
    assert engines.pause_s is None


@pytest.mark.parametrize(
    ("body", "traces"), [(None, None), ({}, None), ({"request_ids": []}, None), ({"request_ids": ["a"]}, ["a"])]
)
async def test_requests_are_aborted_by_name_or_all(
    trained: Served, control: NotedControl, body: dict[str, object] | None, traces: list[str] | None
) -> None:
    answer = await trained.http.post("/abort_requests", json=body)
    assert answer.json() == {"status": "aborted", "aborted": 2}
    assert control.calls == [traces]


async def test_an_unknown_mode_is_refused(trained: Served, control: NotedControl) -> None:
    refused = await trained.http.post("/pause?mode=stop")
    assert_error(refused, status=400, param="mode")
    assert not control.engines.paused


def body_for(path: str, *, token_ids: bool, stream: bool) -> dict[str, object]:
    fields: dict[str, object] = {"n": 2, "max_tokens": 5, "ignore_eos": True}
    fields = {"sampling_params": fields} if path == "/inference/v1/generate" else fields
    return {**ROUTES[path], **fields, "return_token_ids": token_ids, "stream": stream}


@every_route
@streamed_or_not
async def test_an_answer_with_token_ids_reports_which_weights_generated_them(
    serve: Serving, path: str, stream: bool
) -> None:
    served = await serve()
    served.engine.scenario.new_weights = {2: "7"}
    answer = await served.http.post(path, json=body_for(path, token_ids=True, stream=stream))
    pieces = chunks(answer) if stream else [answer.json()]
    versions = {
        choice["index"]: choice["weight_versions"]
        for piece in pieces
        for choice in piece["choices"]
        if choice["finish_reason"] is not None
    }
    spans = [{"version": "0", "start": 0, "end": 2}, {"version": "7", "start": 2, "end": 5}]
    assert versions == {0: spans, 1: spans}
    assert answer.text.count('"weight_versions"') == 2


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@streamed_or_not
async def test_an_answer_of_the_first_weights_or_without_token_ids_has_no_versions(
    serve: Serving, path: str, stream: bool
) -> None:
    served = await serve()
    assert (
        "weight_versions" not in (await served.http.post(path, json=body_for(path, token_ids=True, stream=stream))).text
    )
    served.engine.scenario.new_weights = {2: "7"}
    plain = await served.http.post(path, json=body_for(path, token_ids=False, stream=stream))
    assert (plain.status_code, "weight_versions" in plain.text) == (200, False)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("token_ids", [False, True])
@streamed_or_not
async def test_versions_are_reported_on_request_even_if_the_weights_never_changed(
    serve: Serving, path: str, stream: bool, token_ids: bool
) -> None:
    served = await serve()
    body = body_for(path, token_ids=token_ids, stream=stream)
    for new_weights, spans in (
        ({}, [{"version": "0", "start": 0, "end": 5}]),
        ({2: "7"}, [{"version": "0", "start": 0, "end": 2}, {"version": "7", "start": 2, "end": 5}]),
    ):
        served.engine.scenario.new_weights = new_weights
        answer = await served.http.post(path, json=body | {"return_weight_versions": True})
        pieces = chunks(answer) if stream else [answer.json()]
        found = [choice for piece in pieces for choice in piece["choices"] if "weight_versions" in choice]
        assert [choice["weight_versions"] for choice in found] == [spans, spans]
        assert all(choice["finish_reason"] for choice in found)
        hidden = await served.http.post(path, json=body | {"return_weight_versions": False})
        assert (hidden.status_code, "weight_versions" in hidden.text) == (200, False)


@streamed_or_not
async def test_generate_reports_the_initial_weights_too_and_nothing_for_no_tokens(serve: Serving, stream: bool) -> None:
    path, served = "/inference/v1/generate", await serve()
    answer = await served.http.post(path, json=body_for(path, token_ids=False, stream=stream))
    assert answer.text.count('"weight_versions":[{"version":"0","start":0,"end":5}]') == 2
    body = {**ROUTES[path], "sampling_params": {"max_tokens": 0, "prompt_logprobs": 0}}
    nothing = await served.http.post(path, json=body)
    assert nothing.status_code != 200 or nothing.json()["choices"][0]["weight_versions"] == []


async def test_the_routes_are_closed_without_rl_and_without_engines(serve: Serving) -> None:
    for rl, code in ((False, "rl_off"), (True, "no_engines_here")):
        closed = await serve(rl=rl)
        assert_error(await closed.http.post("/pause"), status=404, code=code)
        assert_error(await closed.http.post("/update_weights", json={"weight_dir": "/new"}), status=404, code=code)
        assert_error(await closed.http.get("/weight_info"), status=404, code=code)


async def test_prefix_caches_are_emptied_with_or_without_running_groups(trained: Served, control: NotedControl) -> None:
    for query in ("", "?reset_running_requests=true", "?reset_external=true"):
        assert (await trained.http.post(f"/reset_prefix_cache{query}")).json() == {"success": True}
    assert (await trained.http.get("/flush_cache")).text == "Cache flushed.\n", "SGLang's name"
    assert_error(await trained.http.post("/reset_prefix_cache?reset_running_requests=perhaps"), status=400)
    assert control.calls == [False, True, False, False]

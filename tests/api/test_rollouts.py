"""The routes that pause: what they pass on, and what they refuse by name."""

import pytest

from motet.types import PauseMode
from tests.api.noted_weights import NotedWeights
from tests.api.serving import Served, Serving, coded

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("query", "mode"), [("", "abort"), ("?mode=wait", "wait"), ("?mode=keep&clear_cache=false", "keep")]
)
async def test_a_pause_has_the_mode_that_is_asked_for(
    trained: Served, weights: NotedWeights, query: str, mode: str
) -> None:
    assert (await trained.http.post(f"/pause{query}")).json() == {"status": "paused"}
    assert weights.asked == [PauseMode(mode)]
    assert (await trained.http.get("/is_paused")).json() == {"is_paused": True}
    assert (await trained.http.post("/resume")).json() == {"status": "resumed"}
    assert (await trained.http.get("/is_paused")).json() == {"is_paused": False}


@pytest.mark.parametrize(
    ("body", "traces"), [(None, None), ({}, None), ({"request_ids": []}, None), ({"request_ids": ["a"]}, ["a"])]
)
async def test_requests_are_aborted_by_name_or_all(
    trained: Served, weights: NotedWeights, body: dict[str, object] | None, traces: list[str] | None
) -> None:
    answer = await trained.http.post("/abort_requests", json=body)
    assert answer.json() == {"status": "aborted", "aborted": 2}
    assert weights.asked == [traces]


async def test_an_unknown_mode_is_refused(trained: Served, weights: NotedWeights) -> None:
    refused = await trained.http.post("/pause?mode=stop")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "mode")
    assert not weights.paused


async def test_the_routes_are_closed_without_rl_and_where_there_are_no_engines(serve: Serving) -> None:
    for rl, code in ((False, "rl_off"), (True, "no_engines_here")):
        closed = await serve(rl=rl)
        assert coded(await closed.http.post("/pause")) == (404, code)
        assert coded(await closed.http.post("/update_weights", json={"weight_dir": "/new"})) == (404, code)
        assert coded(await closed.http.get("/weight_info")) == (404, code)

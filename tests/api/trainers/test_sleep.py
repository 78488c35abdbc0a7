"""The routes that put engines to sleep and empty prefix caches: what they pass on, and what they refuse by name."""

import pytest

from motet.control.cell_sleep import SleepTag
from motet.errors import RequestError
from motet.types import PauseMode
from tests.api.noted_control import NotedControl, NotedSleep
from tests.api.serving import Served, Serving
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio


@pytest.fixture
def sleep(control: NotedControl) -> NotedSleep:
    return control.sleep


@pytest.fixture
async def served(serve: Serving, control: NotedControl) -> Served:
    served = await serve(rl=True)
    served.service.control = control
    return served


@pytest.mark.parametrize(
    ("query", "level", "mode"),
    [("", 1, "abort"), ("?level=0", 0, "abort"), ("?level=2&mode=keep", 2, "keep"), ("?mode=wait", 1, "wait")],
)
async def test_a_sleep_has_the_requested_level_and_mode(
    served: Served, sleep: NotedSleep, query: str, level: int, mode: str
) -> None:
    assert (await served.http.get("/is_sleeping")).json() == {"is_sleeping": False}
    assert (await served.http.post(f"/sleep{query}")).json() == {"status": "sleeping", "level": level}
    assert sleep.calls == [(level, PauseMode(mode))]
    assert (await served.http.get("/is_sleeping")).json() == {"is_sleeping": True}


@pytest.mark.parametrize(
    ("body", "level", "mode"),
    [
        ({}, 1, "abort"),
        ({"level": 2}, 2, "abort"),
        ({"model": "tiny", "options": {"level": 2, "mode": "keep"}}, 2, "keep"),
        ({"mode": "wait", "options": {"level": 0}}, 0, "wait"),
        ({"level": 2, "options": {"level": 2}}, 2, "abort"),
        ({"level": None, "options": None, "model": None}, 1, "abort"),
    ],
)
async def test_a_sleep_has_the_level_and_mode_of_its_body(
    served: Served, sleep: NotedSleep, body: dict[str, object], level: int, mode: str
) -> None:
    assert (await served.http.post("/sleep", json=body)).json() == {"status": "sleeping", "level": level}
    assert sleep.calls == [(level, PauseMode(mode))]


async def test_the_body_takes_precedence_over_the_query(served: Served, sleep: NotedSleep) -> None:
    assert (await served.http.post("/sleep?level=1&mode=keep", json={"level": 2})).json()["level"] == 2
    assert sleep.calls == [(2, PauseMode.KEEP)]
    woken = await served.http.post("/wake_up", json={"options": {"tags": ["weights"]}})
    assert woken.json() == {"status": "sleeping", "tags": ["weights"]}
    assert (await served.http.post("/wakeup")).json() == {"status": "awake", "tags": None}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/sleep", {"level": 3}, 400, "level"),
        ("/sleep", {"level": "2"}, 400, "level"),
        ("/sleep", {"options": {"level": 2, "deep": 1}}, 400, "options.deep"),
        ("/sleep", {"level": 1, "options": {"level": 2}}, 400, "options.level"),
        ("/sleep", {"options": 2}, 400, "options"),
        ("/sleep", {"model": "none"}, 404, "model"),
        ("/sleep", [], 400, None),
        ("/wake_up", {"tags": ["weights", "all"]}, 400, "tags[1]"),
    ],
)
async def test_unknown_values_in_a_body_are_refused_by_name(
    served: Served, sleep: NotedSleep, path: str, body: object, status: int, param: str | None
) -> None:
    assert_error(await served.http.post(path, json=body), status=status, param=param)
    assert sleep.calls == []


async def test_all_memory_wakes_or_only_that_of_the_tags(served: Served, sleep: NotedSleep) -> None:
    await served.http.post("/sleep")
    some = await served.http.post("/wake_up?tags=weights&tags=scheduling")
    assert some.json() == {"status": "sleeping", "tags": ["weights", "scheduling"]}
    assert (await served.http.post("/wake_up")).json() == {"status": "awake", "tags": None}
    assert sleep.calls[1:] == [(SleepTag.WEIGHTS, SleepTag.SCHEDULING), ()]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/sleep?level=3", "level"),
        ("/sleep?level=-1", "level"),
        ("/sleep?level=deep", "level"),
        ("/sleep?mode=stop", "mode"),
        ("/wake_up?tags=weights&tags=all", "tags[1]"),
    ],
)
async def test_unknown_values_are_refused_by_name(served: Served, sleep: NotedSleep, path: str, param: str) -> None:
    assert_error(await served.http.post(path), status=400, param=param)
    assert sleep.calls == []


async def test_engines_that_cannot_sleep_refuse_the_level(
    served: Served, sleep: NotedSleep, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(level: int, mode: PauseMode) -> None:
        raise RequestError("Invalid 'level': /sleep ...", param="level", code="unsupported_value")

    monkeypatch.setattr(sleep, "sleep", refuse)
    assert_error(await served.http.post("/sleep"), status=400, param="level")


async def test_the_routes_are_closed_without_rl_and_without_engines(serve: Serving) -> None:
    for rl, code in ((False, "rl_off"), (True, "no_engines_here")):
        closed = await serve(rl=rl)
        for path in ("/sleep", "/wake_up"):
            assert_error(await closed.http.post(path), status=404, code=code)
        assert_error(await closed.http.get("/is_sleeping"), status=404, code=code)

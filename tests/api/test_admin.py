"""Models, health, drain: what clients list and operators ask."""

import asyncio
from importlib.metadata import version

import openai
import pytest

from tests.api.serving import MODEL, Served, Serving, WatchedEngine

pytestmark = pytest.mark.anyio


async def test_the_model_is_listed_with_its_length(served: Served) -> None:
    (model,) = (await served.openai.models.list()).data
    assert model.id == MODEL
    assert model.object == "model"
    response = await served.http.get("/v1/models")
    assert response.json()["data"][0]["max_model_len"] == 4096


async def test_one_model_can_be_asked_for_by_name(served: Served) -> None:
    model = await served.openai.models.retrieve(MODEL)
    assert model.id == MODEL


async def test_unknown_model_is_a_404_on_every_route(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await served.openai.models.retrieve("other/model")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError) as caught:
        await served.openai.chat.completions.create(model="other", messages=[{"role": "user", "content": "hi"}])
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        await served.openai.completions.create(model="other", prompt="x")


async def test_healthy_and_ready(served: Served) -> None:
    assert (await served.http.get("/health")).status_code == 200
    assert (await served.http.get("/ready")).status_code == 200


async def test_version_is_that_of_the_package(served: Served) -> None:
    assert (await served.http.get("/version")).json() == {"version": version("motet")}


async def test_drain_lets_running_groups_finish_and_takes_no_new_ones(serve: Serving) -> None:
    engine = WatchedEngine(gated=True)
    served = await serve(engine=engine)
    running = asyncio.create_task(served.chat())
    await engine.submitted.acquire()

    assert (await served.http.post("/drain")).json() == {"draining": True, "groups_open": 1}
    assert (await served.http.get("/health")).status_code == 200
    for response in (await served.http.get("/ready"), await served.chat(), await served.complete(stream=True)):
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "draining"
    assert (await served.http.get("/status")).json()["workers"][0]["state"] == "draining"

    for _ in range(20):
        engine.steps.release()
    assert (await running).json()["choices"][0]["message"]["content"] == "hello 0"
    await served.until_empty()

"""`x-motet-worker` names who writes the answer, as far as it is known when the headers are sent."""

import itertools

import msgspec
import pytest

from motet.config import ServerConfig
from motet.engines.base import Worker
from motet.engines.fake import FakeEngine, FakeGroup
from motet.types import GenerateRequest, GroupDelta, Role
from tests.api.serving import MODEL, Serving, WatchedEngine, hello

pytestmark = pytest.mark.anyio

ROUTES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "n": 2},
    "/v1/completions": {"prompt": "x", "n": 2},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"n": 2}},
}


class NamedGroup(FakeGroup):
    """Tells on its first step who writes it."""

    def __init__(self, engine: FakeEngine, request: GenerateRequest, worker: str) -> None:
        super().__init__(engine, request)
        self._worker = worker

    async def __anext__(self) -> GroupDelta:
        delta = await super().__anext__()
        if delta.prompt is None:
            return delta
        return msgspec.structs.replace(delta, prompt=msgspec.structs.replace(delta.prompt, worker=self._worker))


class NamingEngine(WatchedEngine):
    """Stands for several workers, which take turns."""

    def __init__(self, *workers: str) -> None:
        super().__init__()
        self._turns = itertools.cycle(workers)

    def generate(self, request: GenerateRequest) -> FakeGroup:
        self.open[request.request_id] = group = NamedGroup(self, request, next(self._turns))
        return group


TWO = [Worker(f"decode-{place}", FakeEngine(hello), "here") for place in range(2)]


@pytest.mark.parametrize("path", list(ROUTES))
@pytest.mark.parametrize("stream", [False, True])
async def test_the_worker_is_the_one_that_the_first_step_names(serve: Serving, path: str, stream: bool) -> None:
    served = await serve(engine=NamingEngine("decode-1", "decode-0"), workers=TWO)
    for worker in ("decode-1", "decode-0"):
        response = await served.http.post(path, json={**ROUTES[path], "stream": stream})
        assert (response.status_code, response.headers["x-motet-worker"]) == (200, worker)


@pytest.mark.parametrize("path", list(ROUTES))
async def test_an_engine_that_names_nobody_is_the_only_worker(serve: Serving, path: str) -> None:
    served = await serve()
    assert (await served.http.post(path, json=ROUTES[path])).headers["x-motet-worker"] == "engine-0"


async def test_of_several_prompts_each_worker_is_named_once(serve: Serving) -> None:
    served = await serve(engine=NamingEngine("decode-1", "decode-0", "decode-1"), workers=TWO)
    response = await served.complete(["a", "b", "c"])
    assert response.headers["x-motet-worker"] == "decode-1, decode-0"


async def test_where_nobody_is_named_and_several_could_be_there_is_no_header(serve: Serving) -> None:
    served = await serve(workers=TWO)
    assert "x-motet-worker" not in (await served.complete()).headers
    assert "x-motet-worker" not in (await served.complete(temperature=9)).headers


async def test_a_prefill_server_names_its_engine(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(role=Role.PREFILL))
    response = await served.complete("two tokens", kv_transfer_params={"do_remote_decode": True})
    assert response.headers["x-motet-worker"] == "engine-0"
    for ticket in list(served.engine.leases.held.values()):
        served.engine.leases.end(ticket)


async def test_pages_of_other_origins_may_read_it(serve: Serving) -> None:
    served = await serve(config=ServerConfig(served_model_name=MODEL, cors_origins=("https://a.example",)))
    response = await served.http.get("/health", headers={"origin": "https://a.example"})
    assert "x-motet-worker" in response.headers["access-control-expose-headers"]

"""`x-motet-worker` names the workers that generate the answer, as far as they are known when the headers are sent."""

import itertools

import msgspec
import pytest

from motet.engine import Worker
from motet.testing.fake_engine import FakeEngine, FakeGroup
from motet.types import GenerateRequest, GroupDelta, Role
from tests.api.serving import ROUTES, Serving, WatchedEngine, every_route, group_lines, hello, streamed_or_not

pytestmark = pytest.mark.anyio


class NamedGroup(FakeGroup):
    """Names its worker on the first step, and on the next step the worker to which it has moved, if it moves."""

    def __init__(self, engine: FakeEngine, request: GenerateRequest, workers: str) -> None:
        super().__init__(engine, request)
        self._workers = iter(workers.split(" then "))

    async def __anext__(self) -> GroupDelta:
        return msgspec.structs.replace(await super().__anext__(), worker=next(self._workers, ""))


class NamingEngine(WatchedEngine):
    """Fakes several workers, which take turns."""

    def __init__(self, *workers: str) -> None:
        super().__init__()
        self._turns = itertools.cycle(workers)

    def generate(self, request: GenerateRequest) -> FakeGroup:
        self.open[request.request_id] = group = NamedGroup(self, request, next(self._turns))
        return group


TWO = [Worker(f"decode-{place}", FakeEngine(hello), "here") for place in range(2)]


@every_route
@streamed_or_not
async def test_the_worker_is_the_one_that_the_first_step_names(
    serve: Serving, caplog: pytest.LogCaptureFixture, path: str, stream: bool
) -> None:
    caplog.set_level("INFO", logger="motet.api")
    served = await serve(engine=NamingEngine("decode-1", "decode-0"), workers=TWO)
    for worker in ("decode-1", "decode-0"):
        response = await served.http.post(path, json={**ROUTES[path], "stream": stream})
        assert (response.status_code, response.headers["x-motet-worker"]) == (200, worker)
    lines = group_lines(caplog)
    assert [line["worker"] for line in lines] == ["decode-1", "decode-0"]


@pytest.mark.parametrize(("stream", "named"), [(True, "decode-1"), (False, "decode-0")])
async def test_the_log_names_the_last_worker_of_an_answer_that_moves(
    serve: Serving, caplog: pytest.LogCaptureFixture, stream: bool, named: str
) -> None:
    """The log line used to name the lost worker. The headers of a stream have been sent when it moves."""
    caplog.set_level("INFO", logger="motet.api")
    served = await serve(engine=NamingEngine("decode-1 then decode-0"), workers=TWO)
    response = await served.complete(stream=stream)
    assert response.headers["x-motet-worker"] == named
    assert [line["worker"] for line in group_lines(caplog)] == ["decode-0"]


@every_route
async def test_an_engine_that_names_no_worker_is_the_only_worker(serve: Serving, path: str) -> None:
    served = await serve()
    assert (await served.http.post(path, json=ROUTES[path])).headers["x-motet-worker"] == "engine-0"


async def test_of_several_prompts_each_worker_is_named_once(serve: Serving) -> None:
    served = await serve(engine=NamingEngine("decode-1", "decode-0", "decode-1"), workers=TWO)
    assert (await served.complete(["a", "b", "c"])).headers["x-motet-worker"] == "decode-1, decode-0"


async def test_with_several_workers_and_none_named_there_is_no_header(serve: Serving) -> None:
    served = await serve(workers=TWO)
    assert "x-motet-worker" not in (await served.complete()).headers
    assert "x-motet-worker" not in (await served.complete(temperature=9)).headers


async def test_a_prefill_server_names_its_engine(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(role=Role.PREFILL))
    response = await served.complete("two tokens", kv_transfer_params={"do_remote_decode": True})
    assert response.headers["x-motet-worker"] == "engine-0"
    for ticket in list(served.engine.leases.held.values()):
        served.engine.leases.release(ticket)

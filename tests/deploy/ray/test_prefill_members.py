"""A decode replica that serves clients directly, and the prefill replicas to which it sends requests."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from motet.engine import WorkerState
from motet.errors import EngineDiedError
from motet.settings.gateway_config import GatewayConfig
from motet.testing.fake_engine import FakeLeases
from motet.types import Role
from tests.deploy.dying import ANSWER, Starter
from tests.deploy.ray.directories import FakeDirectory
from tests.deploy.ray.workers import LeakCheck, RunningWorker
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.anyio

KEY = "of the cell"
CLIENT = {"authorization": "Bearer client"}
BODY = {"messages": [{"role": "user", "content": "hi"}], "n": 3}


class DirectCell:
    """Prefill replicas, and a decode replica that serves clients."""

    def __init__(self, folder: Path) -> None:
        self.directory = FakeDirectory()
        self._folder = folder
        self._starter = Starter(leases=FakeLeases())

    def prefill(self, id: str) -> RunningWorker:
        return RunningWorker(self._folder, self.directory, Role.PREFILL, id=id, starter=self._starter, worker_key=KEY)

    def decode(self, id: str = "decode") -> RunningWorker:
        return RunningWorker(
            self._folder,
            self.directory,
            Role.DECODE,
            id=id,
            starter=self._starter,
            prefill=GatewayConfig(),
            api_keys=("client",),
            worker_key=KEY,
        )


async def until_member(decode: RunningWorker, url: str, state: WorkerState | None) -> None:
    """Returns when the worker at that URL is in that state. None means that it has been removed."""
    fleet = decode.worker.serving.workforce.router.fleet
    while next((member.state for member in fleet.members if member.address == url), None) is not state:
        await fleet.changes.wait()


@pytest.mark.slow
async def test_a_prompt_is_prefilled_once_on_another_replica_and_answers_do_not_differ(folder: Path) -> None:
    leaks, cell = LeakCheck(), DirectCell(folder)
    async with cell.prefill("first") as first, cell.decode() as decode:
        await until_member(decode, first.url, WorkerState.READY)
        decode.engine.let_run()
        async with httpx.AsyncClient(base_url=decode.url, headers=CLIENT, verify=False, timeout=PATIENCE_S) as http:
            session = {"x-session-id": "talk"}
            answer = (await http.post("/v1/chat/completions", json=BODY, headers=session)).json()
            assert [choice["message"]["content"] for choice in answer["choices"]] == [ANSWER] * 3
            (prefilled,) = first.engine.prefills
            (generated,) = decode.engine.requests
            assert (prefilled.prompt, prefilled.session_id) == (generated.prompt, "talk")
            assert answer["usage"]["prompt_tokens"] == len(prefilled.prompt)
            assert generated.ticket is not None
            assert generated.ticket.remote_engine_id == first.engine_id

            for body, status in (({"n": 0}, 400), ({"model": "other"}, 404), ({"messages": "hi"}, 400)):
                assert (await http.post("/v1/chat/completions", json=BODY | body)).status_code == status
            unknown = await http.post("/v1/chat/completions", json=BODY, headers={"authorization": f"Bearer {KEY}"})
            assert unknown.status_code == 401

            await first.worker.close()
            await until_member(decode, first.url, None)
            async with cell.prefill("second") as second:
                await until_member(decode, second.url, WorkerState.READY)
                await http.post("/v1/chat/completions", json=BODY)
                assert len(second.engine.prefills) == 1
            await until_member(decode, second.url, None)
            assert (await http.post("/v1/chat/completions", json=BODY)).status_code == 200
    leaks.check()


@pytest.mark.slow
async def test_an_answer_names_the_replica_that_generated_it(folder: Path) -> None:
    """Regression: the id of every replica was decode-0."""
    cell = DirectCell(folder)
    for id in ("decode-x4k2", "decode-9abc"):
        async with cell.decode(id) as decode:
            decode.engine.let_run()
            async with httpx.AsyncClient(base_url=decode.url, headers=CLIENT, verify=False, timeout=PATIENCE_S) as http:
                answer = await http.post("/v1/chat/completions", json=BODY)
                (worker,) = (await http.get("/status")).json()["workers"]
            assert answer.headers["x-motet-worker"] == worker["id"] == id


async def test_a_replica_that_no_longer_follows_prefill_is_unhealthy(folder: Path) -> None:
    """Regression: it continued without prefill and reported that it was healthy."""
    leaks, cell = LeakCheck(), DirectCell(folder)
    async with cell.decode() as decode:
        decode.worker.check()
        (watching,) = [task for task in asyncio.all_tasks() if coroutine_of(task) == "Gateway.watch"]
        watching.cancel()
        await asyncio.wait([watching])
        with pytest.raises(EngineDiedError, match="lost contact"):
            decode.worker.check()
    leaks.check()


def coroutine_of(task: "asyncio.Task[Any]") -> str:
    return getattr(task.get_coro(), "__qualname__", "")

"""`POST /workers/{id}/kill`: an operator ends the process of one of this server's own engines, and no client can."""

from typing import Any

import pytest

from motet.engine import Worker, WorkerReport, WorkerState
from motet.engine_info import EngineKind
from tests.api.serving import ChangeableWorkers, Served, Serving, WatchedEngine, ready
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio

ADMIN = {"authorization": "Bearer boss"}
CLIENT = {"authorization": "Bearer k"}
ADDRESS = "127.0.0.1:1"


class KillableEngine(WatchedEngine):
    """Records that it was killed."""

    killed = 0

    def kill(self) -> None:
        self.killed += 1


async def server(serve: Serving, engine: KillableEngine, *, admin_key: str = "boss", **settings: Any) -> Served:
    workers = ChangeableWorkers(
        [
            ready(Worker("decode-0", engine, ADDRESS, kill=engine.kill)),
            ready(Worker("elsewhere", WatchedEngine(), "http://10.0.0.1:8000", local=False)),
            WorkerReport(id="texts", address="http://10.0.0.2:8000", state=WorkerState.READY, kind=EngineKind.OPENAI),
            WorkerReport(id="late", address=ADDRESS, state=WorkerState.STARTING),
            WorkerReport(
                id="gone",
                address=ADDRESS,
                state=WorkerState.DEAD,
                worker=Worker("gone", engine, ADDRESS, kill=engine.kill),
            ),
        ]
    )
    return await serve(engine=engine, workers=workers, admin_key=admin_key, **settings)


async def test_an_engine_of_this_server_is_killed(serve: Serving) -> None:
    engine = KillableEngine()
    served = await server(serve, engine)
    answer = await served.http.post("/workers/decode-0/kill", headers=ADMIN)
    assert (answer.status_code, answer.json(), engine.killed) == (202, {"id": "decode-0", "state": "dead"}, 1)


@pytest.mark.parametrize(
    ("id", "status", "code"),
    [
        ("elsewhere", 400, "worker_elsewhere"),
        ("texts", 400, "worker_elsewhere"),
        ("late", 400, "worker_not_running"),
        ("gone", 400, "worker_not_running"),
        ("nobody", 404, "worker_not_found"),
    ],
)
async def test_a_worker_without_a_process_of_this_server_is_refused_by_its_name(
    serve: Serving, id: str, status: int, code: str
) -> None:
    engine = KillableEngine()
    served = await server(serve, engine)
    refused = await served.http.post(f"/workers/{id}/kill", headers=ADMIN)
    assert_error(refused, status=status, code=code)
    assert engine.killed == 0
    assert id in refused.json()["error"]["message"]


async def test_no_key_of_a_client_kills(serve: Serving) -> None:
    engine = KillableEngine()
    served = await server(serve, engine, api_keys=("k",))
    for headers in ({}, CLIENT):
        refused = await served.http.post("/workers/decode-0/kill", headers=headers)
        assert_error(refused, status=401, code="invalid_api_key")
    assert engine.killed == 0


@pytest.mark.parametrize("api_keys", [(), ("k",)])
async def test_without_an_admin_key_no_engine_can_be_killed(serve: Serving, api_keys: tuple[str, ...]) -> None:
    engine = KillableEngine()
    served = await server(serve, engine, admin_key="", api_keys=api_keys)
    refused = await served.http.post("/workers/decode-0/kill", headers=CLIENT)
    assert_error(refused, status=403, code="admin_key_required")
    assert engine.killed == 0


async def test_a_page_of_another_site_kills_nothing(serve: Serving) -> None:
    engine = KillableEngine()
    served = await server(serve, engine)
    page = {"origin": "https://evil.example"}
    refused = await served.http.post("/workers/decode-0/kill", headers=ADMIN | page)
    assert_error(refused, status=400, code="invalid_content_type")
    assert engine.killed == 0

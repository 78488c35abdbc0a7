"""Batches of complete servers and gateways: at a stop, after a restart, and on a text upstream."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from motet.deploy.server import Outcome
from motet.errors import ConfigError
from tests.api.batches.batch_serving import CHAT, file_of, line, results_in
from tests.deploy.dying import ANSWER
from tests.deploy.gateways import RunningGateway
from tests.deploy.running import Running
from tests.peers.fake_openai import FakeOpenAI
from tests.peers.openai_script import Behaviour

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def create(http: httpx.AsyncClient, *lines: object) -> str:
    form = {"file": ("lines.jsonl", file_of(*lines))}
    file = (await http.post("/v1/files", files=form, data={"purpose": "batch"})).json()
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    id: str = (await http.post("/v1/batches", json=body)).json()["id"]
    return id


async def results(http: httpx.AsyncClient, id: str) -> dict[str, dict[str, Any]]:
    batch = (await http.get(f"/v1/batches/{id}")).json()
    assert (batch["status"], batch["error_file_id"]) == ("completed", None)
    return results_in((await http.get(f"/v1/files/{batch['output_file_id']}/content")).content)


async def test_a_stopped_server_continues_its_batches_at_the_next_start(folder: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"batches": {"batch_dir": str(tmp_path), "batch_concurrency": 2}, "drain_timeout_s": 0.0}
    async with Running(folder, **settings) as server:
        id = await create(server.http, *(line(str(number)) for number in range(6)))
        await server.engine.submitted.wait()
        server.signals.receive()
        assert await server.outcome() is Outcome.STOPPED
    async with Running(folder, **settings) as server:
        assert server.serving.service.batches is not None
        batch = server.serving.service.batches.open[id]
        server.engine.let_run()
        await batch.ended.wait()
        found = await results(server.http, id)
        texts = {result["response"]["body"]["choices"][0]["message"]["content"] for result in found.values()}
        assert (sorted(found), texts) == ([str(number) for number in range(6)], {ANSWER})


async def test_a_server_without_engines_keeps_its_batches(folder: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"batches": {"batch_dir": str(tmp_path)}}
    async with Running(folder, **settings) as server:
        id = await create(server.http, line("a"))
        await server.engine.submitted.wait()
        server.engine.die()
        assert await server.outcome() is Outcome.ENGINE_DIED
    async with Running(folder, **settings) as server:
        assert server.serving.service.batches is not None
        batch = server.serving.service.batches.open[id]
        server.engine.let_run()
        await batch.ended.wait()
        assert [*await results(server.http, id)] == ["a"]


async def test_a_folder_that_cannot_be_used_ends_the_start(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--batch-dir .* cannot be used"):
        async with Running(folder, batches={"batch_dir": str(tmp_path / "file")}) as server:
            await server.outcome()


async def test_a_gateway_runs_batches_on_a_text_upstream(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"batches": {"batch_dir": str(tmp_path)}}
    async with (
        FakeOpenAI(Behaviour(models=({"id": "m", "max_model_len": 99},))) as upstream,
        RunningGateway(upstream.url, **settings) as gateway,
    ):
        id = await create(gateway.http, line("a", model="m"), line("b", n=2))
        assert gateway.serving.service.batches is not None
        if (batch := gateway.serving.service.batches.open.get(id)) is not None:
            await batch.ended.wait()
        found = await results(gateway.http, id)
        assert {len(result["response"]["body"]["choices"]) for result in found.values()} == {1, 2}
        status = (await gateway.http.get("/status")).json()
        assert json.dumps(status).count("anonymous batch") >= 1

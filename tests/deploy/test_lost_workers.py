"""What clients and the log get when a worker on another server is lost: clients get its id in a header, but neither its
address nor the error of the connection."""

import asyncio
import json
import logging
from pathlib import Path

import pytest

from motet.deploy.gateway_models import TokenizerRules
from motet.engine import WorkerState
from motet.settings.server_config import RoutingConfig
from tests.api.serving import group_lines
from tests.deploy.gateways import ADMIN, RunningGateway
from tests.error_response import assert_error
from tests.peers.fake_vllm import MODEL, FakeVLLM

pytestmark = pytest.mark.anyio

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "ignore_eos": True}


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="motet.api")


def gateway_of(folder: Path, server: FakeVLLM) -> RunningGateway:
    routing = RoutingConfig(migration_wait_s=0.0)
    return RunningGateway(server.url, tokenizers=TokenizerRules({}, others=folder), routing=routing)


def without_addresses(text: str, server: FakeVLLM) -> bool:
    return not any(part in text for part in ("127.0.0.1", str(server.port), "Error"))


@pytest.mark.slow
async def test_before_the_first_token_the_worker_is_named_in_a_header_and_its_address_only_in_the_log(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeVLLM() as server, gateway_of(folder, server) as gateway:
        server.hold()
        id = server.url.removeprefix("http://")
        request = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=BODY))
        await server.until(lambda: server.open == 1)
        await server.kill()
        lost = await request
        assert_error(lost, status=503, code="engine_died")
        assert lost.headers["x-motet-worker"] == id
        assert without_addresses(lost.json()["error"]["message"], server)
        (line,) = group_lines(caplog)
        assert (line["worker"], line["status"]) == (id, 503)
        assert id in line["error"]


@pytest.mark.slow
async def test_the_error_event_of_a_stream_has_no_address(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with FakeVLLM() as server, gateway_of(folder, server) as gateway:
        server.hold()
        stepping = asyncio.create_task(step_when_requested(server))
        async with gateway.http.stream("POST", "/v1/chat/completions", json=BODY | {"stream": True}) as response:
            lines = response.aiter_lines()
            while '"delta":{"content":' not in await anext(lines):
                pass
            await server.kill()
            rest = [line async for line in lines if line.startswith("data: {")]
        await stepping
        error = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert error["code"] == "engine_died"
        assert without_addresses(error["message"], server)
    (line,) = group_lines(caplog)
    assert str(server.port) in line["error"]


async def step_when_requested(server: FakeVLLM) -> None:
    await server.until(lambda: server.open == 1)
    server.step(3)


@pytest.mark.slow
async def test_with_no_worker_left_no_address_is_shown(folder: Path) -> None:
    async with FakeVLLM() as server, gateway_of(folder, server) as gateway:
        await server.kill()
        await gateway.until_state(server.url.removeprefix("http://"), WorkerState.DEAD)
        refused = await gateway.http.post("/v1/chat/completions", json=BODY)
        assert_error(refused, status=503, code="no_worker")
        assert without_addresses(refused.json()["error"]["message"], server)
        assert "x-motet-worker" not in refused.headers
        status = await gateway.http.get("/status", headers=ADMIN)
        assert str(server.port) in status.text

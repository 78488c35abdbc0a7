"""A gateway replica, whose workers are those in the directory."""

import asyncio
from pathlib import Path

import httpx
import msgspec
import pytest

from motet.deploy.gateway import Gateway
from motet.deploy.gateway_models import TokenizerRules
from motet.deploy.ray.directory import WorkerStage
from motet.deploy.ray.running_server import RunningServer, running_gateway
from motet.deploy.server_plan import GatewayPlan
from motet.engine import WorkerState
from motet.errors import EngineDiedError
from motet.settings.gateway_config import GatewayConfig
from motet.settings.server_config import CellConfig, RoutingConfig, ServerConfig
from motet.types import Role
from tests.deploy.dying import ANSWER, Starter
from tests.deploy.gateways import BODY, HEARTBEAT_S
from tests.deploy.ray.directories import FakeDirectory, worker
from tests.deploy.ray.workers import LeakCheck, RunningWorker
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.anyio

KEY = "of the cell"


def plan() -> GatewayPlan:
    return GatewayPlan(
        GatewayConfig(),
        msgspec.convert({"served_model_name": "mine", "port": 0, "worker_key": KEY}, ServerConfig),
        tokenizers=TokenizerRules({}),
        routing=RoutingConfig(migration_wait_s=0.0),
        cell=CellConfig(bypass_tokens=0),
        heartbeat_s=HEARTBEAT_S,
    )


async def until_members(gateway: RunningServer[Gateway], *states: WorkerState) -> None:
    fleet = gateway.serving.workforce.router.fleet
    while [member.state for member in fleet.members] != list(states):
        await fleet.changes.wait()


async def answers(gateway: RunningServer[Gateway]) -> None:
    async with httpx.AsyncClient(base_url=gateway.serving.url, verify=False, timeout=PATIENCE_S) as http:
        answer = (await http.post("/v1/chat/completions", json=BODY | {"stream": False})).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == [ANSWER] * 2


@pytest.mark.slow
async def test_workers_are_added_when_they_are_ready_and_kept_until_they_leave(folder: Path) -> None:
    leaks, directory = LeakCheck(), FakeDirectory()
    gateways = FakeDirectory(directory.inner)
    start = asyncio.create_task(running_gateway(plan(), gateways))
    directory.inner.announce(worker("connecting", Role.DECODE, WorkerStage.CONNECTING, url="http://127.0.0.1:1"))
    both = RunningWorker(folder, directory, Role.BOTH, starter=Starter(), api_keys=("client",), worker_key=KEY)
    await both.worker.start()
    both.engine.let_run()
    gateway = await start
    await until_members(gateway, WorkerState.READY)
    await answers(gateway)

    num_waits = gateways.num_waits
    gateways.fail()
    await gateways.until(lambda: gateways.num_waits > num_waits)
    await answers(gateway)
    gateway.check()

    gateways.fails = None
    await both.worker.close()
    await until_members(gateway)
    await gateway.close()
    await gateway.close()
    with pytest.raises(EngineDiedError):
        gateway.check()
    leaks.check()


@pytest.mark.slow
async def test_a_worker_that_is_listed_already_is_added_at_once(folder: Path) -> None:
    """Regression: a change between the gateway's first two reads of the list was lost until the next one."""
    directory = FakeDirectory()
    async with RunningWorker(
        folder, directory, Role.BOTH, starter=Starter(), api_keys=("client",), worker_key=KEY
    ) as both:
        both.engine.let_run()
        gateway = await running_gateway(plan(), directory)
        await answers(gateway)
        await gateway.close()


async def test_cancelling_the_wait_for_a_worker_leaves_nothing() -> None:
    leaks, directory = LeakCheck(), FakeDirectory()
    directory.hangs = True
    start = asyncio.create_task(running_gateway(plan(), directory))
    await directory.until(lambda: directory.num_waits == 1)
    start.cancel()
    await asyncio.wait([start])
    assert start.cancelled()
    leaks.check()

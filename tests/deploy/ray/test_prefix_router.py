"""The router of `--prefix-router` over decode replicas in the test's own loop. A directory tells it of them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from motet.deploy.ray.prefix_choice import NOBODY, PrefixRouter
from motet.deploy.server_plan import GatewayPlan
from motet.errors import EngineDiedError
from motet.settings.gateway_config import GatewayConfig
from motet.settings.server_config import CellConfig, ServerConfig
from motet.types import Role
from tests.deploy.dying import Starter
from tests.deploy.ray.directories import FakeDirectory
from tests.deploy.ray.workers import RunningWorker

pytestmark = pytest.mark.anyio

KEY = "of the cell"
BODY = json.dumps({"messages": [{"role": "user", "content": "the hand in the sand"}], "n": 8}).encode()
PLAN = GatewayPlan(
    GatewayConfig(),
    ServerConfig(served_model_name="", worker_key=KEY),
    cell=CellConfig(),
    heartbeat_s=0.02,
)


@pytest.fixture
def directory() -> FakeDirectory:
    return FakeDirectory()


@pytest.fixture
async def router(directory: FakeDirectory) -> AsyncIterator[PrefixRouter]:
    router = PrefixRouter(PLAN, directory)
    await router.start()
    yield router
    await router.close()
    await router.close()


async def until(router: PrefixRouter, holds: Callable[[str], bool], body: bytes = b"") -> str:
    """Returns the first answer for which `holds` is true: it takes a round of questions to the workers."""
    while not holds(named := await router.replica(body, "")):  # noqa: ASYNC110  other objects change, without an event
        await asyncio.sleep(0.01)
    return named


async def test_without_known_replicas_it_names_none(router: PrefixRouter) -> None:
    assert await router.replica(BODY, "s") == NOBODY
    router.check()


async def test_it_names_the_replica_of_serve_that_runs_the_worker(
    router: PrefixRouter, directory: FakeDirectory, folder: Path
) -> None:
    async with RunningWorker(folder, directory, Role.BOTH, starter=Starter(), id="decode-abc123", worker_key=KEY):
        assert await until(router, bool, BODY) == "abc123"
    assert await until(router, lambda named: not named) == NOBODY


@pytest.mark.slow
async def test_eight_choices_at_one_replica_send_the_next_to_the_other(
    router: PrefixRouter, directory: FakeDirectory, folder: Path
) -> None:
    async with AsyncExitStack() as stack:
        for id in ("decode-one", "decode-two"):
            worker = RunningWorker(folder, directory, Role.BOTH, starter=Starter(), id=id, worker_key=KEY)
            await stack.enter_async_context(worker)
        await until(router, lambda named: named == "one")
        await until(router, lambda named: named == "two")
        first = await router.replica(BODY, "")
        assert {first, await router.replica(BODY, "")} == {"one", "two"}


async def test_a_router_that_has_ended_is_unhealthy(router: PrefixRouter) -> None:
    router.check()
    await router.close()
    with pytest.raises(EngineDiedError):
        router.check()

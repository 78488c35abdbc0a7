"""A gateway of vLLM servers that die, hang, refuse, lose KV, join and leave: all answers to clients are correct."""

import asyncio
from pathlib import Path
from random import Random

import httpx
import pytest

from tests.deploy.gateways import RunningGateway
from tests.fault.vllm_clients import Clients
from tests.fault.vllm_fleet import VLLMFleet, vllm_fleet

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SEEDS = (1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 7)))
"""Seeds of the runs. A seed determines the requests and the faults, but not when they happen."""
RUN_S = 3.0
"""Duration of the faults in a run, in seconds. They continue until there are MIN_ANSWERS answers."""
CLIENTS = 12
"""Number of clients at the same time."""
MIN_ANSWERS = 20
"""Minimum number of answers in a run. On a busy machine they take longer than RUN_S."""
LEFT_TO_LEASES, FEW_LEFT = 0.1, 4
"""Maximum share of a run's tickets, and number in addition, whose leases expire: their clients left during the prefill,
or no worker could release them. If the tickets of all clients that leave expired, the share would be a quarter. On a
busy machine, 4 of 79 were observed."""
FAULTS = 2
"""Number of servers that have a fault at the same time."""


@pytest.mark.parametrize("seed", SEEDS)
async def test_answers_are_correct_whatever_happens_to_vllm_servers(
    folder: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    before = asyncio.all_tasks()
    async with vllm_fleet(folder) as fleet, client_of(fleet.gateway) as http:
        clients = Clients(http)
        await run(fleet, clients, Random(seed))
        await fleet.repair()
        await fleet.until_idle()
        check_nothing_left(fleet)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before
    assert not [record for record in caplog.records if record.name == "asyncio"]


def client_of(gateway: RunningGateway) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=gateway.http.base_url, timeout=None, limits=httpx.Limits(max_connections=None))


async def run(fleet: VLLMFleet, clients: Clients, random: Random) -> None:
    ends_s = asyncio.get_running_loop().time() + RUN_S

    async def repeat(kind: str, number: int) -> None:
        own = Random(f"{random.random()} {kind} {number}")
        while asyncio.get_running_loop().time() < ends_s or clients.ends["answered"] < MIN_ANSWERS:
            if kind == "client":
                await clients.send_request(own)
            else:
                await fleet.inject_fault(own)

    async with asyncio.TaskGroup() as tasks:
        for number in range(CLIENTS):
            tasks.create_task(repeat("client", number))
        for number in range(FAULTS):
            tasks.create_task(repeat("fault", number))


def check_nothing_left(fleet: VLLMFleet) -> None:
    """Fails if anything is left of a group, on a server or in the gateway."""
    fleet.gateway.gateway.router.fleet.check()
    assert fleet.network.faults == []
    assert len(fleet.network.pinned) <= LEFT_TO_LEASES * len(fleet.network.prefilled) + FEW_LEFT
    assert fleet.network.transfers > 0

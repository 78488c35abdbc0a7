"""A gateway in front of vLLM servers that die, hang, refuse, lose KV, come and go: whatever clients read is right."""

import asyncio
from pathlib import Path
from random import Random

import httpx
import pytest

from tests.deploy.gateways import RunningGateway
from tests.fault.vllm_clients import Clients
from tests.fault.vllm_fleet import VLLMFleet, vllm_fleet

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PLAYS = (1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 7)))
"""Seeds; a failure names its own. The seed decides what is done and asked, but the machine has a say in when."""
PLAY_S = 3.0
"""Length of the trouble in a play, in seconds; it goes on until FEWEST answers are there."""
AT_ONCE = 12
"""Number of clients that ask at the same time."""
FEWEST = 20
"""Number of answers that a play needs to prove anything. On a busy machine they take longer than PLAY_S."""
LEFT_TO_LEASES, FEW_LEFT = 0.1, 4
"""Of the tickets of a play, and beside that: those that were on their way to clients that left, or that nobody was up
to give back. It would be a quarter if clients that leave left theirs; on a busy machine 4 of 79 were seen."""
STRIKERS = 2
"""Number of servers that are struck at the same time."""


@pytest.mark.parametrize("seed", PLAYS)
async def test_what_clients_read_is_right_whatever_happens_to_vllm_servers(
    folder: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    before = asyncio.all_tasks()
    async with vllm_fleet(folder) as fleet, client_of(fleet.gateway) as http:
        clients = Clients(http)
        await play(fleet, clients, Random(seed))
        await fleet.mend()
        await fleet.until_idle()
        check_nothing_left(fleet)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before
    assert not [record for record in caplog.records if record.name == "asyncio"]


def client_of(gateway: RunningGateway) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=gateway.http.base_url, timeout=None, limits=httpx.Limits(max_connections=None))


async def play(fleet: VLLMFleet, clients: Clients, random: Random) -> None:
    ends_s = asyncio.get_running_loop().time() + PLAY_S

    async def again(what: str, number: int) -> None:
        own = Random(f"{random.random()} {what} {number}")
        while asyncio.get_running_loop().time() < ends_s or clients.told["answered"] < FEWEST:
            if what == "client":
                await clients.come(own)
            else:
                await fleet.strike(own)

    async with asyncio.TaskGroup() as tasks:
        for number in range(AT_ONCE):
            tasks.create_task(again("client", number))
        for number in range(STRIKERS):
            tasks.create_task(again("striker", number))


def check_nothing_left(fleet: VLLMFleet) -> None:
    """Fails if anything is left on a server, or in the gateway of any group."""
    fleet.gateway.gateway.router.fleet.check()
    assert fleet.network.faults == []
    assert len(fleet.network.pinned) <= LEFT_TO_LEASES * len(fleet.network.prefilled) + FEW_LEFT
    assert fleet.network.transfers > 0

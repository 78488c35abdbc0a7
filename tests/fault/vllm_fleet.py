"""Fake vLLM servers and a text upstream with one gateway, and their faults while clients read."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from bench.servers.ports import free_port
from motet.deploy.gateway_models import TokenizerRules
from motet.engine import Worker, WorkerState
from motet.engines.vllm.vllm_engine import VLLMEngine
from motet.settings.server_config import RoutingConfig
from tests.deploy.gateways import ADMIN, RunningGateway
from tests.peers.fake_openai import FakeOpenAI
from tests.peers.fake_vllm import FakeVLLM
from tests.peers.openai_script import Behaviour, FixedAnswer
from tests.peers.vllm_tickets import Network

TEXTS = "texts"
STEP_S = 0.004
"""Time in seconds that a server takes for one step."""
IDLE_LIMIT_S = 60.0
"""Time in seconds within which every call of the gateway to a server ends: more than the longest time-out."""
WAIT_S = 120.0
"""Time in seconds for which a group waits for a worker: longer than any fault lasts."""


@dataclass
class VLLMFleet:
    """A `gateway` with `prefill`, two `decodes`, a `guest` that joins and leaves, and `texts`, a text upstream."""

    prefill: FakeVLLM
    decodes: tuple[FakeVLLM, FakeVLLM]
    guest: FakeVLLM
    texts: FakeOpenAI
    network: Network
    gateway: RunningGateway
    _has_guest: bool = False
    """True if the guest was added and not removed since."""
    _faulty: set[int] = field(default_factory=set)
    """Ports of the servers that have a fault at this time."""

    @property
    def servers(self) -> list[FakeVLLM]:
        return [self.prefill, *self.decodes, self.guest]

    async def inject_fault(self, random: Random) -> None:
        """Injects a fault into a server that has no other one, and ends it after some time."""
        server = random.choice([server for server in self.servers if server.port not in self._faulty])
        fault = random.choice(
            (self._kill, self._hang, self._fail, self._break_engine, self._overload, self._toggle_guest)
        )
        self._faulty.add(server.port)
        try:
            await fault(server, random)
        finally:
            self._faulty.discard(server.port)

    async def repair(self) -> None:
        """Ends all faults, and waits until every worker is ready."""
        for server in self.servers:
            assert server.switches.healthy and not server.switches.pull_fails and not server.switches.pull_hangs
            server.switches.too_busy = 0
        self.texts.behaviour.next_errors.clear()
        for server in (self.prefill, *self.decodes):
            await self.gateway.until_state(name_of(server), WorkerState.READY)

    async def until_idle(self) -> None:
        """Waits until no server has an open request, and the gateway waits for no answer."""
        for server in self.servers:
            await _until_idle(server)
        await self.texts.until_idle()
        for _ in range(int(IDLE_LIMIT_S / STEP_S)):
            members = self.gateway.gateway.router.fleet.members
            ready = [member.worker for member in members if member.state is WorkerState.READY]
            if not any(_has_open_call(worker) for worker in ready if worker is not None):
                return
            await asyncio.sleep(STEP_S)
        pytest.fail("the gateway still waits for servers")

    async def _kill(self, server: FakeVLLM, random: Random) -> None:
        await server.kill()
        await asyncio.sleep(random.uniform(0.0, 0.3))
        await server.start()

    async def _hang(self, server: FakeVLLM, random: Random) -> None:
        server.stop()
        await asyncio.sleep(random.uniform(0.0, 1.0))
        server.resume()

    async def _fail(self, server: FakeVLLM, random: Random) -> None:
        """Makes the server's fetches of KV fail for some time."""
        how = random.choice(("pull_fails", "pull_hangs"))
        setattr(server.switches, how, True)
        await asyncio.sleep(random.uniform(0.0, 0.8))
        setattr(server.switches, how, False)
        server.changed()

    async def _break_engine(self, server: FakeVLLM, random: Random) -> None:
        """Breaks the engine of the server, which works again only after the server was restarted."""
        server.switches.healthy = False
        await asyncio.sleep(random.uniform(0.0, 0.3))
        await server.kill()
        server.switches.healthy = True
        await server.start()

    async def _overload(self, server: FakeVLLM, random: Random) -> None:
        """Makes the server refuse the next requests. The text upstream can refuse one too."""
        server.switches.too_busy = random.randint(1, 5)
        busy = FixedAnswer.error(503, "full", code="overloaded")
        self.texts.behaviour.next_errors += [busy] * random.randint(0, 1)

    async def _toggle_guest(self, server: FakeVLLM, random: Random) -> None:
        """Adds the guest, or removes it, no matter which server was chosen."""
        if self._has_guest:
            drain_s = random.choice((0, 0.1, 5))
            await self.gateway.http.delete(f"/workers/guest?drain_timeout={drain_s}", headers=ADMIN)
        else:
            body = {"url": self.guest.url, "id": "guest", "role": "decode"}
            await self.gateway.http.post("/workers", json=body, headers=ADMIN)
        self._has_guest = not self._has_guest


async def _until_idle(server: FakeVLLM) -> None:
    await server.until(lambda: not server.open)


def _has_open_call(worker: Worker) -> bool:
    """Returns True if the gateway waits for an answer of the server, for example to a released ticket."""
    try:
        if isinstance(worker.engine, VLLMEngine):
            worker.engine.check()
    except AssertionError:
        return True
    return False


def name_of(server: FakeVLLM) -> str:
    return server.url.removeprefix("http://")


@asynccontextmanager
async def vllm_fleet(folder: Path) -> AsyncIterator[VLLMFleet]:
    network = Network()
    async with AsyncExitStack() as stack:
        # The port of a server is the same after each restart.
        fakes = [FakeVLLM(network=network, stepped=True, port=free_port()) for _ in range(4)]
        servers = [await stack.enter_async_context(server) for server in fakes]
        prefill, one, other, guest = servers
        other.switches.scale_out = True
        texts = await stack.enter_async_context(FakeOpenAI(Behaviour(models=({"id": TEXTS},))))
        pace = asyncio.create_task(_pace(servers))
        stack.callback(pace.cancel)
        workers = (f"{prefill.url},prefill", f"{one.url},decode", f"{other.url},decode", texts.url)
        gateway = RunningGateway(
            *workers,
            tokenizers=TokenizerRules({}, others=folder),
            gateway={"worker_timeout_s": 0.4, "leader_timeout_s": 0.4},
            routing=RoutingConfig(migration_limit=1000, migration_wait_s=WAIT_S, queue_timeout_s=WAIT_S),
        )
        await stack.enter_async_context(gateway)
        fleet = VLLMFleet(prefill, (one, other), guest, texts, network, gateway)
        await fleet.repair()
        yield fleet


async def _pace(servers: list[FakeVLLM]) -> None:
    while True:
        await asyncio.sleep(STEP_S)
        for server in servers:
            server.step()

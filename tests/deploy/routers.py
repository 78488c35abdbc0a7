"""A server's router over fake workers that die, leave and return."""

import msgspec

from motet.config import CellConfig, RoutingConfig
from motet.deploy.compose import make_router
from motet.engines.base import Worker, WorkerState
from motet.engines.fake import FakeEngine, fake_info
from motet.engines.fake_leases import FakeLeases
from motet.errors import WorkerLeavingError
from motet.routing.queued import Queued
from motet.transfer.ticket import TransferAddress
from motet.types import Role
from tests.routing.cell import Clock, Tasks
from tests.routing.moving import script

PLACES = 8


class RoutedServer:
    """Workers by name, such as `decode-1`, with `PLACES` places each."""

    def __init__(self, *names: str, spread_choices: int = 0, migration_limit: int = 3) -> None:
        self.clock = Clock()
        self.leases = FakeLeases()
        routing = RoutingConfig(spread_choices=spread_choices, migration_limit=migration_limit)
        self.router = make_router(routing, CellConfig(), clock=self.clock)
        self.fleet = self.router.fleet
        self.engine = self.router.engine
        self.engines: dict[str, FakeEngine] = {}
        """Those of the present lives."""
        self.all: list[FakeEngine] = []
        for name in names:
            self.start(name)
        self.tasks = Tasks()

    def start(self, name: str) -> FakeEngine:
        """For the first time or again."""
        address = TransferAddress(f"{name}, life {len(self.all)}", "127.0.0.1", 1)
        info = fake_info(role=Role(name.partition("-")[0]), transfer=address)
        info = msgspec.structs.replace(info, max_num_seqs=PLACES)
        self.engines[name] = FakeEngine(script, info=info, leases=self.leases)
        self.all.append(self.engines[name])
        self.fleet.put(Worker(name, self.engines[name], "127.0.0.1:1"))
        return self.engines[name]

    async def leave(self, name: str) -> None:
        """Its time to drain is up."""
        self.fleet.mark(name, WorkerState.DRAINING)
        await self.fleet.evict(name, WorkerLeavingError("it goes"))
        self.fleet.remove(name)

    def expire_leases_of_those_who_left(self) -> None:
        """Of workers that were told nothing any more."""
        here = [member.worker.engine for member in self.fleet.members if member.worker is not None]
        for engine in self.all:
            if engine not in here and engine.info.transfer is not None:
                self.leases.lose(engine.info.transfer.engine_id)

    def check(self) -> None:
        """Nothing is open, kept or running."""
        assert isinstance(self.engine, Queued)
        self.engine.check()
        for engine in self.all:
            engine.check()
        self.fleet.check()
        self.tasks.check()

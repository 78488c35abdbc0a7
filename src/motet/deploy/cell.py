"""The engines of one server: what is started, kept alive, watched and closed as one.

    one engine                    a fleet of one
    --prefill P --decode D        P + D engines; without prefill engines, D that do it all
    --role decode --prefill-url   the engine, and prefill servers elsewhere

1. all engine processes start at once; one that cannot start ends the others
2. every decode engine meets every prefill engine, so that no request pays for connecting
3. `watch` runs beside the server: a keeper for each engine starts it again when it dies, and prefill servers are
   looked after
4. the cell is `dead` when nobody is left who decodes, or will be; a prefill engine is done without
5. `close` ends every process
"""

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence

import httpx

from motet.deploy.block_events import BlockEvents
from motet.deploy.compose import Router, make_router
from motet.deploy.local_keeper import LocalKeeper
from motet.deploy.meet import Connecting, meet_all
from motet.deploy.plan import ServerPlan, cores, engine_configs
from motet.deploy.prefill_servers import PrefillServers
from motet.deploy.start import LocalEngine, StartEngine, start_engines
from motet.engines.base import ANSWERING, Engine, Worker
from motet.metrics.routing import RoutingFigures
from motet.transfer.ticket import TransferAddress
from motet.types import Role


class Cell:
    """Engines that serve together. Made by `start_cell`."""

    def __init__(
        self, router: Router, keepers: Sequence[LocalKeeper], servers: PrefillServers, block_events: BlockEvents
    ) -> None:
        self.router = router
        self.block_events = block_events
        self._keepers = keepers
        self._servers = servers
        decoding = [keeper for keeper in keepers if keeper.role is not Role.PREFILL]
        self._needed = decoding or keepers

    @property
    def engine(self) -> Engine:
        """What requests go to."""
        return self.router.engine

    @property
    def workers(self) -> list[Worker]:
        """Those that are there now."""
        return [member.worker for member in self.router.fleet.members if member.worker is not None]

    @property
    def dead(self) -> bool:
        return all(keeper.given_up.is_set() for keeper in self._needed)

    def figures(self) -> RoutingFigures:
        """What routing has counted, and the keepers."""
        restarts = {keeper.id: keeper.restarted for keeper in self._keepers}
        return dataclasses.replace(self.router.figures(), restarts=restarts)

    async def death(self) -> None:
        """Returns once it is dead."""
        for keeper in self._needed:
            await keeper.given_up.wait()

    async def connect(self, address: TransferAddress) -> None:
        """Its engines that fetch KV get to know a worker elsewhere. Raises MotetError if one cannot."""
        fetching = [keeper.id for keeper in self._keepers if keeper.role is Role.DECODE]
        for worker in self.workers:
            if worker.id in fetching and isinstance(worker.engine, Connecting):
                await worker.engine.connect(address)

    def endpoint(self) -> str | None:
        """Where others are told which blocks its engine has, if that is one place."""
        return self.block_events.endpoint(self._keepers[0].id) if len(self._keepers) == 1 else None

    async def adopt(self, engines: Mapping[str, LocalEngine]) -> None:
        """Those that were started, by worker id."""
        for keeper in self._keepers:
            self.router.fleet.expect(keeper.id, "-", keeper.role)
        # Decode first: who comes later is met by all who are there.
        for keeper in sorted(self._keepers, key=lambda keeper: keeper.role is Role.PREFILL):
            await keeper.adopt(engines[keeper.id])
        (first, *_) = self.workers
        self._servers.join(first)

    async def watch(self) -> None:
        """Runs until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for keeper in self._keepers:
                tasks.create_task(keeper.keep())
            for id in self._servers.ids:
                tasks.create_task(self._servers.watch(id))

    async def close(self) -> None:
        """Ends open groups with `EngineClosedError`, and every process. May be called twice; `watch` is over before, or
        it would start again what is ended here."""
        await self.engine.close()
        await asyncio.gather(*(keeper.close() for keeper in self._keepers))
        await self.block_events.close()


async def start_cell(plan: ServerPlan, *, address: str, start_engine: StartEngine, client: httpx.AsyncClient) -> Cell:
    """Starts what the plan names, all or nothing. `address`: where the server itself is reached; `client`: for prefill
    servers, to be closed after the cell."""
    configs = engine_configs(plan, cores=cores())
    router = make_router(plan.routing, plan.cell, role=plan.role)
    fleet = router.fleet
    block_events = BlockEvents(plan.kv_events, list(configs))

    async def meet(worker: Worker) -> None:
        """Those that answer: to ask one that is dead would hold up who has just come back."""
        answering = [member.worker for member in fleet.members if member.state in ANSWERING]
        await meet_all(worker, [other for other in answering if other is not None])

    keepers = [
        LocalKeeper(
            id,
            config,
            fleet=fleet,
            start_engine=start_engine,
            address=side_channel_of if len(configs) > 1 else lambda _: address,
            publish=block_events.publish,
            meet=meet,
            restarts=plan.routing.engine_restarts,
        )
        for id, config in configs.items()
    ]
    engines = await start_engines(configs, start_engine)
    cell = Cell(router, keepers, PrefillServers(plan.cell, fleet, client), block_events)
    try:
        await cell.adopt(engines)
    except BaseException:
        await asyncio.gather(*(engine.close() for engine in engines.values()))
        await block_events.close()
        raise
    return cell


def side_channel_of(engine: LocalEngine) -> str:
    transfer = engine.info.transfer
    return f"{transfer.host}:{transfer.port}" if transfer else "-"

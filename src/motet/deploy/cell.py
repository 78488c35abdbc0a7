"""The engines of one server, which are started, watched, restarted and closed together.

    one engine                    a fleet of one
    --prefill P --decode D        P + D engines; without prefill engines, D engines that do both
    --role decode --prefill-url   the engine, and prefill workers on other servers

1. all engine processes start at the same time; if a process cannot start, all of them end
2. each engine gets the weights of the cell, and every decode engine connects to every prefill engine, so that no
   request waits for a connection
3. `watch` runs next to the server: each engine has a keeper (`LocalKeeper`), which restarts it when it dies. Prefill
   workers on other servers are watched as a gateway watches its workers

       ready ── died ──► dead ── back-off ──► starting ──► joined ──► ready, with a new process
                          └── after `engine_restarts` restarts in a row ──► given up

   restarts are in a row if the engine was ready for less than `STEADY_S` in between; the back-off grows with each
4. the cell is `dead` when all engines that decode are given up; it continues without prefill engines
5. `close` ends every process
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from motet.control.engine_control import EngineControl
from motet.deploy.block_events import BlockEvents, indexing
from motet.deploy.discover import FoundServer, ProbeSettings
from motet.deploy.gateway import Gateway
from motet.deploy.kv_connections import connect_to_fleet
from motet.deploy.server_plan import ServerPlan, engine_configs
from motet.deploy.worker_list import WorkerList
from motet.engine import ControlledEngine, Engine, Worker, WorkerState
from motet.engine_info import EngineKind
from motet.engine_orders import Connect
from motet.engines.http import Client
from motet.engines.wire import EngineReport
from motet.errors import EngineError, MotetError
from motet.kv_events.changes import BlockListener
from motet.metrics.routing import RoutingFigures
from motet.routing.router import Router
from motet.routing.workers.fleet import Fleet
from motet.settings.engine_config import EngineConfig
from motet.settings.gateway_config import GatewayConfig
from motet.settings.named_worker import NamedWorker
from motet.settings.server_url import server_url
from motet.system.machine import cores, read_memory
from motet.tracing.spans import NO_TRACES, Tracer
from motet.transfer.ticket import TransferAddress
from motet.types import Role

logger = logging.getLogger(__name__)

DEFAULTS = GatewayConfig()
STEADY_S = 10.0
"""Time for which an engine must be ready before its death counts as the first in a row."""
FIRST_BACKOFF_S = 0.25


class LocalEngine(Engine, ControlledEngine, Protocol):
    """An engine in a process that this server has started: `NativeEngine`, or a fake in tests."""

    @property
    def died(self) -> asyncio.Event:
        """Set when the process has ended by itself, or was killed because it hung."""
        ...

    def kill(self) -> None:
        """Kills the process with SIGKILL, as if it had crashed."""
        ...

    def listen_to_blocks(self, listener: BlockListener) -> None:
        """Passes changes of the engine's prompt blocks to `listener`. Must be called before the engine gets a group."""
        ...


StartEngine = Callable[[EngineConfig], Awaitable[LocalEngine]]


class Cell:
    """Engines that serve together. Made by `start_cell`."""

    def __init__(self, router: Router, keepers: Sequence["LocalKeeper"], *, control: EngineControl) -> None:
        self.router = router
        self.control = control
        self._keepers = keepers
        self._prefill: Gateway | None = None
        """Prefill workers on other servers; None if there are none."""
        self._needed = [keeper for keeper in keepers if keeper.role is not Role.PREFILL] or keepers
        """Keepers of the engines without which the server cannot serve."""

    @property
    def workers(self) -> list[Worker]:
        """The workers that have an engine now."""
        return [member.worker for member in self.router.fleet.members if member.worker is not None]

    @property
    def dead(self) -> bool:
        """True if the server cannot serve any more."""
        return all(keeper.given_up.is_set() for keeper in self._needed)

    def figures(self) -> RoutingFigures:
        """Returns the figures of the router, with the restarts of the engines."""
        restarts = {keeper.id: keeper.restarted for keeper in self._keepers}
        return dataclasses.replace(self.router.figures(), restarts=restarts)

    async def death(self) -> None:
        """Returns when the cell is dead."""
        for keeper in self._needed:
            await keeper.given_up.wait()

    async def connect(self, address: TransferAddress) -> None:
        """Connects the decode engines to a worker on another server. Raises MotetError if an engine cannot connect."""
        pulling = [keeper.id for keeper in self._keepers if keeper.role is Role.DECODE]
        for worker in self.workers:
            if worker.id in pulling and isinstance(worker.engine, ControlledEngine):
                await worker.engine.send(Connect(address))

    def endpoint(self) -> str | None:
        """Returns the address of the block events, if the cell has one engine; else None."""
        return self._keepers[0].block_events.endpoint if len(self._keepers) == 1 else None

    async def start(self, plan: ServerPlan, client: Client) -> None:
        """Starts the engines, and requests a report of each prefill server of the plan."""
        for keeper in self._keepers:
            self.router.fleet.expect(keeper.id, "-", role=keeper.role)
        await start_all(self._keepers)
        # Decode first: each prefill engine that joins is then connected to all decode engines at the same time.
        for keeper in sorted(self._keepers, key=lambda keeper: keeper.role is Role.PREFILL):
            await keeper.join()
        if plan.cell.prefill_urls:
            self._prefill = prefill_members(
                self, client, worker_key=plan.server.worker_key, drain_s=plan.server.drain_timeout_s
            )
            for number, url in enumerate(dict.fromkeys(map(server_url, plan.cell.prefill_urls))):
                self._prefill.add(NamedWorker(url, Role.PREFILL, EngineKind.MOTET), id=f"{Role.PREFILL}-{number}")
            async with self._prefill.watched():
                pass

    async def watch(self) -> None:
        """Watches the engines and prefill servers until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for keeper in self._keepers:
                tasks.create_task(keeper.keep())
            if self._prefill is not None:
                tasks.create_task(self._prefill.watch())

    async def close(self) -> None:
        """Ends open groups with `EngineClosedError`, then all processes. Called after `watch`. Can be called twice."""
        await self.router.close()
        await asyncio.gather(*(keeper.close() for keeper in self._keepers))
        await self.control.close()
        if self._prefill is not None:
            await self._prefill.close()


async def start_cell(
    plan: ServerPlan, *, address: str, start_engine: StartEngine, client: Client, tracer: Tracer = NO_TRACES
) -> Cell:
    """Starts all engines of the plan, or none. `address`: address of this server; `client`: for prefill servers."""
    configs = engine_configs(plan, cores=cores(), available_bytes=read_memory().available_bytes)
    fleet = Fleet(session_expiry_s=plan.routing.session_expiry_s)
    router = Router(fleet, plan.routing, cell=plan.cell, role=plan.role, tracer=tracer)
    control = EngineControl(router)
    keepers = [
        LocalKeeper(
            id,
            config,
            fleet=fleet,
            start_engine=start_engine,
            block_events=BlockEvents(plan.kv_events, number),
            control=control,
            restarts=RestartSeries(plan.routing.engine_restarts, longest_backoff_s=plan.longest_backoff_s),
            address=address if len(configs) == 1 else None,
        )
        for number, (id, config) in enumerate(configs.items())
    ]
    cell = Cell(router, keepers, control=control)
    try:
        await cell.start(plan, client)
    except BaseException:
        await cell.close()
        raise
    return cell


def prefill_members(
    cell: Cell,
    client: Client,
    *,
    worker_key: str,
    drain_s: float,
    config: GatewayConfig = DEFAULTS,
    connects_workers: bool = True,
    listed: WorkerList | None = None,
) -> Gateway:
    """Makes a `Gateway` to the prefill servers of a cell, for a server that decodes and serves clients directly.

    The `Gateway` watches these servers like its own workers. They are named at the start (`--prefill-url`), or on Ray
    they join and leave with the directory (`listed`)."""
    model = cell.workers[0].engine.info.model

    async def prepare(report: EngineReport, server: FoundServer) -> None:
        if report.info.model != model:
            raise EngineError(
                f"{server.url} has the model {report.info.model}, and this server {model}: "
                "set the same --served-model-name on both"
            )

    probes = ProbeSettings(config=config, client=client, worker_key=worker_key)
    return Gateway(
        cell.router, prepare, probes=probes, drain_s=drain_s, connects_workers=connects_workers, listed=listed
    )


async def start_all(keepers: Iterable["LocalKeeper"]) -> None:
    """Starts all engines at the same time. The first failure ends the other starts; the caller closes all keepers."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for keeper in keepers:
                tasks.create_task(keeper.start())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


class RestartSeries:
    """Counts the restarts of one engine in a row, and computes the time to wait before each."""

    def __init__(
        self, max_in_a_row: int, *, longest_backoff_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_in_a_row = max_in_a_row
        self._longest_backoff_s = longest_backoff_s
        self._clock = clock
        self._in_a_row = 0
        self._ready_s = clock()
        """Time at which the engine last became ready."""

    def __str__(self) -> str:
        """Returns the number of the current start in words, for the notes of `/status`."""
        return f"start {self._in_a_row} of {self._max_in_a_row}"

    def record_ready(self) -> None:
        self._ready_s = self._clock()

    def record_death(self) -> None:
        if self._clock() - self._ready_s >= STEADY_S:
            self._in_a_row = 0

    def next_backoff_s(self) -> float | None:
        """Counts a restart. Returns the time to wait before it: 0.25, 0.5, 1, 2 ... The first restart is quick, since a
        single death can be an accident. Returns None after the maximum number of restarts."""
        if self._in_a_row >= self._max_in_a_row:
            return None
        self._in_a_row += 1
        return min(self._longest_backoff_s, FIRST_BACKOFF_S * 2.0 ** (self._in_a_row - 1))


class LocalKeeper:
    """The keeper of an engine on this machine: restarts a dead process. The owner calls `start` and `join` first."""

    def __init__(
        self,
        id: str,
        config: EngineConfig,
        *,
        fleet: Fleet,
        start_engine: StartEngine,
        block_events: BlockEvents,
        control: EngineControl,
        restarts: RestartSeries,
        address: str | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`address`: the worker's address in routing; None for the address of its side channel."""
        self.id = id
        self.role = config.role
        self.given_up = asyncio.Event()
        """Set when the engine will not be restarted any more."""
        self.restarted = 0
        """Number of successful restarts."""
        self.block_events = block_events
        self._fleet = fleet
        self._start_engine = partial(start_engine, config)
        self._address = address
        self._restarts = restarts
        self._sleep = sleep
        self._control = control
        self._engine: LocalEngine | None = None

    async def start(self) -> None:
        """Starts the engine's process. Raises StartupError."""
        self._engine = await self._start_engine()

    async def join(self) -> None:
        """Puts the started engine in the fleet: it gets the weights of the other engines, is connected to the workers
        with which it exchanges KV, and gets groups from now on. Raises MotetError if it cannot get these weights."""
        engine = self._engine
        assert engine is not None  # it was started
        engine.listen_to_blocks(indexing(self._fleet.cached_blocks, self.id))
        if (listener := self.block_events.listener(engine.info.block_size)) is not None:
            engine.listen_to_blocks(listener)
        async with self._control.joining(engine):
            transfer = engine.info.transfer
            side_channel = f"{transfer.host}:{transfer.port}" if transfer else "-"
            worker = Worker(self.id, engine, self._address or side_channel, kill=engine.kill)
            await connect_to_fleet(worker, self._fleet)
            self._fleet.put(worker)

    async def keep(self) -> None:
        """Watches and restarts the engine, until this call is cancelled or the engine is given up."""
        while self._engine is not None:
            self._restarts.record_ready()
            await self._engine.died.wait()
            logger.error("the process of %s (pid %s) died", self.id, self._engine.info.pid)
            self._fleet.mark(self.id, WorkerState.DEAD, why="its process ended")
            await self._engine.close()  # removes its pipes and their folder
            self._engine = None
            self._restarts.record_death()
            while self._engine is None and (wait_s := self._restarts.next_backoff_s()) is not None:
                await self._sleep(wait_s)
                await self._restart()
        logger.error("%s is not restarted any more", self.id)
        self._fleet.give_up(self.id)
        self.given_up.set()

    async def _restart(self) -> None:
        self._fleet.mark(self.id, WorkerState.STARTING, why=str(self._restarts))
        try:
            await self.start()
            await self.join()
        except MotetError as error:
            self._fleet.mark(self.id, WorkerState.DEAD, why=f"it cannot start: {error.message}")
            if self._engine is not None:
                await self._engine.close()
                self._engine = None
        else:
            self.restarted += 1

    async def close(self) -> None:
        """Ends the engine, even if it never joined the fleet. Must be called after `keep` has ended."""
        if self._engine is not None:
            await self._engine.close()
        await self.block_events.close()

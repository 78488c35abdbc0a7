"""The engines of one server, put together: what is started, watched and closed as one.

    one engine                    the engine itself
    --prefill P --decode D        Disaggregated(Routed(P engines), Routed(D engines))
    --role decode --prefill-url   Disaggregated(Routed(prefill servers), Routed(the engine))

1. all engine processes start at once; one that cannot start ends the others
2. every decode engine meets every prefill engine, so that no request pays for connecting; a pair that cannot meet is
   a warning, for decode computes what it cannot fetch
3. `watch` runs beside the server: it tells which engines die, and looks after prefill servers
4. the cell is `dead` when nobody is left who decodes; a dead prefill engine is done without
5. `close` ends every process
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httpx

from motet.config import CellConfig
from motet.deploy.plan import ServerPlan, cores, engine_configs
from motet.deploy.start import LocalEngine, StartEngine, start_engines
from motet.engines.base import Engine, Worker
from motet.engines.remote import RemotePrefill
from motet.errors import EngineError, MotetError
from motet.routing.bypass import BypassRules
from motet.routing.disaggregate import Disaggregated
from motet.routing.routed import Routed
from motet.transfer.ticket import TransferAddress
from motet.types import Role

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cell:
    """Engines that serve together. Made by `start_cell`."""

    engine: Engine
    """What requests go to; closing it closes all."""
    workers: tuple[Worker, ...]
    decoding: Mapping[str, LocalEngine]
    """By worker id; when all of these have died nothing can be served."""
    prefilling: Mapping[str, LocalEngine]
    servers: tuple[RemotePrefill, ...]
    """Prefill servers elsewhere."""
    bypasses: Callable[[], Mapping[str, int]]
    """How many prompts were not prefilled apart, by reason."""

    @property
    def dead(self) -> bool:
        return all(engine.died.is_set() for engine in self.decoding.values())

    async def death(self) -> None:
        """Returns once it is dead."""
        for engine in self.decoding.values():
            await engine.died.wait()

    async def meet(self) -> None:
        """Connects every decode engine with every prefill engine, all at once."""
        await asyncio.gather(
            *(
                meet(name, engine, prefill_name, prefill.info.transfer)
                for name, engine in self.decoding.items()
                for prefill_name, prefill in self.prefilling.items()
            )
        )

    async def watch(self) -> None:
        """Runs until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for name, engine in (*self.decoding.items(), *self.prefilling.items()):
                tasks.create_task(self._watch_engine(name, engine))
            for server in self.servers:
                tasks.create_task(server.watch(self._meet_server))

    async def _watch_engine(self, name: str, engine: LocalEngine) -> None:
        await engine.died.wait()
        logger.error("the process of %s (pid %s) died", name, engine.info.pid)
        with contextlib.suppress(EngineError):
            # From which routing learns whom to pass over: a group that was given to a dead engine is lost, while a
            # prefill that fails is asked for elsewhere.
            await self.engine.stats()

    async def _meet_server(self, address: TransferAddress) -> None:
        await asyncio.gather(*(engine.connect(address) for engine in self.decoding.values()))

    async def close(self) -> None:
        """Ends open groups with `EngineClosedError`, and every process. May be called twice."""
        await self.engine.close()


async def start_cell(plan: ServerPlan, *, address: str, start_engine: StartEngine, client: httpx.AsyncClient) -> Cell:
    """Starts what the plan names, all or nothing. `address`: where the server itself is reached; `client`: for prefill
    servers, to be closed after the cell."""
    engines = await start_engines(engine_configs(plan, cores=cores()), start_engine)
    if plan.cell.prefill:
        cell = prefill_and_decode(engines, plan.cell)
    else:
        ((name, engine),) = engines.items()
        cell = alone(Worker(name, engine, address), engine, plan.cell, client)
    try:
        await cell.meet()
    except BaseException:
        await cell.close()
        raise
    return cell


def alone(worker: Worker, local: LocalEngine, config: CellConfig, client: httpx.AsyncClient) -> Cell:
    """One engine, which `worker` names, with the prefill servers it asks, if any."""
    decoding = {worker.id: local}
    if not config.prefill_urls:
        return Cell(local, (worker,), decoding, {}, (), dict)
    servers = tuple(
        RemotePrefill(
            url, info=local.info, client=client, release_through=local.release, api_key=config.prefill_api_key
        )
        for url in config.prefill_urls
    )
    prefill = tuple(
        Worker(f"prefill-{i}", server, url, local=False)
        for i, (server, url) in enumerate(zip(servers, config.prefill_urls, strict=True))
    )
    engine = disaggregated(prefill, (worker,), config, role=Role.DECODE)
    return Cell(engine, (worker, *prefill), decoding, {}, servers, lambda: engine.bypasses)


def prefill_and_decode(engines: Mapping[str, LocalEngine], config: CellConfig) -> Cell:
    prefilling = {name: engine for name, engine in engines.items() if engine.info.role is Role.PREFILL}
    decoding = {name: engine for name, engine in engines.items() if engine.info.role is Role.DECODE}
    prefill, decode = (
        tuple(Worker(name, engine, side_channel_of(engine)) for name, engine in side.items())
        for side in (prefilling, decoding)
    )
    engine = disaggregated(prefill, decode, config, role=Role.BOTH)
    return Cell(engine, (*prefill, *decode), decoding, prefilling, (), lambda: engine.bypasses)


def disaggregated(
    prefill: tuple[Worker, ...], decode: tuple[Worker, ...], config: CellConfig, *, role: Role
) -> Disaggregated:
    rules = BypassRules(config.bypass_tokens, config.prefill_timeout_s)
    return Disaggregated(Routed(prefill), Routed(decode), rules, role=role)


def side_channel_of(engine: Engine) -> str:
    transfer = engine.info.transfer
    return f"{transfer.host}:{transfer.port}" if transfer else "-"


async def meet(name: str, engine: LocalEngine, prefill_name: str, address: TransferAddress | None) -> None:
    """Never raises: what cannot be fetched is computed."""
    if address is None:
        return
    try:
        await engine.connect(address)
    except MotetError as exc:
        logger.warning("%s cannot fetch from %s: %s", name, prefill_name, exc)

"""The body of `GET /status`: every worker at this moment, and what was done in all."""

import msgspec

from motet.api.service import Service
from motet.engines.base import Engine
from motet.errors import EngineClosedError, EngineDiedError
from motet.types import EngineStats, Role


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    role: Role
    state: str
    """`starting`, `ready`, `draining` or `dead`."""
    pid: int | None
    """Only of a process on this machine."""
    address: str
    groups_running: int
    choices_running: int
    choices_waiting: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    leases: int = 0
    oldest_lease_s: float | None = None
    last_decision: str | None = None


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """0 where one does not apply to this deployment."""

    prefills: int = 0
    prefill_tokens: int = 0
    transfers: int = 0
    transfer_bytes: int = 0
    recomputed_tokens: int = 0
    forks: int = 0
    blocks_shared: int = 0
    migrations: int = 0
    choices_resumed: int = 0
    bypasses: int = 0


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    version: str
    workers: list[WorkerStatus]
    totals: Totals


async def stats_if_alive(engine: Engine) -> EngineStats | None:
    """None if the engine is dead or closed."""
    try:
        return await engine.stats()
    except (EngineDiedError, EngineClosedError):
        return None


async def server_status(service: Service, version: str) -> ServerStatus:
    stats = await stats_if_alive(service.engine)
    return ServerStatus(
        model=service.model,
        version=version,
        workers=[_worker(service, stats)],
        totals=Totals(prefill_tokens=stats.prefill_tokens, forks=stats.forks, blocks_shared=stats.blocks_shared)
        if stats
        else Totals(),
    )


def _worker(service: Service, stats: EngineStats | None) -> WorkerStatus:
    info, config = service.engine.info, service.config
    state = "dead" if stats is None else "draining" if service.admission.draining else "ready"
    figures = stats or EngineStats(blocks_total=info.num_blocks)
    return WorkerStatus(
        id="engine-0",
        role=info.role,
        state=state,
        pid=info.pid,
        address=f"{config.host}:{config.port}",
        groups_running=figures.groups_running,
        choices_running=figures.choices_running,
        choices_waiting=figures.choices_waiting,
        blocks_total=figures.blocks_total,
        blocks_used=figures.blocks_used,
        blocks_cached=figures.blocks_cached,
    )

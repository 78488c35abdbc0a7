"""The body of `GET /status`: every worker at this moment, and what was done in all."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from motet.api.service import Service
from motet.api.workers import Seen, look
from motet.engines.base import WorkerState
from motet.ids import ModelName
from motet.metrics.routing import RoutingFigures
from motet.transfer.ticket import TransferAddress
from motet.types import EngineKind, EngineStats, Role

T = TypeVar("T")

PATIENCE_S = 2.0
"""How long a worker is waited for: longer than most steps."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a silent worker are not known, and left out. One without an engine holds nothing: 0."""

    id: str
    role: Role | None
    """None: it has not told yet."""
    state: WorkerState
    pid: int | None
    """Only of a process on this machine."""
    address: str
    kind: EngineKind | None
    model: str | None
    models: tuple[ModelName, ...]
    """Beside `model`."""
    max_num_seqs: int
    """Choices that run there at once."""
    transfer: TransferAddress | None
    """Where its KV can be fetched."""
    groups_running: int | UnsetType = UNSET
    choices_running: int | UnsetType = UNSET
    choices_waiting: int | UnsetType = UNSET
    blocks_total: int
    blocks_used: int | UnsetType = UNSET
    blocks_cached: int | UnsetType = UNSET
    leases: int | UnsetType = UNSET
    oldest_lease_s: float | UnsetType | None = UNSET
    pulls_open: int | UnsetType = UNSET
    blocks_pulling: int | UnsetType = UNSET
    resumable: bool
    """Whether what it writes can go on elsewhere."""
    last_decision: str | None
    """Why it got the last group it was given."""
    note: str | None
    """Why it is in its state."""


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Over the workers that answered; 0 where one does not apply to this deployment."""

    prefills: int
    prefill_tokens: int
    transfers: int
    transfer_bytes: int
    recomputed_tokens: int
    forks: int
    blocks_shared: int
    migrations: int
    choices_resumed: int
    bypasses: int


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None
    """The first of `models`."""
    models: list[str]
    version: str
    workers: list[WorkerStatus]
    totals: Totals


async def server_status(service: Service, version: str) -> ServerStatus:
    workers, models = await look_at_all(service), service.model_names
    return ServerStatus(
        model=models[0] if models else None,
        models=models,
        version=version,
        workers=[worker_status(seen) for seen in workers],
        totals=_totals([seen.stats for seen in workers if seen.stats], service.figures()),
    )


async def look_at_all(service: Service) -> list[Seen]:
    return await look(service.workers.reports(), patience_s=PATIENCE_S, draining=service.admission.draining)


def worker_status(seen: Seen) -> WorkerStatus:
    report, info = seen.report, seen.info

    def figure(read: Callable[[EngineStats], T]) -> T | UnsetType:
        return UNSET if seen.state is WorkerState.SILENT else read(seen.stats or EngineStats())

    return WorkerStatus(
        id=report.id,
        role=report.role,
        state=seen.state,
        pid=info.pid if info else None,
        address=report.address,
        kind=report.kind,
        model=info.model if info else None,
        models=report.models,
        max_num_seqs=info.max_num_seqs if info else 0,
        transfer=info.transfer if info else None,
        groups_running=figure(lambda s: s.groups_running),
        choices_running=figure(lambda s: s.choices_running),
        choices_waiting=figure(lambda s: s.choices_waiting),
        blocks_total=info.num_blocks if info else 0,
        blocks_used=figure(lambda s: s.blocks_used),
        blocks_cached=figure(lambda s: s.blocks_cached),
        leases=figure(lambda s: s.leases),
        oldest_lease_s=figure(lambda s: s.oldest_lease_s),
        pulls_open=figure(lambda s: s.pulls_open),
        blocks_pulling=figure(lambda s: s.blocks_pulling),
        resumable=report.resumable,
        last_decision=report.last_decision,
        note=report.note,
    )


def _totals(stats: Sequence[EngineStats], routing: RoutingFigures) -> Totals:
    return Totals(
        prefills=sum(s.prefills for s in stats),
        prefill_tokens=sum(s.prefill_tokens for s in stats),
        transfers=sum(s.transfers for s in stats),
        transfer_bytes=sum(s.transfer_bytes for s in stats),
        recomputed_tokens=sum(s.recomputed_tokens for s in stats),
        forks=sum(s.forks for s in stats),
        blocks_shared=sum(s.blocks_shared for s in stats),
        migrations=sum(routing.migrations.values()),
        choices_resumed=routing.choices_resumed,
        bypasses=sum(routing.bypasses.values()),
    )

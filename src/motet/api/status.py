"""The body of `GET /status`: every worker at this moment, and what was done in all."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from motet.api.service import Service
from motet.api.workers import Answered, Life, ask
from motet.transfer.ticket import TransferAddress
from motet.types import EngineStats, Role

T = TypeVar("T")

PATIENCE_S = 2.0
"""How long a worker is waited for: longer than most steps."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a silent worker are not known, and left out. A dead one holds nothing: 0."""

    id: str
    role: Role
    state: str
    """`ready`, `draining`, `silent` or `dead`."""
    pid: int | None
    """Only of a process on this machine."""
    address: str
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
    last_decision: str | None = None


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Over the workers that answered; 0 where one does not apply to this deployment."""

    prefills: int
    prefill_tokens: int
    transfers: int
    transfer_bytes: int
    recomputed_tokens: int
    forks: int
    blocks_shared: int
    migrations: int = 0
    choices_resumed: int = 0
    bypasses: int


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    version: str
    workers: list[WorkerStatus]
    totals: Totals


async def server_status(service: Service, version: str) -> ServerStatus:
    answers = await ask(service.workers, patience_s=PATIENCE_S)
    draining = service.admission.draining
    return ServerStatus(
        model=service.model,
        version=version,
        workers=[_worker(answer, draining=draining) for answer in answers],
        totals=_totals([answer.stats for answer in answers if answer.stats], sum(service.bypasses().values())),
    )


def _worker(answer: Answered, *, draining: bool) -> WorkerStatus:
    info = answer.worker.engine.info

    def figure(read: Callable[[EngineStats], T]) -> T | UnsetType:
        return UNSET if answer.life is Life.SILENT else read(answer.stats or EngineStats())

    return WorkerStatus(
        id=answer.worker.id,
        role=info.role,
        state=_state(answer.life, draining=draining),
        pid=info.pid,
        address=answer.worker.address,
        transfer=info.transfer,
        groups_running=figure(lambda s: s.groups_running),
        choices_running=figure(lambda s: s.choices_running),
        choices_waiting=figure(lambda s: s.choices_waiting),
        blocks_total=info.num_blocks,
        blocks_used=figure(lambda s: s.blocks_used),
        blocks_cached=figure(lambda s: s.blocks_cached),
        leases=figure(lambda s: s.leases),
        oldest_lease_s=figure(lambda s: s.oldest_lease_s),
        pulls_open=figure(lambda s: s.pulls_open),
        blocks_pulling=figure(lambda s: s.blocks_pulling),
    )


def _state(life: Life, *, draining: bool) -> str:
    if life is not Life.ANSWERED:
        return life.value
    return "draining" if draining else "ready"


def _totals(stats: Sequence[EngineStats], bypasses: int) -> Totals:
    return Totals(
        prefills=sum(s.prefills for s in stats),
        prefill_tokens=sum(s.prefill_tokens for s in stats),
        transfers=sum(s.transfers for s in stats),
        transfer_bytes=sum(s.transfer_bytes for s in stats),
        recomputed_tokens=sum(s.recomputed_tokens for s in stats),
        forks=sum(s.forks for s in stats),
        blocks_shared=sum(s.blocks_shared for s in stats),
        bypasses=bypasses,
    )

"""One model of a fleet as an engine of its own: what a server that serves several hands its requests to."""

import asyncio

import msgspec

from motet.engines.base import Engine, GroupStream
from motet.errors import EngineClosedError, EngineDiedError, NoWorkerError
from motet.ids import ModelName, RequestId
from motet.routing.candidate import Work
from motet.routing.fleet import Fleet
from motet.routing.member import Member
from motet.routing.totals import common_info, total_stats
from motet.transfer.ticket import Ticket
from motet.types import EngineInfo, EngineStats, GenerateRequest, Role


class OfModel:
    """An `Engine` around the one that all models of the fleet share; closing it closes that."""

    def __init__(self, engine: Engine, fleet: Fleet, model: ModelName, *, role: Role = Role.BOTH) -> None:
        """`role`: of the server as its clients see it."""
        self._engine = engine
        self._fleet = fleet
        self._model = model
        self._role = role
        self._seen: tuple[Member, ...] = ()
        """Those that `info` was worked out for."""
        self._info: EngineInfo | None = None

    @property
    def info(self) -> EngineInfo:
        """What holds for any group on any worker that serves the model; while none is up, what held last. Raises
        NoWorkerError if none ever was."""
        members = self._fleet.ready(Work.GENERATE, self._model)
        if members is not self._seen:
            self._seen = members
            infos = [info for member in members if (info := member.info_of(self._model)) is not None]
            self._info = self._as_seen(common_info(infos)) if infos else self._info
        if self._info is None:
            raise self._none_up()
        return self._info

    def generate(self, request: GenerateRequest) -> GroupStream:
        return self._engine.generate(self._named(request))

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        return await self._engine.prefill(self._named(request), readers=readers)

    async def release(self, ticket: Ticket) -> None:
        await self._engine.release(ticket)

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        await self._engine.stop_choice(request_id, index)

    async def stats(self) -> EngineStats:
        """Of all workers that serve the model and answer. Raises NoWorkerError if none does."""
        answers = await asyncio.gather(*map(_stats_of, self._fleet.ready(Work.GENERATE, self._model)))
        alive = [stats for stats in answers if stats is not None]
        if not alive:
            raise self._none_up()
        return total_stats(alive)

    async def close(self) -> None:
        await self._engine.close()

    def _named(self, request: GenerateRequest) -> GenerateRequest:
        return msgspec.structs.replace(request, model=self._model)

    def _as_seen(self, info: EngineInfo) -> EngineInfo:
        return info if info.role is self._role else msgspec.structs.replace(info, role=self._role, transfer=None)

    def _none_up(self) -> NoWorkerError:
        return NoWorkerError(f"no worker serves {self._model} now")


async def _stats_of(member: Member) -> EngineStats | None:
    """None: it does not answer; its keeper finds that out."""
    if member.worker is None:
        return None
    try:
        return await member.worker.engine.stats()
    except (EngineDiedError, EngineClosedError):
        return None

"""A group outlives its worker: what its choices had not finished goes on elsewhere.

When a worker dies, falls silent or leaves, the unfinished choices of its groups become new groups, of
`ChoiceStart(index, seed, written)`, for the engine below to place. A token is a function of logits, seed and position,
so between equal fingerprints they write what they would have written. The reader sees a pause.

    error                                       what happens to the group
    RequestError, EngineError, EngineClosed     it ends: the error would come again, or this server is closing
    EngineDied, EngineSilent, WorkerLeaving     it goes on elsewhere, `limit` times at most
    NoWorker                                    it waits until a worker comes, `wait_s` at most
    Overloaded                                  another worker is asked; `REFUSALS` of them, and a group that has shown
                                                nothing is refused itself; one that has waits as for a worker
"""

import asyncio
import time
from collections.abc import Callable

from motet.engines.base import Engine
from motet.ids import RequestId
from motet.routing.migrating_group import MigratingGroup
from motet.routing.moves import MigrationFigures, MigrationRules, Moves
from motet.transfer.ticket import Ticket
from motet.types import EngineInfo, EngineStats, GenerateRequest


class Migrating:
    """An `Engine` around one that places groups. `changed` is done when a worker came, left, or has room; `hopeful`
    says whether any may come."""

    def __init__(
        self,
        engine: Engine,
        rules: MigrationRules,
        *,
        changed: Callable[[], asyncio.Future[None]],
        hopeful: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._rules = rules
        self._changed = changed
        self._hopeful = hopeful
        self._clock = clock
        self._groups: dict[RequestId, MigratingGroup] = {}
        self.figures = MigrationFigures()

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def generate(self, request: GenerateRequest) -> MigratingGroup:
        group = MigratingGroup(
            request,
            self._engine,
            Moves(self._rules, self.figures, clock=self._clock),
            changed=self._changed,
            hopeful=self._hopeful,
            ended=self._ended,
        )
        self._groups[request.request_id] = group
        return group

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        return await self._engine.prefill(request, readers=readers)

    async def release(self, ticket: Ticket) -> None:
        await self._engine.release(ticket)

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        if group := self._groups.get(request_id):
            await group.stop(index)

    async def stats(self) -> EngineStats:
        return await self._engine.stats()

    async def close(self) -> None:
        """A group that waits for a worker waits no more; any other gets the error of its engine."""
        for group in list(self._groups.values()):
            group.wait_no_more()
        await self._engine.close()

    def check(self) -> None:
        """Raises unless every group has ended."""
        if self._groups:
            raise AssertionError(f"groups left open: {sorted(self._groups)}")

    def _ended(self, group: MigratingGroup) -> None:
        if self._groups.get(group.request.request_id) is group:
            del self._groups[group.request.request_id]

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
from motet.ids import ModelName
from motet.routing.around import Around
from motet.routing.migrating_group import MigratingGroup
from motet.routing.moves import MigrationFigures, MigrationRules, Moves
from motet.types import GenerateRequest


class Migrating(Around[MigratingGroup]):
    """An `Engine` around one that places groups. `changed` is done when a worker came, left, or has room; `hopeful`
    says whether any that has the model may come."""

    def __init__(
        self,
        engine: Engine,
        rules: MigrationRules,
        *,
        changed: Callable[[], asyncio.Future[None]],
        hopeful: Callable[[ModelName], bool] = lambda _: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(engine)
        self._rules = rules
        self._changed = changed
        self._hopeful = hopeful
        self._clock = clock
        self.figures = MigrationFigures()

    def generate(self, request: GenerateRequest) -> MigratingGroup:
        group = MigratingGroup(
            request,
            self._engine,
            Moves(self._rules, self.figures, clock=self._clock),
            changed=self._changed,
            hopeful=self._hopeful,
            ended=self._ended,
        )
        return self._keep(group)

    async def close(self) -> None:
        """A group that waits for a worker waits no more; any other gets the error of its engine."""
        for group in list(self._groups.values()):
            group.wait_no_more()
        await self._engine.close()

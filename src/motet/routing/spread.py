"""One large group over several decode workers: one prefill, one ticket with a reader for each part, one stream.

A part is a group of its own for everything below, with the numbers and seeds that its choices have in the whole; so it
is placed, moved and resumed like any other, and what it writes is what it would have written in one piece. There are no
more parts than a ticket may have readers: where it may have one, a group that is prefilled stays whole.
"""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from motet.engines.base import Engine, GroupStream
from motet.ids import ModelName
from motet.routing.around import Around
from motet.routing.spread_group import SpreadGroup, Tickets
from motet.routing.spread_plan import Group, plan_parts
from motet.types import GenerateRequest


class Spread(Around[SpreadGroup]):
    """An `Engine` around one that places whole groups. `open_choices`: of each worker that a part of a group of this
    model could go to."""

    def __init__(
        self,
        engine: Engine,
        tickets: Tickets,
        *,
        spread_choices: int,
        open_choices: Callable[[ModelName], Sequence[int]],
    ) -> None:
        super().__init__(engine)
        self._tickets = tickets
        self._spread_choices = spread_choices
        self._open_choices = open_choices
        self.spreads = 0
        """Groups that were split."""

    def choices_on_the_way(self, model: ModelName) -> int:
        """Of groups that are being prefilled: no decode worker has them in its books yet."""
        return sum(group.choices_on_the_way for group in self._groups.values() if group.request.model == model)

    def generate(self, request: GenerateRequest) -> GroupStream:
        """A greedy group is computed once whatever its size, and a client's ticket has one reader: these stay whole."""
        large = 0 < self._spread_choices < len(request.choices)
        if not large or request.sampling.greedy or request.ticket is not None:
            return self._engine.generate(request)
        apart = self._tickets.asks_prefill(request)
        levels = sorted(self._open_choices(request.model))
        plan = plan_parts(
            Group(len(request.choices), len(request.prompt), request.sampling.max_tokens, ticket=apart),
            levels[: self._tickets.ticket_readers(request.model)] if apart else levels,
            spread_choices=self._spread_choices,
        )
        if len(plan) == 1:
            # Prefill is asked, and a bypass counted, once: who is not for it now goes past the question.
            return self._engine.generate(request if apart else msgspec.structs.replace(request, straight=True))
        self.spreads += 1
        group = SpreadGroup(request, plan, self._engine, self._tickets, apart=apart, ended=self._ended)
        return self._keep(group)

    async def close(self) -> None:
        """Parts end with what the engine below says; a group that has none yet ends here."""
        await asyncio.gather(*(group.wait_no_more() for group in list(self._groups.values())))
        await self._engine.close()

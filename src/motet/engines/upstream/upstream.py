"""A text upstream as one of several: takes groups, learns what it can, and ends what it has when it is lost.

What a model can is asked for once, in the background: of a server with one model by `learn` when it has been met; of
one with several when a model is first wanted for several choices (some load a model only then, some take money for each
request). Until it is known, choices are asked for one by one, which every server understands.
"""

import asyncio
import time
from collections.abc import Callable

from motet.engines.upstream.ask import Asks
from motet.engines.upstream.base import TextRequest
from motet.engines.upstream.client import Ids, UpstreamServer
from motet.engines.upstream.group import UpstreamGroup
from motet.engines.upstream.probe import Abilities, probe
from motet.engines.upstream.report import report_of
from motet.engines.wire import EngineReport
from motet.errors import EngineClosedError, MotetError, NotFoundError

AGAIN_S = 60.0
"""After asking in vain what a model can."""


class TextUpstream:
    """Made of the first report of a server; owned by its keeper, who closes it."""

    def __init__(
        self, server: UpstreamServer, report: EngineReport, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.engine_id = report.engine_id
        self.server = server
        self.cards = report.models
        """Of the models it served when it was met."""
        self._parents: dict[str, str] = {card.name: card.parent for card in report.models if card.parent is not None}
        self._base_models = [card.name for card in report.models if card.parent is None]
        self._abilities: dict[str, Abilities] = {}
        """By base model, in the server's own names."""
        self._ask_again_s: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._groups: set[UpstreamGroup] = set()
        self._clock = clock

    async def report(self) -> EngineReport:
        return await report_of(self.server)

    async def learn(self) -> None:
        """What its model can, if it has just one."""
        if len(self._base_models) == 1 and (task := self._learn(self._theirs(self._base_models[0]), Ids())):
            await asyncio.wait([task])

    async def learned(self) -> None:
        """Returns once nothing is being asked."""
        await asyncio.gather(*self._asking.values())

    def generate(self, request: TextRequest) -> UpstreamGroup:
        theirs = self._theirs(request.model)
        base = self._theirs(self._parents.get(request.model, request.model))
        known = self._abilities.get(base)
        ability = (known or Abilities()).on(request.route)
        if not ability.there:
            raise NotFoundError(
                f"The model `{request.model}` is not to be had on {request.route}: its server has no such route.",
                code="unknown_url",
            )
        several = request.num_choices > 1
        if known is None and several:
            self._learn(base, Ids(authorization=request.authorization))
        asks = Asks(request, theirs, usage=ability.takes_usage, at_once=not several or ability.honours_n)
        group = UpstreamGroup(self.server, asks if asks.at_once else asks.as_singles(), on_end=self._groups.discard)
        self._groups.add(group)
        return group

    def lost(self, error: MotetError) -> None:
        """Ends all groups with `error`. What it can is asked anew: it may come back as another one."""
        for group in list(self._groups):
            group.fail(error)
        self._abilities.clear()
        self._ask_again_s.clear()

    async def close(self) -> None:
        self.lost(EngineClosedError(f"{self.server.name} is not used any more."))
        asking = list(self._asking.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    def check(self) -> None:
        """Raises unless every group has ended."""
        if self._groups:
            raise AssertionError(f"{self.server.name}: {len(self._groups)} groups left")

    def _theirs(self, name: str) -> str:
        return self.server.options.names.get(name, name)

    def _learn(self, model: str, ids: Ids) -> asyncio.Task[None] | None:
        """None: it is known, or is not to be asked just now."""
        if model in self._asking or model in self._abilities or self._clock() < self._ask_again_s.get(model, 0.0):
            return self._asking.get(model)
        self._asking[model] = task = asyncio.create_task(self._ask(model, ids))
        return task

    async def _ask(self, model: str, ids: Ids) -> None:
        try:
            found = await probe(self.server, model, ids=ids)
            if found is None:
                self._ask_again_s[model] = self._clock() + AGAIN_S
            else:
                self._abilities[model] = found
        finally:
            del self._asking[model]

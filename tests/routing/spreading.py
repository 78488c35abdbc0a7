"""Fake workers behind a `Spread`, and what a test of it needs."""

import asyncio

from motet.errors import MotetError
from motet.ids import ModelName
from motet.routing.bypass import BypassRules
from motet.routing.candidate import Work
from motet.routing.spread import Spread
from motet.transfer.ticket import Ticket
from motet.types import GenerateRequest
from tests.routing.moving import Scene

APART = ("prefill-0", "decode-0", "decode-1")


class Spreading(Scene):
    """Workers by name behind `Spread(Migrating(Disaggregated(Routed(fleet))))`."""

    def __init__(
        self,
        *names: str,
        spread_choices: int = 4,
        limit: int = 3,
        wait_s: float = 15.0,
        rules: BypassRules | None = None,
    ) -> None:
        super().__init__(*names, limit=limit, wait_s=wait_s, rules=rules)
        self.tickets = HeldTickets(self)
        self.spread = Spread(
            self.engine,
            self.tickets,
            spread_choices=spread_choices,
            open_choices=lambda model: [member.open_choices for member in self.fleet.ready(Work.GENERATE, model)],
        )

    @property
    def pulls(self) -> int:
        return sum(engine.pulls for engine in self.all)

    @property
    def written(self) -> int:
        """Tokens that the workers have written."""
        return sum(engine.generated_tokens for engine in self.all)

    @property
    def prefills(self) -> list[str]:
        """Groups that were prefilled, by name."""
        return [one.request_id for engine in self.all for one in engine.prefills]

    def gate(self, steps: int) -> asyncio.Semaphore:
        """All workers together take so many steps, and one more each time it is released."""
        gate = asyncio.Semaphore(steps)
        for engine in self.all:
            engine.gate = gate
        return gate

    def check(self) -> None:
        self.spread.check()
        super().check()


class HeldTickets:
    """Those of a scene; a release waits for `may_release`."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.may_release = asyncio.Event()
        self.may_release.set()
        self.released: list[Ticket] = []

    def asks_prefill(self, request: GenerateRequest) -> bool:
        return self._scene.apart.asks_prefill(request)

    def ticket_readers(self, model: ModelName) -> int:
        return self._scene.apart.ticket_readers(model)

    def reads(self, ticket: Ticket, model: ModelName) -> bool:
        return self._scene.apart.reads(ticket, model)

    async def ticket(self, request: GenerateRequest, *, readers: int = 1) -> Ticket | None:
        return await self._scene.apart.ticket(request, readers=readers)

    async def release(self, ticket: Ticket) -> None:
        await self.may_release.wait()
        await self._scene.apart.release(ticket)
        self.released.append(ticket)


class Failing:
    """What prefill does: it fails after a few turns of the loop, if there is an error."""

    def __init__(self, error: MotetError | None = None, *, turns: int = 3) -> None:
        self._error = error
        self._turns = turns

    async def __call__(self, _: GenerateRequest) -> None:
        for _turn in range(self._turns):
            await asyncio.sleep(0)
        if self._error is not None:
            raise self._error

"""Fake workers with little room behind a `Queued`, and what a test of it needs."""

import msgspec

from motet.engines.base import GroupStream, Worker
from motet.engines.fake import FakeEngine, fake_info
from motet.routing.queued import Queued
from motet.transfer.ticket import TransferAddress
from motet.types import GenerateRequest, Role
from tests.routing.moving import Heard, Scene, script, settle, wish


class Queueing(Scene):
    """Workers by name, with so many places each, behind `Queued(Migrating(Disaggregated(Routed(fleet))))`."""

    def __init__(
        self,
        *names: str,
        places: int = 4,
        blocks: int = 1024,
        timeout_s: float = 60.0,
        make: type[FakeEngine] = FakeEngine,
    ) -> None:
        self.places = places
        self.blocks = blocks
        self.make = make
        super().__init__(*names)
        self.queued = Queued(
            self.engine,
            self.fleet,
            timeout_s=timeout_s,
            on_the_way=self.apart.choices_on_the_way,
            clock=self.clock,
        )

    def start(self, name: str) -> FakeEngine:
        address = TransferAddress(f"{name}, life {len(self.all)}", "127.0.0.1", 1)
        info = fake_info(role=Role(name.partition("-")[0]), transfer=address)
        info = msgspec.structs.replace(info, max_num_seqs=self.places, num_blocks=self.blocks)
        self.engines[name] = self.make(script, info=info, leases=self.leases)
        self.all.append(self.engines[name])
        self.fleet.put(Worker(name, self.engines[name], "127.0.0.1:1"))
        return self.engines[name]

    def give(self, name: str, n: int, *, priority: int = 0) -> "Given":
        request = msgspec.structs.replace(wish(name, n=n), priority=priority)
        return Given(request, self.queued.generate(request))

    async def pass_time(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.fleet.notify_room()
        await settle()

    @property
    def gone(self) -> list[str]:
        """Groups that were let through, in that order, if there is one worker."""
        return [one.request_id for engine in self.all for one in engine.requests]

    def check(self) -> None:
        self.queued.check()
        super().check()


class Given:
    """A group and its stream."""

    def __init__(self, request: GenerateRequest, stream: GroupStream) -> None:
        self.request = request
        self.stream = stream
        self.heard = Heard()

    async def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.heard.take(await anext(self.stream), self.request)

    async def read(self) -> Heard:
        """To the end; then whoever waits for its room has had the time to go."""
        await self.heard.read(self.stream, self.request)
        await settle()
        return self.heard

    async def leave(self) -> None:
        await self.stream.aclose()
        await settle()

"""Scripted engines that can die, and a starter that makes them in place of engine processes."""

import asyncio
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from motet.engine_orders import AdapterOrder, Connect, Done, EngineFacts, EngineOrder, LoadAdapter, OrderAnswer
from motet.errors import EngineDiedError, MotetError
from motet.ids import ModelName
from motet.models.checkpoint import CheckpointKind
from motet.settings.engine_config import EngineConfig
from motet.settings.named_adapter import named_adapters
from motet.testing.fake_adapters import with_adapters
from motet.testing.fake_engine import FakeEngine, FakeGroup, FakeLeases, fake_info
from motet.transfer.orders import FailureKind, TransferError
from motet.transfer.ticket import TransferAddress
from motet.types import ChoiceStart, GenerateRequest, Role
from tests.tiny_tokenizer import fake_answer

MAX_ADAPTERS = 2
ANSWER = "the hand and the other hand"
DEAD = EngineDiedError("the engine process ended")


def script(_: GenerateRequest, __: ChoiceStart) -> list[int]:
    return fake_answer(ANSWER)


class DyingEngine(FakeEngine):
    """Runs a step each time `steps` is released. `die` ends it as the death of its process would."""

    def __init__(
        self,
        *,
        role: Role = Role.BOTH,
        transfer: TransferAddress | None = None,
        leases: FakeLeases | None = None,
        connects: bool = True,
    ) -> None:
        self.steps = asyncio.Semaphore(0)
        info = fake_info(role=role, transfer=transfer, max_adapters=MAX_ADAPTERS)
        super().__init__(script, info=info, gate=self.steps, leases=leases)
        self.died = asyncio.Event()
        self.submitted = asyncio.Event()
        self.connected: list[TransferAddress] = []
        self.has_connected = asyncio.Event()
        self.adapter_orders: list[AdapterOrder] = []
        self._connects = connects

    def generate(self, request: GenerateRequest) -> FakeGroup:
        self.submitted.set()
        return super().generate(request)

    async def send(self, order: EngineOrder) -> OrderAnswer:
        if isinstance(order, Connect):
            if not self._connects:
                raise TransferError("no server answers there", FailureKind.UNREACHABLE)
            self.connected.append(order.address)
            self.has_connected.set()
        if isinstance(order, AdapterOrder):
            if self.death is not None:
                raise self.death
            self.adapter_orders.append(order)
            self.info = with_adapters(self.info, order)
            return EngineFacts(self.info)
        return Done()

    def kill(self) -> None:
        self.die()

    def die(self, error: EngineDiedError = DEAD) -> None:
        super().die(error)
        self.died.set()

    def let_run(self) -> None:
        for _ in range(1000):
            self.steps.release()


class Starter:
    """Replaces `NativeEngine.start`. Engines of a role in `hangs` never become ready, and engines of a role in `errors`
    cannot start. `connect`: False if no engine can be connected to another."""

    def __init__(
        self,
        *,
        hangs: Sequence[Role] = (),
        errors: Mapping[Role, MotetError] | None = None,
        connect: bool = True,
        leases: FakeLeases | None = None,
    ) -> None:
        self.configs: list[EngineConfig] = []
        self.engines: list[DyingEngine] = []
        self.hanging = asyncio.Event()
        self.cancelled = 0
        self._started = asyncio.Semaphore(0)
        self._hangs = hangs
        self._errors = {} if errors is None else errors
        self._connect = connect
        self._leases = leases or FakeLeases()

    async def __call__(self, config: EngineConfig) -> DyingEngine:
        self.configs.append(config)
        number = len(self.configs)
        if config.role in self._hangs:
            self.hanging.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if config.role in self._errors:
            raise self._errors[config.role]
        transfer = None if config.role is Role.BOTH else TransferAddress(f"engine {number}", "127.0.0.1", number)
        engine = DyingEngine(role=config.role, transfer=transfer, leases=self._leases, connects=self._connect)
        engine.info = replace(engine.info, default_sampling_params=dict(config.default_sampling_params))
        for adapter in named_adapters(config.adapters):
            name, path = ModelName(adapter.name), adapter.path
            await engine.send(LoadAdapter(name, CheckpointKind.FILES, path, root=path))
        self.engines.append(engine)
        self._started.release()
        return engine

    async def engine(self, number: int) -> DyingEngine:
        """Waits for the engine with that number, counted from 0, and returns it. Must be called in ascending order."""
        while len(self.engines) <= number:
            await self._started.acquire()
        return self.engines[number]

    def of(self, role: Role) -> list[DyingEngine]:
        return [engine for engine in self.engines if engine.info.role is role]

"""A router over workers of several models and kinds, and a record of groups that a worker should not have got."""

import logging
from collections import Counter

import msgspec

from motet.engine_info import EngineInfo, EngineKind, ModelCard
from motet.ids import ModelName
from motet.routing.workers.worker_facts import PairKey, pair_key
from motet.testing.fake_engine import FakeGroup, FakeLeases, fake_info
from motet.transfer.ticket import Ticket, TransferAddress
from motet.types import GenerateRequest, Role
from tests.routing.scene import ControlledEngine, Scene, script

A, B = ModelName("a"), ModelName("b")
MAX_CHOICES = 8
FRENCH = ModelName("french")
"""An adapter of model `A`."""
ADAPTER = ModelCard(name=FRENCH, root="adapters/french", parent=A, max_model_len=2048)


def info_of(name: str, *, start: int = 0) -> EngineInfo:
    """`name`: role, model, kind and number, such as `prefill-a-vllm-0`."""
    role, model, kind, _ = name.split("-")
    foreign = kind == EngineKind.VLLM
    return msgspec.structs.replace(
        fake_info(role=Role(role), transfer=TransferAddress(f"{name}, start {start}", "127.0.0.1", 1)),
        model=ModelName(model),
        kind=EngineKind(kind),
        block_size=128 if foreign else 16,
        ticket_readers=1 if foreign else 64,
        max_num_seqs=MAX_CHOICES,
    )


class Makers:
    """The makers of all tickets, and everything that went wrong."""

    def __init__(self) -> None:
        self.keys: dict[str, PairKey] = {}
        """The pair key of each maker, by engine id."""
        self.released = Counter[int]()
        """Number of times that each lease was released."""
        self.wrong: list[str] = []


class KindEngine(ControlledEngine):
    """An engine that records groups that it should not have got."""

    def __init__(self, info: EngineInfo, leases: FakeLeases, makers: Makers) -> None:
        super().__init__(script, info=info, leases=leases)
        self.cards: tuple[ModelCard, ...] = ()
        self._makers = makers
        makers.keys[self._address.engine_id] = pair_key(info)

    def generate(self, request: GenerateRequest) -> FakeGroup:
        self._check_model(request)
        ticket, me = request.ticket, self._address.engine_id
        if ticket is not None and self._makers.keys[ticket.remote_engine_id] != pair_key(self.info):
            self._makers.wrong.append(f"{me} got a ticket of {ticket.remote_engine_id}")
        if ticket is not None and self.info.role is not Role.DECODE:
            self._makers.wrong.append(f"{me} got a ticket, and cannot read one")
        return super().generate(request)

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        self._check_model(request)
        if readers > self.info.ticket_readers:
            self._makers.wrong.append(f"a ticket of {self._address.engine_id} was to have {readers} readers")
        ticket = await super().prefill(request, readers=readers)
        return ticket if self.info.kind is EngineKind.MOTET else msgspec.structs.replace(ticket, foreign="{}")

    async def release(self, ticket: Ticket, *, trace: str = "") -> None:
        if bool(ticket.foreign) is (self.info.kind is EngineKind.MOTET):
            self._makers.wrong.append(f"{self._address.engine_id} was to release a ticket of another kind")
        self._makers.released[ticket.lease_id] += 1
        await super().release(ticket, trace=trace)

    def _check_model(self, request: GenerateRequest) -> None:
        if request.model not in (self.info.model, *(card.name for card in self.cards)):
            self._makers.wrong.append(f"{self._address.engine_id} got a group for {request.model}")


class UnreleasedTickets(logging.Handler):
    """Collects the groups whose tickets no worker could release."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.groups: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("no worker can release the ticket") and isinstance(record.args, tuple):
            self.groups.add(str(record.args[0]))


class KindsScene(Scene):
    """A scene whose workers have names such as `prefill-a-vllm-0`."""

    def __init__(self, *names: str, spread_choices: int = 0, limit: int = 3) -> None:
        self.makers = Makers()
        self.unreleased = UnreleasedTickets()
        super().__init__(*names, spread_choices=spread_choices, limit=limit, max_choices=MAX_CHOICES)
        router = logging.getLogger("motet.routing.groups.tickets")
        router.setLevel(logging.INFO)
        router.addHandler(self.unreleased)

    def make_engine(self, name: str) -> KindEngine:
        engine = KindEngine(info_of(name, start=len(self.all)), self.leases, self.makers)
        if member := self.fleet.get(name):
            engine.cards = member.models.additional
        return engine

    def offer(self, name: str, *cards: ModelCard) -> None:
        engine = self.engines[name]
        assert isinstance(engine, KindEngine)
        engine.cards = cards
        self.fleet.set_models(name, cards)

    def check(self) -> None:
        for ticket in list(self.leases.held.values()):
            if ticket.remote_request_id in self.unreleased.groups:
                self.leases.release(ticket)
        logging.getLogger("motet.routing.groups.tickets").removeHandler(self.unreleased)
        assert self.makers.wrong == []
        assert set(self.makers.released.values()) <= {1}, "a ticket is released once"
        super().check()

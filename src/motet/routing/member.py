"""One worker as a fleet knows it: its state, what it serves, and the books of what it was given."""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from motet.engines.base import Worker, WorkerReport, WorkerState
from motet.errors import MotetError
from motet.ids import ModelName
from motet.routing.load import WorkerLoad
from motet.routing.pairs import PairKey, fetches, pair_key
from motet.types import EngineInfo, EngineKind, ModelCard, Role

REFUSAL_S = 0.5
"""A worker that took no more is passed over for so long."""


class Evictable(Protocol):
    """A group that can be told to go elsewhere."""

    async def evict(self, error: MotetError) -> None: ...


class Member:
    """From when it was first heard of. Its `Fleet` changes it, for it has to know."""

    def __init__(
        self, id: str, address: str, role: Role | None, *, text: bool = False, clock: Callable[[], float]
    ) -> None:
        self.id = id
        self.address = address
        self.role = role
        self.text = text
        """It takes texts, not tokens: no engine of ours stands for it, and no group goes to it."""
        self.state = WorkerState.STARTING
        self.worker: Worker | None = None
        self.models: tuple[ModelCard, ...] = ()
        """What it serves beside its engine's own model."""
        self.pair_key: PairKey | None = None
        """None: it has not been there yet."""
        self.fetches = False
        """Whether its engine can fetch KV that another has computed."""
        self.block_size = 0
        self.ticket_readers = 1
        self.books = WorkerLoad(clock=clock)
        self.foreign_choices = 0
        """Open choices that others gave it, as it told last; 0 for a worker that is ours alone."""
        self.groups: set[Evictable] = set()
        """Those it is writing."""
        self.stirred = False
        """Something of a group has come from it since this was set to False."""
        self.last_decision: str | None = None
        self.note = ""
        """Why it is in its state."""
        self.given_up = False
        """Whether nobody expects it back."""
        self._cards: dict[ModelName, ModelCard] = {}
        self._clock = clock
        self._refused_until_s = clock()

    @property
    def cards(self) -> Sequence[ModelCard]:
        """Of all it serves, its engine's own model first. While it is away, what it served last."""
        return tuple(self._cards.values())

    def has(self, model: str) -> bool:
        """Whether it serves the model; whoever names none means the only one there is."""
        return not model or model in self._cards

    def may_have(self, model: str) -> bool:
        """The same, or it has not told yet what it serves."""
        return self.has(model) or not self._cards

    def info_of(self, model: str) -> EngineInfo | None:
        """What its engine is to whoever asks for this model; None: it has no engine, or not the model."""
        if self.worker is None or not self.has(model):
            return None
        info = self.worker.engine.info
        if not model or model == info.model:
            return info
        card = self._cards[ModelName(model)]
        return msgspec.structs.replace(info, model=card.name, max_model_len=card.max_model_len)

    @property
    def engine_id(self) -> str | None:
        """Which its tickets name; None: it makes none."""
        address = None if self.worker is None else self.worker.engine.info.transfer
        return None if address is None else address.engine_id

    @property
    def open_choices(self) -> int:
        """Being written there or to be written, whoever wants them."""
        return self.books.open_choices + self.foreign_choices

    def reported(self, choices: int) -> None:
        """It says that so many are open there."""
        self.foreign_choices = max(0, choices - self.books.open_choices)

    def expect(self, choices: int) -> None:
        """Others give it so many more; when it reports next it says itself what it has."""
        self.foreign_choices += choices

    @property
    def refused(self) -> bool:
        """Whether it took no more a moment ago."""
        return self._clock() < self._refused_until_s

    def refuse(self) -> None:
        self._refused_until_s = self._clock() + REFUSAL_S

    def returned(self, worker: Worker | None) -> None:
        """It is there, for the first time or again. `worker`: None for one that takes texts."""
        self.books = WorkerLoad(clock=self._clock)
        self.groups = set()
        self.given_up = False
        self.foreign_choices = 0
        self._refused_until_s = self._clock()
        self.worker, self.text = worker, worker is None
        if worker is not None:
            info = worker.engine.info
            self.address, self.role = worker.address, info.role
            self.pair_key = pair_key(info)
            self.fetches = fetches(info)
            self.block_size, self.ticket_readers = info.block_size, info.ticket_readers
        self.offers(self.models)

    def offers(self, cards: Sequence[ModelCard]) -> None:
        """Such models beside its engine's own."""
        self.models = tuple(cards)
        own = [] if self.worker is None else [_own_card(self.worker.engine.info)]
        self._cards = {card.name: card for card in (*own, *self.models)}

    def report(self) -> WorkerReport:
        return WorkerReport(
            id=self.id,
            address=self.address,
            state=self.state,
            role=self.role,
            worker=self.worker,
            last_decision=self.last_decision,
            note=self.note or None,
            kind=self._kind,
            models=tuple(card.name for card in self.models),
            resumable=not self.text,
        )

    @property
    def _kind(self) -> EngineKind | None:
        if self.text:
            return EngineKind.OPENAI
        return None if self.worker is None else self.worker.engine.info.kind


def _own_card(info: EngineInfo) -> ModelCard:
    return ModelCard(name=info.model, max_model_len=info.max_model_len)

"""One worker as a fleet knows it: its state, what it serves, and the books of what it was given.

The books hold only what this server gave a worker, and what came back when. A worker itself reports what others gave
it (`Member.foreign_choices`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from motet.block_names import BlockName
from motet.engine import Worker, WorkerReport, WorkerState
from motet.errors import MotetError
from motet.ids import ModelName
from motet.types import EngineInfo, EngineKind, ModelCard, Role

REFUSAL_S = 0.5
"""Seconds for which a worker that refused a group is avoided."""
LEAST_MEASURED_TOKENS = 128
"""Shorter prompts are not measured: they show the time of a step, not tokens per second."""
DISTRUST_S = 2.0
LONGEST_DISTRUST_S = 60.0
"""A worker whose answer cannot be right gets nothing for `DISTRUST_S`; each time that it happens again within
`LONGEST_DISTRUST_S` doubles the time, up to that."""
KEPT = 0.8
"""Each new measurement keeps 80 % of the old mean, so about the last five count."""
INT8 = "-int8_"
"""The part of a fingerprint that says that the weights are rounded to 8 bits."""


class Evictable(Protocol):
    """A group that can be told to go elsewhere."""

    def look(self) -> int:
        """Called by the worker's keeper at each of its looks. Returns the number of looks in a row at which the reader
        waited for this worker and nothing had come."""
        ...

    async def evict(self, error: MotetError) -> None: ...

    def renewed(self, model_digest: str) -> None:
        """Called when its worker has got new weights, with which it goes on."""
        ...


class Member:
    """A worker, from the first time it was named. Only its `Fleet` changes it, since the fleet must inform others."""

    def __init__(
        self, id: str, address: str, *, role: Role | None, text: bool = False, clock: Callable[[], float]
    ) -> None:
        self.id = id
        self.address = address
        self.role = role
        self.text = text
        """True for a server that takes texts: it has no engine here, and no group of tokens goes to it."""
        self.state = WorkerState.STARTING
        self.worker: Worker | None = None
        self.models: tuple[ModelCard, ...] = ()
        """The models that it serves beside its engine's own."""
        self.pair_key: PairKey | None = None
        self.fetches = False
        """True if its engine can fetch KV that another one has computed."""
        self.block_size = 0
        self.block_weights = ""
        self.ticket_readers = 1
        self.books = WorkerLoad(clock=clock)
        self.foreign_choices = 0
        """Open choices that others gave it, by its last report; 0 for a worker that only this server uses."""
        self.groups: set[Evictable] = set()
        self.stirred = False
        """True if it has sent anything of a group since its keeper set this to False."""
        self.last_decision: str | None = None
        self.note = ""
        """Why the worker is in its state; empty if there is nothing to say."""
        self.deaths = 0
        """How often it has been found dead."""
        self.given_up = False
        self._cards: dict[ModelName, ModelCard] = {}
        self._clock = clock
        self._refused_until_s = clock()
        self._distrust_s = 0.0
        self._distrusted_until_s = clock()

    @property
    def shares_prompts(self) -> bool:
        return self.worker is not None and self.worker.engine.info.shares_prompts

    @property
    def cards(self) -> Sequence[ModelCard]:
        """Every model it serves, its engine's own first; while it is away, those it served last."""
        return tuple(self._cards.values())

    def has(self, model: str) -> bool:
        """Returns True if it serves the model. A group that names none means the only one there is."""
        return not model or model in self._cards

    def may_have(self, model: str) -> bool:
        """Returns True if it serves the model, or has not said yet what it serves."""
        return self.has(model) or not self._cards

    def may_go_on(self, model_digest: str) -> bool:
        """Returns True unless its engine reports other weights than those that began a group."""
        info = None if self.worker is None else self.worker.engine.info
        return info is None or not info.model_digest or info.model_digest == model_digest

    def info_of(self, model: str) -> EngineInfo | None:
        """Returns its engine's facts for this model; None if it has no engine, or does not serve the model."""
        if self.worker is None or not self.has(model):
            return None
        info = self.worker.engine.info
        if not model or model == info.model:
            return info
        card = self._cards[ModelName(model)]
        return msgspec.structs.replace(info, model=card.name, max_model_len=card.max_model_len)

    @property
    def engine_id(self) -> str | None:
        """The engine id that its tickets name; None if it makes no tickets."""
        address = None if self.worker is None else self.worker.engine.info.transfer
        return None if address is None else address.engine_id

    @property
    def open_choices(self) -> int:
        """Number of choices that it writes or has waiting, whoever gave them."""
        return self.books.open_choices + self.foreign_choices

    def reported(self, choices: int) -> None:
        """Notes the worker's report that this many choices are open there."""
        self.foreign_choices = max(0, choices - self.books.open_choices)

    def expect(self, choices: int) -> None:
        """Adds choices that others give it; its next report replaces the number."""
        self.foreign_choices += choices

    @property
    def refused(self) -> bool:
        """True if it refused a group a moment ago."""
        return self._clock() < self._refused_until_s

    def refuse(self) -> None:
        self._refused_until_s = self._clock() + REFUSAL_S

    @property
    def distrusted(self) -> bool:
        """True if its answer could not be right a while ago: it gets nothing, whatever it reports."""
        return self._clock() < self._distrusted_until_s

    def distrust(self) -> None:
        now_s = self._clock()
        again = now_s < self._distrusted_until_s + LONGEST_DISTRUST_S and self._distrust_s > 0
        self._distrust_s = min(2 * self._distrust_s, LONGEST_DISTRUST_S) if again else DISTRUST_S
        self._distrusted_until_s = now_s + self._distrust_s

    def returned(self, worker: Worker | None) -> None:
        """Notes that the worker is there, for the first time or again. `worker` is None for one that takes texts."""
        self.books = WorkerLoad(clock=self._clock)
        self.groups = set()
        self.given_up = False
        self.foreign_choices = 0
        self._refused_until_s = self._clock()
        self.worker, self.text = worker, worker is None
        if worker is not None:
            self.address = worker.address
            self.note_facts(worker.engine.info)
        self.offers(self.models)

    def note_facts(self, info: EngineInfo) -> None:
        """Notes what its engine is: when it is there, and when it has got new weights."""
        self.role = info.role
        self.pair_key = pair_key(info)
        self.fetches = fetches(info)
        self.block_size, self.ticket_readers = info.block_size, info.ticket_readers
        here = self.worker is not None and self.worker.local
        self.block_weights = info.block_weights if here else ""  # events of others name blocks by their tokens alone

    def offers(self, cards: Sequence[ModelCard]) -> None:
        """Notes the models that it serves from now on, beside its engine's own."""
        self.models = tuple(cards)
        self._cards = {card.name: card for card in self.models}
        if self.worker is not None:
            info = self.worker.engine.info
            own = ModelCard(name=info.model, max_model_len=info.max_model_len)
            self._cards = {own.name: own} | self._cards

    def report(self) -> WorkerReport:
        kind = EngineKind.OPENAI if self.text else None if self.worker is None else self.worker.engine.info.kind
        return WorkerReport(
            id=self.id,
            address=self.address,
            state=self.state,
            role=self.role,
            worker=self.worker,
            last_decision=self.last_decision,
            note=self.note or None,
            kind=kind,
            models=tuple(card.name for card in self.models),
            resumable=not self.text,
        )


@dataclass(frozen=True)
class Load:
    """The prompt tokens that a worker must compute until a given prompt is done."""

    own_tokens: int
    """Tokens of that prompt whose KV the worker does not have."""
    waiting_tokens: int = 0
    """Tokens of earlier prompts that it has not finished yet."""
    tokens_per_s: float | None = None
    """Prompt tokens that it computes in a second, as a running mean; None until one was measured."""

    def seconds(self, tokens_per_s: float) -> float:
        return (self.waiting_tokens + self.own_tokens) / tokens_per_s


@dataclass(frozen=True)
class PromptReading:
    """A prompt that a worker was given and has not finished."""

    tokens: int
    begun_s: float


class WorkerLoad:
    """The books of one start of a worker: its open choices, their blocks, its prompts.

    The time of a prompt runs from when it was given, or from the end of the one before it, to its own end:

        given   a────────────────┐   b: waits behind a, then takes b's own time
        given        b           └──────────┐
                seconds of a ───►│ of b ───►│       tokens_per_s = sum of tokens / sum of seconds, old ones fading
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self.open_choices = 0
        self.trunk_blocks = 0
        """KV blocks of the prompts of open groups, each counted once, however many groups share it."""
        self.tail_blocks = 0
        self.waiting_tokens = 0
        self._sharers: dict[BlockName, int] = {}
        """The number of open groups that have each of those blocks."""
        self._clock = clock
        self._done_s = clock()
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        return self._tokens / self._seconds if self._seconds > 0 else None

    def hold(self, trunk: Sequence[BlockName]) -> Sequence[BlockName]:
        """Books the blocks of a group's prompt. Returns those that no other open group has."""
        sharers, fresh = self._sharers, []
        for name in trunk:
            if (count := sharers.get(name, 0)) == 0:
                fresh.append(name)
            sharers[name] = count + 1
        self.trunk_blocks += len(fresh)
        return fresh

    def let_go(self, trunk: Sequence[BlockName]) -> Sequence[BlockName]:
        """Undoes `hold`. Returns the blocks that no open group has any more."""
        sharers, gone = self._sharers, []
        for name in trunk:
            if (left := sharers.pop(name) - 1) > 0:
                sharers[name] = left
            else:
                gone.append(name)
        self.trunk_blocks -= len(gone)
        return gone

    def give(self, tokens: int) -> PromptReading:
        """Books a prompt of which this many tokens must be computed. One `done` or `drop` must follow."""
        self.waiting_tokens += tokens
        return PromptReading(tokens, self._clock())

    def done(self, reading: PromptReading, *, computed_tokens: int) -> None:
        self.drop(reading)
        now = self._clock()
        if computed_tokens >= LEAST_MEASURED_TOKENS:
            self._tokens = KEPT * self._tokens + computed_tokens
            self._seconds = KEPT * self._seconds + now - max(reading.begun_s, self._done_s)
        self._done_s = now

    def drop(self, reading: PromptReading) -> None:
        """Takes out a prompt that failed, or that nobody wants any more, without measuring it."""
        self.waiting_tokens -= reading.tokens

    def check(self) -> None:
        """Raises AssertionError unless the books are empty."""
        left = (self.open_choices, self.trunk_blocks, self.tail_blocks, self.waiting_tokens)
        if any(left):
            raise AssertionError(f"left in the books: choices, trunk blocks, tail blocks, prompt tokens = {left}")


class PairKey(NamedTuple):
    """The facts that must be equal on a prefill and a decode worker that exchange KV.

    A reader cannot use blocks of other weights, of another size or number type, or of another kind of engine, even if
    the model's name is the same. An adapter has its base model's key, since that decides the layout of the blocks."""

    kind: EngineKind
    model: ModelName
    model_digest: str
    numbers: str
    block_size: int
    bytes_per_block: int


def pair_key(info: EngineInfo) -> PairKey:
    return PairKey(info.kind, info.model, info.model_digest, numbers_of(info), info.block_size, info.bytes_per_block)


def fetches(info: EngineInfo) -> bool:
    """Returns True if the engine writes choices and can fetch KV that another one has computed."""
    return info.role is Role.DECODE or (info.role is Role.BOTH and info.transfer is not None)


def numbers_of(info: EngineInfo) -> str:
    """Returns the type of the weights. Workers that differ in it serve two models, whatever the name."""
    return f"{info.dtype} with int8 weights" if INT8 in info.fingerprint else info.dtype

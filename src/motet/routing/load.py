"""How busy the workers are, and how fast they read prompts: what choosing a worker and bypassing prefill go by.

Everything is seen from here: what this server gave a worker and what came back when. What others gave it, a worker
tells itself (`fleet.Member.foreign_choices`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from motet.engines.base import Engine
from motet.ids import ModelName
from motet.transfer.ticket import Ticket
from motet.types import GenerateRequest

LEAST_MEASURED_TOKENS = 128
"""A shorter prompt tells how long a step takes, and nothing about how many tokens fit into a second."""
KEPT = 0.8
"""Of the weight of a measurement when the next one comes: the last five or so make the mean."""


@dataclass(frozen=True)
class Load:
    """What a worker has to read until a certain prompt is done, as things stand."""

    own_tokens: int
    """Of that prompt: those whose KV it does not have."""
    waiting_tokens: int = 0
    """Of prompts that it was given before and has not answered for yet."""
    tokens_per_s: float | None = None
    """What it reads in a second, as a running mean; None: not measured yet."""

    def seconds(self, tokens_per_s: float) -> float:
        return (self.waiting_tokens + self.own_tokens) / tokens_per_s


class Loaded(Engine, Protocol):
    """An engine that knows how busy it is."""

    def has_prefill(self, model: ModelName) -> bool:
        """Whether there are prefill workers for it, up or not."""
        ...

    def ticket_readers(self, model: ModelName) -> int:
        """How many readers a ticket of `prefill` may have."""
        ...

    def reads(self, ticket: Ticket, model: ModelName) -> bool:
        """Whether `generate` has a worker now that can fetch what the ticket is for."""
        ...

    def check_ready(self, model: ModelName) -> None:
        """Raises NoWorkerError if `generate` has no worker now."""
        ...

    def prefill_load(self, request: GenerateRequest) -> Load | None:
        """Of the worker that `prefill` would choose; None: there is none now whose KV `generate` could fetch."""
        ...

    def generate_load(self, request: GenerateRequest) -> Load:
        """Of the worker that `generate` would choose. Raises NoWorkerError if there is none now."""
        ...


@dataclass(frozen=True)
class Reading:
    """One prompt that a worker has been given."""

    tokens: int
    begun_s: float


class WorkerLoad:
    """The books of one start of a worker: its open choices, their blocks, its prompts. Owned by `fleet.Member`.

    A prompt takes a worker from when it was given, or from when the one before it was done, to when it is done itself:

        given   a────────────────┐   b: waits behind a, then takes b's own time
        given        b           └──────────┐
                seconds of a ───►│ of b ───►│       tokens_per_s = sum of tokens / sum of seconds, old ones fading
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self.open_choices = 0
        self.trunk_blocks = 0
        """Of the prompts of open groups, once a group."""
        self.tail_blocks = 0
        """Of what their open choices have written."""
        self.waiting_tokens = 0
        self._clock = clock
        self._done_s = clock()
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        return self._tokens / self._seconds if self._seconds > 0 else None

    def give(self, tokens: int) -> Reading:
        """A prompt of which so many tokens have to be computed. One `done` or `drop` must follow."""
        self.waiting_tokens += tokens
        return Reading(tokens, self._clock())

    def done(self, reading: Reading, *, computed_tokens: int) -> None:
        self.drop(reading)
        now = self._clock()
        if computed_tokens >= LEAST_MEASURED_TOKENS:
            self._tokens = KEPT * self._tokens + computed_tokens
            self._seconds = KEPT * self._seconds + now - max(reading.begun_s, self._done_s)
        self._done_s = now

    def drop(self, reading: Reading) -> None:
        """It failed, or nobody wants it any more: nothing is learnt from it."""
        self.waiting_tokens -= reading.tokens

    def check(self) -> None:
        """Raises unless everything that was given is over."""
        left = (self.open_choices, self.trunk_blocks, self.tail_blocks, self.waiting_tokens)
        if any(left):
            raise AssertionError(f"left in the books: choices, trunk blocks, tail blocks, prompt tokens = {left}")

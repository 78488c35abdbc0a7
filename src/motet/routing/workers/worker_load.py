"""The load of a worker: the open choices that it was given, their blocks, and the prompts that it has not finished.

The figures count what this server has sent to the worker and received from it. Only `WorkerLoad.foreign_choices` comes
from the worker's own reports."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from motet.block_names import BlockName
from motet.routing.workers.client_holdings import ClientHoldings, ClientTotal, SharedBlocks
from motet.routing.workers.prefix_index import PrefixIndex

MIN_MEASURED_TOKENS = 128
"""Shorter prompts are not measured: they show the time of a step, not tokens per second."""
DECAY = 0.8
"""Factor for older measurements at each new one, so about the last five measurements count."""


@dataclass(frozen=True)
class PromptBacklog:
    """The prompt tokens that a worker must compute until a given prompt is done."""

    own_tokens: int
    """Tokens of that prompt whose KV the worker does not have."""
    waiting_tokens: int = 0
    """Tokens of earlier prompts that the worker has not finished."""
    tokens_per_s: float | None = None
    """Prompt tokens that the worker computes per second: a running mean. None until a prompt was measured."""

    def seconds(self, tokens_per_s: float) -> float:
        return (self.waiting_tokens + self.own_tokens) / tokens_per_s


@dataclass(frozen=True)
class UnfinishedPrompt:
    """A prompt that a worker was given and has not finished."""

    tokens: int
    started_s: float


class PromptLoad:
    """The prompts that a worker was given and has not finished, and how fast it computes prompts.

    The time of a prompt runs from when it was given, or from the end of the prompt before it, to its own end:

        given   a────────────────┐   b waits for a, then takes its own time
        given        b           └──────────┐
                seconds of a ───►│ of b ───►│       tokens_per_s = sum of tokens / sum of seconds, with `DECAY`
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self.waiting_tokens = 0
        """Tokens to compute of the prompts that it has not finished."""
        self._clock = clock
        self._last_end_s = clock()
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        return self._tokens / self._seconds if self._seconds > 0 else None

    def backlog(self, own_tokens: int) -> PromptBacklog:
        """Returns the backlog of another prompt, with this number of tokens to compute."""
        return PromptBacklog(own_tokens, self.waiting_tokens, self.tokens_per_s)

    def add(self, tokens: int) -> UnfinishedPrompt:
        """Adds a prompt with this number of tokens to compute. `finish` or `remove` must follow, once."""
        self.waiting_tokens += tokens
        return UnfinishedPrompt(tokens, self._clock())

    def finish(self, prompt: UnfinishedPrompt, *, computed_tokens: int) -> None:
        self.remove(prompt)
        now_s = self._clock()
        if computed_tokens >= MIN_MEASURED_TOKENS:
            self._tokens = DECAY * self._tokens + computed_tokens
            self._seconds = DECAY * self._seconds + now_s - max(prompt.started_s, self._last_end_s)
        self._last_end_s = now_s

    def remove(self, prompt: UnfinishedPrompt) -> None:
        """Removes a prompt that failed or whose group has ended, without a measurement."""
        self.waiting_tokens -= prompt.tokens


class WorkerLoad:
    """The load of a worker from one start of its engine to the next. Its groups leave it even after `retire`."""

    def __init__(
        self,
        worker: str,
        open_blocks: PrefixIndex,
        *,
        client_totals: dict[str, ClientTotal],
        clock: Callable[[], float],
    ) -> None:
        """`worker`: id of the worker. `open_blocks`: the prompt blocks of open groups. `client_totals`: what each
        client with open groups holds. Both cover all workers, and this load updates them."""
        self.given_choices = 0
        """Open choices that this server gave the worker."""
        self.foreign_choices = 0
        """Open choices that other servers gave the worker, according to its last report."""
        self.trunk_blocks = 0
        """KV blocks of the prompts of open groups. A shared block counts once."""
        self.tail_blocks = 0
        """KV blocks of the output tokens of open choices."""
        self.prompts = PromptLoad(clock=clock)
        self._worker = worker
        self._client_totals = client_totals
        self._clock = clock
        self._open_blocks: PrefixIndex | None = open_blocks
        """None after `retire`."""
        self.clients: dict[str, ClientHoldings] = {}
        """What each client with open groups holds."""
        self._trunks = SharedBlocks()

    @property
    def open_choices(self) -> int:
        """Number of choices that the worker generates or has queued, from all servers."""
        return self.given_choices + self.foreign_choices

    @property
    def idle(self) -> bool:
        """True if the worker has no work from this server."""
        return not any(self._figures())

    def record_report(self, open_choices: int) -> None:
        self.foreign_choices = max(0, open_choices - self.given_choices)

    def add_trunk(self, trunk: Sequence[BlockName]) -> None:
        added = self._trunks.add(trunk)
        self.trunk_blocks += len(added)
        if self._open_blocks is not None:
            self._open_blocks.stored(self._worker, added)

    def remove_trunk(self, trunk: Sequence[BlockName]) -> None:
        removed = self._trunks.remove(trunk)
        self.trunk_blocks -= len(removed)
        if self._open_blocks is not None:
            self._open_blocks.removed(self._worker, removed)

    def enter(self, client: str, *, weight: float) -> ClientHoldings:
        """Adds an open group of a client. Returns what the client holds here, to which the group adds its choices and
        blocks."""
        held = self.clients.get(client)
        if held is None:
            held = self.clients[client] = ClientHoldings(client, self._client_totals)
        held.enter(weight)
        return held

    def leave(self, held: ClientHoldings) -> None:
        """Removes an open group that has removed its choices and blocks. Must be called once for each `enter`."""
        held.leave()
        if not held.groups:
            del self.clients[held.client]

    def retire(self) -> None:
        """Removes the worker's open blocks, because it has left or has a new engine."""
        if self._open_blocks is not None:
            self._open_blocks.cleared(self._worker)
            self._open_blocks = None

    def next_start(self) -> "WorkerLoad":
        """Retires this load, and returns the empty load of the worker's next start. Must be called once."""
        open_blocks = self._open_blocks
        assert open_blocks is not None  # it is the load of the present start
        self.retire()
        return WorkerLoad(self._worker, open_blocks, client_totals=self._client_totals, clock=self._clock)

    def check(self) -> None:
        """Raises AssertionError unless the load is empty."""
        if not self.idle:
            names = "choices, trunk blocks, tail blocks, prompt tokens, clients"
            raise AssertionError(f"{self._worker} is loaded: {names} = {self._figures()}")

    def _figures(self) -> tuple[int, int, int, int, int]:
        waiting_tokens = self.prompts.waiting_tokens
        return self.given_choices, self.trunk_blocks, self.tail_blocks, waiting_tokens, len(self.clients)

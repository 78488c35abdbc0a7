"""An engine with almost no CPU time, to measure the parts in front of it. Its token ids are real and computed in
advance.

Groups take their steps together, as in one forward pass: each group waits for the next pulse. A pulse follows as soon
as a group waits. With bursts, a number of pulses follow each other at once, and then there is a rest.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Any, TypeVar

import msgspec

from motet.engine_orders import Done, EngineOrder, OrderAnswer
from motet.testing.fake_engine import FakeEngine, FakeGroup, fake_info
from motet.types import ChoiceDelta, Finish, FinishReason, GenerateRequest, GroupDelta, PromptReport, TokenLogprob

VOCAB_SIZE = 49_152
Result = TypeVar("Result")
LOGPROB = 0.0123456789
"""The first token of a choice has the log-probability -LOGPROB; each further token has LOGPROB less."""
STRIDE = 7
"""Number of tokens between the starts of two neighbouring choices, so that they generate different tokens in a step."""


class Pulse:
    """Decides when steps are taken. After each `burst` pulses follows a rest of `rest_s`; without rests if it is 0."""

    def __init__(self, *, burst: int = 0, rest_s: float = 0.0) -> None:
        self._burst = burst
        self._rest_s = rest_s
        self._taken = 0
        self._waiting: list[tuple[asyncio.Future[Any], object]] = []

    def next(self, result: Result) -> asyncio.Future[Result]:
        """Returns a future that gets the result at the next step."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._waiting.append((future, result))
        if len(self._waiting) == 1:
            if self._burst and self._taken % self._burst == 0:
                loop.call_later(self._rest_s, self._beat)
            else:
                loop.call_soon(self._beat)
        return future

    def _beat(self) -> None:
        self._taken += 1
        waiting, self._waiting = self._waiting, []
        for future, result in waiting:
            if not future.done():  # its client has possibly disconnected
                future.set_result(result)


class PulsedEngine(FakeEngine):
    """An engine in which every choice generates `tokens` over and over up to its `max_tokens`, each from another
    start."""

    def __init__(self, tokens: Sequence[int], pulse: Pulse, *, max_num_seqs: int = 1024) -> None:
        info = msgspec.structs.replace(fake_info(vocab_size=VOCAB_SIZE), max_num_seqs=max_num_seqs, num_blocks=2**20)
        super().__init__(lambda request, start: tokens, info=info)
        self.died = asyncio.Event()
        self.pulse = pulse
        self.steps = cache(
            lambda indices, max_tokens, listed: ScriptedSteps(tokens, indices, max_tokens=max_tokens, listed=listed)
        )

    def generate(self, request: GenerateRequest) -> "PulsedGroup":
        group = PulsedGroup(self, request)
        self.open[request.request_id] = group
        return group

    async def send(self, order: EngineOrder) -> OrderAnswer:
        """Carries out no order: this engine has no weights and fetches no KV."""
        return Done()

    def kill(self) -> None:
        self.died.set()


class PulsedGroup(FakeGroup):
    def __init__(self, engine: PulsedEngine, request: GenerateRequest) -> None:
        super().__init__(engine, request)
        self._pulse = engine.pulse
        sampling = request.sampling
        indices = tuple([start.index for start in request.choices])
        listed = None if sampling.logprobs is None else listed_tokens(sampling.logprobs, sampling.logprob_token_ids)
        steps = engine.steps(indices, sampling.max_tokens, listed)
        report = PromptReport(cached_tokens=0)
        if sampling.prompt_logprobs is not None:
            report = scored(request.prompt, listed_tokens(sampling.prompt_logprobs, sampling.prompt_logprob_token_ids))
        reports = itertools.chain([report], itertools.repeat(None))
        self._deltas = map(GroupDelta, itertools.repeat(request.request_id), steps, reports)

    def __anext__(self) -> Awaitable[GroupDelta]:  # type: ignore[override]  # it is awaited all the same
        if self._ended:
            raise StopAsyncIteration
        try:
            return self._pulse.next(next(self._deltas))
        except StopIteration:
            raise StopAsyncIteration from None


def listed_tokens(num_top: int, named: Sequence[int]) -> tuple[int, ...]:
    """Returns the alternatives to each token."""
    return (*range(num_top), *named)


@lru_cache(1024)
def scored(prompt: tuple[int, ...], listed: tuple[int, ...]) -> PromptReport:
    """Returns a report with the log-probabilities of a prompt. It is made once, because an engine makes it in another
    process."""
    top = tuple((token_id, -1.0) for token_id in listed)
    return PromptReport.scored(0, [None, *(TokenLogprob(token_id, -LOGPROB, 1, top) for token_id in prompt[1:])])


class ScriptedSteps:
    """The deltas of the choices for each step, with a log-probability for each token, and for the tokens of `listed`,
    unless it is None. The deltas of a step are made when the first group takes it, and kept: making all at once would
    hold the event loop for 50 ms."""

    def __init__(
        self, tokens: Sequence[int], indices: Sequence[int], *, max_tokens: int, listed: tuple[int, ...] | None
    ) -> None:
        self._tokens = tokens
        self._indices = indices
        self._max_tokens = max_tokens
        self._top = None if listed is None else tuple((token_id, -1.0) for token_id in listed)
        self._made: list[tuple[ChoiceDelta, ...]] = []

    def __iter__(self) -> Iterator[tuple[ChoiceDelta, ...]]:
        for step in range(self._max_tokens):
            if step == len(self._made):
                self._made.append(tuple(self._delta(index, step) for index in self._indices))
            yield self._made[step]

    def _delta(self, index: int, step: int) -> ChoiceDelta:
        token_id = self._tokens[(index * STRIDE + step) % len(self._tokens)]
        logprobs = None
        if self._top is not None:
            logprobs = (TokenLogprob(token_id, -LOGPROB * (step + 1), 1, self._top),)
        finish = Finish(FinishReason.LENGTH) if step == self._max_tokens - 1 else None
        return ChoiceDelta(index, (token_id,), logprobs, finish)

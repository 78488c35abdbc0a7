"""An engine without a model, for tests and front-end benchmarks: answers are scripted, steps taken when asked for."""

import asyncio
from collections.abc import Callable, Sequence

from motet.errors import EngineClosedError, MotetError
from motet.ids import ModelName, RequestId
from motet.types import (
    ChoiceDelta,
    ChoiceStart,
    EngineInfo,
    EngineStats,
    Finish,
    FinishReason,
    GenerateRequest,
    GroupDelta,
    PromptReport,
    Role,
    TokenLogprob,
)

Script = Callable[[GenerateRequest, ChoiceStart], Sequence[int]]
"""The whole answer of a choice, as tokens. Without an end-of-sequence token in it, it is repeated to `max_tokens`."""


def fake_info(*, vocab_size: int = 512, max_model_len: int = 4096, eos_token_ids: tuple[int, ...] = (0,)) -> EngineInfo:
    return EngineInfo(
        model=ModelName("fake"),
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        block_size=16,
        num_blocks=1024,
        bytes_per_block=16,
        max_num_seqs=1024,
        role=Role.BOTH,
        eos_token_ids=eos_token_ids,
        dtype="none",
        device="none",
        fingerprint="fake-same",
    )


class FakeEngine:
    """Writes one scripted token a choice and step. With a `gate`, a step is taken each time the gate is released.

    `fail_after` maps a step number (0 = before the first token) to the error every group raises there.
    """

    def __init__(
        self,
        script: Script,
        *,
        info: EngineInfo | None = None,
        gate: asyncio.Semaphore | None = None,
        fail_after: dict[int, MotetError] | None = None,
    ) -> None:
        self.info = info or fake_info()
        self.script = script
        self.gate = gate
        self.fail_after = fail_after or {}
        self.open: dict[RequestId, FakeGroup] = {}
        self.requests: list[GenerateRequest] = []
        self.generated_tokens = 0
        self.closed = False

    def generate(self, request: GenerateRequest) -> "FakeGroup":
        self.requests.append(request)
        group = FakeGroup(self, request)
        self.open[request.request_id] = group
        return group

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        if group := self.open.get(request_id):
            group.stop(index)

    async def stats(self) -> EngineStats:
        started = [g for g in self.open.values() if g.step > 0]
        return EngineStats(
            groups_running=len(started),
            groups_waiting=len(self.open) - len(started),
            choices_running=sum(len(g.unfinished) for g in started),
            choices_waiting=sum(len(g.unfinished) for g in self.open.values() if g.step == 0),
            blocks_total=self.info.num_blocks,
            prompt_tokens=sum(len(r.prompt) for r in self.requests),
            generated_tokens=self.generated_tokens,
        )

    async def close(self) -> None:
        self.closed = True
        for group in list(self.open.values()):
            await group.aclose()

    def check(self) -> None:
        """Raises unless every group has ended."""
        if self.open:
            raise AssertionError(f"groups left open: {sorted(self.open)}")


class FakeGroup:
    """The stream of one group of a `FakeEngine`."""

    def __init__(self, engine: FakeEngine, request: GenerateRequest) -> None:
        self.step = 0
        self.unfinished = {c.index: c for c in request.choices}
        self._written = {c.index: list(c.written) for c in request.choices}
        self._engine = engine
        self._request = request

    def __aiter__(self) -> "FakeGroup":
        return self

    async def __anext__(self) -> GroupDelta:
        if self._engine.gate is not None:
            await self._engine.gate.acquire()
        if error := self._engine.fail_after.get(self.step):
            await self.aclose()
            raise error
        if self._engine.closed:
            raise EngineClosedError("the engine was closed")
        if not self.unfinished:
            await self.aclose()
            raise StopAsyncIteration
        deltas = tuple(self._advance(start) for start in list(self.unfinished.values()))
        report = self._report() if self.step == 0 else None
        self.step += 1
        if not self.unfinished:
            await self.aclose()
        return GroupDelta(self._request.request_id, deltas, report)

    async def aclose(self) -> None:
        self._engine.open.pop(self._request.request_id, None)

    def stop(self, index: int) -> None:
        self.unfinished.pop(index, None)
        if not self.unfinished:
            self._engine.open.pop(self._request.request_id, None)

    def _report(self) -> PromptReport:
        """Each prompt token is as likely as its place in the prompt: -1 for the second, -2 for the third."""
        if self._request.sampling.prompt_logprobs is None:
            return PromptReport(cached_tokens=0)
        known = tuple(TokenLogprob(token, -float(place), 1) for place, token in enumerate(self._request.prompt[1:], 1))
        return PromptReport(cached_tokens=0, logprobs=(None, *known))

    def _advance(self, start: ChoiceStart) -> ChoiceDelta:
        sampling, written = self._request.sampling, self._written[start.index]
        answer = self._engine.script(self._request, start)
        token = answer[len(written) % len(answer)]
        written.append(token)
        self._engine.generated_tokens += 1
        finish = None
        if token in self._engine.info.eos_token_ids and not sampling.ignore_eos:
            finish = Finish(FinishReason.STOP)
        elif token in sampling.stop_token_ids:
            finish = Finish(FinishReason.STOP, token)
        elif len(written) >= sampling.max_tokens:
            finish = Finish(FinishReason.LENGTH)
        if finish:
            self.unfinished.pop(start.index)
        logprobs = None
        if sampling.logprobs is not None:
            top = tuple(((token + k) % self._engine.info.vocab_size, -0.5 - k) for k in range(sampling.logprobs))
            logprobs = (TokenLogprob(token, -0.5, 1, top),)
        return ChoiceDelta(start.index, (token,), logprobs, finish)

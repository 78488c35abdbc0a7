"""An engine without a model, for tests and benchmarks of the front end: a script determines the answers, and tests can
control the steps. It ignores grammars.

1. `generate` opens a group. Each step of the group generates one token for each of its choices.
2. A group ends when its choices are finished, when its reader closes it, or when the engine fails, dies or is closed.
3. `check` raises an error if a group, a prefill or a lease is left.

Prefill and decode can be separate: the fake workers of a cell share a `FakeLeases`. A group with a ticket acknowledges
the lease at its first step, or when it is closed before that. A dead or closed engine sends nothing, and the leases of
a dead engine are gone.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from motet.engine_info import FIRST_VERSION, EngineInfo, adapter_in
from motet.errors import EngineClosedError, EngineDiedError, MotetError
from motet.ids import ModelName, RequestId
from motet.kv_events.changes import BlockListener
from motet.metrics.stats import EngineStats
from motet.testing.fake_adapters import adapted_token, check_model, kv_weights_of
from motet.transfer.ticket import Ticket, TransferAddress, prompt_digest
from motet.types import (
    ChoiceDelta,
    ChoiceStart,
    Finish,
    FinishReason,
    GenerateRequest,
    GroupDelta,
    PromptReport,
    Role,
    TokenLogprob,
)

Script = Callable[[GenerateRequest, ChoiceStart], Sequence[int]]
"""Returns the complete answer of a choice as tokens. Without end-of-sequence, the answer repeats up to `max_tokens`."""
DuringPrefill = Callable[[GenerateRequest], Awaitable[None]]
"""Called while a prompt is prefilled. It can wait, and its errors become errors of the prefill."""
NOWHERE = TransferAddress("fake", "127.0.0.1", 1)
"""Address of engines without transfers."""
GONE = EngineDiedError("the engine is gone")
LEASE_S = 60.0


def fake_info(
    *,
    vocab_size: int = 512,
    max_model_len: int = 4096,
    eos_token_ids: tuple[int, ...] = (0,),
    role: Role = Role.BOTH,
    transfer: TransferAddress | None = None,
    default_sampling_params: dict[str, int | float] | None = None,
    max_adapters: int = 0,
) -> EngineInfo:
    return EngineInfo(
        model=ModelName("fake"),
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        block_size=16,
        num_blocks=1024,
        bytes_per_block=16,
        max_num_seqs=1024,
        role=role,
        shares_prompts=True,
        eos_token_ids=eos_token_ids,
        default_sampling_params=default_sampling_params or {},
        dtype="none",
        device="none",
        fingerprint="fake-same",
        transfer=transfer,
        max_adapters=max_adapters,
    )


class FakeLeases:
    """The leases of all workers of a fake cell."""

    def __init__(self) -> None:
        self.held: dict[int, Ticket] = {}
        self._num_done: Counter[int] = Counter()
        """Number of readers of each lease that are done."""
        self._ids = count(1)

    def grant(
        self, request: GenerateRequest, address: TransferAddress, *, readers: int, block_size: int, weights: str = ""
    ) -> Ticket:
        """Returns a ticket with a block id for each block of the prompt without its last token."""
        tokens = request.prompt[:-1]
        blocks = tuple(range(-(-len(tokens) // block_size)))
        lease_id = next(self._ids)
        self.held[lease_id] = Ticket(
            remote_engine_id=address.engine_id,
            remote_request_id=request.request_id,
            remote_host=address.host,
            remote_port=address.port,
            remote_block_ids=blocks,
            num_tokens=len(tokens),
            prompt_digest=prompt_digest(tokens),
            generations=(0,) * len(blocks),
            lease_id=lease_id,
            lease_slot=lease_id,
            lease_s=LEASE_S,
            readers=readers,
            weights=weights,
        )
        return self.held[lease_id]

    def acknowledge(self, ticket: Ticket) -> None:
        """Counts a reader as done. The lease ends after the last reader."""
        self._num_done[ticket.lease_id] += 1
        if self._num_done[ticket.lease_id] >= ticket.readers:
            self.release(ticket)

    def release(self, ticket: Ticket) -> None:
        self.held.pop(ticket.lease_id, None)

    def remove(self, engine_id: str) -> None:
        """Removes the leases of an engine that has died."""
        self.held = {id: ticket for id, ticket in self.held.items() if ticket.remote_engine_id != engine_id}

    def count(self, engine_id: str) -> int:
        return sum(ticket.remote_engine_id == engine_id for ticket in self.held.values())


@dataclass(eq=False)
class FakeScenario:
    """Controls the steps of an engine's groups. Tests can change it while groups run."""

    script: Script
    gate: asyncio.Semaphore | None = None
    """Each release of this semaphore allows one step. None if steps run freely."""
    fail_after: dict[int, MotetError] = field(default_factory=dict)
    """Errors that every group raises, by the number of steps before it (0: before the first token)."""
    new_weights: dict[int, str] = field(default_factory=dict)
    """Weight versions by the step from which they generate."""


@dataclass(eq=False)
class FakeRecord:
    """Figures of an engine, and calls that do not concern groups. Tests check them."""

    prefilling: int = 0
    """Number of prefills in progress."""
    pulls: int = 0
    """Number of trunks that were fetched with a ticket."""
    unused_tickets: int = 0
    """Number of tickets for other weights, whose trunks were not fetched."""
    generated_tokens: int = 0
    release_traces: list[str] = field(default_factory=list)
    """Traces of the releases of tickets."""
    block_listeners: list[BlockListener] = field(default_factory=list)
    """Listeners to block events. The engine has no blocks, so tests call the listeners."""


class FakeEngine:
    """Generates one scripted token for each choice in each step. `die` ends the engine permanently: a worker that is
    started again is another `FakeEngine`."""

    def __init__(
        self,
        script: Script,
        *,
        info: EngineInfo | None = None,
        gate: asyncio.Semaphore | None = None,
        fail_after: dict[int, MotetError] | None = None,
        during_prefill: DuringPrefill | None = None,
        leases: FakeLeases | None = None,
    ) -> None:
        self.info = info or fake_info()
        self.scenario = FakeScenario(script, gate, fail_after or {})
        self.during_prefill = during_prefill
        self.leases = leases if leases is not None else FakeLeases()
        self.open: dict[RequestId, FakeGroup] = {}
        """Groups that have not ended, by request id."""
        self.requests: list[GenerateRequest] = []
        """Requests of all groups."""
        self.prefills: list[GenerateRequest] = []
        """Requests of all prefills."""
        self.released: list[Ticket] = []
        """Tickets whose release was requested."""
        self.record = FakeRecord()
        self.closed = False
        self.death: EngineDiedError | None = None
        """Error with which everything ends after `die`; None before."""

    def generate(self, request: GenerateRequest) -> "FakeGroup":
        self.requests.append(request)
        group = FakeGroup(self, request)
        if self.death is None:
            self.open[request.request_id] = group
        else:
            group.wake()
        return group

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        self.prefills.append(request)
        self.record.prefilling += 1
        try:
            if self.during_prefill is not None:
                await self.during_prefill(request)
        finally:
            self.record.prefilling -= 1
        if error := self.death or self.closing:
            raise error
        size, weights = self.info.block_size, kv_weights_of(self.info, request.model)
        return self.leases.grant(request, self._address, readers=readers, block_size=size, weights=weights)

    async def release(self, ticket: Ticket, *, trace: str = "") -> None:
        self.released.append(ticket)
        self.record.release_traces.append(trace)
        self.leases.release(ticket)

    def listen_to_blocks(self, listener: BlockListener) -> None:
        self.record.block_listeners.append(listener)

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        if group := self.open.get(request_id):
            group.stop(index)

    async def stats(self) -> EngineStats:
        if self.death is not None:
            raise self.death
        started = [g for g in self.open.values() if g.step > 0]
        return EngineStats(
            groups_running=len(started),
            groups_waiting=len(self.open) - len(started),
            choices_running=sum(len(g.unfinished) for g in started),
            choices_waiting=sum(len(g.unfinished) for g in self.open.values() if g.step == 0),
            blocks_total=self.info.num_blocks,
            prompt_tokens=sum(len(r.prompt) for r in self.requests),
            generated_tokens=self.record.generated_tokens,
            prefills=len(self.prefills),
            leases=self.leases.count(self._address.engine_id),
            transfers=self.record.pulls,
            recomputed_tokens=self.record.pulls,
        )

    def die(self, error: EngineDiedError = GONE) -> None:
        """Ends every group, prefill and query with `error`, and every later one."""
        self.death = error
        self.leases.remove(self._address.engine_id)
        self._wake_all()

    async def close(self) -> None:
        self.closed = True
        self._wake_all()

    def check(self) -> None:
        """Raises AssertionError unless every group, prefill and lease has ended."""
        if self.open:
            raise AssertionError(f"groups are left open: {sorted(self.open)}")
        if self.record.prefilling:
            raise AssertionError(f"prefills are left open: {self.record.prefilling}")
        if self.leases.held:
            raise AssertionError(f"leases are left: {self.leases.held}")

    @property
    def closing(self) -> MotetError | None:
        """The error with which groups of a closed engine end."""
        return EngineClosedError("the engine was closed") if self.closed else None

    def _wake_all(self) -> None:
        groups, self.open = self.open, {}
        for group in groups.values():
            group.wake()

    @property
    def _address(self) -> TransferAddress:
        return self.info.transfer or NOWHERE


class FakeGroup:
    """The stream of one group of a `FakeEngine`."""

    def __init__(self, engine: FakeEngine, request: GenerateRequest) -> None:
        self.step = 0
        self.unfinished = {c.index: c for c in request.choices}
        self._output_tokens = {c.index: list(c.output_tokens) for c in request.choices}
        self._engine = engine
        self._request = request
        self._error: MotetError | None = None
        self._ended = False
        self._acknowledged = False
        """True once the lease of the ticket has been acknowledged."""
        self._woken = asyncio.Event()
        self._version = FIRST_VERSION
        """Version of the weights of the last delta."""
        check_model(engine.info, request.model)

    def __aiter__(self) -> "FakeGroup":
        return self

    async def __anext__(self) -> GroupDelta:
        scenario = self._engine.scenario
        if scenario.gate is not None:
            await self._pass(scenario.gate)
        if self._error is None and not self._ended:
            self._error = self._engine.death or scenario.fail_after.get(self.step) or self._engine.closing
            if self._error is not None:
                self._end(acknowledge=not isinstance(self._error, EngineDiedError))
        if self._error is not None:
            raise self._error
        if self._ended:
            raise StopAsyncIteration
        if self.step == 0 and (ticket := self._request.ticket) is not None:
            is_usable = ticket.weights == kv_weights_of(self._engine.info, self._request.model)
            self._engine.record.pulls += is_usable
            self._engine.record.unused_tickets += not is_usable
            self._acknowledge()
        deltas = tuple(self._advance(start) for start in list(self.unfinished.values()))
        report = self._report() if self.step == 0 else None
        version = scenario.new_weights.get(self.step, "") or self._new_version()
        self.step += 1
        if not self.unfinished:
            self._end()
        return GroupDelta(self._request.request_id, deltas, report, weight_version=version)

    async def aclose(self) -> None:
        self._end()

    def stop(self, index: int) -> None:
        self.unfinished.pop(index, None)
        if not self.unfinished:
            self._end()

    def wake(self) -> None:
        """Wakes a task that waits for a step, because the group has ended."""
        self._woken.set()

    async def _pass(self, gate: asyncio.Semaphore) -> None:
        """Returns when the gate allows a step, or when the group has ended."""
        if self._woken.is_set():
            return
        tasks = asyncio.ensure_future(gate.acquire()), asyncio.ensure_future(self._woken.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self, *, acknowledge: bool = True) -> None:
        """Ends the group. `acknowledge`: False for a dead engine, which does not acknowledge the lease."""
        self._ended = True
        was_open = self._engine.open.pop(self._request.request_id, None) is not None
        if was_open and acknowledge:
            self._acknowledge()
        self.wake()

    def _acknowledge(self) -> None:
        """Acknowledges the lease of the ticket once, if there is a ticket."""
        if self._request.ticket is not None and not self._acknowledged:
            self._acknowledged = True
            self._engine.leases.acknowledge(self._request.ticket)

    def _new_version(self) -> str:
        """Returns the version of the group's adapter if it has changed; else an empty text."""
        adapter = adapter_in(self._engine.info, self._request.model)
        if adapter is None or adapter.version == self._version:
            return ""
        self._version = adapter.version
        return adapter.version

    def _report(self) -> PromptReport:
        """Returns the report on the prompt. Its second token has the log-probability -1, the third -2, and so on."""
        if self._request.sampling.prompt_logprobs is None:
            return PromptReport(cached_tokens=0)
        named = self._request.sampling.prompt_logprob_token_ids
        known = tuple(
            TokenLogprob(token, -float(place), 1, _listed({}, token, logprob=-float(place), named=named))
            for place, token in enumerate(self._request.prompt[1:], 1)
        )
        scored_from = self._request.scored_from
        return PromptReport.scored(0, (None, *known)[scored_from:], scored_from=scored_from)

    def _advance(self, start: ChoiceStart) -> ChoiceDelta:
        """Generates one token of a choice."""
        sampling, output_tokens = self._request.sampling, self._output_tokens[start.index]
        answer = self._engine.scenario.script(self._request, start)
        token = adapted_token(answer[len(output_tokens) % len(answer)], self._engine.info, model=self._request.model)
        output_tokens.append(token)
        self._engine.record.generated_tokens += 1
        finish = None
        if token in self._engine.info.eos_token_ids and not sampling.ignore_eos:
            finish = Finish(FinishReason.STOP)
        elif token in sampling.stop_token_ids:
            finish = Finish(FinishReason.STOP, token)
        elif len(output_tokens) >= sampling.max_tokens:
            finish = Finish(FinishReason.LENGTH)
        if finish:
            self.unfinished.pop(start.index)
        logprobs = None
        if sampling.logprobs is not None:
            named, vocab_size = sampling.logprob_token_ids, self._engine.info.vocab_size
            top = {(token + k) % vocab_size: -0.5 - k for k in range(sampling.logprobs)}
            logprobs = (TokenLogprob(token, -0.5, 1, _listed(top, token, logprob=-0.5, named=named)),)
        return ChoiceDelta(start.index, (token,), logprobs, finish)


def _listed(
    top: Mapping[int, float], token: int, *, logprob: float, named: Sequence[int]
) -> tuple[tuple[int, float], ...]:
    """Returns the listed tokens: the most likely ones and, if there are named tokens, then the token and these."""
    if not named:
        return tuple(top.items())
    others = {id: -1.0 - place for place, id in enumerate(named) if id != token}
    return tuple(({**top, token: logprob} | others).items())

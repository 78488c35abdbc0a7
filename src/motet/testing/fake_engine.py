"""An engine without a model, for tests and front-end benchmarks: answers come from a script, and steps can be
controlled. It ignores grammars.

It plays prefill and decode apart too: the fake workers of a cell share a book of leases, and a group with a ticket ends
its lease at its first step, or when it is closed before that. A fake that died or was closed sends nothing; leases that
a dead one granted are gone.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import count

from motet.errors import EngineClosedError, EngineDiedError, MotetError
from motet.ids import ModelName, RequestId
from motet.kv_events.changes import BlockListener
from motet.metrics.stats import EngineStats
from motet.transfer.ticket import Ticket, TransferAddress, prompt_digest
from motet.types import (
    ChoiceDelta,
    ChoiceStart,
    EngineInfo,
    Finish,
    FinishReason,
    GenerateRequest,
    GroupDelta,
    PromptReport,
    Role,
    TokenLogprob,
)

Script = Callable[[GenerateRequest, ChoiceStart], Sequence[int]]
"""Returns the whole answer of a choice, as tokens. Without end-of-sequence it is repeated up to `max_tokens`."""

DuringPrefill = Callable[[GenerateRequest], Awaitable[None]]
"""Called while a prompt is prefilled: it may wait, and its errors become those of the prefill."""

NOWHERE = TransferAddress("fake", "127.0.0.1", 1)
GONE = EngineDiedError("the engine is gone")
LEASE_S = 60.0


def fake_info(
    *,
    vocab_size: int = 512,
    max_model_len: int = 4096,
    eos_token_ids: tuple[int, ...] = (0,),
    role: Role = Role.BOTH,
    transfer: TransferAddress | None = None,
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
        dtype="none",
        device="none",
        fingerprint="fake-same",
        transfer=transfer,
    )


class FakeLeases:
    """The book of trunks that the workers of a fake cell keep for each other."""

    def __init__(self) -> None:
        self.held: dict[int, Ticket] = {}
        self._read: Counter[int] = Counter()
        self._ids = count(1)

    def grant(self, request: GenerateRequest, address: TransferAddress, *, readers: int, block_size: int) -> Ticket:
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
        )
        return self.held[lease_id]

    def read(self, ticket: Ticket) -> None:
        """Notes that a reader is done; after the last one the lease is over."""
        self._read[ticket.lease_id] += 1
        if self._read[ticket.lease_id] >= ticket.readers:
            self.end(ticket)

    def end(self, ticket: Ticket) -> None:
        self.held.pop(ticket.lease_id, None)

    def lose(self, engine_id: str) -> None:
        """Removes the leases of an engine that has died."""
        self.held = {id: ticket for id, ticket in self.held.items() if ticket.remote_engine_id != engine_id}

    def count(self, engine_id: str) -> int:
        return sum(ticket.remote_engine_id == engine_id for ticket in self.held.values())


class FakeEngine:
    """Writes one scripted token for each choice in each step. With a `gate`, each release of the gate allows one step.

    `fail_after` maps a step number (0 = before the first token) to the error that every group raises there. `die` ends
    the engine for ever; a worker that comes back is another `FakeEngine`.
    """

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
        self.script = script
        self.gate = gate
        self.fail_after = fail_after or {}
        self.new_weights: dict[int, str] = {}
        """Step -> the version of the weights that write from there on."""
        self.during_prefill = during_prefill
        self.leases = leases if leases is not None else FakeLeases()
        self.open: dict[RequestId, FakeGroup] = {}
        self.requests: list[GenerateRequest] = []
        self.prefills: list[GenerateRequest] = []
        self.prefilling = 0
        self.released: list[Ticket] = []
        self.release_traces: list[str] = []
        self.block_listeners: list[BlockListener] = []
        self.pulls = 0
        self.generated_tokens = 0
        self.closed = False
        self.death: EngineDiedError | None = None

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
        self.prefilling += 1
        try:
            if self.during_prefill is not None:
                await self.during_prefill(request)
        finally:
            self.prefilling -= 1
        if error := self.death or self.closing:
            raise error
        return self.leases.grant(request, self._address, readers=readers, block_size=self.info.block_size)

    async def release(self, ticket: Ticket, *, trace: str = "") -> None:
        self.released.append(ticket)
        self.release_traces.append(trace)
        self.leases.end(ticket)

    def listen_to_blocks(self, listener: BlockListener) -> None:
        """Keeps the listener: there are no blocks here, so a test calls `block_listeners` itself."""
        self.block_listeners.append(listener)

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
            generated_tokens=self.generated_tokens,
            prefills=len(self.prefills),
            leases=self.leases.count(self._address.engine_id),
            transfers=self.pulls,
            recomputed_tokens=self.pulls,
        )

    def die(self, error: EngineDiedError = GONE) -> None:
        """Ends every group, prefill and question, also later ones, with `error`."""
        self.death = error
        self.leases.lose(self._address.engine_id)
        self._wake_all()

    async def close(self) -> None:
        self.closed = True
        self._wake_all()

    def check(self) -> None:
        """Raises unless every group and every lease has ended."""
        if self.open:
            raise AssertionError(f"groups left open: {sorted(self.open)}")
        if self.prefilling:
            raise AssertionError(f"prefills left open: {self.prefilling}")
        if self.leases.held:
            raise AssertionError(f"leases left: {self.leases.held}")

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
        self._written = {c.index: list(c.output_tokens) for c in request.choices}
        self._engine = engine
        self._request = request
        self._error: MotetError | None = None
        self._left = False
        self._lease_told = False
        self._woken = asyncio.Event()

    def __aiter__(self) -> "FakeGroup":
        return self

    async def __anext__(self) -> GroupDelta:
        if self._engine.gate is not None:
            await self._pass(self._engine.gate)
        if self._error is None and not self._left:
            self._error = self._engine.death or self._engine.fail_after.get(self.step) or self._engine.closing
            if self._error is not None:
                self._end(tells=not isinstance(self._error, EngineDiedError))
        if self._error is not None:
            raise self._error
        if self._left:
            raise StopAsyncIteration
        if self.step == 0 and self._request.ticket is not None:
            self._engine.pulls += 1
            self._tell_lease()
        deltas = tuple(self._advance(start) for start in list(self.unfinished.values()))
        report = self._report() if self.step == 0 else None
        version = self._engine.new_weights.get(self.step, "")
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
        """Wakes a task that waits for a step, since the group has ended."""
        self._woken.set()

    async def _pass(self, gate: asyncio.Semaphore) -> None:
        """Returns when a step may be taken, or the group has ended."""
        if self._woken.is_set():
            return
        turns = asyncio.ensure_future(gate.acquire()), asyncio.ensure_future(self._woken.wait())
        try:
            await asyncio.wait(turns, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for turn in turns:
                turn.cancel()
            await asyncio.gather(*turns, return_exceptions=True)

    def _end(self, *, tells: bool = True) -> None:
        """Ends the group. `tells`: True to notify the lease, if there is one; a dead engine does not."""
        self._left = True
        here = self._engine.open.pop(self._request.request_id, None) is not None
        if here and tells:
            self._tell_lease()
        self.wake()

    def _tell_lease(self) -> None:
        """Notifies the lease, once, that the ticket is not needed any more."""
        if self._request.ticket is not None and not self._lease_told:
            self._lease_told = True
            self._engine.leases.read(self._request.ticket)

    def _report(self) -> PromptReport:
        """Returns the report: the log-probability of the second prompt token is -1, of the third -2, and so on."""
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
            named = sampling.logprob_token_ids
            others = {token: -0.5} | {id: -1.0 - place for place, id in enumerate(named) if id != token}
            top = (
                tuple(others.items())
                if named
                else tuple(((token + k) % self._engine.info.vocab_size, -0.5 - k) for k in range(sampling.logprobs))
            )
            logprobs = (TokenLogprob(token, -0.5, 1, top),)
        return ChoiceDelta(start.index, (token,), logprobs, finish)

"""The engine of a fake vLLM server: it generates token by token, in the steps that the test allows, and fetches KV."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tests.peers.vllm_counters import VLLMCounters
from tests.peers.vllm_requests import RequestRefused, VLLMRequest
from tests.peers.vllm_shapes import Child
from tests.peers.vllm_switches import Switches
from tests.peers.vllm_tickets import Network, Read
from tests.peers.vllm_tokens import Kind, state_of

BROKEN = RequestRefused(500, "Internal server error", kind="InternalServerError")


class FakeVLLMEngine:
    """The engine of one server."""

    def __init__(
        self, counters: VLLMCounters, network: Network, switches: Switches, max_model_len: int, *, stepped: bool
    ) -> None:
        self.counters = counters
        self.id = ""
        """Identifies the KV that it computes; each start has a new id."""
        self._network = network
        self._switches = switches
        self._max_model_len = max_model_len
        self._stepped = stepped
        self._steps = 0
        self._awake = True
        self._change = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits for a condition, which is checked at each change of this server. The test's time-out is the limit."""
        while not holds():
            await self._change.wait()

    def step(self, count: int = 1) -> None:
        """Lets every choice of every open request get `count` more tokens."""
        self._steps += count
        self.changed()

    def hold(self) -> None:
        """Makes every token wait for a step from now on. Call it after the gateway has detected what
        the server supports."""
        self._stepped = True

    def run(self) -> None:
        """Makes all requests generate without waiting for steps, from now on."""
        self._stepped = False
        self.changed()

    def stop(self) -> None:
        """Simulates SIGSTOP: connections stay open, and no request is answered."""
        self._awake = False

    def resume(self) -> None:
        self._awake = True
        self.changed()

    async def until_awake(self) -> None:
        await self.until(lambda: self._awake)

    def changed(self) -> None:
        change, self._change = self._change, asyncio.Event()
        change.set()

    @asynccontextmanager
    async def counted(self, request: VLLMRequest) -> AsyncIterator[int]:
        """Counts the request as open during the context. Yields the number of earlier steps, which give it no
        tokens."""
        before = self._steps
        self.counters.arrived(request)
        self.changed()
        try:
            yield before
            self.counters.finished += 1
        except (asyncio.CancelledError, ConnectionError):
            self.counters.aborted += 1
            raise
        finally:
            self.counters.left(request)
            self.changed()

    async def generate(self, request: VLLMRequest, before: int) -> AsyncIterator[list[Child]]:
        """Yields all choices after each step. `before` comes from `counted`. Raises RequestRefused if the engine
        fails."""
        wrong = await self._fetched(request) if request.reads_ticket and self._switches.connector else False
        self.counters.computed(request)
        children = [
            Child(i, self._kind(request, i, wrong), state_of(request.prompt)) for i in range(request.sampling.n)
        ]
        max_tokens = self._max_model_len - len(request.prompt)
        steps = 0

        def can_step() -> bool:
            return self._awake and (not self._stepped or self._steps > before + steps)

        while unfinished := [child for child in children if child.finish_reason is None]:
            await self.until(can_step)
            if steps == self._switches.fail_after:
                raise BROKEN
            for child in unfinished:
                child.generate(request.sampling, max_tokens)
                self._network.sampled.note_generated(child.state)
            steps += 1
            self.counters.generated_tokens += len(unfinished)
            self.changed()
            yield children
            await asyncio.sleep(0)

    def _kind(self, request: VLLMRequest, index: int, wrong: bool) -> Kind:
        if request.sampling.seed is not None and not request.sampling.greedy:
            return Kind(seed=request.sampling.seed + index, wrong=wrong)
        is_sampled = not request.sampling.greedy and not request.makes_ticket
        return Kind(
            number=self._network.sampled.next_number(state_of(request.prompt)) if is_sampled else 0, wrong=wrong
        )

    async def _fetched(self, request: VLLMRequest) -> bool:
        """Pulls the KV once for each choice. Returns True if it belongs to another prompt. Raises RequestRefused."""
        self._network.pulling += 1
        self.changed()
        try:
            await self.until(lambda: not self._switches.pull_hangs)
            if self._switches.pull_fails:
                raise BROKEN
            reads = [self._network.read(request.transfer, request.prompt) for _ in range(request.sampling.n)]
        except asyncio.CancelledError:
            self._network.refuse(request.transfer)  # vLLM also notifies the prefill server after an abort
            raise
        finally:
            self._network.pulling -= 1
        if Read.FAILED in reads:
            raise BROKEN
        self.counters.transfers += len(reads)
        return Read.STALE in reads

    def ticket(self, request: VLLMRequest) -> object:
        if not (request.makes_ticket and self._switches.connector):
            return None
        ticket = self._network.pin(self.id, request.prompt, self.counters.block_size)
        return [ticket] if self._switches.ticket_in_list else ticket

    def pinned_blocks(self) -> int:
        own = [
            entry
            for id, entry in self._network.prefilled.items()
            if entry.engine_id == self.id and id in self._network.pinned
        ]
        return sum(-(-entry.num_tokens // self.counters.block_size) for entry in own)

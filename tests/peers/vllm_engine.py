"""The engine of a played vLLM server: it writes token by token, as far as the test lets it, and fetches KV."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tests.peers.vllm_asked import Asked, Refused
from tests.peers.vllm_books import Books
from tests.peers.vllm_shapes import Child
from tests.peers.vllm_switches import Switches
from tests.peers.vllm_tickets import Network, Read
from tests.peers.vllm_tokens import Kind, state_of

BROKEN = Refused(500, "Internal server error", kind="InternalServerError")


class PlayedEngine:
    """The engine of one server. Its books last from start to start."""

    def __init__(
        self, books: Books, network: Network, switches: Switches, max_model_len: int, *, stepped: bool
    ) -> None:
        self.books = books
        self.id = ""
        """Names the KV that it makes; each start has a new id."""
        self._network = network
        self._switches = switches
        self._max_model_len = max_model_len
        self._stepped = stepped
        self._steps = 0
        self._awake = True
        self._change = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Looks whenever something changed here; the test's time-out is the limit."""
        while not holds():
            await self._change.wait()

    def step(self, count: int = 1) -> None:
        """Lets every open request write `count` more tokens a choice."""
        self._steps += count
        self.changed()

    def hold(self) -> None:
        """Makes every token wait for a step from now on. Call it when a gateway has found out what this server is."""
        self._stepped = True

    def run(self) -> None:
        """Lets nobody wait for steps any more."""
        self._stepped = False
        self.changed()

    def stop(self) -> None:
        """Acts as after SIGSTOP: connections stay, and nothing is answered."""
        self._awake = False

    def go_on(self) -> None:
        self._awake = True
        self.changed()

    async def until_awake(self) -> None:
        await self.until(lambda: self._awake)

    def changed(self) -> None:
        change, self._change = self._change, asyncio.Event()
        change.set()

    @asynccontextmanager
    async def booked(self, asked: Asked) -> AsyncIterator[int]:
        """Keeps the request in the books. Yields the number of steps before it, which do not count for it."""
        before = self._steps
        self.books.arrived(asked)
        self.changed()
        try:
            yield before
            self.books.finished += 1
        except (asyncio.CancelledError, ConnectionError):
            self.books.aborted += 1
            raise
        finally:
            self.books.left(asked)
            self.changed()

    async def write(self, asked: Asked, before: int) -> AsyncIterator[list[Child]]:
        """Yields all choices after each step. `before` comes from `booked`. Raises Refused when the engine fails."""
        wrong = await self._fetched(asked) if asked.reads_ticket and self._switches.connector else False
        self.books.computed(asked)
        children = [Child(i, self._kind(asked, i, wrong), state_of(asked.prompt)) for i in range(asked.sampling.n)]
        room = self._max_model_len - len(asked.prompt)
        steps = 0

        def may_step() -> bool:
            return self._awake and (not self._stepped or self._steps > before + steps)

        while writing := [child for child in children if child.finish_reason is None]:
            await self.until(may_step)
            if steps == self._switches.fail_after:
                raise BROKEN
            for child in writing:
                child.write(asked.sampling, room)
                self._network.draws.wrote(child.state)
            steps += 1
            self.books.generated_tokens += len(writing)
            self.changed()
            yield children
            await asyncio.sleep(0)

    def _kind(self, asked: Asked, index: int, wrong: bool) -> Kind:
        if asked.sampling.seed is not None and not asked.sampling.greedy:
            return Kind(seed=asked.sampling.seed + index, wrong=wrong)
        drawn = not asked.sampling.greedy and not asked.makes_ticket
        return Kind(draw=self._network.draws.draw(state_of(asked.prompt)) if drawn else 0, wrong=wrong)

    async def _fetched(self, asked: Asked) -> bool:
        """Pulls the KV once for each choice. Returns True if it was another prompt's. Raises Refused."""
        self._network.pulling += 1
        self.changed()
        try:
            await self.until(lambda: not self._switches.pull_hangs)
            if self._switches.pull_fails:
                raise BROKEN
            reads = [self._network.read(asked.transfer, asked.prompt) for _ in range(asked.sampling.n)]
        except asyncio.CancelledError:
            self._network.refuse(asked.transfer)  # vLLM tells the prefill server after an abort too
            raise
        finally:
            self._network.pulling -= 1
        if Read.FAILED in reads:
            raise BROKEN
        self.books.transfers += len(reads)
        return Read.STALE in reads

    def ticket(self, asked: Asked) -> object:
        if not (asked.makes_ticket and self._switches.connector):
            return None
        ticket = self._network.pin(self.id, asked.prompt, self.books.block_size)
        return [ticket] if self._switches.ticket_in_list else ticket

    def pinned_blocks(self) -> int:
        here = [
            entry
            for id, entry in self._network.prefilled.items()
            if entry.engine_id == self.id and id in self._network.pinned
        ]
        return sum(-(-entry.num_tokens // self.books.block_size) for entry in here)

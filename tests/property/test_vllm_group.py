"""Groups on a vLLM server that accepts, refuses, generates, fails and dies in any order, and readers that leave.

No choice gets tokens of another one, nothing is left open, and a ticket is used or released.
"""

import asyncio

from hypothesis import event, given
from hypothesis import strategies as st

from motet.engines.vllm.vllm_wire import VLLMPiece
from motet.errors import EngineDiedError, EngineError, MotetError, OverloadedError
from motet.transfer.ticket import Ticket
from motet.types import ChoiceStart, GenerateRequest
from tests.clock import settle
from tests.engines.vllm.scripted_vllm import GREEDY, LENGTH, SAMPLING, Call, VLLMScene, group, ticket

LAST_STEP = 4
"""Maximum number of tokens that a child generates."""


class ScriptedCall:
    """One call whose children generate tokens that identify the call and the child."""

    def __init__(self, number: int, call: Call) -> None:
        self.call = call
        self.tokens: list[list[int]] = [[] for _ in range(call.request.n)]
        self.finished: set[int] = set()
        self._first = 1000 * (number + 1)

    def say(self, child: int, *, last: bool) -> None:
        child %= len(self.tokens)
        if not self.call.open or child in self.finished:
            return
        tokens = self.tokens[child]
        tokens.append(self._first + 100 * child + len(tokens))
        ends = last or len(tokens) >= min(LAST_STEP, self.call.request.sampling.max_tokens)
        if ends:
            self.finished.add(child)
        self.call.say(VLLMPiece(child, (tokens[-1],), None, LENGTH if ends else None))
        if len(self.finished) == len(self.tokens):
            self.call.end()


class Play:
    """One group, its server and its reader."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.scene = VLLMScene(accepting=False)
        self.stream = self.scene.engine.generate(request)
        self.received: dict[int, list[int]] = {start.index: [] for start in request.choices}
        self.finished: set[int] = set()
        self.stopped: set[int] = set()
        self.prompts = 0
        self.over = False
        self.error: MotetError | None = None
        self.left = False
        """True if the reader did not wait for the end."""
        self.lost = False
        """True if a connection of the group was lost."""
        self.hurt = False
        """True if something happened that ends groups with an error."""
        self._said: list[ScriptedCall] = []
        self._reading: asyncio.Task[None] | None = None

    @property
    def scripted(self) -> list[ScriptedCall]:
        calls = self.scene.calls
        self._said += [ScriptedCall(number, calls[number]) for number in range(len(self._said), len(calls))]
        return self._said

    def of(self, number: int) -> ScriptedCall | None:
        return self.scripted[number % len(self.scripted)] if self.scripted else None

    async def do(self, what: str, number: int, child: int) -> None:
        scripted = self.of(number)
        self.hurt = self.hurt or what in ("refuse", "fail", "break", "lose", "close")
        match what:
            case "read":
                self._read()
            case "stop":
                index = self.request.choices[child % len(self.request.choices)].index
                self.stopped.add(index)
                await self.scene.engine.stop_choice(self.request.request_id, index)
            case "late":
                self.scene.leader_wait.time_out()
            case "leave":
                await self.stream.aclose()
                self.over = self.left = True
            case "lose":
                self.scene.engine.lost(EngineDiedError("gone"))
                self.lost = True
            case "close":
                await self.scene.engine.close()
            case _ if scripted is not None:
                self._act(what, scripted, child)

    async def finish(self) -> None:
        """Lets the server answer every call, and the reader read to the end."""
        while not self.over:
            self._read()
            await settle()
            for scripted in self.scripted:
                scripted.call.accept()
                for child in range(scripted.call.request.n):
                    scripted.say(child, last=True)
        if self._reading is not None:
            await self._reading
        await self.stream.aclose()
        await settle()

    async def check(self) -> None:
        assert self.scene.open == []
        assert self.prompts <= 1
        sources = [self._source(index) for index in self.received if self.received[index]]
        if not self.request.sampling.greedy:
            assert len(set(sources)) == len(sources)
        if self.error is None and not self.left:
            assert self.finished | self.stopped == set(self.received)
        if self.request.ticket is None:
            assert self.scene.server.rejected == []
        else:
            await self._check_ticket(self.request.ticket)

    def _act(self, what: str, scripted: ScriptedCall, child: int) -> None:
        match what:
            case "accept":
                scripted.call.accept()
            case "say":
                scripted.say(child, last=False)
            case "last":
                scripted.say(child, last=True)
            case "refuse" if not scripted.call.opening.done():
                scripted.call.refuse(OverloadedError("full"))
            case "fail" if scripted.call.open:
                scripted.call.end(EngineError("sick"))
            case "break" if scripted.call.open:
                scripted.call.end()
                self.lost = True

    def _read(self) -> None:
        """Starts to read a delta, unless one is still awaited. Raises the error of the last one, if it was not
        correct."""
        if self._reading is not None and self._reading.done():
            self._reading.result()
        if not self.over and (self._reading is None or self._reading.done()):
            self._reading = asyncio.create_task(self._take())

    async def _take(self) -> None:
        try:
            delta = await anext(self.stream)
        except StopAsyncIteration:
            self.over = True
        except MotetError as error:
            self.over, self.error = True, error
        else:
            self.prompts += delta.prompt is not None
            for choice in delta.choices:
                assert choice.index not in self.finished
                assert choice.index not in self.stopped or self.hurt  # tokens that were ready when the group ended
                self.received[choice.index] += choice.token_ids
                if choice.finish is not None:
                    self.finished.add(choice.index)

    def _source(self, index: int) -> tuple[int, int]:
        """Returns the call and the child that generated all tokens of a choice."""
        tokens = self.received[index]
        call, child = tokens[0] // 1000 - 1, tokens[0] % 1000 // 100
        scripted = self.scripted[call]
        complete = scripted.tokens[child]
        assert tokens == complete if index in self.finished else tokens == complete[: len(tokens)]
        start = next(start for start in self.request.choices if start.index == index)
        assert tuple(scripted.call.request.prompt) == self.request.prompt + start.output_tokens
        if self.request.seeded and not self.request.sampling.greedy and not start.output_tokens:
            assert scripted.call.request.seed is not None
            assert scripted.call.request.seed + child == start.seed
        return call, child

    async def _check_ticket(self, ticket: Ticket) -> None:
        """Checks that the ticket is used or released once, as far as the group can know."""
        carrying = [scripted.call for scripted in self.scripted if scripted.call.request.kv_params is not None]
        assert len(carrying) <= 1
        taken = any(call.taken for call in carrying)
        ends = self._ends
        event(f"taken {taken}, lost {self.lost}, released and left {ends}")
        fell_back = self.scene.figures.pull_fallbacks.total() > 0
        if not self.lost:
            assert sum(ends) == (fell_back or not taken)
        await self.scene.engine.release(ticket)
        assert self._ends == ends if not self.lost else taken or sum(self._ends) == 1
        if len(self.scripted) > len(carrying) and not fell_back:
            assert self.scripted[0].tokens[0], "no request follows before the first token"

    @property
    def _ends(self) -> tuple[int, int]:
        """Returns the number of times that the ticket was released, and the number of times that its lease had to
        expire."""
        return len(self.scene.server.rejected), self.scene.figures.tickets_unused["left"]


WHATS = st.sampled_from(
    ["accept"] * 4
    + ["say"] * 5
    + ["last", "read", "read", "read", "stop", "late", "refuse", "fail", "break", "leave"]
    + ["lose", "close"]
)
STEPS = st.lists(st.tuples(WHATS, st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=30)


@st.composite
def requests(draw: st.DrawFn) -> GenerateRequest:
    n = draw(st.integers(1, 4))
    written = st.sampled_from([(), (), (8,), (8, 9)])
    return group(
        choices=tuple(ChoiceStart(index, 7 + index, draw(written)) for index in range(n)),
        sampling=draw(st.sampled_from([SAMPLING, GREEDY])),
        ticket=draw(st.sampled_from([None, ticket()])),
        seeded=draw(st.booleans()),
        stops=draw(st.booleans()),
    )


async def played(request: GenerateRequest, steps: list[tuple[str, int, int, bool]]) -> None:
    before = asyncio.all_tasks()
    play = Play(request)
    for what, number, child, at_rest in steps:
        if at_rest:
            await settle()
        await play.do(what, number, child)
    await play.finish()
    await play.check()
    play.scene.engine.check()
    await play.scene.engine.close()
    assert asyncio.all_tasks() == before


@given(requests(), STEPS)
def test_every_choice_has_its_own_tokens_and_nothing_is_left_open(
    request: GenerateRequest, steps: list[tuple[str, int, int, bool]]
) -> None:
    asyncio.run(played(request, steps))

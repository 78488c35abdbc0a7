"""Requests for texts: which server gets them, the load that they add, and where they go when a server fails."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from motet.engine import WorkerState
from motet.engine_info import ModelCard
from motet.engines.upstream.text_source import TextPiece, TextRequest, TextRoute, TextStep
from motet.errors import (
    EngineDiedError,
    EngineError,
    EngineSilentError,
    MotetError,
    NoWorkerError,
    OverloadedError,
    UpstreamRefusalError,
    WorkerFaultError,
    WorkerLeavingError,
)
from motet.ids import ModelName
from motet.routing.text_router import SESSION_CHOICES, TextRouter
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.member import REFUSAL_S
from motet.types import FinishReason, Usage
from tests.clock import Clock

pytestmark = pytest.mark.anyio

BUSY = OverloadedError("busy")
DIED = EngineDiedError("gone")
LIMIT = UpstreamRefusalError("slow down", status=429, type="rate_limit_error", param=None, code=None)

Read = Sequence[TextStep] | MotetError


def ended(index: int) -> TextStep:
    return TextStep((TextPiece(index, {}, FinishReason.STOP),))


def part(index: int) -> TextStep:
    return TextStep((TextPiece(index, {}),))


class ScriptedGroup:
    """A group that returns one read after the other and then ends. If `hangs`, it waits for ever instead."""

    worker = ""
    usage: Usage | None = None

    def __init__(self, reads: Sequence[Read], *, hangs: bool) -> None:
        self._reads = list(reads)
        self._hangs = hangs
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.closed = False
        self.started: list[int] = []

    async def read(self) -> Sequence[TextStep]:
        if self._reads:
            read = self._reads.pop(0)
            if isinstance(read, MotetError):
                raise read
            return read
        if self._hangs:
            await self._failed
        return ()

    def start(self, indices: Sequence[int]) -> None:
        self.started += indices

    def end_choice(self, index: int) -> None:
        self._reads.insert(0, [TextStep((TextPiece(index, {}, FinishReason.ABORT),))])

    def fail(self, error: MotetError) -> None:
        self._failed.set_exception(error)

    async def aclose(self) -> None:
        self.closed = True


@dataclass
class ScriptedSource:
    """A source whose requests get these reads in turn. All further requests get the last ones."""

    scripts: list[list[Read]] = field(default_factory=lambda: [[[ended(0)]]])
    hangs: bool = False
    requests: list[TextRequest] = field(default_factory=list)
    groups: list[ScriptedGroup] = field(default_factory=list)
    submitted: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    def generate(self, request: TextRequest) -> ScriptedGroup:
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self.requests.append(request)
        self.groups.append(ScriptedGroup(script, hangs=self.hangs))
        self.submitted.release()
        return self.groups[-1]


class Texts:
    """A fleet of text upstreams `a`, `b` and so on, which serve model m."""

    def __init__(self, *sources: ScriptedSource) -> None:
        self.clock = Clock()
        self.fleet = Fleet(clock=self.clock)
        self.router = TextRouter(self.fleet)
        for id, source in zip("abc", sources, strict=False):
            self.fleet.expect(id, f"http://{id}", takes_texts=True)
            self.router.put(id, source.generate)
            self.fleet.put_text(id, [ModelCard(name=ModelName("m"), max_model_len=10)])

    def open_choices(self) -> list[int]:
        return [member.load.open_choices for member in self.fleet.members]

    async def all_of(self, request: TextRequest) -> str:
        """Reads a request to its end. Returns the server that answered it."""
        group = self.router.generate(request)
        try:
            while await group.read():
                pass
            return group.worker
        finally:
            await group.aclose()

    def decision(self, id: str) -> str | None:
        member = self.fleet.get(id)
        assert member is not None
        return member.last_decision


def text_request(n: int = 1, *, session: str = "", model: str = "m") -> TextRequest:
    return TextRequest(route=TextRoute.CHAT, body={}, model=model, n=n, session_id=session)


def steered_request(n: int, *start: int) -> TextRequest:
    return TextRequest(route=TextRoute.CHAT, body={}, model="m", n=n, start=start)


async def test_the_server_with_the_fewest_open_choices_gets_a_request() -> None:
    texts = Texts(ScriptedSource([[[part(0)], [ended(0)]]]), ScriptedSource([[[part(0)]]]))
    open_groups = []
    for n, server in ((3, "a"), (1, "b"), (1, "b"), (2, "b"), (1, "a")):
        group = texts.router.generate(text_request(n))
        await group.read()
        assert group.worker == server
        open_groups.append(group)
    assert texts.open_choices() == [4, 4]
    assert texts.decision("a") == "3 open choices, the fewest of 2"
    await open_groups[0].read()
    assert texts.open_choices() == [3, 4]
    for group in open_groups:
        await group.aclose()
    texts.fleet.check()


async def test_servers_take_turns_if_they_are_equally_busy() -> None:
    texts = Texts(ScriptedSource(), ScriptedSource(), ScriptedSource())
    assert [await texts.all_of(text_request()) for _ in range(6)] == list("abcabc")


async def test_a_session_stays_unless_its_server_is_much_busier() -> None:
    texts = Texts(ScriptedSource([[[part(0)]]]), ScriptedSource())
    assert await texts.all_of(text_request(session="s")) == "a"
    busy = texts.router.generate(text_request(SESSION_CHOICES - 1, session="s"))
    await busy.read()
    assert busy.worker == "a"
    assert texts.decision("a") == "its session was here, 0 open choices"
    assert await texts.all_of(text_request()) == "b"
    assert await texts.all_of(text_request(session="s")) == "a"
    busier = texts.router.generate(text_request(2, session="s"))
    await busier.read()
    assert await texts.all_of(text_request(session="s")) == "b"
    await busy.aclose()
    assert await texts.all_of(text_request(session="s")) == "b"  # the session is on b now
    await busier.aclose()
    texts.fleet.check()


@pytest.mark.parametrize("error", [BUSY, DIED])
async def test_a_request_that_fails_before_its_first_chunk_goes_to_another_server(error: MotetError) -> None:
    failing = ScriptedSource([[error]])
    texts = Texts(failing, ScriptedSource())
    assert await texts.all_of(text_request()) == "b"
    assert failing.groups[0].closed
    assert texts.decision("b") == "after a failed"
    assert [await texts.all_of(text_request()) for _ in range(3)] == ["b"] * 3  # a has just failed
    texts.clock.now_s += REFUSAL_S
    failing.scripts = [[[ended(0)]]]
    assert await texts.all_of(text_request()) == "a"


async def test_the_only_server_is_tried_once_more() -> None:
    texts = Texts(ScriptedSource([[BUSY], [[ended(0)]]]))
    assert await texts.all_of(text_request()) == "a"
    assert texts.decision("a") == "tried once more: there is no other worker"


async def test_a_request_is_tried_twice_and_no_more() -> None:
    sources = [ScriptedSource([[BUSY]]) for _ in range(3)]
    texts = Texts(*sources)
    with pytest.raises(OverloadedError):
        await texts.all_of(text_request())
    assert [len(source.groups) for source in sources] == [1, 1, 0]


@pytest.mark.parametrize("error", [EngineSilentError("silent"), EngineError("refused the key"), LIMIT])
async def test_errors_that_another_try_would_not_fix_are_raised_at_once(error: MotetError) -> None:
    texts = Texts(ScriptedSource([[error]]), other := ScriptedSource())
    with pytest.raises(type(error)):
        await texts.all_of(text_request())
    assert other.groups == []


async def test_a_server_that_has_reached_its_limit_comes_last_for_some_time() -> None:
    texts = Texts(ScriptedSource([[LIMIT]]), ScriptedSource())
    with pytest.raises(UpstreamRefusalError):
        await texts.all_of(text_request())
    assert [await texts.all_of(text_request()) for _ in range(3)] == ["b"] * 3


async def test_a_server_with_an_invalid_answer_gets_no_requests_and_has_the_reason() -> None:
    texts = Texts(ScriptedSource([[WorkerFaultError("it sent choice 7")]]), ScriptedSource())
    assert [await texts.all_of(text_request()) for _ in range(3)] == ["b"] * 3
    (faulty, _) = texts.fleet.members
    assert (faulty.state, faulty.note, faulty.faults.distrusted) == (WorkerState.DEAD, "it sent choice 7", True)


async def test_a_request_that_has_started_ends_with_its_server() -> None:
    texts = Texts(ScriptedSource([[[part(0)], DIED]]), other := ScriptedSource())
    with pytest.raises(EngineDiedError):
        await texts.all_of(text_request(2))
    assert other.groups == []
    assert texts.open_choices() == [0, 0]


async def test_requests_that_wait_at_a_server_that_leaves_go_to_other_servers() -> None:
    texts = Texts(source := ScriptedSource([[]], hangs=True), ScriptedSource())
    reading = asyncio.create_task(texts.all_of(text_request(3)))
    await source.submitted.acquire()
    assert texts.open_choices() == [3, 0]
    texts.fleet.mark("a", WorkerState.DRAINING)
    await texts.fleet.evict("a", WorkerLeavingError("it goes"))
    assert await reading == "b"


async def test_leaving_empties_the_load_and_wakes_waiting_tasks() -> None:
    texts = Texts(source := ScriptedSource([[[part(0)]]], hangs=True))
    group = texts.router.generate(text_request(3))
    await group.read()
    assert texts.open_choices() == [3]
    changed = texts.fleet.changes.wait()
    await group.aclose()
    assert changed.done()
    assert source.groups[0].closed
    texts.fleet.check()


async def test_clients_can_use_another_name_for_a_model() -> None:
    texts = Texts(ScriptedSource())
    group = texts.router.of("m")(text_request(model="name of the client"))
    assert await group.read() == [ended(0)]
    await group.aclose()


async def test_the_load_has_the_choices_that_have_started() -> None:
    texts = Texts(source := ScriptedSource([[[part(0)], [ended(0)], [ended(2)]]]))
    group = texts.router.generate(steered_request(4, 0, 1))
    await group.read()
    assert texts.open_choices() == [2]
    group.end_choice(1)
    await group.read()
    assert texts.open_choices() == [1]
    group.start([2, 3])
    assert (texts.open_choices(), source.groups[0].started) == ([3], [2, 3])
    for left in (2, 1, 0):
        await group.read()
        assert texts.open_choices() == [left]
    await group.aclose()
    texts.fleet.check()


async def test_starts_and_ends_before_an_answer_hold_on_the_next_server_too() -> None:
    failing, other = ScriptedSource([[BUSY]]), ScriptedSource([[[ended(0)]]])
    texts = Texts(failing, other)
    group = texts.router.generate(steered_request(4, 0, 1))
    group.end_choice(1)
    assert [piece.index for step in await group.read() for piece in step.pieces] == [1]
    group.start([2])
    await group.read()
    assert failing.requests[0].start == (0, 1)
    assert other.requests[0].start == (0, 2)
    assert texts.open_choices() == [0, 1]
    await group.aclose()
    texts.fleet.check()


async def test_without_a_server_for_the_model_the_error_says_so() -> None:
    texts = Texts(ScriptedSource())
    with pytest.raises(NoWorkerError, match="the model `other`"):
        await texts.all_of(text_request(model="other"))
    texts.fleet.mark("a", WorkerState.DEAD)
    with pytest.raises(NoWorkerError, match="the model `m`"):
        await texts.all_of(text_request())
    texts.fleet.mark("a", WorkerState.READY)
    texts.router.remove("a")
    with pytest.raises(NoWorkerError):
        await texts.all_of(text_request())

"""Ends of a group at every moment and in every order: afterwards no ticket, no group and no task is left."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.engines.base import GroupStream
from motet.errors import EngineClosedError, EngineDiedError, EngineError, MotetError, RequestError
from motet.types import GenerateRequest
from tests.property_settings import examples
from tests.routing.cell import Cell, Hold, answer, group, tokens_of

N = 2
EVERYTHING = {index: answer(index) for index in range(N)}
PREFILL_TICKS = 3
MOST_TICKS = 24
"""More turns of the loop than an undisturbed group takes."""


async def tick(times: int = 1) -> None:
    """Lets everything that can run take one step."""
    for _ in range(times):
        await asyncio.sleep(0)


def prefill_that(error: MotetError | None) -> Callable[[GenerateRequest], Awaitable[None]]:
    async def during_prefill(_: GenerateRequest) -> None:
        await tick(PREFILL_TICKS)
        if error is not None:
            raise error

    return during_prefill


async def read(stream: GroupStream) -> dict[int, list[int]]:
    with contextlib.suppress(MotetError):
        return await tokens_of(stream)
    return {}


ENDS: dict[str, tuple[MotetError | None, dict[int, MotetError]]] = {
    "all is well": (None, {}),
    "prefill fails": (EngineError("sick"), {}),
    "prefill refuses": (RequestError("never"), {}),
    "decode dies before it read": (None, {0: EngineDiedError("gone")}),
    "decode dies after it read": (None, {1: EngineDiedError("gone")}),
    "both fail": (EngineDiedError("gone"), {0: EngineClosedError("closed")}),
}


@pytest.mark.anyio
@pytest.mark.parametrize("ticks", range(MOST_TICKS))
@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize("end", ENDS)
async def test_closed_after_any_number_of_turns_of_the_loop(end: str, is_read: bool, ticks: int) -> None:
    prefill_error, fail_after = ENDS[end]
    cell = Cell(during_prefill=prefill_that(prefill_error), fail_after=fail_after)
    stream = cell.engine.generate(group(n=N))
    reader = asyncio.ensure_future(read(stream)) if is_read else None
    await tick(ticks)
    await stream.aclose()
    if reader is not None:
        await reader
    cell.check()


@pytest.mark.anyio
async def test_so_many_turns_are_enough_for_an_undisturbed_group() -> None:
    """Else the test above would never see the last of them."""
    cell = Cell(during_prefill=prefill_that(None))
    reader = asyncio.ensure_future(read(cell.engine.generate(group(n=N))))
    await tick(MOST_TICKS)
    assert reader.done()
    assert reader.result() == EVERYTHING
    cell.check()


class Play:
    """One group, whose prefill, steps and releases happen when told to."""

    def __init__(self, prefill_error: MotetError | None, fail_after: dict[int, MotetError]) -> None:
        self.hold = Hold(error=prefill_error)
        self.gate = asyncio.Semaphore(0)
        self.cell = Cell(during_prefill=self.hold, gate=self.gate, fail_after=fail_after)
        self.cell.prefill.may_release.clear()
        self.request = group(n=N)
        self.stream = self.cell.engine.generate(self.request)
        self.reader: asyncio.Future[dict[int, list[int]]] | None = None
        self.others: list[asyncio.Future[None]] = []

    def read(self) -> None:
        if self.reader is None:
            self.reader = asyncio.ensure_future(read(self.stream))

    def stop_reading(self) -> None:
        if self.reader is not None:
            self.reader.cancel()

    def stop(self, index: int) -> None:
        self.begin(self.cell.engine.stop_choice(self.request.request_id, index))

    def begin(self, what: Coroutine[None, None, None]) -> None:
        self.others.append(asyncio.ensure_future(what))

    def cancel_last(self) -> None:
        if self.others:
            self.others[-1].cancel()

    async def finish(self) -> None:
        """Lets go of everything that was held, and leaves."""
        self.hold.go.set()
        self.cell.prefill.may_release.set()
        for _ in range(MOST_TICKS):
            self.gate.release()
        await self.stream.aclose()
        with contextlib.suppress(asyncio.CancelledError):
            await (self.reader or tick())
        for task in self.others:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.cell.check()


ACTS: dict[str, Callable[[Play], None]] = {
    "prefill ends": lambda play: play.hold.go.set(),
    "decode takes a step": lambda play: play.gate.release(),
    "release ends": lambda play: play.cell.prefill.may_release.set(),
    "reader comes": Play.read,
    "reader is cancelled": Play.stop_reading,
    "first choice is stopped": lambda play: play.stop(0),
    "second choice is stopped": lambda play: play.stop(1),
    "client leaves": lambda play: play.begin(play.stream.aclose()),
    "who acted last is cancelled": Play.cancel_last,
    "decode is closed": lambda play: play.begin(play.cell.decode.close()),
    "cell is closed": lambda play: play.begin(play.cell.engine.close()),
}
TURN = "a turn of the loop"


@examples(300)
@given(
    acts=st.lists(st.sampled_from([*ACTS, TURN, TURN, TURN]), max_size=30),
    prefill_error=st.sampled_from([None, None, EngineError("sick"), RequestError("never")]),
    fail_at=st.sampled_from([None, 0, 1]),
)
def test_any_order_of_events_leaves_nothing(
    acts: list[str], prefill_error: MotetError | None, fail_at: int | None
) -> None:
    async def play() -> None:
        scene = Play(prefill_error, {} if fail_at is None else {fail_at: EngineDiedError("gone")})
        for act in acts:
            if act == TURN:
                await tick()
            else:
                ACTS[act](scene)
        await scene.finish()

    asyncio.run(play())

"""A group ends at every moment and in every way: no ticket, group or task of it may be left.

Scenes go through the states of a journey: the group waits for capacity, is prefilled, is generated in one part or in
several, and moves. Each scene is ended after every number of turns of the loop (in `make check`: after every fourth).
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.engine import GroupStream
from motet.errors import EngineDiedError, EngineError, MotetError, OverloadedError, RequestError
from motet.routing.groups.migration import NEXT, GroupState, transition
from motet.testing.fake_engine import GONE
from tests.clock import turn
from tests.property_settings import examples, some
from tests.routing.cells import CellScene
from tests.routing.scene import (
    APART,
    ControlledPrefill,
    Scene,
    SlowPrefill,
    SubmittedGroup,
    group,
    read,
    tokens_of,
    uninterrupted,
)

pytestmark = pytest.mark.anyio

N = 4
MAX_TURNS = 48
"""More turns of the event loop than a group takes that waits, is prefilled and moves."""
FULL: dict[int, MotetError] = {0: OverloadedError("full")}


def losing(
    first: dict[int, MotetError],
    second: dict[int, MotetError] | None = None,
    *,
    prefill: MotetError | None = None,
    spread_choices: int = 0,
    max_choices: int = 1024,
) -> Scene:
    """Returns a scene of a slow prefill worker and two decode workers that fail like this. A group in one part goes to
    the first one."""
    scene = Scene(*APART, spread_choices=spread_choices, max_choices=max_choices)
    scene.engines["prefill-0"].during_prefill = SlowPrefill(prefill)
    scene.engines["decode-0"].scenario.fail_after = first
    scene.engines["decode-1"].scenario.fail_after = second or {}
    return scene


def crowded(first: dict[int, MotetError], second: dict[int, MotetError] | None = None) -> Scene:
    """Returns a scene in which the group has to wait for two other groups to end."""
    scene = losing(first, second, max_choices=N)
    for name in ("before", "other"):
        submitted = scene.submit(name, N)
        scene.others.append(asyncio.ensure_future(read(submitted.stream, submitted.request, submitted.received)))
    return scene


SCENES: dict[str, Callable[[], Scene]] = {
    "all is well": lambda: losing({}),
    "prefill fails": lambda: losing({}, prefill=EngineError("sick")),
    "prefill refuses": lambda: losing({}, prefill=RequestError("never")),
    "dies before it read": lambda: losing({0: GONE}),
    "dies in the middle": lambda: losing({2: GONE}),
    "both die": lambda: losing({1: GONE}, {1: GONE}),
    "dies, the other refuses for ever": lambda: losing({1: GONE}, FULL),
    "dies, the other is sick": lambda: losing({1: GONE}, {0: EngineError("sick")}),
    "waits for capacity": lambda: crowded({}),
    "waits, then its worker dies": lambda: crowded({1: GONE}),
    "in parts": lambda: losing({}, spread_choices=2),
    "in parts, prefill fails": lambda: losing({}, prefill=EngineError("sick"), spread_choices=2),
    "in parts, one dies before it read": lambda: losing({0: GONE}, spread_choices=2),
    "in parts, one dies in the middle": lambda: losing({2: GONE}, spread_choices=2),
    "in parts, one dies, the other refuses": lambda: losing({1: GONE}, FULL, spread_choices=2),
    "in parts, one is sick": lambda: losing({1: EngineError("sick")}, spread_choices=2),
}


async def twice(_: Scene, submitted: SubmittedGroup) -> None:
    await asyncio.gather(submitted.stream.aclose(), submitted.stream.aclose())


async def evict_all(scene: Scene, submitted: SubmittedGroup) -> None:
    await asyncio.gather(*(scene.evict(name) for name in APART))
    await submitted.stream.aclose()


async def stop_all(scene: Scene, submitted: SubmittedGroup) -> None:
    for start in submitted.request.choices:
        await scene.router.stop_choice(submitted.request.request_id, start.index)


async def refuse(scene: Scene, submitted: SubmittedGroup) -> None:
    await scene.pass_time(60.0)
    await submitted.stream.aclose()


ENDS: dict[str, Callable[[Scene, SubmittedGroup], Awaitable[None]]] = {
    "closed": lambda _, submitted: submitted.stream.aclose(),
    "closed twice at once": twice,
    "server closed": lambda scene, _: scene.router.close(),
    "evicted, then closed": evict_all,
    "stopped": stop_all,
    "refused for lack of capacity": refuse,
}


async def leave_all(scene: Scene, submitted: SubmittedGroup) -> None:
    """Ends everything else in the scene too."""
    await submitted.stream.aclose()
    await scene.router.close()
    await asyncio.gather(*scene.others)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", SCENES)
async def test_a_group_that_ends_after_any_number_of_turns_leaves_nothing(name: str, end: str) -> None:
    complete = await uninterrupted(group(n=N))
    for turns in some(range(MAX_TURNS), name + end):
        scene = SCENES[name]()
        submitted = scene.submit("g", N)
        reader = asyncio.ensure_future(read(submitted.stream, submitted.request, submitted.received))
        await turn(turns)
        was_over = reader.done()
        await ENDS[end](scene, submitted)
        await leave_all(scene, submitted)
        await reader
        scene.check()
        assert submitted.received.is_prefix_of(complete)
        if was_over:  # later turns would change nothing
            break


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", SCENES)
async def test_a_group_without_a_reader_leaves_nothing_when_it_ends(name: str, end: str) -> None:
    for turns in some((0, 1, 2, 4, 8, 16, 32), name + end):
        scene = SCENES[name]()
        submitted = scene.submit("g", N)
        await turn(turns)
        await ENDS[end](scene, submitted)
        await leave_all(scene, submitted)
        scene.check()


@pytest.mark.parametrize("name", SCENES)
async def test_a_group_leaves_nothing_if_the_task_that_closes_it_is_cancelled(name: str) -> None:
    for turns in some(range(0, MAX_TURNS, 3), name):
        for more in (0, 1, 2):
            scene = SCENES[name]()
            submitted = scene.submit("g", N)
            reader = asyncio.ensure_future(read(submitted.stream, submitted.request, submitted.received))
            await turn(turns)
            closing = asyncio.ensure_future(submitted.stream.aclose())
            await turn(more)
            closing.cancel()
            await asyncio.wait([closing])
            if more == 0:  # the reader never started
                reader.cancel()
                await asyncio.wait([reader])
            else:
                await reader
            await leave_all(scene, submitted)
            await turn(2)
            scene.check()


@pytest.mark.parametrize("name", SCENES)
async def test_a_reader_cancelled_after_any_number_of_turns_leaves_the_group_intact(name: str) -> None:
    complete = await uninterrupted(group(n=N))
    for turns in some(range(0, MAX_TURNS, 2), name):
        scene = SCENES[name]()
        submitted = scene.submit("g", N)
        reader = asyncio.ensure_future(read(submitted.stream, submitted.request, submitted.received))
        await turn(turns)
        reader.cancel()
        await asyncio.wait([reader])
        for worker in ("decode-0", "decode-1"):
            scene.engines[worker].scenario.fail_after = {}
            scene.start(worker)
        second = asyncio.ensure_future(read(submitted.stream, submitted.request, submitted.received))
        while not second.done():
            await turn()
            scene.fleet.changes.wake()
        assert submitted.received.is_prefix_of(complete)
        if "sick" not in name and name != "prefill refuses" and "parts," not in name:
            assert submitted.received == complete
        await leave_all(scene, submitted)
        scene.check()


async def test_the_number_of_turns_is_enough_for_a_group_that_waits_and_moves() -> None:
    """Without enough turns, the tests above would never reach the last turns of a group."""
    scene = SCENES["waits, then its worker dies"]()
    submitted = scene.submit("g", N)
    reader = asyncio.ensure_future(read(submitted.stream, submitted.request, submitted.received))
    await turn(MAX_TURNS)
    assert reader.done()
    assert submitted.received == await uninterrupted(submitted.request)
    await leave_all(scene, submitted)


def test_a_journey_changes_state_only_as_its_table_allows() -> None:
    for old in GroupState:
        for new in GroupState:
            if new is old or new in NEXT[old]:
                assert transition(old, new) is new
            else:
                with pytest.raises(AssertionError, match=f"from {old.name} to {new.name}"):
                    transition(old, new)
    assert not NEXT[GroupState.OVER]


async def tokens(stream: GroupStream) -> dict[int, list[int]]:
    with contextlib.suppress(MotetError):
        return await tokens_of(stream)
    return {}


class Play:
    """One group. Its prefill, steps and releases happen when the test lets them."""

    def __init__(self, prefill_error: MotetError | None, fail_after: dict[int, MotetError]) -> None:
        self.prefill = ControlledPrefill(error=prefill_error)
        self.gate = asyncio.Semaphore(0)
        self.cell = CellScene(during_prefill=self.prefill, gate=self.gate, fail_after=fail_after)
        self.cell.prefill.may_release.clear()
        self.request = group(n=2)
        self.stream = self.cell.router.generate(self.request)
        self.reader: asyncio.Future[dict[int, list[int]]] | None = None
        self.others: list[asyncio.Future[None]] = []

    def read(self) -> None:
        if self.reader is None:
            self.reader = asyncio.ensure_future(tokens(self.stream))

    def stop_reading(self) -> None:
        if self.reader is not None:
            self.reader.cancel()

    def stop(self, index: int) -> None:
        self.start(self.cell.router.stop_choice(self.request.request_id, index))

    def start(self, coroutine: Coroutine[None, None, None]) -> None:
        self.others.append(asyncio.ensure_future(coroutine))

    def cancel_last(self) -> None:
        if self.others:
            self.others[-1].cancel()

    async def finish(self) -> None:
        """Lets everything continue that was stopped, and leaves."""
        self.prefill.may_end.set()
        self.cell.prefill.may_release.set()
        for _ in range(MAX_TURNS):
            self.gate.release()
        await self.stream.aclose()
        with contextlib.suppress(asyncio.CancelledError):
            await (self.reader or turn())
        for task in self.others:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.cell.check()


ACTS: dict[str, Callable[[Play], None]] = {
    "prefill ends": lambda play: play.prefill.may_end.set(),
    "decode takes a step": lambda play: play.gate.release(),
    "release ends": lambda play: play.cell.prefill.may_release.set(),
    "reader starts": Play.read,
    "reader is cancelled": Play.stop_reading,
    "first choice is stopped": lambda play: play.stop(0),
    "second choice is stopped": lambda play: play.stop(1),
    "client leaves": lambda play: play.start(play.stream.aclose()),
    "the last task is cancelled": Play.cancel_last,
    "decode is closed": lambda play: play.start(play.cell.decode.close()),
    "cell is closed": lambda play: play.start(play.cell.router.close()),
}
TURN = "a turn of the loop"


@pytest.mark.slow
@examples(150)
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
                await turn()
            else:
                ACTS[act](scene)
        await scene.finish()

    asyncio.run(play())

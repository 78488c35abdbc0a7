"""One life of a group ends at every moment and in every way: no ticket, group or task of it may be left.

Scenes walk through the states of a journey (the group waits for room, is prefilled, is written whole or in parts, and
moves). Each scene is ended after every number of turns of the loop (in `make check`: after every fourth).
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.engine import GroupStream
from motet.errors import EngineDiedError, EngineError, MotetError, OverloadedError, RequestError
from motet.routing.groups.group_state import NEXT, GroupState, transition
from motet.testing.fake_engine import GONE
from tests.property_settings import examples, some
from tests.routing.cells import Cell
from tests.routing.scene import APART, Given, Hold, Scene, Slowly, group, read, tokens_of, turn, undisturbed

pytestmark = pytest.mark.anyio

N = 4
MOST_TURNS = 48
"""More turns of the loop than a group takes that waits, is prefilled and moves."""
FULL: dict[int, MotetError] = {0: OverloadedError("full")}


def losing(
    first: dict[int, MotetError],
    second: dict[int, MotetError] | None = None,
    *,
    prefill: MotetError | None = None,
    spread_choices: int = 0,
    places: int = 1024,
) -> Scene:
    """A slow prefill worker and two decode workers that fail like this. A whole group goes to the first one."""
    scene = Scene(*APART, spread_choices=spread_choices, places=places)
    scene.engines["prefill-0"].during_prefill = Slowly(prefill)
    scene.engines["decode-0"].fail_after = first
    scene.engines["decode-1"].fail_after = second or {}
    return scene


def crowded(first: dict[int, MotetError], second: dict[int, MotetError] | None = None) -> Scene:
    """A scene in which the group has to wait for two others to end."""
    scene = losing(first, second, places=N)
    for name in ("before", "beside"):
        given = scene.come(name, N)
        scene.others.append(asyncio.ensure_future(read(given.stream, given.request, given.heard)))
    return scene


SCENES: dict[str, Callable[[], Scene]] = {
    "all is well": lambda: losing({}),
    "prefill fails": lambda: losing({}, prefill=EngineError("sick")),
    "prefill refuses": lambda: losing({}, prefill=RequestError("never")),
    "dies before it read": lambda: losing({0: GONE}),
    "dies in the midst": lambda: losing({2: GONE}),
    "both die": lambda: losing({1: GONE}, {1: GONE}),
    "dies, the other refuses for ever": lambda: losing({1: GONE}, FULL),
    "dies, the other is sick": lambda: losing({1: GONE}, {0: EngineError("sick")}),
    "waits for room": lambda: crowded({}),
    "waits, then its worker dies": lambda: crowded({1: GONE}),
    "in parts": lambda: losing({}, spread_choices=2),
    "in parts, prefill fails": lambda: losing({}, prefill=EngineError("sick"), spread_choices=2),
    "in parts, one dies before it read": lambda: losing({0: GONE}, spread_choices=2),
    "in parts, one dies in the midst": lambda: losing({2: GONE}, spread_choices=2),
    "in parts, one dies, the other refuses": lambda: losing({1: GONE}, FULL, spread_choices=2),
    "in parts, one is sick": lambda: losing({1: EngineError("sick")}, spread_choices=2),
}


async def twice(_: Scene, given: Given) -> None:
    await asyncio.gather(given.stream.aclose(), given.stream.aclose())


async def evict_all(scene: Scene, given: Given) -> None:
    await asyncio.gather(*(scene.evict(name) for name in APART))
    await given.stream.aclose()


async def stop_all(scene: Scene, given: Given) -> None:
    for start in given.request.choices:
        await scene.router.stop_choice(given.request.request_id, start.index)


async def refuse(scene: Scene, given: Given) -> None:
    await scene.pass_time(60.0)
    await given.stream.aclose()


ENDS: dict[str, Callable[[Scene, Given], Awaitable[None]]] = {
    "closed": lambda _, given: given.stream.aclose(),
    "closed twice at once": twice,
    "server closed": lambda scene, _: scene.router.close(),
    "evicted, then closed": evict_all,
    "stopped": stop_all,
    "refused for want of room": refuse,
}


async def leave_all(scene: Scene, given: Given) -> None:
    """Ends everything else in the scene too."""
    await given.stream.aclose()
    await scene.router.close()
    await asyncio.gather(*scene.others)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", SCENES)
async def test_a_group_that_ends_after_any_number_of_turns_leaves_nothing(name: str, end: str) -> None:
    whole = await undisturbed(group(n=N))
    for turns in some(range(MOST_TURNS), name + end):
        scene = SCENES[name]()
        given = scene.come("g", N)
        reader = asyncio.ensure_future(read(given.stream, given.request, given.heard))
        await turn(turns)
        was_over = reader.done()
        await ENDS[end](scene, given)
        await leave_all(scene, given)
        await reader
        scene.check()
        assert given.heard.begins(whole)
        if was_over:  # later turns would change nothing
            break


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", SCENES)
async def test_a_group_that_nobody_reads_leaves_nothing_when_it_ends(name: str, end: str) -> None:
    for turns in some((0, 1, 2, 4, 8, 16, 32), name + end):
        scene = SCENES[name]()
        given = scene.come("g", N)
        await turn(turns)
        await ENDS[end](scene, given)
        await leave_all(scene, given)
        scene.check()


@pytest.mark.parametrize("name", SCENES)
async def test_a_group_leaves_nothing_if_the_task_that_closes_it_is_cancelled(name: str) -> None:
    for turns in some(range(0, MOST_TURNS, 3), name):
        for more in (0, 1, 2):
            scene = SCENES[name]()
            given = scene.come("g", N)
            reader = asyncio.ensure_future(read(given.stream, given.request, given.heard))
            await turn(turns)
            closing = asyncio.ensure_future(given.stream.aclose())
            await turn(more)
            closing.cancel()
            await asyncio.wait([closing])
            if more == 0:  # the reader never began
                reader.cancel()
                await asyncio.wait([reader])
            else:
                await reader
            await leave_all(scene, given)
            await turn(2)
            scene.check()


@pytest.mark.parametrize("name", SCENES)
async def test_a_reader_cancelled_after_any_number_of_turns_leaves_the_group_intact(name: str) -> None:
    whole = await undisturbed(group(n=N))
    for turns in some(range(0, MOST_TURNS, 2), name):
        scene = SCENES[name]()
        given = scene.come("g", N)
        reader = asyncio.ensure_future(read(given.stream, given.request, given.heard))
        await turn(turns)
        reader.cancel()
        await asyncio.wait([reader])
        for worker in ("decode-0", "decode-1"):
            scene.engines[worker].fail_after = {}
            scene.start(worker)
        second = asyncio.ensure_future(read(given.stream, given.request, given.heard))
        while not second.done():
            await turn()
            scene.fleet.changes.wake()
        assert given.heard.begins(whole)
        if "sick" not in name and name != "prefill refuses" and "parts," not in name:
            assert given.heard == whole
        await leave_all(scene, given)
        scene.check()


async def test_the_number_of_turns_is_enough_for_a_group_that_waits_and_moves() -> None:
    """Otherwise the tests above would never reach the last turns of a group."""
    scene = SCENES["waits, then its worker dies"]()
    given = scene.come("g", N)
    reader = asyncio.ensure_future(read(given.stream, given.request, given.heard))
    await turn(MOST_TURNS)
    assert reader.done()
    assert given.heard == await undisturbed(given.request)
    await leave_all(scene, given)


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
    """One group. Its prefill, steps and releases happen when the test says so."""

    def __init__(self, prefill_error: MotetError | None, fail_after: dict[int, MotetError]) -> None:
        self.hold = Hold(error=prefill_error)
        self.gate = asyncio.Semaphore(0)
        self.cell = Cell(during_prefill=self.hold, gate=self.gate, fail_after=fail_after)
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
        self.begin(self.cell.router.stop_choice(self.request.request_id, index))

    def begin(self, what: Coroutine[None, None, None]) -> None:
        self.others.append(asyncio.ensure_future(what))

    def cancel_last(self) -> None:
        if self.others:
            self.others[-1].cancel()

    async def finish(self) -> None:
        """Lets everything go on that was held, and leaves."""
        self.hold.go.set()
        self.cell.prefill.may_release.set()
        for _ in range(MOST_TURNS):
            self.gate.release()
        await self.stream.aclose()
        with contextlib.suppress(asyncio.CancelledError):
            await (self.reader or turn())
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
    "cell is closed": lambda play: play.begin(play.cell.router.close()),
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

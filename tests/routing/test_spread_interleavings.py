"""A group in parts, ended at every moment: afterwards no ticket, no group and no task of it is left."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from motet.engines.base import GroupStream
from motet.errors import EngineDiedError, EngineError, MotetError, OverloadedError, RequestError
from motet.ids import RequestId
from tests.routing.moving import Heard, undisturbed, wish
from tests.routing.spreading import APART, Failing, Spreading
from tests.routing.turns import read, read_and_ended, turn

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

N = 4
MOST_TURNS = 36
"""More turns of the loop than a group takes of which a part moves in its midst."""
UNREAD_TURNS = 16
"""More than one takes that nobody reads, until it waits for its reader."""
GONE = EngineDiedError("gone")


def losing(
    first: dict[int, MotetError], second: dict[int, MotetError] | None = None, *, prefill: MotetError | None = None
) -> Spreading:
    """Two decode workers that fail so."""
    scene = Spreading(*APART, spread_choices=2)
    scene.engines["prefill-0"].during_prefill = Failing(prefill)
    scene.engines["decode-0"].fail_after = first
    scene.engines["decode-1"].fail_after = second or {}
    return scene


SCENES: dict[str, Callable[[], Spreading]] = {
    "all is well": lambda: losing({}),
    "prefill fails": lambda: losing({}, prefill=EngineError("sick")),
    "prefill refuses": lambda: losing({}, prefill=RequestError("never")),
    "one dies before it read": lambda: losing({0: GONE}),
    "one dies in the midst": lambda: losing({2: GONE}),
    "one dies, the other refuses for ever": lambda: losing({1: GONE}, {0: OverloadedError("full")}),
    "one is sick": lambda: losing({1: EngineError("sick")}),
}
ENDS: dict[str, Callable[[Spreading, GroupStream], Awaitable[None]]] = {
    "closed": lambda _, stream: stream.aclose(),
    "closed twice at once": lambda _, stream: twice(stream),
    "server closed": lambda scene, _: scene.spread.close(),
    "evicted, then closed": lambda scene, stream: evict_all(scene, stream),
    "stopped": lambda scene, _: stop_all(scene),
}


async def twice(stream: GroupStream) -> None:
    await asyncio.gather(stream.aclose(), stream.aclose())


async def evict_all(scene: Spreading, stream: GroupStream) -> None:
    await asyncio.gather(*(scene.evict(name) for name in APART))
    await stream.aclose()


async def stop_all(scene: Spreading) -> None:
    for index in range(N):
        await scene.spread.stop_choice(RequestId("g"), index)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("lost", SCENES)
async def test_ended_after_any_number_of_turns_of_the_loop(lost: str, end: str) -> None:
    request = wish(n=N)
    whole = await undisturbed(request)
    for turns in range(MOST_TURNS):
        scene = SCENES[lost]()
        stream = scene.spread.generate(request)
        heard, was_over = await read_and_ended(stream, request, turns, ENDS[end](scene, stream))
        scene.check()
        assert heard.begins(whole)
        if was_over:
            break


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("lost", SCENES)
async def test_ended_unread_after_any_number_of_turns_of_the_loop(lost: str, end: str) -> None:
    for turns in range(UNREAD_TURNS):
        scene = SCENES[lost]()
        stream = scene.spread.generate(wish(n=N))
        await turn(turns)
        await ENDS[end](scene, stream)
        await stream.aclose()
        scene.check()


@pytest.mark.parametrize("lost", SCENES)
async def test_a_task_that_closes_a_group_and_is_cancelled_leaves_nothing_either(lost: str) -> None:
    request = wish(n=N)
    for turns in range(MOST_TURNS):
        for more in (0, 1, 2):
            scene = SCENES[lost]()
            stream = scene.spread.generate(request)
            reader = asyncio.ensure_future(read(stream, request, Heard()))
            await turn(turns)
            was_over = reader.done()
            closing = asyncio.ensure_future(stream.aclose())
            await turn(more)
            closing.cancel()
            await asyncio.wait([closing])
            if more:  # else it never began
                await reader
                await turn(2)
            else:
                reader.cancel()
                await asyncio.wait([reader])
                await stream.aclose()
            scene.check()
        if was_over:
            break


@pytest.mark.parametrize("lost", ["all is well", "one dies in the midst"])
async def test_so_many_turns_are_enough(lost: str) -> None:
    """Else the tests above would never see the last of them."""
    scene, request, heard = SCENES[lost](), wish(n=N), Heard()
    reader = asyncio.ensure_future(read(scene.spread.generate(request), request, heard))
    await turn(MOST_TURNS)
    assert reader.done()
    assert heard == await undisturbed(request)
    assert scene.spread.spreads == 1
    scene.check()


@pytest.mark.parametrize("lost", ["all is well", "prefill fails", "one dies before it read", "one dies in the midst"])
async def test_so_many_turns_are_enough_for_a_group_that_nobody_reads(lost: str) -> None:
    scene = SCENES[lost]()
    stream = scene.spread.generate(wish(n=N))
    await turn(UNREAD_TURNS)
    written = scene.written
    assert written > 0
    await turn(MOST_TURNS)
    assert scene.written == written
    await stream.aclose()
    scene.check()

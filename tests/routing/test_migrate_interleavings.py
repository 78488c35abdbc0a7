"""A group that moves, closed, stopped or left by its server at every moment: afterwards nothing of it is left."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from motet.engines.base import GroupStream
from motet.errors import EngineDiedError, EngineError, MotetError, OverloadedError
from motet.ids import RequestId
from motet.types import GenerateRequest
from tests.routing.moving import Heard, Scene, undisturbed, wish
from tests.routing.turns import read, read_and_ended, turn

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

NAMES = ("prefill-0", "decode-0", "decode-1")
PREFILL_TURNS = 3
MOST_TURNS = 40
"""More turns of the loop than a group takes that moves in its midst."""
GONE = EngineDiedError("gone")


async def slowly(_: GenerateRequest) -> None:
    await turn(PREFILL_TURNS)


def losing(first: dict[int, MotetError], second: dict[int, MotetError]) -> Scene:
    """Two decode workers that fail so; the first one gets the group."""
    scene = Scene(*NAMES)
    scene.engines["prefill-0"].during_prefill = slowly
    scene.engines["decode-0"].fail_after = first
    scene.engines["decode-1"].fail_after = second
    return scene


SCENES: dict[str, Callable[[], Scene]] = {
    "one dies before it read": lambda: losing({0: GONE}, {}),
    "one dies in the midst": lambda: losing({2: GONE}, {}),
    "both die, and nobody is left": lambda: losing({1: GONE}, {1: GONE}),
    "one dies, the other refuses for ever": lambda: losing({1: GONE}, {0: OverloadedError("full")}),
    "one dies, the other is sick": lambda: losing({1: GONE}, {0: EngineError("sick")}),
}
ENDS: dict[str, Callable[[Scene, GroupStream], Awaitable[None]]] = {
    "closed": lambda _, stream: stream.aclose(),
    "server closed": lambda scene, _: scene.engine.close(),
    "evicted, then closed": lambda scene, stream: evict_all(scene, stream),
    "stopped": lambda scene, _: stop_all(scene),
}


async def evict_all(scene: Scene, stream: GroupStream) -> None:
    await asyncio.gather(*(scene.evict(name) for name in NAMES))
    await stream.aclose()


async def stop_all(scene: Scene) -> None:
    for index in range(3):
        await scene.engine.stop_choice(RequestId("g"), index)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("lost", SCENES)
async def test_ended_after_any_number_of_turns_of_the_loop(lost: str, end: str) -> None:
    request = wish()
    whole = await undisturbed(request)
    for turns in range(MOST_TURNS):
        scene = SCENES[lost]()
        stream = scene.engine.generate(request)
        heard, was_over = await read_and_ended(stream, request, turns, ENDS[end](scene, stream))
        scene.check()
        assert heard.begins(whole)
        if was_over:
            break


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("turns", [0, 1, MOST_TURNS])
async def test_ended_unread_a_group_leaves_nothing(turns: int, end: str) -> None:
    """Nothing happens to it by itself."""
    scene = losing({0: GONE}, {})
    stream = scene.engine.generate(wish())
    await turn(turns)
    await ENDS[end](scene, stream)
    await stream.aclose()
    assert sum(engine.generated_tokens for engine in scene.all) == 0
    scene.check()


@pytest.mark.parametrize("lost", SCENES)
async def test_a_reader_cancelled_after_any_number_of_turns_leaves_the_group_to_the_next_one(lost: str) -> None:
    request = wish()
    whole = await undisturbed(request)
    for turns in range(MOST_TURNS):
        scene, heard = SCENES[lost](), Heard()
        stream = scene.engine.generate(request)
        reader = asyncio.ensure_future(read(stream, request, heard))
        await turn(turns)
        reader.cancel()
        await asyncio.wait([reader])
        for name in ("decode-0", "decode-1"):
            scene.engines[name].fail_after = {}
            scene.start(name)
        second = asyncio.ensure_future(read(stream, request, heard))
        while not second.done():
            await turn()
            scene.fleet.notify()
        if lost != "one dies, the other is sick":
            assert heard == whole
        scene.check()


async def test_so_many_turns_are_enough_for_a_group_that_moves() -> None:
    """Else the tests above would never see the last of them."""
    scene, request, heard = SCENES["one dies in the midst"](), wish(), Heard()
    reader = asyncio.ensure_future(read(scene.engine.generate(request), request, heard))
    await turn(MOST_TURNS)
    assert reader.done()
    assert heard == await undisturbed(request)
    scene.check()

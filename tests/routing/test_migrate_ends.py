"""Choices are stopped, readers leave or are cancelled, and servers close: before, during and after a move."""

import asyncio
import contextlib

import pytest

from motet.errors import EngineClosedError, NoWorkerError
from motet.ids import RequestId
from tests.routing.scene import Heard, Hold, Scene, group, length, settle, undisturbed

pytestmark = pytest.mark.anyio

N = 3
FLEETS = [("both-0", "both-1"), ("prefill-0", "decode-0", "decode-1")]
apart_and_not = pytest.mark.parametrize("names", FLEETS, ids=["alike", "apart"])


@apart_and_not
@pytest.mark.parametrize("steps", [0, 1, 4])
async def test_a_choice_stopped_before_its_worker_dies_does_not_go_on(steps: int, names: tuple[str, ...]) -> None:
    scene, request, heard = Scene(*names), group(n=N), Heard()
    whole = await undisturbed(request)
    stream = scene.router.generate(request)
    await settle()
    for _ in range(steps):
        heard.take(await anext(stream), request)
    await scene.router.stop_choice(request.request_id, 1)
    scene.writer().die()
    await heard.read(stream, request)
    assert heard.tokens.pop(1, []) == whole.tokens[1][:steps]
    assert heard.tokens == {index: whole.tokens[index] for index in (0, 2)}
    assert 1 not in [start.index for start in scene.asked[-1].choices]


@apart_and_not
async def test_a_choice_stopped_while_its_group_waits_for_a_worker_does_not_go_on(names: tuple[str, ...]) -> None:
    scene, request, heard = Scene(*names), group(n=N), Heard()
    stream = scene.router.generate(request)
    heard.take(await anext(stream), request)
    scene.kill_all()
    reading = asyncio.ensure_future(heard.read(stream, request))
    await settle()
    await scene.router.stop_choice(request.request_id, 0)
    await scene.router.stop_choice(request.request_id, 0)
    scene.start(names[-1])
    await reading
    assert [start.index for start in scene.asked[-1].choices] == [1, 2]
    assert sorted(heard.finished) == [1, 2]


@apart_and_not
async def test_a_choice_stopped_after_the_move_is_stopped_where_its_group_is(names: tuple[str, ...]) -> None:
    scene, request, heard = Scene(*names), group(n=N), Heard()
    stream = scene.router.generate(request)
    heard.take(await anext(stream), request)
    scene.writer().die()
    heard.take(await anext(stream), request)
    await scene.router.stop_choice(request.request_id, 2)
    await heard.read(stream, request)
    assert sorted(heard.finished) == [0, 1]
    assert len(heard.tokens[2]) == 2


@apart_and_not
async def test_a_choice_stopped_between_the_move_and_its_first_step_is_stopped_too(names: tuple[str, ...]) -> None:
    """With prefill, the resumed group is on its way there when the choice is stopped."""
    scene, request, heard = Scene(*names), group(n=N), Heard()
    gate, hold = asyncio.Semaphore(1), Hold()
    for engine in scene.all:
        engine.gate = gate
    stream = scene.router.generate(request)
    heard.take(await anext(stream), request)
    scene.engines[names[0]].during_prefill = hold
    scene.writer().die()
    reading = asyncio.ensure_future(heard.read(stream, request))
    await settle()
    await scene.router.stop_choice(request.request_id, 2)
    hold.go.set()
    for _ in range(100):
        gate.release()
    await reading
    assert sorted(heard.finished) == [0, 1]
    assert len(heard.tokens[2]) == 1


@apart_and_not
async def test_when_all_choices_are_stopped_during_a_move_the_group_is_over(names: tuple[str, ...]) -> None:
    scene, request, heard = Scene(*names), group(n=2), Heard()
    stream = scene.router.generate(request)
    heard.take(await anext(stream), request)
    scene.kill_all()
    reading = asyncio.ensure_future(heard.read(stream, request))
    await settle()
    for index in (1, 0, 7):
        await scene.router.stop_choice(request.request_id, index)
    await reading
    assert len(scene.asked) == 1
    assert heard.finished == {}
    assert scene.moves == {("died", "closed"): 1}
    await scene.router.stop_choice(RequestId("unknown"), 0)


async def test_a_group_whose_choices_are_all_done_needs_no_other_worker() -> None:
    """The last choices were stopped, and the worker died before it could report the end of the group."""
    scene, request, heard = Scene("both-0", "both-1"), group(n=2), Heard()
    stream = scene.router.generate(request)
    for _ in range(length(0)):
        heard.take(await anext(stream), request)
    writer = scene.writer()
    await scene.router.stop_choice(request.request_id, 1)
    writer.die()
    await heard.read(stream, request)
    assert len(scene.asked) == 1
    assert scene.moves == {}


@apart_and_not
@pytest.mark.parametrize("is_read", [True, False])
async def test_closing_a_group_that_waits_for_a_worker_ends_it(is_read: bool, names: tuple[str, ...]) -> None:
    scene, request, heard = Scene(*names), group(), Heard()
    stream = scene.router.generate(request)
    heard.take(await anext(stream), request)
    scene.kill_all()
    reading = asyncio.ensure_future(heard.read(stream, request)) if is_read else None
    await settle()
    await stream.aclose()
    await stream.aclose()
    if reading is not None:
        assert await reading is heard
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert scene.moves == ({("died", "closed"): 1} if is_read else {})
    scene.start(names[-1])
    await settle()
    assert len(scene.asked) == 1


@apart_and_not
async def test_closing_a_group_before_the_first_delta_after_a_move_ends_it(names: tuple[str, ...]) -> None:
    scene, request, heard = Scene(*names), group(), Heard()
    gate = asyncio.Semaphore(1)
    for engine in scene.all:
        engine.gate = gate
    stream = scene.router.generate(request)
    heard.take(await anext(stream), request)
    scene.writer().die()
    reading = asyncio.ensure_future(heard.read(stream, request))
    await settle()
    assert len(scene.asked) == 2
    await stream.aclose()
    await reading
    assert scene.moves == {("died", "closed"): 1}
    assert scene.router.counts.choices_resumed == 0


@apart_and_not
async def test_a_reader_that_is_cancelled_during_a_move_leaves_the_group_to_the_next_one(
    names: tuple[str, ...],
) -> None:
    """The next reader used to see the end of a closed stream, as if the group were done."""
    scene, request, heard = Scene(*names, limit=1), group(), Heard()
    stream = scene.router.generate(request)
    heard.take(await anext(stream), request)
    scene.kill_all()
    for _ in range(2):
        reading = asyncio.ensure_future(anext(stream))
        await settle()
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
    scene.start(names[-1])
    assert await heard.read(stream, request) == await undisturbed(request)
    assert scene.moves == {("died", "resumed"): 1}


@apart_and_not
async def test_closing_the_server_ends_groups_wherever_they_are(names: tuple[str, ...]) -> None:
    scene = Scene(*names)
    requests = [group(name) for name in ("read", "unread", "waits", "lost")]
    streams = [scene.router.generate(request) for request in requests]
    await settle()
    for stream in streams[2:]:
        await anext(stream)
    scene.kill_all()
    endings = [asyncio.ensure_future(Heard().read(streams[place], requests[place])) for place in (0, 2)]
    await settle()
    await scene.router.close()
    for ending in (*endings, *(anext(streams[place]) for place in (1, 3))):
        with pytest.raises(EngineClosedError):
            await ending
    await scene.router.close()
    with pytest.raises(NoWorkerError):
        scene.router.generate(group("late"))
    assert scene.moves == {("died", "closed"): 2}


async def test_closing_the_server_ends_groups_that_are_being_written() -> None:
    scene, request = Scene("both-0", "both-1"), group()
    stream = scene.router.generate(request)
    await anext(stream)
    await scene.router.close()
    with pytest.raises(EngineClosedError):
        await anext(stream)
    assert len(scene.asked) == 1
    assert scene.moves == {}


async def test_a_bug_below_reaches_the_reader_and_the_group_can_be_closed() -> None:
    scene, request = Scene("both-0", "both-1"), group()
    stream = scene.router.generate(request)
    await anext(stream)

    def bug(_: object, __: object) -> list[int]:
        raise ZeroDivisionError

    scene.writer().script = bug
    with pytest.raises(ZeroDivisionError):
        await anext(stream)
    await stream.aclose()

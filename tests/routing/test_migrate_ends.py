"""Choices are stopped, readers leave or are cancelled, and servers close: before, during and after a move."""

import asyncio
import contextlib

import pytest

from motet.errors import EngineClosedError, NoWorkerError
from motet.ids import RequestId
from tests.clock import settle
from tests.routing.scene import ControlledPrefill, Received, Scene, group, length, uninterrupted

pytestmark = pytest.mark.anyio

N = 3
FLEETS = [("both-0", "both-1"), ("prefill-0", "decode-0", "decode-1")]
in_both_fleets = pytest.mark.parametrize("names", FLEETS, ids=["alike", "apart"])


@in_both_fleets
@pytest.mark.parametrize("steps", [0, 1, 4])
async def test_a_choice_stopped_before_its_worker_dies_does_not_continue(steps: int, names: tuple[str, ...]) -> None:
    scene, request, received = Scene(*names), group(n=N), Received()
    complete = await uninterrupted(request)
    stream = scene.router.generate(request)
    await settle()
    for _ in range(steps):
        received.take(await anext(stream), request)
    await scene.router.stop_choice(request.request_id, 1)
    scene.generating_engine().die()
    await received.read(stream, request)
    assert received.tokens.pop(1, []) == complete.tokens[1][:steps]
    assert received.tokens == {index: complete.tokens[index] for index in (0, 2)}
    assert 1 not in [start.index for start in scene.requests[-1].choices]


@in_both_fleets
async def test_a_choice_stopped_while_its_group_waits_for_a_worker_does_not_continue(names: tuple[str, ...]) -> None:
    scene, request, received = Scene(*names), group(n=N), Received()
    stream = scene.router.generate(request)
    received.take(await anext(stream), request)
    scene.kill_all()
    reading = asyncio.ensure_future(received.read(stream, request))
    await settle()
    await scene.router.stop_choice(request.request_id, 0)
    await scene.router.stop_choice(request.request_id, 0)
    scene.start(names[-1])
    await reading
    assert [start.index for start in scene.requests[-1].choices] == [1, 2]
    assert sorted(received.finished) == [1, 2]


@in_both_fleets
async def test_a_choice_stopped_after_the_move_is_stopped_where_its_group_is(names: tuple[str, ...]) -> None:
    scene, request, received = Scene(*names), group(n=N), Received()
    stream = scene.router.generate(request)
    received.take(await anext(stream), request)
    scene.generating_engine().die()
    received.take(await anext(stream), request)
    await scene.router.stop_choice(request.request_id, 2)
    await received.read(stream, request)
    assert sorted(received.finished) == [0, 1]
    assert len(received.tokens[2]) == 2


@in_both_fleets
async def test_a_choice_stopped_between_the_move_and_its_first_step_is_stopped_too(names: tuple[str, ...]) -> None:
    """With prefill, the resumed group is being prefilled when the choice is stopped."""
    scene, request, received = Scene(*names), group(n=N), Received()
    gate, controlled = asyncio.Semaphore(1), ControlledPrefill()
    for engine in scene.all:
        engine.scenario.gate = gate
    stream = scene.router.generate(request)
    received.take(await anext(stream), request)
    scene.engines[names[0]].during_prefill = controlled
    scene.generating_engine().die()
    reading = asyncio.ensure_future(received.read(stream, request))
    await settle()
    await scene.router.stop_choice(request.request_id, 2)
    controlled.may_end.set()
    for _ in range(100):
        gate.release()
    await reading
    assert sorted(received.finished) == [0, 1]
    assert len(received.tokens[2]) == 1


@in_both_fleets
async def test_when_all_choices_are_stopped_during_a_move_the_group_has_ended(names: tuple[str, ...]) -> None:
    scene, request, received = Scene(*names), group(n=2), Received()
    stream = scene.router.generate(request)
    received.take(await anext(stream), request)
    scene.kill_all()
    reading = asyncio.ensure_future(received.read(stream, request))
    await settle()
    for index in (1, 0, 7):
        await scene.router.stop_choice(request.request_id, index)
    await reading
    assert len(scene.requests) == 1
    assert received.finished == {}
    assert scene.moves == {("died", "closed"): 1}
    await scene.router.stop_choice(RequestId("unknown"), 0)


async def test_a_group_whose_choices_are_all_done_needs_no_other_worker() -> None:
    """The last choices were stopped, and the worker died before it could report the end of the group."""
    scene, request, received = Scene("both-0", "both-1"), group(n=2), Received()
    stream = scene.router.generate(request)
    for _ in range(length(0)):
        received.take(await anext(stream), request)
    engine = scene.generating_engine()
    await scene.router.stop_choice(request.request_id, 1)
    engine.die()
    await received.read(stream, request)
    assert len(scene.requests) == 1
    assert scene.moves == {}


@in_both_fleets
@pytest.mark.parametrize("is_read", [True, False])
async def test_closing_a_group_that_waits_for_a_worker_ends_it(is_read: bool, names: tuple[str, ...]) -> None:
    scene, request, received = Scene(*names), group(), Received()
    stream = scene.router.generate(request)
    received.take(await anext(stream), request)
    scene.kill_all()
    reading = asyncio.ensure_future(received.read(stream, request)) if is_read else None
    await settle()
    await stream.aclose()
    await stream.aclose()
    if reading is not None:
        assert await reading is received
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert scene.moves == ({("died", "closed"): 1} if is_read else {})
    scene.start(names[-1])
    await settle()
    assert len(scene.requests) == 1


@in_both_fleets
async def test_closing_a_group_before_the_first_delta_after_a_move_ends_it(names: tuple[str, ...]) -> None:
    scene, request, received = Scene(*names), group(), Received()
    gate = asyncio.Semaphore(1)
    for engine in scene.all:
        engine.scenario.gate = gate
    stream = scene.router.generate(request)
    received.take(await anext(stream), request)
    scene.generating_engine().die()
    reading = asyncio.ensure_future(received.read(stream, request))
    await settle()
    assert len(scene.requests) == 2
    await stream.aclose()
    await reading
    assert scene.moves == {("died", "closed"): 1}
    assert scene.router.counts.choices_resumed == 0


@pytest.mark.slow
@in_both_fleets
async def test_a_reader_that_is_cancelled_during_a_move_leaves_the_group_to_the_next_one(
    names: tuple[str, ...],
) -> None:
    """The next reader used to get the end of a closed stream, as if the group had finished."""
    scene, request, received = Scene(*names, limit=1), group(), Received()
    stream = scene.router.generate(request)
    received.take(await anext(stream), request)
    scene.kill_all()
    for _ in range(2):
        reading = asyncio.ensure_future(anext(stream))
        await settle()
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
    scene.start(names[-1])
    assert await received.read(stream, request) == await uninterrupted(request)
    assert scene.moves == {("died", "resumed"): 1}


@in_both_fleets
async def test_closing_the_server_ends_groups_wherever_they_are(names: tuple[str, ...]) -> None:
    scene = Scene(*names)
    requests = [group(name) for name in ("read", "unread", "waits", "lost")]
    streams = [scene.router.generate(request) for request in requests]
    await settle()
    for stream in streams[2:]:
        await anext(stream)
    scene.kill_all()
    endings = [asyncio.ensure_future(Received().read(streams[index], requests[index])) for index in (0, 2)]
    await settle()
    await scene.router.close()
    for ending in (*endings, *(anext(streams[index]) for index in (1, 3))):
        with pytest.raises(EngineClosedError):
            await ending
    await scene.router.close()
    with pytest.raises(NoWorkerError):
        scene.router.generate(group("late"))
    assert scene.moves == {("died", "closed"): 2}


async def test_closing_the_server_ends_groups_that_are_being_generated() -> None:
    scene, request = Scene("both-0", "both-1"), group()
    stream = scene.router.generate(request)
    await anext(stream)
    await scene.router.close()
    with pytest.raises(EngineClosedError):
        await anext(stream)
    assert len(scene.requests) == 1
    assert scene.moves == {}


async def test_a_defect_of_an_engine_reaches_the_reader_and_the_group_can_be_closed() -> None:
    scene, request = Scene("both-0", "both-1"), group()
    stream = scene.router.generate(request)
    await anext(stream)

    def defect(_: object, __: object) -> list[int]:
        raise ZeroDivisionError

    scene.generating_engine().scenario.script = defect
    with pytest.raises(ZeroDivisionError):
        await anext(stream)
    await stream.aclose()

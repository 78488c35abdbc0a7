"""Workers die, readers leave and servers close while a group is in parts."""

import asyncio
import contextlib

import pytest

from motet.engine import WorkerState
from motet.errors import EngineClosedError, EngineDiedError, EngineError, RequestError
from tests.clock import settle
from tests.property_settings import some
from tests.routing.scene import APART, ControlledPrefill, Received, Scene, group, uninterrupted

pytestmark = pytest.mark.anyio

N = 8


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13, 21, 34])
@pytest.mark.parametrize("dying", ["decode-0", "decode-1"])
async def test_a_worker_that_dies_is_not_noticed_in_any_choice(dying: str, turns: int) -> None:
    scene, request = Scene(*APART, "decode-2", spread_choices=4), group(n=N, logprobs=1)
    scene.gate(10**6)
    reading = asyncio.ensure_future(Received().read(scene.router.generate(request), request))
    for _ in range(turns):
        await asyncio.sleep(0)
    scene.kill(dying)
    assert await reading == await uninterrupted(request)


@pytest.mark.parametrize("steps", [0, 1])
async def test_a_part_that_moves_affects_no_other_part_and_leaves_no_lease(steps: int) -> None:
    """The part that died before its first step did not read the ticket, so its lease lacks a reader. It continues where
    the other part already has the prompt."""
    scene, request = Scene(*APART, spread_choices=4), group(n=N)
    gate = scene.gate(0)
    reading = asyncio.ensure_future(Received().read(scene.router.generate(request), request))
    await settle()
    scene.engines["decode-0"].scenario.gate = asyncio.Semaphore(steps)
    if steps:
        gate.release()
        await settle()
    scene.kill("decode-0")
    for _ in range(100):
        gate.release()
    await settle()
    assert scene.leases.held == {}
    assert await reading == await uninterrupted(request)
    assert [one.request_id for one in scene.requests] == ["g/0", "g/0.1", "g/1"]
    assert [len(engine.requests) for engine in scene.all] == [0, 1, 2]
    assert scene.moves == {("died", "resumed"): 1}
    assert scene.prefills == ["g"]


async def test_a_ticket_that_every_part_has_read_is_not_released() -> None:
    scene, request = Scene(*APART, spread_choices=4), group(n=N)
    assert await Received().read(scene.router.generate(request), request) == await uninterrupted(request)
    assert scene.released == []
    assert scene.leases.held == {}


async def test_a_reader_does_not_wait_until_the_ticket_is_released() -> None:
    """One part has not read it, because its worker died before."""
    scene, request = Scene(*APART, spread_choices=4), group(n=N)
    scene.all[0].may_release.clear()
    scene.engines["decode-0"].scenario.fail_after = {0: EngineDiedError("gone")}
    stream, received = scene.router.generate(request), Received()
    while len(received.finished) < N:
        received.take(await anext(stream), request)
    assert received == await uninterrupted(request)
    assert scene.released == []
    scene.all[0].may_release.set()
    await stream.aclose()
    assert len(scene.released) == 1


async def test_a_group_whose_decode_workers_all_died_while_it_was_prefilled_waits_for_one() -> None:
    scene, request, controlled = Scene(*APART, spread_choices=4), group(n=N), ControlledPrefill()
    scene.engines["prefill-0"].during_prefill = controlled
    reading = asyncio.ensure_future(Received().read(scene.router.generate(request), request))
    await controlled.entered.wait()
    for name in ("decode-0", "decode-1"):
        scene.kill(name)
        scene.fleet.mark(name, WorkerState.DEAD)
    controlled.may_end.set()
    await settle()
    scene.start("decode-0")
    assert await reading == await uninterrupted(request)


async def test_an_error_of_one_part_ends_all() -> None:
    scene, request, received = Scene(*APART, spread_choices=4), group(n=N), Received()
    scene.engines["decode-0"].scenario.fail_after = {2: EngineError("sick")}
    stream = scene.router.generate(request)
    with pytest.raises(EngineError, match="sick"):
        await received.read(stream, request)
    assert scene.generating() == []
    assert received.is_prefix_of(await uninterrupted(request))
    with pytest.raises(EngineError, match="sick"):
        await anext(stream)


async def test_a_request_error_of_prefill_ends_the_group() -> None:
    scene, request = Scene(*APART, spread_choices=4), group(n=N)
    scene.engines["prefill-0"].during_prefill = ControlledPrefill(error=RequestError("never"), held=False)
    with pytest.raises(RequestError, match="never"):
        await anext(scene.router.generate(request))
    assert scene.requests == []


@pytest.mark.parametrize("step", [0, 2])
async def test_a_defect_in_a_part_reaches_the_reader(step: int) -> None:
    scene, request, received = Scene(*APART, spread_choices=4), group(n=N), Received()

    def defect(_: object, __: object) -> list[int]:
        raise ZeroDivisionError

    scene.gate(2 * step)
    stream = scene.router.generate(request)
    for _ in range(2 * step):
        received.take(await anext(stream), request)
    scene.engines["decode-1"].scenario.script = defect
    scene.gate(10**6)
    for engine in scene.all:
        for one in engine.open.values():
            one.wake()
    with pytest.raises(ZeroDivisionError):
        await received.read(stream, request)


async def test_closing_the_server_ends_groups_wherever_they_are() -> None:
    scene, controlled = Scene(*APART, spread_choices=4), ControlledPrefill()
    scene.gate(4)
    written = group("written", n=N, prompt_tokens=20)
    requests = [written, group("prefilled", n=N), group("unread", n=N)]
    streams = [scene.router.generate(requests[0])]
    await settle()
    scene.engines["prefill-0"].during_prefill = controlled
    streams += [scene.router.generate(request) for request in requests[1:]]
    await controlled.entered.wait()
    reading = [asyncio.ensure_future(Received().read(streams[place], requests[place])) for place in (0, 1)]
    await settle()
    for _ in range(6):
        await scene.router.close()
    assert scene.engines["prefill-0"].record.prefilling == 0
    for ending in (*reading, anext(streams[2])):
        with pytest.raises(EngineClosedError):
            await ending


async def test_an_error_is_not_lost_with_a_reader_that_is_cancelled() -> None:
    request = group(n=N)
    for turns in some(range(60), "an error"):
        scene, received = Scene(*APART, spread_choices=4, limit=0), Received()
        scene.engines["decode-1"].scenario.fail_after = {1: EngineDiedError("gone")}
        stream = scene.router.generate(request)
        reading = asyncio.ensure_future(received.read(stream, request))
        for _ in range(turns):
            await asyncio.sleep(0)
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError, EngineDiedError):
            await reading
        with pytest.raises(EngineDiedError):
            await received.read(stream, request)
        scene.leases.held.clear()
        scene.check()


async def test_the_reader_of_a_group_closed_by_another_task_gets_the_end() -> None:
    """Once the parts had filled the queue, its reader used to wait for ever."""
    scene = Scene(*APART, spread_choices=4)
    scene.gate(10**6)
    stream = scene.router.generate(group(n=N))
    await anext(stream)
    await settle()  # the parts have filled the queue
    await stream.aclose()
    for _ in range(2):
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

"""Workers that die, readers that leave and servers that close, while a group is in parts."""

import asyncio
import contextlib

import pytest

from motet.engines.base import WorkerState
from motet.errors import (
    EngineClosedError,
    EngineDiedError,
    EngineError,
    NoWorkerError,
    RequestError,
)
from tests.routing.cell import Hold, group
from tests.routing.moving import Heard, length, settle, undisturbed, wish
from tests.routing.spreading import APART, Spreading

pytestmark = pytest.mark.anyio

N = 8


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13, 21, 34])
@pytest.mark.parametrize("dying", ["decode-0", "decode-1"])
async def test_a_worker_that_dies_is_not_noticed_in_any_choice(dying: str, turns: int) -> None:
    scene, request = Spreading(*APART, "decode-2"), wish(n=N, logprobs=1)
    scene.gate(10**6)
    reading = asyncio.ensure_future(Heard().read(scene.spread.generate(request), request))
    for _ in range(turns):
        await asyncio.sleep(0)
    scene.kill(dying)
    assert await reading == await undisturbed(request)
    scene.check()


@pytest.mark.parametrize("steps", [0, 1])
async def test_a_part_that_moves_leaves_the_other_alone_and_no_lease_behind(steps: int) -> None:
    """The part that died before its first step has not read the ticket: its lease has a reader too few."""
    scene, request = Spreading(*APART), wish(n=N)
    gate = scene.gate(0)
    reading = asyncio.ensure_future(Heard().read(scene.spread.generate(request), request))
    await settle()
    scene.engines["decode-0"].gate = asyncio.Semaphore(steps)
    if steps:
        gate.release()
        await settle()
    scene.kill("decode-0")
    for _ in range(100):
        gate.release()
    await settle()
    assert scene.leases.held == {}
    assert await reading == await undisturbed(request)
    assert [one.request_id for one in scene.asked] == ["g/0", "g/0.1", "g/1"]
    assert [len(engine.requests) for engine in scene.all] == [0, 1, 2]
    assert scene.engine.figures.moves == {("died", "resumed"): 1}
    assert scene.prefills == ["g", "g/0.1"]
    scene.check()


async def test_a_reader_does_not_wait_until_the_ticket_is_given_back() -> None:
    scene, request = Spreading(*APART), wish(n=N)
    scene.tickets.may_release.clear()
    stream, heard = scene.spread.generate(request), Heard()
    for _ in range(2 * length(N - 1) - 1):
        heard.take(await anext(stream), request)
        if len(heard.finished) == N:
            break
    assert heard == await undisturbed(request)
    assert scene.tickets.released == []
    scene.tickets.may_release.set()
    await stream.aclose()
    assert len(scene.tickets.released) == 1
    scene.check()


async def test_a_group_whose_decode_workers_all_died_while_it_was_prefilled_waits_for_one() -> None:
    scene, request, hold = Spreading(*APART), wish(n=N), Hold()
    scene.engines["prefill-0"].during_prefill = hold
    reading = asyncio.ensure_future(Heard().read(scene.spread.generate(request), request))
    await hold.entered.wait()
    for name in ("decode-0", "decode-1"):
        scene.kill(name)
        scene.fleet.mark(name, WorkerState.DEAD)
    hold.go.set()
    await settle()
    scene.start("decode-0")
    assert await reading == await undisturbed(request)
    scene.check()


async def test_without_a_worker_a_large_group_is_refused_at_once() -> None:
    scene = Spreading(*APART)
    scene.kill_all()
    with pytest.raises(NoWorkerError):
        scene.spread.generate(wish(n=N))
    scene.check()


async def test_an_error_of_one_part_ends_all() -> None:
    scene, request, heard = Spreading(*APART), wish(n=N), Heard()
    scene.engines["decode-0"].fail_after = {2: EngineError("sick")}
    stream = scene.spread.generate(request)
    with pytest.raises(EngineError, match="sick"):
        await heard.read(stream, request)
    assert scene.writers() == []
    assert heard.begins(await undisturbed(request))
    with pytest.raises(EngineError, match="sick"):
        await anext(stream)
    scene.check()


async def test_what_prefill_says_of_the_request_ends_the_group() -> None:
    scene, request = Spreading(*APART), wish(n=N)
    scene.engines["prefill-0"].during_prefill = Hold(error=RequestError("never"), held=False)
    with pytest.raises(RequestError, match="never"):
        await anext(scene.spread.generate(request))
    assert scene.asked == []
    scene.check()


@pytest.mark.parametrize("step", [0, 2])
async def test_a_bug_in_a_part_reaches_the_reader(step: int) -> None:
    scene, request, heard = Spreading(*APART), wish(n=N), Heard()

    def bug(_: object, __: object) -> list[int]:
        raise ZeroDivisionError

    scene.gate(2 * step)
    stream = scene.spread.generate(request)
    for _ in range(2 * step):
        heard.take(await anext(stream), request)
    scene.engines["decode-1"].script = bug
    scene.gate(10**6)
    for engine in scene.all:
        for one in engine.open.values():
            one.wake()
    with pytest.raises(ZeroDivisionError):
        await heard.read(stream, request)
    scene.check()


async def test_closing_the_server_ends_groups_wherever_they_are() -> None:
    scene, hold = Spreading(*APART), Hold()
    scene.gate(4)
    written = group("written", n=N, prompt_tokens=20)
    requests = [written, wish("prefilled", n=N), wish("unread", n=N)]
    streams = [scene.spread.generate(requests[0])]
    await settle()
    scene.engines["prefill-0"].during_prefill = hold
    streams += [scene.spread.generate(request) for request in requests[1:]]
    await hold.entered.wait()
    reading = [asyncio.ensure_future(Heard().read(streams[place], requests[place])) for place in (0, 1)]
    await settle()
    for _ in range(6):
        await scene.spread.close()
    assert scene.engines["prefill-0"].prefilling == 0
    for ending in (*reading, anext(streams[2])):
        with pytest.raises(EngineClosedError):
            await ending
    scene.check()


async def test_a_reader_that_is_cancelled_leaves_everything_to_the_next_one() -> None:
    request = wish(n=N)
    whole = await undisturbed(request)
    for turns in range(60):
        scene, heard = Spreading(*APART), Heard()
        stream = scene.spread.generate(request)
        reading = asyncio.ensure_future(heard.read(stream, request))
        for _ in range(turns):
            await asyncio.sleep(0)
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        assert await heard.read(stream, request) == whole
        scene.check()


async def test_an_error_is_not_lost_with_a_reader_that_is_cancelled() -> None:
    request = wish(n=N)
    for turns in range(60):
        scene, heard = Spreading(*APART, limit=0), Heard()
        scene.engines["decode-1"].fail_after = {1: EngineDiedError("gone")}
        stream = scene.spread.generate(request)
        reading = asyncio.ensure_future(heard.read(stream, request))
        for _ in range(turns):
            await asyncio.sleep(0)
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError, EngineDiedError):
            await reading
        with pytest.raises(EngineDiedError):
            await heard.read(stream, request)
        scene.leases.held.clear()
        scene.check()

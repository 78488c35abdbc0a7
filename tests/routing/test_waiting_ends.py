"""Groups that wait for capacity are refused, stopped, left by their readers, closed, or cause a defect to show."""

import asyncio
import contextlib

import msgspec
import pytest

from motet.engine import Worker
from motet.errors import EngineClosedError, EngineError, OverloadedError
from motet.ids import RequestId
from tests.clock import settle
from tests.routing.scene import Scene, uninterrupted

pytestmark = pytest.mark.anyio


async def test_a_group_that_waits_too_long_is_refused_before_any_of_it_ran() -> None:
    scene = Scene("both-0", max_choices=4, queue_timeout_s=10.0)
    first, waiting = scene.submit("first", 4), scene.submit("waiting", 2)
    await scene.pass_time(9.9)
    assert len(scene.router.waiting) == 1
    await scene.pass_time(0.1)
    assert len(scene.router.waiting) == 0
    with pytest.raises(OverloadedError, match="within 10 s") as refused:
        await waiting.read()
    assert refused.value.retry_after_s
    assert waiting.received.tokens == {}
    assert scene.started == ["first"]
    await first.read()
    assert sum(scene.router.counts.queue_seconds) == 1, "only admitted groups are counted"


async def test_a_group_that_came_later_continues_to_wait() -> None:
    scene = Scene("both-0", max_choices=4, queue_timeout_s=10.0)
    first, waiting = scene.submit("first", 4), scene.submit("waiting", 2)
    await scene.pass_time(5.0)
    later = scene.submit("later", 2)
    await scene.pass_time(5.0)
    with pytest.raises(OverloadedError):
        await waiting.read()
    await first.read()
    assert await later.read() == await uninterrupted(later.request)


async def test_a_group_that_has_been_admitted_is_not_refused() -> None:
    scene = Scene("both-0", max_choices=4, queue_timeout_s=10.0)
    first, waiting = scene.submit("first", 4), scene.submit("waiting", 4)
    await first.read()
    other = scene.submit("other", 1)
    await scene.pass_time(10.0)
    with pytest.raises(OverloadedError):
        await other.read()
    assert await waiting.read() == await uninterrupted(waiting.request)


@pytest.mark.parametrize("is_read", [True, False])
async def test_a_client_that_leaves_waits_no_more(is_read: bool) -> None:
    scene = Scene("both-0", max_choices=4)
    first, leaving, staying = (scene.submit(name, 4) for name in ("first", "leaving", "staying"))
    reading = asyncio.ensure_future(leaving.read()) if is_read else None
    await settle()
    await leaving.stream.aclose()
    await leaving.stream.aclose()
    assert len(scene.router.waiting) == 1
    if reading is not None:
        assert (await reading).tokens == {}
    with pytest.raises(StopAsyncIteration):
        await anext(leaving.stream)
    await first.read()
    assert await staying.read() == await uninterrupted(staying.request)
    assert scene.started == ["first", "staying"]


async def test_a_reader_that_is_cancelled_leaves_the_group_in_its_place() -> None:
    scene = Scene("both-0", max_choices=4)
    first, waiting = scene.submit("first", 4), scene.submit("waiting", 4)
    reading = asyncio.ensure_future(waiting.read())
    await settle()
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading
    assert len(scene.router.waiting) == 1
    await first.read()
    assert await waiting.read() == await uninterrupted(waiting.request)


async def test_choices_stopped_while_their_group_waits_are_left_out_of_it() -> None:
    scene = Scene("both-0", max_choices=4)
    first, waiting = scene.submit("first", 4), scene.submit("waiting", 4)
    await settle()
    for index in (0, 2, 2, 9):
        await scene.router.stop_choice(waiting.request.request_id, index)
    await first.read()
    received, complete = await waiting.read(), await uninterrupted(waiting.request)
    assert received.tokens == {index: complete.tokens[index] for index in (1, 3)}
    assert [start.index for start in scene.requests[-1].choices] == [1, 3]


async def test_a_group_that_fits_after_choices_were_stopped_starts() -> None:
    scene = Scene("both-0", max_choices=4)
    first, waiting = scene.submit("first", 2), scene.submit("waiting", 4)
    await settle()
    for index in (2, 3):
        await scene.router.stop_choice(waiting.request.request_id, index)
    await settle()
    assert scene.started == ["first", "waiting"]
    for one in (first, waiting):
        await one.leave()


async def test_a_choice_stopped_later_is_stopped_where_its_group_is() -> None:
    scene = Scene("both-0", max_choices=4)
    first, waiting = scene.submit("first", 4), scene.submit("waiting", 3)
    await first.read()
    await waiting.step()
    await scene.router.stop_choice(waiting.request.request_id, 1)
    await scene.router.stop_choice(RequestId("unknown"), 1)
    await waiting.read()
    assert sorted(waiting.received.finished) == [0, 2]
    assert len(waiting.received.tokens[1]) == 1


async def test_when_all_choices_are_stopped_the_group_has_ended() -> None:
    scene = Scene("both-0", max_choices=4)
    first, waiting = scene.submit("first", 4), scene.submit("waiting", 2)
    reading = asyncio.ensure_future(waiting.read())
    await settle()
    for index in (1, 0, 0):
        await scene.router.stop_choice(waiting.request.request_id, index)
    assert (await reading).tokens == {}
    await first.read()
    assert scene.started == ["first"]


async def test_closing_the_server_ends_waiting_and_admitted_groups() -> None:
    scene = Scene("both-0", max_choices=4)
    submitted = [scene.submit(name, 4) for name in ("ended", "went in", "read", "unread")]
    await submitted[0].read()
    await submitted[1].step()
    reading = asyncio.ensure_future(submitted[2].read())
    await settle()
    await scene.router.close()
    await scene.router.close()
    for ending in (reading, submitted[1].read(), submitted[3].read()):
        with pytest.raises(EngineClosedError):
            await ending
    assert scene.started == ["ended", "went in"]


async def test_a_group_that_comes_after_the_server_has_closed_is_refused() -> None:
    """It used to wait for ever, after groups that were not admitted any more."""
    scene = Scene("both-0", max_choices=4)
    submitted = [scene.submit(name, 4) for name in ("first", "waiting")]
    await settle()
    await scene.router.close()
    submitted.append(scene.submit("late", 4))
    for one in reversed(submitted):
        with pytest.raises(EngineClosedError):
            await one.read()


async def test_an_error_of_a_group_that_waited_ends_it() -> None:
    scene = Scene("both-0", max_choices=4)
    first, waiting = scene.submit("first", 4), scene.submit("waiting", 4)
    await first.read()
    await waiting.step()
    scene.engines["both-0"].scenario.fail_after = {1: EngineClosedError("closed")}
    with pytest.raises(EngineClosedError):
        await waiting.read()
    scene.router.check()
    await waiting.stream.aclose()


async def test_a_defect_in_one_group_does_not_keep_others_from_being_admitted() -> None:
    """The task that admits groups used to end with it, so all other groups waited for ever."""
    scene = Scene("both-0", max_choices=4)
    scene.engines["both-0"].has_defect = True
    first, unlucky, second = (scene.submit(name, 4) for name in ("first", "unlucky", "second"))
    await first.read()
    with pytest.raises(ZeroDivisionError):
        await unlucky.read()
    await unlucky.leave()
    assert await second.read() == await uninterrupted(second.request)


async def test_check_finds_an_open_group() -> None:
    scene = Scene("both-0", max_choices=4)
    first, waiting = scene.submit("first", 4), scene.submit("waiting", 4)
    with pytest.raises(AssertionError, match="groups left open"):
        scene.router.check()
    await settle()
    await waiting.leave()
    await first.leave()


async def test_a_worker_with_impossible_figures_does_not_stop_admission_for_ever() -> None:
    """The check for capacity raised in the task that admits groups, so all later groups waited past their time-outs."""
    scene = Scene("both-0", max_choices=4)
    first, unlucky = scene.submit("first", 4), scene.submit("unlucky", 4)
    await settle()
    senseless = scene.make_engine("both-1")
    senseless.info = msgspec.structs.replace(senseless.info, max_num_seqs=None)
    scene.fleet.put(Worker("both-1", senseless, ""))
    await settle()
    with pytest.raises(EngineError, match="could not check its workers for capacity"):
        await unlucky.read()
    scene.fleet.remove("both-1")
    later = scene.submit("later", 4)
    await first.read()
    assert await later.read() == await uninterrupted(later.request)

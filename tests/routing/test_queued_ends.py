"""Groups that wait for room: refused, stopped, left by their readers, closed, or unlucky."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from motet.engines.fake import FakeEngine, FakeGroup
from motet.errors import EngineClosedError, OverloadedError
from motet.ids import RequestId
from motet.types import GenerateRequest
from tests.routing.moving import settle, undisturbed, wish
from tests.routing.queueing import Given, Queueing

pytestmark = pytest.mark.anyio


async def test_a_group_that_waits_too_long_is_refused_before_anything_of_it_ran() -> None:
    scene = Queueing("both-0", timeout_s=10.0)
    first, waiting = scene.give("first", 4), scene.give("waiting", 2)
    await scene.pass_time(9.9)
    assert scene.queued.queued == 1
    await scene.pass_time(0.1)
    assert scene.queued.queued == 0
    with pytest.raises(OverloadedError, match="within 10 s") as refused:
        await waiting.read()
    assert refused.value.retry_after_s
    assert waiting.heard.tokens == {}
    assert scene.gone == ["first"]
    await first.read()
    assert sum(scene.queued.waits) == 1, "only those that were let in are counted"
    scene.check()


async def test_whoever_came_later_waits_on() -> None:
    scene = Queueing("both-0", timeout_s=10.0)
    first, waiting = scene.give("first", 4), scene.give("waiting", 2)
    await scene.pass_time(5.0)
    later = scene.give("later", 2)
    await scene.pass_time(5.0)
    with pytest.raises(OverloadedError):
        await waiting.read()
    await first.read()
    assert await later.read() == await undisturbed(later.request)
    scene.check()


async def test_a_group_that_went_in_is_not_refused_any_more() -> None:
    scene = Queueing("both-0", timeout_s=10.0)
    first, waiting = scene.give("first", 4), scene.give("waiting", 4)
    await first.read()
    other = scene.give("other", 1)
    await scene.pass_time(10.0)
    with pytest.raises(OverloadedError):
        await other.read()
    assert await waiting.read() == await undisturbed(waiting.request)
    scene.check()


@pytest.mark.parametrize("is_read", [True, False])
async def test_a_client_that_leaves_waits_no_more(is_read: bool) -> None:
    scene = Queueing("both-0")
    first, leaving, staying = (scene.give(name, 4) for name in ("first", "leaving", "staying"))
    reading = asyncio.ensure_future(leaving.read()) if is_read else None
    await settle()
    await leaving.stream.aclose()
    await leaving.stream.aclose()
    assert scene.queued.queued == 1
    if reading is not None:
        assert (await reading).tokens == {}
    with pytest.raises(StopAsyncIteration):
        await anext(leaving.stream)
    await first.read()
    assert await staying.read() == await undisturbed(staying.request)
    assert scene.gone == ["first", "staying"]
    scene.check()


async def test_a_reader_that_is_cancelled_leaves_the_group_in_its_place() -> None:
    scene = Queueing("both-0")
    first, waiting = scene.give("first", 4), scene.give("waiting", 4)
    reading = asyncio.ensure_future(waiting.read())
    await settle()
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading
    assert scene.queued.queued == 1
    await first.read()
    assert await waiting.read() == await undisturbed(waiting.request)
    scene.check()


async def test_choices_stopped_while_their_group_waits_are_left_out_of_it() -> None:
    scene = Queueing("both-0")
    first, waiting = scene.give("first", 4), scene.give("waiting", 4)
    await settle()
    for index in (0, 2, 2, 9):
        await scene.queued.stop_choice(waiting.request.request_id, index)
    await first.read()
    heard, whole = await waiting.read(), await undisturbed(waiting.request)
    assert heard.tokens == {index: whole.tokens[index] for index in (1, 3)}
    assert [start.index for start in scene.asked[-1].choices] == [1, 3]
    scene.check()


async def test_a_group_that_fits_since_choices_of_it_were_stopped_goes() -> None:
    scene = Queueing("both-0")
    first, waiting = scene.give("first", 2), scene.give("waiting", 4)
    await settle()
    for index in (2, 3):
        await scene.queued.stop_choice(waiting.request.request_id, index)
    await settle()
    assert scene.gone == ["first", "waiting"]
    for one in (first, waiting):
        await one.leave()
    scene.check()


async def test_a_choice_stopped_later_is_stopped_where_its_group_is() -> None:
    scene = Queueing("both-0")
    first, waiting = scene.give("first", 4), scene.give("waiting", 3)
    await first.read()
    await waiting.step()
    await scene.queued.stop_choice(waiting.request.request_id, 1)
    await scene.queued.stop_choice(RequestId("unknown"), 1)
    await waiting.read()
    assert sorted(waiting.heard.finished) == [0, 2]
    assert len(waiting.heard.tokens[1]) == 1
    scene.check()


async def test_when_all_choices_are_stopped_the_group_is_over() -> None:
    scene = Queueing("both-0")
    first, waiting = scene.give("first", 4), scene.give("waiting", 2)
    reading = asyncio.ensure_future(waiting.read())
    await settle()
    for index in (1, 0, 0):
        await scene.queued.stop_choice(waiting.request.request_id, index)
    assert (await reading).tokens == {}
    await first.read()
    assert scene.gone == ["first"]
    scene.check()


async def test_closing_the_server_ends_groups_that_wait_and_those_that_went_in() -> None:
    scene = Queueing("both-0")
    given = [scene.give(name, 4) for name in ("ended", "went in", "read", "unread")]
    await given[0].read()
    await given[1].step()
    reading = asyncio.ensure_future(given[2].read())
    await settle()
    await scene.queued.close()
    await scene.queued.close()
    for ending in (reading, given[1].read(), given[3].read()):
        with pytest.raises(EngineClosedError):
            await ending
    assert scene.gone == ["ended", "went in"]
    scene.check()


async def test_a_group_that_comes_after_the_server_has_closed_is_told_so() -> None:
    """It waited for ever, behind groups that nobody let in any more."""
    scene = Queueing("both-0")
    given = [scene.give(name, 4) for name in ("first", "waiting")]
    await settle()
    await scene.queued.close()
    given.append(scene.give("late", 4))
    for one in reversed(given):
        with pytest.raises(EngineClosedError):
            await one.read()
    scene.check()


async def test_an_error_of_a_group_that_waited_ends_it() -> None:
    scene = Queueing("both-0")
    first, waiting = scene.give("first", 4), scene.give("waiting", 4)
    await first.read()
    await waiting.step()
    scene.engines["both-0"].fail_after = {1: EngineClosedError("closed")}
    with pytest.raises(EngineClosedError):
        await waiting.read()
    scene.queued.check()
    await waiting.stream.aclose()
    scene.check()


class Faulty(FakeEngine):
    """Has a bug that one group meets."""

    def generate(self, request: GenerateRequest) -> FakeGroup:
        if request.request_id == "unlucky":
            raise ZeroDivisionError
        return super().generate(request)


async def test_a_bug_that_one_group_meets_is_its_own_and_the_others_go_in() -> None:
    """Whoever lets groups in ended with it, and all others waited for ever."""
    scene = Queueing("both-0", make=Faulty)
    first, unlucky, second = (scene.give(name, 4) for name in ("first", "unlucky", "second"))
    await first.read()
    with pytest.raises(ZeroDivisionError):
        await unlucky.read()
    await unlucky.leave()
    assert await second.read() == await undisturbed(second.request)
    scene.check()


async def test_what_is_not_of_a_group_is_passed_on() -> None:
    scene = Queueing("prefill-0", "decode-0")
    ticket = await scene.queued.prefill(wish(), readers=2)
    assert ticket.readers == 2
    await scene.queued.release(ticket)
    assert scene.queued.info == scene.apart.info
    assert await scene.queued.stats() == await scene.engines["decode-0"].stats()
    scene.check()


async def test_a_group_that_is_open_is_noticed() -> None:
    scene = Queueing("both-0")
    first, waiting = scene.give("first", 4), scene.give("waiting", 4)
    with pytest.raises(AssertionError, match="groups left open"):
        scene.queued.check()
    await settle()
    await waiting.leave()
    await first.leave()
    scene.check()


MOST_TURNS = 30
ENDS: dict[str, Callable[[Queueing, Given], Awaitable[None]]] = {
    "left": lambda _, one: one.stream.aclose(),
    "stopped": lambda scene, one: stop_all(scene, one),
    "closed": lambda scene, _: scene.queued.close(),
    "refused": lambda scene, _: scene.pass_time(60.0),
}


async def stop_all(scene: Queueing, one: Given) -> None:
    for start in one.request.choices:
        await scene.queued.stop_choice(one.request.request_id, start.index)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", ["prefill-0", "both-1"])
async def test_ended_after_any_number_of_turns_of_the_loop_nothing_is_left(name: str, end: str) -> None:
    for turns in range(MOST_TURNS):
        scene = Queueing(name, "decode-0" if name == "prefill-0" else "both-0", places=4)
        given = [scene.give(f"g{number}", 4) for number in range(4)]
        reading = [asyncio.ensure_future(one.read()) for one in given]
        for _ in range(turns):
            await asyncio.sleep(0)
        await ENDS[end](scene, given[-1])
        results = await asyncio.gather(*reading, return_exceptions=True)
        for one, result in zip(given, results, strict=True):
            assert one.heard.begins(await undisturbed(one.request))
            assert not isinstance(result, BaseException) or isinstance(result, EngineClosedError | OverloadedError)
            await one.leave()
        scene.check()

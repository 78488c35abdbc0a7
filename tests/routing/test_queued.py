"""Which group goes when: at once if there is room, else in a fair order as soon as there is."""

import asyncio

import pytest

from motet.errors import EngineDiedError, NoWorkerError
from motet.ids import RequestId
from motet.routing.fair_queue import PATIENCE_S
from motet.routing.queued import Queued
from tests.routing.cell import Hold, Tasks
from tests.routing.moving import length, settle, undisturbed, wish
from tests.routing.queueing import Queueing

pytestmark = pytest.mark.anyio


async def test_with_room_the_stream_is_that_of_the_engine_below() -> None:
    scene = Queueing("both-0")
    engine = scene.engines["both-0"]
    queued = Queued(engine, scene.fleet, timeout_s=60.0, on_the_way=lambda _: 0)
    assert queued.generate(wish("g")) is engine.open[RequestId("g")]
    assert queued.waits[0] == 1
    assert queued.waits_sum_s == 0.0
    queued.check()


async def test_a_group_without_room_waits_until_another_has_ended() -> None:
    scene = Queueing("both-0", places=4)
    first, second = scene.give("first", 3), scene.give("second", 2)
    await settle()
    assert scene.gone == ["first"]
    assert scene.queued.queued == 1
    assert await first.read() == await undisturbed(first.request)
    assert scene.gone == ["first", "second"]
    assert scene.queued.queued == 0
    assert await second.read() == await undisturbed(second.request)
    scene.check()


async def test_a_group_goes_as_soon_as_choices_have_ended() -> None:
    """Not when their whole group has, nor when somebody looks again."""
    scene = Queueing("both-0", places=3)
    first, second = scene.give("first", 3), scene.give("second", 1)
    await first.step(length(0) - 1)
    await settle()
    assert scene.gone == ["first"]
    await first.step()
    await settle()
    assert scene.gone == ["first", "second"]
    await second.read()
    await first.read()
    scene.check()


@pytest.mark.parametrize("end", ["stopped", "closed"])
async def test_a_group_goes_when_one_before_it_is_ended_early(end: str) -> None:
    scene = Queueing("both-0", places=3)
    first, second = scene.give("first", 3), scene.give("second", 1)
    await settle()
    if end == "stopped":
        await scene.queued.stop_choice(first.request.request_id, 1)
    else:
        await first.stream.aclose()
    await settle()
    assert scene.gone == ["first", "second"]
    await first.leave()
    await second.leave()
    scene.check()


async def test_a_group_goes_when_a_worker_joins() -> None:
    scene = Queueing("both-0")
    given = [scene.give("first", 4), scene.give("second", 4)]
    await settle()
    scene.start("both-1")
    await settle()
    assert [len(engine.requests) for engine in scene.all] == [1, 1]
    for one in given:
        assert await one.read() == await undisturbed(one.request)
    scene.check()


async def test_lower_priorities_go_first_and_small_groups_before_large_ones_that_came_shortly_before() -> None:
    scene = Queueing("both-0", places=4)
    full = scene.give("full", 4)
    given = [scene.give("large", 4), scene.give("small", 1), scene.give("idle", 1, priority=1)]
    given.append(scene.give("urgent", 4, priority=-1))
    await settle()
    await scene.pass_time(1.9)
    given.append(scene.give("late", 1))
    await full.read()
    for name in ("urgent", "small", "large", "late", "idle"):
        (one,) = [one for one in given if one.request.request_id == name]
        await one.read()
    assert scene.gone == ["full", "urgent", "small", "large", "late", "idle"]
    scene.check()


async def test_a_small_group_that_comes_while_a_large_one_waits_goes_at_once_for_a_while() -> None:
    """It waited until somebody looked again, with room enough."""
    scene = Queueing("both-0", places=4)
    first, large = scene.give("first", 2), scene.give("large", 4)
    await settle()
    small = scene.give("small", 1)
    await settle()
    assert scene.gone == ["first", "small"]
    await small.read()
    await scene.pass_time(PATIENCE_S + 0.6)  # the late one stands behind the large one by now
    late = scene.give("late", 1)
    await settle()
    assert scene.gone == ["first", "small"], "room is kept for the large one"
    await first.read()
    assert scene.gone == ["first", "small", "large"]
    for one in (large, late):
        assert await one.read() == await undisturbed(one.request)
    scene.check()


async def test_a_group_that_is_larger_than_any_worker_goes_when_one_is_idle() -> None:
    scene = Queueing("both-0", places=4)
    first, large = scene.give("first", 1), scene.give("large", 9)
    await scene.pass_time(PATIENCE_S)
    assert scene.gone == ["first"]
    await first.read()
    assert scene.gone == ["first", "large"]
    assert await large.read() == await undisturbed(large.request)
    scene.check()


async def test_a_group_waits_for_blocks_too() -> None:
    scene = Queueing("both-0", places=100, blocks=30)  # a prompt has 13
    first, second = scene.give("first", 4), scene.give("second", 1)
    await settle()
    assert scene.gone == ["first"]
    await first.read()
    assert scene.gone == ["first", "second"]
    await second.read()
    scene.check()


async def test_choices_that_are_being_prefilled_take_places_already() -> None:
    scene, hold = Queueing("prefill-0", "decode-0", places=4), Hold()
    scene.engines["prefill-0"].during_prefill = hold
    first, second = scene.give("first", 3), scene.give("second", 2)
    await hold.entered.wait()
    assert scene.queued.queued == 1
    assert [one.request_id for one in scene.engines["prefill-0"].prefills] == ["first"]
    hold.go.set()
    await first.read()
    assert await second.read() == await undisturbed(second.request)
    scene.check()


async def test_room_that_comes_without_anybody_telling_is_found() -> None:
    """The group before it left during its prefill: no worker had it, so none says that it has gone. Takes half a
    second."""
    scene, hold = Queueing("prefill-0", "decode-0", places=4), Hold()
    scene.engines["prefill-0"].during_prefill = hold
    first, second = scene.give("first", 3), scene.give("second", 2)
    await hold.entered.wait()
    await first.stream.aclose()
    hold.go.set()
    assert await second.read() == await undisturbed(second.request)
    scene.check()


async def test_a_group_that_is_resumed_does_not_wait() -> None:
    scene = Queueing("both-0", "both-1", places=4)
    given = [scene.give("first", 4), scene.give("second", 4)]
    waiting = scene.give("waiting", 4)
    for one in given:
        await one.step()
    scene.kill("both-0")
    for one in given:
        assert await one.read() == await undisturbed(one.request)
    assert scene.engine.figures.moves == {("died", "resumed"): 1}
    assert await waiting.read() == await undisturbed(waiting.request)
    assert scene.queued.waits[0] == 3
    scene.check()


async def test_without_a_worker_a_new_group_is_told_so_at_once_and_those_that_wait_go_on_waiting() -> None:
    """While others waited, a new one waited too."""
    scene = Queueing("both-0", places=4)
    first, waiting = scene.give("first", 4), scene.give("waiting", 2)
    await settle()
    scene.kill_all()
    with pytest.raises(NoWorkerError):
        scene.give("new", 1)
    await settle()
    assert scene.queued.queued == 1
    scene.start("both-0")
    await settle()
    for one in (waiting, first):
        assert await one.read() == await undisturbed(one.request)
    assert sum(scene.queued.waits) == 2
    scene.check()


async def test_when_no_worker_will_come_back_all_that_wait_are_told_so() -> None:
    scene = Queueing("both-0", places=4)
    first, waiting = scene.give("first", 4), scene.give("waiting", 2)
    await settle()
    scene.kill_all()
    scene.fleet.give_up("both-0")
    for one in (first, waiting):
        with pytest.raises(EngineDiedError):  # of which NoWorkerError is one
            await one.read()
    assert scene.gone == ["first"]
    scene.check()


async def test_who_lets_groups_in_goes_home_when_nobody_waits_and_comes_back() -> None:
    scene, tasks = Queueing("both-0", places=2), Tasks()
    for round_ in range(3):
        first, second = scene.give(f"first{round_}", 2), scene.give(f"second{round_}", 2)
        await first.read()
        tasks.check()
        await second.read()
    scene.check()


@pytest.mark.parametrize("turns", range(8))
async def test_a_group_that_comes_just_when_the_last_one_has_gone_in_goes_too(turns: int) -> None:
    scene = Queueing("both-0", places=2)
    first, second = scene.give("first", 2), scene.give("second", 2)
    await settle()
    await first.stream.aclose()
    third = scene.give("third", 2)
    await second.stream.aclose()
    given = [scene.give("fourth", 1)]
    for _ in range(turns):
        await undisturbed(third.request)
    given.append(scene.give("fifth", 2))
    for heard in await asyncio.gather(*(one.read() for one in (third, *given))):
        assert heard.begins(await undisturbed(third.request))
    scene.check()


async def test_waits_are_counted_by_their_length() -> None:
    scene = Queueing("both-0", places=2)
    first, second, third = (scene.give(name, 2) for name in ("first", "second", "third"))
    await scene.pass_time(0.2)
    await first.read()
    await scene.pass_time(2.0)
    await second.read()
    await third.read()
    assert {place: count for place, count in enumerate(scene.queued.waits) if count} == {0: 1, 3: 1, 6: 1}
    assert scene.queued.waits_sum_s == pytest.approx(0.2 + 2.2)
    scene.check()

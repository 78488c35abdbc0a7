"""A group begins at once if there is room, else in a fair order as soon as there is."""

import asyncio

import pytest

from motet.errors import EngineDiedError, NoWorkerError
from motet.routing.queue.fair_queue import PATIENCE_S
from tests.routing.scene import Hold, Scene, Tasks, length, settle, undisturbed

pytestmark = pytest.mark.anyio


async def test_with_room_a_group_goes_at_once_and_has_not_waited() -> None:
    scene = Scene("both-0", places=4)
    given = scene.come("g", 2)
    assert scene.gone == ["g"]
    assert scene.router.counts.queue_seconds[0] == 1
    assert scene.router.counts.queue_seconds_sum == 0.0
    await given.read()


async def test_a_group_without_room_waits_until_another_has_ended() -> None:
    scene = Scene("both-0", places=4)
    first, second = scene.come("first", 3), scene.come("second", 2)
    await settle()
    assert scene.gone == ["first"]
    assert len(scene.router.waiting) == 1
    assert await first.read() == await undisturbed(first.request)
    assert scene.gone == ["first", "second"]
    assert len(scene.router.waiting) == 0
    assert await second.read() == await undisturbed(second.request)


async def test_a_group_goes_as_soon_as_choices_have_ended() -> None:
    """It waits neither for their whole group nor for the next regular look."""
    scene = Scene("both-0", places=3)
    first, second = scene.come("first", 3), scene.come("second", 1)
    await first.step(length(0) - 1)
    await settle()
    assert scene.gone == ["first"]
    await first.step()
    await settle()
    assert scene.gone == ["first", "second"]
    await second.read()
    await first.read()


@pytest.mark.parametrize("end", ["stopped", "closed"])
async def test_a_group_goes_when_one_before_it_is_ended_early(end: str) -> None:
    scene = Scene("both-0", places=3)
    first, second = scene.come("first", 3), scene.come("second", 1)
    await settle()
    if end == "stopped":
        await scene.router.stop_choice(first.request.request_id, 1)
    else:
        await first.stream.aclose()
    await settle()
    assert scene.gone == ["first", "second"]
    await first.leave()
    await second.leave()


async def test_a_group_goes_when_a_worker_joins() -> None:
    scene = Scene("both-0", places=4)
    given = [scene.come("first", 4), scene.come("second", 4)]
    await settle()
    scene.start("both-1")
    await settle()
    assert [len(engine.requests) for engine in scene.all] == [1, 1]
    for one in given:
        assert await one.read() == await undisturbed(one.request)


async def test_lower_priorities_go_first_and_small_groups_before_recent_large_ones() -> None:
    scene = Scene("both-0", places=4)
    full = scene.come("full", 4)
    given = [scene.come("large", 4), scene.come("small", 1), scene.come("idle", 1, priority=1)]
    given.append(scene.come("urgent", 4, priority=-1))
    await settle()
    await scene.pass_time(1.9)
    given.append(scene.come("late", 1))
    await full.read()
    for name in ("urgent", "small", "large", "late", "idle"):
        (one,) = [one for one in given if one.request.request_id == name]
        await one.read()
    assert scene.gone == ["full", "urgent", "small", "large", "late", "idle"]


async def test_a_small_group_that_comes_while_a_large_one_waits_goes_at_once_for_a_while() -> None:
    """It used to wait until the next regular look, though there was enough room."""
    scene = Scene("both-0", places=4)
    first, large = scene.come("first", 2), scene.come("large", 4)
    await settle()
    small = scene.come("small", 1)
    await settle()
    assert scene.gone == ["first", "small"]
    await small.read()
    await scene.pass_time(PATIENCE_S + 0.6)  # the late one stands behind the large one by now
    late = scene.come("late", 1)
    await settle()
    assert scene.gone == ["first", "small"], "room is kept for the large one"
    await first.read()
    assert scene.gone == ["first", "small", "large"]
    for one in (large, late):
        assert await one.read() == await undisturbed(one.request)


async def test_a_group_that_is_larger_than_any_worker_goes_when_one_is_idle() -> None:
    scene = Scene("both-0", places=4)
    first, large = scene.come("first", 1), scene.come("large", 9)
    await scene.pass_time(PATIENCE_S)
    assert scene.gone == ["first"]
    await first.read()
    assert scene.gone == ["first", "large"]
    assert await large.read() == await undisturbed(large.request)


async def test_a_group_waits_for_blocks_too() -> None:
    scene = Scene("both-0", places=100, blocks=30)  # a prompt takes 13
    first, second = scene.come("first", 4), scene.come("second", 1)
    await settle()
    assert scene.gone == ["first"]
    await first.read()
    assert scene.gone == ["first", "second"]
    await second.read()


async def test_choices_that_are_being_prefilled_take_places_already() -> None:
    scene, hold = Scene("prefill-0", "decode-0", places=4), Hold()
    scene.engines["prefill-0"].during_prefill = hold
    first, second = scene.come("first", 3), scene.come("second", 2)
    await hold.entered.wait()
    assert len(scene.router.waiting) == 1
    assert [one.request_id for one in scene.engines["prefill-0"].prefills] == ["first"]
    hold.go.set()
    await first.read()
    assert await second.read() == await undisturbed(second.request)


async def test_room_that_nobody_reports_is_found() -> None:
    """The group before it left during its prefill. No worker had it, so none reports its end. This takes half a
    second."""
    scene, hold = Scene("prefill-0", "decode-0", places=4), Hold()
    scene.engines["prefill-0"].during_prefill = hold
    first, second = scene.come("first", 3), scene.come("second", 2)
    await hold.entered.wait()
    await first.stream.aclose()
    hold.go.set()
    assert await second.read() == await undisturbed(second.request)


async def test_a_group_that_is_resumed_does_not_wait() -> None:
    scene = Scene("both-0", "both-1", places=4)
    given = [scene.come("first", 4), scene.come("second", 4)]
    waiting = scene.come("waiting", 4)
    for one in given:
        await one.step()
    scene.kill("both-0")
    for one in given:
        assert await one.read() == await undisturbed(one.request)
    assert scene.moves == {("died", "resumed"): 1}
    assert await waiting.read() == await undisturbed(waiting.request)
    assert scene.router.counts.queue_seconds[0] == 3


async def test_without_a_worker_a_new_group_is_refused_at_once_and_waiting_ones_stay() -> None:
    """If others waited, a new group used to wait too."""
    scene = Scene("both-0", places=4)
    first, waiting = scene.come("first", 4), scene.come("waiting", 2)
    await settle()
    scene.kill_all()
    with pytest.raises(NoWorkerError):
        scene.come("new", 1)
    await settle()
    assert len(scene.router.waiting) == 1
    scene.start("both-0")
    await settle()
    for one in (waiting, first):
        assert await one.read() == await undisturbed(one.request)
    assert sum(scene.router.counts.queue_seconds) == 2


async def test_when_no_worker_will_come_back_all_waiting_groups_are_refused() -> None:
    scene = Scene("both-0", places=4)
    first, waiting = scene.come("first", 4), scene.come("waiting", 2)
    await settle()
    scene.kill_all()
    scene.fleet.give_up("both-0")
    for given, error in ((first, EngineDiedError), (waiting, NoWorkerError)):
        with pytest.raises(error):
            await given.read()
    assert scene.gone == ["first"]


async def test_the_task_that_admits_groups_ends_when_nobody_waits_and_starts_again() -> None:
    scene, tasks = Scene("both-0", places=2), Tasks()
    for round_ in range(3):
        first, second = scene.come(f"first{round_}", 2), scene.come(f"second{round_}", 2)
        await first.read()
        tasks.check()
        await second.read()


@pytest.mark.parametrize("turns", range(8))
async def test_a_group_that_comes_just_when_the_last_one_was_admitted_begins_too(turns: int) -> None:
    scene = Scene("both-0", places=2)
    first, second = scene.come("first", 2), scene.come("second", 2)
    await settle()
    await first.stream.aclose()
    third = scene.come("third", 2)
    await second.stream.aclose()
    given = [scene.come("fourth", 1)]
    for _ in range(turns):
        await undisturbed(third.request)
    given.append(scene.come("fifth", 2))
    for heard in await asyncio.gather(*(one.read() for one in (third, *given))):
        assert heard.begins(await undisturbed(third.request))


async def test_waits_are_counted_by_their_length() -> None:
    scene = Scene("both-0", places=2)
    first, second, third = (scene.come(name, 2) for name in ("first", "second", "third"))
    await scene.pass_time(0.2)
    await first.read()
    await scene.pass_time(2.0)
    await second.read()
    await third.read()
    assert {place: count for place, count in enumerate(scene.router.counts.queue_seconds) if count} == {
        0: 1,
        3: 1,
        6: 1,
    }
    assert scene.router.counts.queue_seconds_sum == pytest.approx(0.2 + 2.2)

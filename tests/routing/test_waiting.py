"""A group starts at once if there is capacity, otherwise in a fair order as soon as there is."""

import asyncio

import pytest

from motet.errors import EngineDiedError, NoWorkerError
from motet.routing.queue.fair_queue import PATIENCE_S
from tests.clock import settle
from tests.routing.scene import ControlledPrefill, Scene, Tasks, length, uninterrupted

pytestmark = pytest.mark.anyio


async def test_with_capacity_a_group_starts_at_once_and_has_not_waited() -> None:
    scene = Scene("both-0", max_choices=4)
    submitted = scene.submit("g", 2)
    assert scene.started == ["g"]
    assert scene.router.counts.queue_seconds[0] == 1
    assert scene.router.counts.queue_seconds_sum == 0.0
    await submitted.read()


async def test_a_group_without_capacity_waits_until_another_has_ended() -> None:
    scene = Scene("both-0", max_choices=4)
    first, second = scene.submit("first", 3), scene.submit("second", 2)
    await settle()
    assert scene.started == ["first"]
    assert len(scene.router.waiting) == 1
    assert await first.read() == await uninterrupted(first.request)
    assert scene.started == ["first", "second"]
    assert len(scene.router.waiting) == 0
    assert await second.read() == await uninterrupted(second.request)


async def test_a_group_starts_as_soon_as_choices_have_ended() -> None:
    """It waits neither for the end of their group nor for the next regular check."""
    scene = Scene("both-0", max_choices=3)
    first, second = scene.submit("first", 3), scene.submit("second", 1)
    await first.step(length(0) - 1)
    await settle()
    assert scene.started == ["first"]
    await first.step()
    await settle()
    assert scene.started == ["first", "second"]
    await second.read()
    await first.read()


@pytest.mark.parametrize("end", ["stopped", "closed"])
async def test_a_group_starts_when_one_before_it_is_ended_early(end: str) -> None:
    scene = Scene("both-0", max_choices=3)
    first, second = scene.submit("first", 3), scene.submit("second", 1)
    await settle()
    if end == "stopped":
        await scene.router.stop_choice(first.request.request_id, 1)
    else:
        await first.stream.aclose()
    await settle()
    assert scene.started == ["first", "second"]
    await first.leave()
    await second.leave()


async def test_a_group_starts_when_a_worker_joins() -> None:
    scene = Scene("both-0", max_choices=4)
    submitted = [scene.submit("first", 4), scene.submit("second", 4)]
    await settle()
    scene.start("both-1")
    await settle()
    assert [len(engine.requests) for engine in scene.all] == [1, 1]
    for one in submitted:
        assert await one.read() == await uninterrupted(one.request)


async def test_lower_priorities_start_first_and_small_groups_before_recent_large_ones() -> None:
    scene = Scene("both-0", max_choices=4)
    full = scene.submit("full", 4)
    submitted = [scene.submit("large", 4), scene.submit("small", 1), scene.submit("idle", 1, priority=1)]
    submitted.append(scene.submit("urgent", 4, priority=-1))
    await settle()
    await scene.pass_time(1.9)
    submitted.append(scene.submit("late", 1))
    await full.read()
    for name in ("urgent", "small", "large", "late", "idle"):
        (one,) = [one for one in submitted if one.request.request_id == name]
        await one.read()
    assert scene.started == ["full", "urgent", "small", "large", "late", "idle"]


async def test_a_small_group_that_comes_soon_after_a_waiting_large_one_starts_at_once() -> None:
    """It used to wait until the next regular check, although there was enough capacity."""
    scene = Scene("both-0", max_choices=4)
    first, large = scene.submit("first", 2), scene.submit("large", 4)
    await settle()
    small = scene.submit("small", 1)
    await settle()
    assert scene.started == ["first", "small"]
    for one in (small, first, large):
        await one.read()


async def test_a_group_that_did_not_fit_for_its_patience_starts_in_parts_when_a_choice_fits() -> None:
    scene = Scene("both-0", max_choices=4)
    first, large = scene.submit("first", 1), scene.submit("large", 4)
    await settle()
    await scene.pass_time(PATIENCE_S - 0.1)
    assert scene.started == ["first"]
    await scene.pass_time(0.1)
    assert scene.started == ["first", "large"]
    for one in (first, large):
        assert await one.read() == await uninterrupted(one.request)


async def test_a_group_without_the_blocks_gets_them_before_later_groups_of_its_client() -> None:
    scene = Scene("both-0", max_choices=100, blocks=40)  # a prompt takes 13
    first, large = scene.submit("first", 4, client="same"), scene.submit("large", 12, client="same")
    await settle()
    await scene.pass_time(PATIENCE_S + 6.0)  # by now, "late" comes after the large group
    late = scene.submit("late", 1, client="same")
    await settle()
    assert scene.started == ["first"], "the blocks are reserved for the large one"
    other = scene.submit("other", 1, client="other")
    await settle()
    assert scene.started == ["first", "other"]
    for one in (other, first):
        await one.read()
    assert scene.started == ["first", "other", "large", "late"]
    for one in (large, late):
        assert await one.read() == await uninterrupted(one.request)


async def test_a_group_that_is_larger_than_any_worker_starts_when_one_is_idle() -> None:
    scene = Scene("both-0", max_choices=4)
    first, large = scene.submit("first", 1), scene.submit("large", 9)
    await scene.pass_time(PATIENCE_S)
    assert scene.started == ["first"]
    await first.read()
    assert scene.started == ["first", "large"]
    assert await large.read() == await uninterrupted(large.request)


async def test_a_group_waits_for_blocks_too() -> None:
    scene = Scene("both-0", max_choices=100, blocks=30)  # a prompt takes 13
    first, second = scene.submit("first", 4), scene.submit("second", 1)
    await settle()
    assert scene.started == ["first"]
    await first.read()
    assert scene.started == ["first", "second"]
    await second.read()


async def test_choices_that_are_being_prefilled_take_capacity_already() -> None:
    scene, controlled = Scene("prefill-0", "decode-0", max_choices=4), ControlledPrefill()
    scene.engines["prefill-0"].during_prefill = controlled
    first, second = scene.submit("first", 3), scene.submit("second", 2)
    await controlled.entered.wait()
    assert len(scene.router.waiting) == 1
    assert [one.request_id for one in scene.engines["prefill-0"].prefills] == ["first"]
    controlled.may_end.set()
    await first.read()
    assert await second.read() == await uninterrupted(second.request)


async def test_capacity_that_is_not_reported_is_found() -> None:
    """The group before it left during its prefill. It was on no worker, so no worker reports its end. This takes half
    a second."""
    scene, controlled = Scene("prefill-0", "decode-0", max_choices=4), ControlledPrefill()
    scene.engines["prefill-0"].during_prefill = controlled
    first, second = scene.submit("first", 3), scene.submit("second", 2)
    await controlled.entered.wait()
    await first.stream.aclose()
    controlled.may_end.set()
    assert await second.read() == await uninterrupted(second.request)


async def test_a_group_that_is_resumed_does_not_wait() -> None:
    scene = Scene("both-0", "both-1", max_choices=4)
    submitted = [scene.submit("first", 4), scene.submit("second", 4)]
    waiting = scene.submit("waiting", 4)
    for one in submitted:
        await one.step()
    scene.kill("both-0")
    for one in submitted:
        assert await one.read() == await uninterrupted(one.request)
    assert scene.moves == {("died", "resumed"): 1}
    assert await waiting.read() == await uninterrupted(waiting.request)
    assert scene.router.counts.queue_seconds[0] == 3


async def test_without_a_worker_a_new_group_is_refused_at_once_and_waiting_ones_stay() -> None:
    """If other groups waited, a new group used to wait too."""
    scene = Scene("both-0", max_choices=4)
    first, waiting = scene.submit("first", 4), scene.submit("waiting", 2)
    await settle()
    scene.kill_all()
    with pytest.raises(NoWorkerError):
        scene.submit("new", 1)
    await settle()
    assert len(scene.router.waiting) == 1
    scene.start("both-0")
    await settle()
    for one in (waiting, first):
        assert await one.read() == await uninterrupted(one.request)
    assert sum(scene.router.counts.queue_seconds) == 2


async def test_when_no_worker_will_come_back_all_waiting_groups_are_refused() -> None:
    scene = Scene("both-0", max_choices=4)
    first, waiting = scene.submit("first", 4), scene.submit("waiting", 2)
    await settle()
    scene.kill_all()
    scene.fleet.give_up("both-0")
    for submitted, error in ((first, EngineDiedError), (waiting, NoWorkerError)):
        with pytest.raises(error):
            await submitted.read()
    assert scene.started == ["first"]


async def test_the_task_that_admits_groups_ends_when_none_waits_and_starts_again() -> None:
    scene, tasks = Scene("both-0", max_choices=2), Tasks()
    for round_ in range(3):
        first, second = scene.submit(f"first{round_}", 2), scene.submit(f"second{round_}", 2)
        await first.read()
        tasks.check()
        await second.read()


@pytest.mark.parametrize("turns", range(8))
async def test_a_group_that_arrives_just_when_the_last_one_was_admitted_starts_too(turns: int) -> None:
    scene = Scene("both-0", max_choices=2)
    first, second = scene.submit("first", 2), scene.submit("second", 2)
    await settle()
    await first.stream.aclose()
    third = scene.submit("third", 2)
    await second.stream.aclose()
    submitted = [scene.submit("fourth", 1)]
    for _ in range(turns):
        await uninterrupted(third.request)
    submitted.append(scene.submit("fifth", 2))
    for received in await asyncio.gather(*(one.read() for one in (third, *submitted))):
        assert received.is_prefix_of(await uninterrupted(third.request))


async def test_waits_are_counted_by_their_length() -> None:
    scene = Scene("both-0", max_choices=2)
    first, second, third = (scene.submit(name, 2) for name in ("first", "second", "third"))
    await scene.pass_time(0.2)
    waits = [(await first.read()).queue_s]
    await scene.pass_time(2.0)
    waits += [(await second.read()).queue_s, (await third.read()).queue_s]
    assert waits == pytest.approx([0.0, 0.2, 2.2])
    assert {bucket: count for bucket, count in enumerate(scene.router.counts.queue_seconds) if count} == {
        0: 1,
        3: 1,
        6: 1,
    }
    assert scene.router.counts.queue_seconds_sum == pytest.approx(0.2 + 2.2)

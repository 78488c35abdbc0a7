"""Choices are stopped before, while and after their group is in parts."""

import asyncio

import pytest

from tests.clock import settle
from tests.routing.scene import APART, ControlledPrefill, Received, Scene, group, uninterrupted

pytestmark = pytest.mark.anyio

N = 8
HALF = N // 2


async def test_choices_stopped_before_the_parts_are_made_are_left_out() -> None:
    scene, request, controlled, received = Scene(*APART, spread_choices=4), group(n=N), ControlledPrefill(), Received()
    complete = await uninterrupted(request)
    scene.engines["prefill-0"].during_prefill = controlled
    stream = scene.router.generate(request)
    await controlled.entered.wait()
    for index in (0, 5):
        await scene.router.stop_choice(request.request_id, index)
    controlled.may_end.set()
    await received.read(stream, request)
    assert [[start.index for start in one.choices] for one in scene.requests] == [[1, 2, 3, 4], [6, 7]]
    assert received.tokens == {index: complete.tokens[index] for index in range(N) if index not in (0, 5)}


async def test_when_stopped_choices_leave_only_one_part_the_lease_waits_for_no_other() -> None:
    scene, request, controlled = Scene(*APART, spread_choices=4), group(n=N), ControlledPrefill()
    scene.engines["prefill-0"].during_prefill = controlled
    reading = asyncio.ensure_future(Received().read(scene.router.generate(request), request))
    await controlled.entered.wait()
    for index in range(HALF):
        await scene.router.stop_choice(request.request_id, index)
    gate = scene.gate(1)
    controlled.may_end.set()
    await settle()
    assert [[start.index for start in one.choices] for one in scene.requests] == [[4, 5, 6, 7]]
    assert scene.leases.held == {}
    for _ in range(100):
        gate.release()
    assert sorted((await reading).finished) == [4, 5, 6, 7]


async def test_when_all_choices_are_stopped_during_prefill_it_is_cancelled() -> None:
    scene, request, controlled = Scene(*APART, spread_choices=4), group(n=N), ControlledPrefill()
    scene.engines["prefill-0"].during_prefill = controlled
    reading = asyncio.ensure_future(Received().read(scene.router.generate(request), request))
    await controlled.entered.wait()
    for index in range(N):
        await scene.router.stop_choice(request.request_id, index)
    assert scene.engines["prefill-0"].record.prefilling == 0
    assert (await reading).tokens == {}
    assert scene.requests == []


async def test_a_choice_stopped_later_is_stopped_where_its_part_is() -> None:
    scene, request, received = Scene(*APART, spread_choices=4), group(n=N), Received()
    gate = scene.gate(2)
    stream = scene.router.generate(request)
    for _ in range(2):
        received.take(await anext(stream), request)
    for index in (1, 6):
        await scene.router.stop_choice(request.request_id, index)
    for _ in range(100):
        gate.release()
    await received.read(stream, request)
    assert sorted(received.finished) == [0, 2, 3, 4, 5, 7]
    assert [len(received.tokens[index]) for index in (1, 6)] == [1, 1]


async def test_a_part_stopped_before_it_has_read_the_ticket_holds_no_lease() -> None:
    scene, request = Scene(*APART, spread_choices=4), group(n=N)
    gate = scene.gate(0)
    reading = asyncio.ensure_future(Received().read(scene.router.generate(request), request))
    await settle()
    for index in range(HALF):
        await scene.router.stop_choice(request.request_id, index)
    await settle()
    gate.release()
    await settle()
    assert scene.leases.held == {}
    for _ in range(100):
        gate.release()
    assert sorted((await reading).finished) == [4, 5, 6, 7]


async def test_a_part_that_is_stopped_after_its_worker_died_holds_no_lease() -> None:
    """A dead worker acknowledges no lease, and this reader never comes: the lease lasted until the other part ended."""
    scene, request = Scene(*APART, spread_choices=4), group(n=N)
    gate = scene.gate(0)
    reading = asyncio.ensure_future(Received().read(scene.router.generate(request), request))
    await settle()
    scene.engines["prefill-0"].during_prefill = ControlledPrefill()
    scene.kill("decode-0")
    await settle()
    for index in range(HALF):
        await scene.router.stop_choice(request.request_id, index)
    gate.release()
    await settle()
    assert scene.leases.held == {}
    for _ in range(100):
        gate.release()
    assert sorted((await reading).finished) == [4, 5, 6, 7]


async def test_when_all_choices_are_stopped_the_group_has_ended() -> None:
    scene, request, received = Scene(*APART, spread_choices=4), group(n=N), Received()
    scene.gate(4)
    stream = scene.router.generate(request)
    for _ in range(4):
        received.take(await anext(stream), request)
    for index in (*range(N), 99):
        await scene.router.stop_choice(request.request_id, index)
    assert scene.generating() == []
    await received.read(stream, request)
    assert received.finished == {}

"""A group that a gateway has placed on this server: the gateway queues and moves it, so the router does neither."""

import pytest

from motet.engine import WorkerState
from motet.errors import EngineDiedError, NoWorkerError, OverloadedError
from tests.clock import settle
from tests.routing.scene import Received, Scene, SubmittedGroup, error_of, group, uninterrupted

pytestmark = pytest.mark.anyio


def place(scene: Scene, name: str = "g", n: int = 2) -> SubmittedGroup:
    request = group(name, n=n)
    return SubmittedGroup(request, scene.router.placed().generate(request))


async def test_a_placed_group_passes_the_queue_and_the_groups_in_it() -> None:
    scene = Scene("both-0", max_choices=4)
    first, waits = scene.submit("first", 4), scene.submit("waits", 1)
    placed = place(scene, "placed", 4)
    await settle()
    assert scene.started == ["first", "placed"]
    assert (len(scene.router.waiting), sum(scene.router.counts.queue_seconds)) == (1, 1)
    for submitted in (placed, first, waits):
        assert await submitted.read() == await uninterrupted(submitted.request)


async def test_a_placed_group_moves_at_once_to_a_worker_that_is_ready() -> None:
    scene = Scene("both-0", "both-1")
    submitted = place(scene)
    await submitted.step()
    scene.generating_engine().die(EngineDiedError("gone"))
    assert await submitted.read() == await uninterrupted(submitted.request)
    assert scene.moves == {("died", "resumed"): 1}


async def test_a_placed_group_ends_with_its_worker_if_others_would_wait_for_the_next() -> None:
    scene = Scene("both-0")
    placed, own = place(scene, "placed"), scene.submit("own", 2)
    await placed.step()
    await own.step()
    scene.fleet.expect("both-1", "-", role=scene.engines["both-0"].info.role)  # a worker for which other groups wait
    scene.kill("both-0", EngineDiedError("gone"))
    error = await error_of(placed.stream)
    assert isinstance(error, EngineDiedError)
    assert error.message == "gone"
    scene.start("both-1")
    assert await own.read() == await uninterrupted(own.request)
    assert scene.moves == {("died", "no-worker"): 1, ("died", "resumed"): 1}


async def test_a_placed_group_is_refused_when_its_second_worker_refuses_it_too() -> None:
    scene = Scene("both-0", "both-1", "both-2")
    for engine in scene.all:
        engine.scenario.fail_after = dict.fromkeys(range(100), OverloadedError("full"))
    submitted = place(scene)
    assert isinstance(await error_of(submitted.stream), OverloadedError)
    assert len(scene.requests) == 2
    assert submitted.received == Received()


async def test_a_placed_group_without_a_worker_is_refused_before_it_starts() -> None:
    scene = Scene("both-0")
    scene.fleet.mark("both-0", WorkerState.DEAD)
    with pytest.raises(NoWorkerError):
        place(scene)


async def test_a_choice_of_a_placed_group_is_stopped_by_the_group_s_id() -> None:
    scene = Scene("both-0")
    submitted = place(scene, n=2)
    await submitted.step()
    await scene.router.placed().stop_choice(submitted.request.request_id, 1)
    assert set((await submitted.read()).finished) == {0}

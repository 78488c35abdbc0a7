"""A group that a gateway has placed on this server: the gateway queues and moves it, so the router does neither."""

import pytest

from motet.engine import WorkerState
from motet.errors import EngineDiedError, NoWorkerError, OverloadedError
from tests.routing.scene import Given, Heard, Scene, error_of, group, settle, undisturbed

pytestmark = pytest.mark.anyio


def place(scene: Scene, name: str = "g", n: int = 2) -> Given:
    request = group(name, n=n)
    return Given(request, scene.router.placed().generate(request))


async def test_a_placed_group_passes_the_queue_and_the_groups_in_it() -> None:
    scene = Scene("both-0", places=4)
    first, waits = scene.come("first", 4), scene.come("waits", 1)
    placed = place(scene, "placed", 4)
    await settle()
    assert scene.gone == ["first", "placed"]
    assert (len(scene.router.waiting), sum(scene.router.counts.queue_seconds)) == (1, 1)
    for given in (placed, first, waits):
        assert await given.read() == await undisturbed(given.request)


async def test_a_placed_group_moves_at_once_to_a_worker_that_is_ready() -> None:
    scene = Scene("both-0", "both-1")
    given = place(scene)
    await given.step()
    scene.writer().die(EngineDiedError("gone"))
    assert await given.read() == await undisturbed(given.request)
    assert scene.moves == {("died", "resumed"): 1}


async def test_a_placed_group_ends_with_its_worker_where_others_would_wait_for_the_next() -> None:
    scene = Scene("both-0")
    placed, own = place(scene, "placed"), scene.come("own", 2)
    await placed.step()
    await own.step()
    scene.fleet.expect("both-1", "-", role=scene.engines["both-0"].info.role)  # one that others wait for
    scene.kill("both-0", EngineDiedError("gone"))
    error = await error_of(placed.stream)
    assert isinstance(error, EngineDiedError)
    assert error.message == "gone"
    scene.start("both-1")
    assert await own.read() == await undisturbed(own.request)
    assert scene.moves == {("died", "no-worker"): 1, ("died", "resumed"): 1}


async def test_a_placed_group_is_refused_when_its_second_worker_refuses_it_too() -> None:
    scene = Scene("both-0", "both-1", "both-2")
    for engine in scene.all:
        engine.fail_after = dict.fromkeys(range(100), OverloadedError("full"))
    given = place(scene)
    assert isinstance(await error_of(given.stream), OverloadedError)
    assert len(scene.asked) == 2
    assert given.heard == Heard()


async def test_a_placed_group_without_a_worker_is_refused_before_it_begins() -> None:
    scene = Scene("both-0")
    scene.fleet.mark("both-0", WorkerState.DEAD)
    with pytest.raises(NoWorkerError):
        place(scene)


async def test_a_choice_of_a_placed_group_is_stopped_by_the_groups_name() -> None:
    scene = Scene("both-0")
    given = place(scene, n=2)
    await given.step()
    await scene.router.placed().stop_choice(given.request.request_id, 1)
    assert set((await given.read()).finished) == {0}

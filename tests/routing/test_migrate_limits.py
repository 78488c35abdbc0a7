"""The limits on moves of a group and on its waits for workers. Every move has exactly one outcome."""

import asyncio

import pytest

from motet.engine import WorkerState
from motet.errors import (
    ContextLengthError,
    DrainingError,
    EngineClosedError,
    EngineDiedError,
    EngineError,
    MotetError,
    NoWorkerError,
    OverloadedError,
    RequestError,
)
from motet.routing.groups.migration import MAX_REFUSALS
from motet.routing.groups.part_mover import NO_WORKER_NOW
from tests.clock import settle
from tests.routing.scene import ControlledPrefill, Received, Scene, error_of, group, uninterrupted

pytestmark = pytest.mark.anyio

FULL = OverloadedError("full")


def always(error: MotetError) -> dict[int, MotetError]:
    return dict.fromkeys(range(100), error)


@pytest.mark.parametrize("limit", [0, 1, 3])
async def test_a_group_moves_up_to_the_limit_and_then_ends_with_its_worker(limit: int) -> None:
    names = [f"both-{number}" for number in range(limit + 2)]
    scene, request, received = Scene(*names, limit=limit), group(), Received()
    stream = scene.router.generate(request)
    for start in range(limit + 1):
        received.take(await anext(stream), request)
        scene.generating_engine().die(EngineDiedError(f"start {start} is over"))
    for _ in range(2):
        with pytest.raises(EngineDiedError, match=f"start {limit} is over"):
            await anext(stream)
    assert received.is_prefix_of(await uninterrupted(request))
    resumed = {("died", "resumed"): limit} if limit else {}
    assert scene.moves == {**resumed, ("died", "limit"): 1}
    assert len(scene.requests) == 1 + limit


async def test_deaths_before_the_first_delta_are_one_move_but_each_counts_for_the_limit() -> None:
    scene, request = Scene("both-0", "both-1", "both-2", "both-3", limit=2), group()
    for name in ("both-1", "both-2", "both-3"):
        scene.engines[name].scenario.fail_after = always(EngineDiedError("gone"))
    stream = scene.router.generate(request)
    await anext(stream)
    scene.kill("both-0")
    assert isinstance(await error_of(stream), EngineDiedError)
    assert scene.moves == {("died", "limit"): 1}
    assert (scene.router.counts.choices_resumed, scene.router.counts.tokens_replayed) == (0, 0)
    assert len(scene.requests) == 3


@pytest.mark.parametrize(
    "error", [RequestError("never"), ContextLengthError("too long"), EngineError("sick"), EngineClosedError("closed")]
)
@pytest.mark.parametrize("step", [0, 2])
async def test_errors_that_would_occur_again_and_closing_are_not_retried(step: int, error: MotetError) -> None:
    scene, request = Scene("both-0", "both-1"), group()
    scene.engines["both-0"].scenario.fail_after = {step: error}
    stream = scene.router.generate(request)
    first, again = await error_of(stream), await error_of(stream)
    assert first is not None and first is again
    assert (type(first), first.message) == (type(error), error.message)
    assert first.worker == ("both-0" if type(error) is EngineError else "")
    assert error.worker == ""  # other groups can get the same one
    assert len(scene.requests) == 1
    assert scene.moves == {}


async def test_a_move_that_ends_with_a_final_error_has_failed() -> None:
    scene, request = Scene("both-0", "both-1"), group()
    scene.engines["both-1"].scenario.fail_after = always(EngineError("sick"))
    stream = scene.router.generate(request)
    await anext(stream)
    scene.kill("both-0")
    assert isinstance(await error_of(stream), EngineError)
    assert scene.moves == {("died", "failed"): 1}


async def test_a_group_that_is_refused_is_sent_to_another_worker_at_once() -> None:
    scene, request = Scene("both-0", "both-1"), group(n=3)
    scene.engines["both-0"].scenario.fail_after = always(FULL)
    reading = asyncio.ensure_future(Received().read(scene.router.generate(request), request))
    await settle()
    assert reading.done()  # no time has passed
    assert reading.result() == await uninterrupted(request)
    assert scene.moves == {("refused", "resumed"): 1}
    assert (scene.router.counts.choices_resumed, scene.router.counts.tokens_replayed) == (3, 0)


async def test_a_group_without_tokens_is_refused_after_too_many_refusals() -> None:
    scene, request = Scene("both-0", "both-1", limit=0), group()
    for engine in scene.all:
        engine.scenario.fail_after = always(FULL)
    stream = scene.router.generate(request)
    ending = asyncio.ensure_future(error_of(stream))
    while not ending.done():
        await settle()
        scene.fleet.changes.wake()
    refusal = ending.result()
    assert isinstance(refusal, OverloadedError)
    assert (refusal.message, refusal.worker in scene.engines) == (FULL.message, True)
    assert len(scene.requests) == MAX_REFUSALS
    assert [len(engine.requests) for engine in scene.all] == [MAX_REFUSALS // 2] * 2
    assert scene.moves == {("refused", "refused"): 1}


@pytest.mark.parametrize("error", [FULL, DrainingError("going")])
async def test_a_group_with_tokens_waits_for_capacity_as_it_does_for_a_worker(error: MotetError) -> None:
    scene, request, received = Scene("both-0", "both-1", wait_s=5.0), group(), Received()
    scene.engines["both-1"].scenario.fail_after = always(error)
    stream = scene.router.generate(request)
    received.take(await anext(stream), request)
    scene.kill("both-0")
    reading = asyncio.ensure_future(received.read(stream, request))
    for _ in range(2 * MAX_REFUSALS):
        await settle()
        scene.clock.now_s += 0.25
        scene.fleet.changes.wake()
    assert len(scene.requests) > MAX_REFUSALS
    scene.engines["both-1"].scenario.fail_after = {}
    scene.fleet.changes.wake()
    assert await reading == await uninterrupted(request)
    assert scene.moves == {("died", "resumed"): 1}


async def test_a_group_with_tokens_is_refused_if_no_worker_has_capacity_in_time() -> None:
    scene, request = Scene("both-0", "both-1", wait_s=5.0), group()
    scene.engines["both-1"].scenario.fail_after = always(FULL)
    stream = scene.router.generate(request)
    await anext(stream)
    scene.kill("both-0")
    ending = asyncio.ensure_future(error_of(stream))
    await settle()
    scene.clock.now_s += 5.0
    scene.fleet.changes.wake()
    await settle()
    assert isinstance(await ending, OverloadedError)
    assert scene.moves == {("died", "refused"): 1}


async def test_a_group_with_tokens_tries_again_without_being_woken() -> None:
    scene, request, received = Scene("both-0", "both-1"), group(), Received()
    scene.engines["both-1"].scenario.fail_after = always(FULL)
    stream = scene.router.generate(request)
    received.take(await anext(stream), request)
    scene.kill("both-0")
    reading = asyncio.ensure_future(received.read(stream, request))
    await settle()
    scene.engines["both-1"].scenario.fail_after = {}
    assert await reading == await uninterrupted(request)


@pytest.mark.parametrize("names", [("both-0", "both-1"), ("prefill-0", "decode-0")], ids=["alike", "apart"])
@pytest.mark.parametrize("steps", [0, 2])
async def test_with_all_workers_dead_a_group_waits_for_one_to_return(steps: int, names: tuple[str, ...]) -> None:
    scene, request, received = Scene(*names), group(), Received()
    stream = scene.router.generate(request)
    await settle()
    for _ in range(steps):
        received.take(await anext(stream), request)
    scene.kill_all()
    reading = asyncio.ensure_future(received.read(stream, request))
    await settle()
    scene.clock.now_s += 14.9
    scene.fleet.changes.wake()
    await settle()
    assert not reading.done()
    scene.start(names[-1])
    assert await reading == await uninterrupted(request)
    assert scene.moves == {("died", "resumed"): 1}


@pytest.mark.parametrize("wait_s", [0.0, 15.0])
async def test_after_its_wait_a_group_ends_with_the_error_of_its_lost_worker(
    wait_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """The bug: without a line about the wait, the log had the end of a lost server, and nothing for 15 s."""
    scene, request = Scene("both-0", "both-1", wait_s=wait_s), group()
    stream = scene.router.generate(request)
    await anext(stream)
    scene.kill_all()
    ending = asyncio.ensure_future(error_of(stream))
    await settle()
    assert caplog.messages.count(NO_WORKER_NOW % wait_s) == bool(wait_s)
    scene.clock.now_s += wait_s
    scene.fleet.changes.wake()
    error = await ending
    assert isinstance(error, EngineDiedError)
    assert scene.moves == {("died", "no-worker"): 1}


async def test_a_group_does_not_wait_for_workers_that_will_not_return() -> None:
    scene, request = Scene("both-0"), group()
    stream = scene.router.generate(request)
    await anext(stream)
    scene.kill_all()
    ending = asyncio.ensure_future(error_of(stream))
    await settle()
    assert not ending.done()
    scene.fleet.give_up("both-0")
    assert isinstance(await ending, EngineDiedError)
    assert scene.moves == {("died", "no-worker"): 1}


@pytest.mark.parametrize(("steps", "moves"), [(1, 3), (0, 1)])
async def test_the_wait_starts_again_with_each_loss(steps: int, moves: int) -> None:
    """Each worker that returns takes `steps` steps before it dies too."""
    scene, request, received = Scene("both-0", wait_s=10.0), group(), Received()
    dies_soon: dict[int, MotetError] = {steps: EngineDiedError("gone")}
    scene.engines["both-0"].scenario.fail_after = {1: EngineDiedError("gone")}
    reading = asyncio.ensure_future(received.read(scene.router.generate(request), request))
    for fail_after in (dies_soon, dies_soon, {}):
        await settle()
        scene.clock.now_s += 9.0
        scene.fleet.changes.wake()
        await settle()
        assert not reading.done()
        scene.start("both-0").scenario.fail_after = fail_after
    assert await reading == await uninterrupted(request)
    assert scene.moves == {("died", "resumed"): moves}


@pytest.mark.parametrize("names", [("both-0",), ("prefill-0", "decode-0")], ids=["alike", "apart"])
async def test_a_new_group_without_any_worker_is_refused_at_once(names: tuple[str, ...]) -> None:
    scene = Scene(*names)
    scene.kill_all()
    with pytest.raises(NoWorkerError) as raised:
        scene.router.generate(group())
    assert raised.value.retry_after_s == 2
    assert scene.moves == {}


async def test_a_group_whose_last_decode_worker_dies_during_prefill_waits_too() -> None:
    scene, request = Scene("prefill-0", "decode-0"), group()
    controlled = ControlledPrefill()
    scene.engines["prefill-0"].during_prefill = controlled
    stream = scene.router.generate(request)
    reading = asyncio.ensure_future(Received().read(stream, request))
    await settle()
    scene.kill("decode-0")
    scene.fleet.mark("decode-0", WorkerState.DEAD)
    controlled.may_end.set()
    await settle()
    assert not reading.done()
    scene.start("decode-0")
    assert await reading == await uninterrupted(request)
    assert scene.moves == {("no-worker", "resumed"): 1}
    assert scene.engines["prefill-0"].released  # the first ticket, which no worker has read

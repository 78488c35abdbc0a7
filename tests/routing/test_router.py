"""The parts of routing together, over fake workers."""

import asyncio
import gc
import weakref

import pytest

from motet.routing.groups.journey import Journey
from motet.types import GenerateRequest
from tests.clock import settle
from tests.routing.scene import ControlledPrefill, Received, Scene, group, uninterrupted

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("spread_choices", [0, 4])
@pytest.mark.parametrize(
    ("names", "request_"),
    [
        (("both-0",), group(n=3)),
        (("both-0", "both-1"), group(n=3)),
        (("prefill-0", "decode-0"), group(n=3, prompt_tokens=20)),
    ],
)
async def test_a_simple_group_has_one_stream_around_the_worker_s(
    names: tuple[str, ...], request_: GenerateRequest, spread_choices: int
) -> None:
    """There is no task either: the client's reader reads the worker directly."""
    scene = Scene(*names, spread_choices=spread_choices)
    stream = scene.router.generate(request_)
    assert type(stream) is Journey
    scene.tasks.check()
    assert sum(len(member.groups) for member in scene.fleet.members) == 1
    assert await Received().read(stream, request_) == await uninterrupted(request_)


async def test_a_group_in_parts_takes_its_capacity_already_during_prefill() -> None:
    scene, controlled = Scene("prefill-0", "decode-0", "decode-1", spread_choices=4, max_choices=8), ControlledPrefill()
    scene.engines["prefill-0"].during_prefill = controlled
    requests = [group("parts", n=8), group("whole", n=4), group("waits", n=8)]
    reading = [asyncio.ensure_future(Received().read(scene.router.generate(request), request)) for request in requests]
    await controlled.entered.wait()
    await settle()
    assert scene.router.figures().queued == 1
    assert [one.request_id for one in scene.engines["prefill-0"].prefills] == ["parts", "whole"]
    controlled.may_end.set()
    for received, request in zip(await asyncio.gather(*reading), requests, strict=True):
        assert received == await uninterrupted(request)


async def test_the_figures_come_from_every_part_of_routing() -> None:
    scene = Scene("prefill-0", "decode-0", "decode-1", spread_choices=4)
    first, second = group("first", n=8), group("second", n=8, prompt_tokens=20)
    streams = [scene.router.generate(request) for request in (first, second)]
    await settle()
    assert sum(scene.router.figures().choices.values()) > 0
    scene.engines["decode-0"].die()
    for stream, request in zip(streams, (first, second), strict=True):
        assert await Received().read(stream, request) == await uninterrupted(request)
    figures = scene.router.figures()
    assert figures.spreads == 2
    assert figures.bypasses["short"] >= 1
    assert figures.migrations[("died", "resumed")] >= 1
    assert figures.choices_resumed >= 1
    assert sum(figures.decisions.values()) >= 4
    assert figures.routed_tokens >= 4 * 20
    assert figures.queued == 0
    assert sum(figures.queue_seconds) == 2
    assert figures.choices == {"prefill-0": 0, "decode-0": 0, "decode-1": 0}


async def test_a_server_without_prefill_workers_counts_no_bypass() -> None:
    scene = Scene("both-0")
    await Received().read(scene.router.generate(group()), group())
    assert scene.router.figures().bypasses == {}


@pytest.mark.parametrize("names", [("both-0",), ("prefill-0", "decode-0")])
async def test_nothing_of_a_group_that_has_ended_waits_for_a_garbage_collection(names: tuple[str, ...]) -> None:
    """A full collection stopped all streams for 100 ms when a request with 2,048 groups had ended."""
    scene, request = Scene(*names), group(n=3)
    gc.disable()
    try:
        journey = scene.router.generate(request)
        left = weakref.ref(journey)
        assert await Received().read(journey, request) == await uninterrupted(request)
        del journey
        await settle()
        assert left() is None
    finally:
        gc.enable()

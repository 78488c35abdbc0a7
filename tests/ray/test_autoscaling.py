"""A cell on Ray Serve that grows and shrinks with its load, and loses no choice by it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fault.answers import Body, ask
from tests.fault.asked import CHAT, STREAMED, chat
from tests.fault.oracle import Undisturbed
from tests.ray.asking import LONGEST
from tests.ray.processes import engine_of, give_way
from tests.ray.running_ray import RunningRay
from tests.ray.their_cluster import TheirCluster

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.ray, pytest.mark.long]

ENOUGH = 5
"""Choices that one replica should have at a time."""
STAYING = (
    chat("stays", STREAMED, n=2, max_tokens=LONGEST),
    *(chat(f"stays {i}", max_tokens=LONGEST) for i in range(3)),
)
"""Each client asks for this again and again, so there is always a choice to write on each of two replicas. Whole
answers take less of the cores on which replicas start."""
LEAVING = chat("leaves", STREAMED, n=3, max_tokens=LONGEST)
SOON_S = 150.0
"""Time by which Serve has decided, and a replica has started or ended."""


@pytest.fixture
async def growing(folder: Path, theirs: TheirCluster) -> AsyncIterator[RunningRay]:
    """A cell with one decode replica and no prefill replica. It may have two and one."""
    running = RunningRay(
        folder,
        "--autoscale",
        joined=await theirs.joined(),
        prefill=1,
        min_prefill=0,
        decode=2,
        choices_per_decode=ENOUGH,
        scale_up_delay=1,
        scale_down_delay=1,
        drain_timeout=0,
        bypass_tokens=64,
        routing_policy="least-loaded",
    )
    async with running:
        yield running


async def keep_asking(ray: RunningRay, body: Body, undisturbed: Undisturbed, over: asyncio.Event) -> None:
    """Asks for one answer after the other, and checks each."""
    expected = await undisturbed.answer(CHAT, body)
    while not over.is_set():
        assert await ask(ray.http, CHAT, body) == expected


async def prefilled(ray: RunningRay, name: str) -> int:
    """Returns the number of prompts that prefill computed for a new prompt."""
    before = await ray.totals()
    await ask(ray.http, CHAT, chat(name, n=2, max_tokens=2))
    return (await ray.totals()).prefills - before.prefills


async def test_replicas_come_and_go_with_the_load_and_no_choice_is_lost(
    growing: RunningRay, undisturbed: Undisturbed
) -> None:
    assert not (await growing.status()).ready("prefill")
    give_way(map(engine_of, growing.replicas("decode")))
    less, nothing = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as clients:
        for body, over in [*((body, nothing) for body in STAYING), (LEAVING, less)]:
            clients.create_task(keep_asking(growing, body, undisturbed, over))
        # The first prompts missed prefill: it starts, and gets the next one. Eight choices are too many for a replica.
        await growing.until(lambda status: len(status.ready("prefill")) == 1, seconds=SOON_S)
        assert await prefilled(growing, "newcomer") >= 1
        await growing.until(lambda status: len(status.ready("decode")) == 2, seconds=SOON_S)
        assert (await growing.totals()).migrations == 0
        less.set()  # Five are not: while they are written one replica goes, and its groups go on on the other one.
        smaller = await growing.until(lambda status: status.totals.migrations > 0, seconds=SOON_S)
        assert smaller.totals.choices_resumed > 0
        nothing.set()
    await growing.until(lambda status: status.idle(decode=1), seconds=SOON_S)

"""A cell on Ray Serve whose number of replicas follows its load, and which loses no choice by that."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fault.answers import Body, fetch_answer
from tests.fault.fault_requests import CHAT, STREAMED, chat
from tests.fault.oracle import Undisturbed
from tests.ray.existing_cluster import ExistingCluster
from tests.ray.processes import engine_of, lower_priority
from tests.ray.running_ray import RunningRay
from tests.ray.streaming import LONGEST

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.ray, pytest.mark.long]

CHOICES = 5
"""Target number of choices per replica."""
STAYING = (
    chat("stays", STREAMED, n=2, max_tokens=LONGEST),
    *(chat(f"stays {i}", max_tokens=LONGEST) for i in range(3)),
)
"""Each client repeats one of these, so that each of two replicas always generates a choice. Answers that are not
streamed take less time of the cores on which replicas start."""
LEAVING = chat("leaves", STREAMED, n=3, max_tokens=LONGEST)
SCALED_S = 150.0
"""Time within which Serve decides, and a replica starts or ends."""


@pytest.fixture
async def growing(folder: Path, existing: ExistingCluster) -> AsyncIterator[RunningRay]:
    """A cell with one decode replica and no prefill replica. The maximum is two and one."""
    running = RunningRay(
        folder,
        "--autoscale",
        joined=await existing.joined(),
        prefill=1,
        min_prefill=0,
        decode=2,
        choices_per_decode=CHOICES,
        scale_up_delay=1,
        scale_down_delay=1,
        drain_timeout=0,
        bypass_tokens=64,
        routing_policy="least-loaded",
    )
    async with running:
        yield running


async def repeat(ray: RunningRay, body: Body, undisturbed: Undisturbed, end: asyncio.Event) -> None:
    """Requests one answer after the other until `end` is set, and checks each."""
    expected = await undisturbed.answer(CHAT, body)
    while not end.is_set():
        assert await fetch_answer(ray.http, CHAT, body) == expected


async def prefilled(ray: RunningRay, name: str) -> int:
    """Returns the number of prompts that prefill computed for a new prompt."""
    before = await ray.totals()
    await fetch_answer(ray.http, CHAT, chat(name, n=2, max_tokens=2))
    return (await ray.totals()).prefills - before.prefills


async def test_replicas_come_and_go_with_the_load_and_no_choice_is_lost(
    growing: RunningRay, undisturbed: Undisturbed
) -> None:
    assert not (await growing.status()).ready("prefill")
    lower_priority(map(engine_of, growing.replicas("decode")))
    end_leaving, end_staying = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as clients:
        for body, end in [*((body, end_staying) for body in STAYING), (LEAVING, end_leaving)]:
            clients.create_task(repeat(growing, body, undisturbed, end))
        # Prefill starts because the first prompts missed it, and gets the next one. A second decode replica starts
        # because eight choices exceed the target of one.
        await growing.until(lambda status: len(status.ready("prefill")) == 1, seconds=SCALED_S)
        assert await prefilled(growing, "newcomer") >= 1
        await growing.until(lambda status: len(status.ready("decode")) == 2, seconds=SCALED_S)
        assert (await growing.totals()).migrations == 0
        # Five choices do not: one replica is ended while they are generated, and its groups continue on the other one.
        end_leaving.set()
        smaller = await growing.until(lambda status: status.totals.migrations > 0, seconds=SCALED_S)
        assert smaller.totals.choices_resumed > 0
        end_staying.set()
    await growing.until(lambda status: status.idle(decode=1), seconds=SCALED_S)

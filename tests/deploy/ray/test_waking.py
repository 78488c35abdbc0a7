"""Prefill is called for where it was missed."""

import asyncio
from typing import Any

import pytest

from motet.deploy.ray.waking import LOOK_S, Waker, wake
from motet.errors import EngineError

pytestmark = pytest.mark.anyio


class Prefill:
    """Missed so often, and woken when the test says so."""

    def __init__(self) -> None:
        self.missed = 0
        self.calls = 0
        self.failing = False
        self.there = asyncio.Event()
        self.waits: list[float] = []
        self._look = asyncio.Event()
        self._looked = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self._looked.set()
        await self._look.wait()
        self._look.clear()

    async def wake(self) -> None:
        self.calls += 1
        if self.failing:
            raise EngineError("no node has room")
        self._looked.set()
        await self.there.wait()

    async def look(self) -> None:
        """Lets the waker look once, until it waits again: for the next look, or for prefill."""
        await self._looked.wait()
        self._looked.clear()
        self._look.set()
        await self._looked.wait()

    async def come(self) -> None:
        """Until the waker has seen it and waits for its next look."""
        self._looked.clear()
        self.there.set()
        await self._looked.wait()

    def waker(self) -> Waker:
        return Waker(lambda: self.missed, self.wake, wait=self.wait)


async def test_prefill_that_nobody_misses_is_left_alone() -> None:
    prefill = Prefill()
    prefill.missed = 5  # before the waker came
    waker = prefill.waker()
    await prefill.look()
    await prefill.look()
    await waker.close()
    assert (prefill.calls, set(prefill.waits)) == (0, {LOOK_S})


async def test_one_call_waits_for_a_replica_however_many_groups_miss_it() -> None:
    prefill = Prefill()
    waker = prefill.waker()
    await prefill.look()
    prefill.missed = 1
    await prefill.look()
    prefill.missed = 7
    assert prefill.calls == 1
    await prefill.come()
    await prefill.look()
    assert prefill.calls == 1  # those were missed before it came
    prefill.missed = 8
    await prefill.look()
    assert prefill.calls == 2  # it has gone again
    await waker.close()


async def test_a_call_that_fails_is_made_again_when_prefill_is_missed_again() -> None:
    prefill = Prefill()
    prefill.failing = True
    waker = prefill.waker()
    await prefill.look()
    prefill.missed = 1
    await prefill.look()
    assert prefill.calls == 1
    await prefill.look()
    assert prefill.calls == 1
    prefill.missed = 2
    await prefill.look()
    assert prefill.calls == 2
    await waker.close()


async def test_it_ends_while_its_call_waits() -> None:
    prefill = Prefill()
    waker = prefill.waker()
    await prefill.look()
    prefill.missed = 1
    await prefill.look()
    assert prefill.calls == 1
    await waker.close()
    await waker.close()


class EndedHandle:
    """Of a deployment that was taken down while it was called: Ray cancels the call."""

    def __getattr__(self, name: str) -> Any:
        return self

    async def remote(self) -> None:
        raise asyncio.CancelledError


async def test_a_call_that_ends_with_its_deployment_has_failed_like_any_other() -> None:
    """It ended the waker, and prefill was never called for again."""
    with pytest.raises(EngineError, match="ended before it answered"):
        await wake(EndedHandle())

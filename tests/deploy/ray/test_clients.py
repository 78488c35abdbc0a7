"""A replica with clients notices that Serve is ending it, and starts prefill replicas where groups miss them."""

import asyncio
from typing import Any, cast

import pytest

from motet.deploy.ray.clients import LEAST_S, LOOK_S, OVERDUE_S, ClientStreams, Interest, call_for_prefill, wake
from motet.deploy.ray.directory import Handle
from motet.errors import DirectoryError, EngineDiedError, EngineError
from tests.deploy.ray.directories import ended

pytestmark = pytest.mark.anyio


class Serve:
    """Serve's controller, which ends a replica or does not. `waits` counts the seconds that the replica has looked."""

    def __init__(self) -> None:
        self.ends_one = True
        self.times_asked = 0
        self.waits = 0
        self.until: dict[int, str] = {}
        self.interest = Interest(self._answers, wait=self._wait)

    async def _answers(self) -> bool:
        self.times_asked += 1
        return self.ends_one

    async def _wait(self, seconds: float) -> None:
        assert seconds == 1.0
        self.waits += 1
        match self.until.get(self.waits):
            case "asks":
                self.interest.asked()
            case "ends nobody":
                self.ends_one = False
            case "ends one":
                self.ends_one = True
        if self.waits > 1000:
            await asyncio.Event().wait()


EVENTS: dict[str, tuple[dict[int, str], float, int]] = {
    "one that is not asked any more is being ended": ({}, 30.0, 30),
    # counted from the last question, which came within the 45th second
    "one that is asked stays": ({20: "asks", 45: "asks"}, 30.0, 74),
    "a controller that is away ends nobody": ({10: "ends nobody", 500: "ends one"}, 30.0, 9 + 490 + 21),
    "the shortest time leaves room for a controller that is busy": ({}, 0.0, int(LEAST_S)),
}
"""The events by second, the limit, and the second in which the replica notices."""


@pytest.mark.parametrize(("until", "limit_s", "waits"), EVENTS.values(), ids=EVENTS)
async def test_a_replica_notices_that_it_is_being_ended(until: dict[int, str], limit_s: float, waits: int) -> None:
    serve = Serve()
    serve.interest.asked()
    serve.until = until
    await serve.interest.lost(limit_s)
    assert serve.waits == waits


async def test_only_a_replica_that_the_controller_passes_over_asks_it() -> None:
    """The controller's answer tells of all replicas. If all of them asked together, it would be busy."""
    serve = Serve()
    serve.interest.asked()
    serve.until = dict.fromkeys(range(3, 60, 3), "asks")
    await serve.interest.lost(10.0)
    assert serve.waits == 57 + 9
    assert serve.times_asked == 10 - OVERDUE_S


async def test_a_replica_that_was_never_asked_is_still_starting() -> None:
    serve = Serve()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(serve.interest.lost(30.0), timeout=0.2)
    assert serve.waits > 1000


class Prefill:
    """Counts calls for prefill, which `missed` groups lacked. The test lets time pass with `look`."""

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
        """Lets prefill come, and returns when the waker has seen it and waits for its next look."""
        self._looked.clear()
        self.there.set()
        await self._looked.wait()

    def waker(self) -> "asyncio.Task[None]":
        return asyncio.create_task(call_for_prefill(lambda: self.missed, self.wake, wait=self.wait))


async def test_prefill_that_nobody_misses_is_left_alone() -> None:
    prefill = Prefill()
    prefill.missed = 5  # missed before the waker started
    waker = prefill.waker()
    await prefill.look()
    await prefill.look()
    await ended(waker)
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
    assert prefill.calls == 1  # they were missed before prefill came
    prefill.missed = 8
    await prefill.look()
    assert prefill.calls == 2  # prefill has gone again
    await ended(waker)


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
    await ended(waker)


async def test_it_ends_while_its_call_waits() -> None:
    prefill = Prefill()
    waker = prefill.waker()
    await prefill.look()
    prefill.missed = 1
    await prefill.look()
    assert prefill.calls == 1
    await ended(waker)


class EndedHandle:
    """A handle of a deployment that ended during the call, which Ray then cancels."""

    def __getattr__(self, name: str) -> Any:
        return self

    async def remote(self) -> None:
        raise asyncio.CancelledError


async def test_a_call_that_ends_with_its_deployment_counts_as_failed() -> None:
    """This used to end the waker, and prefill was never called for again."""
    with pytest.raises(DirectoryError, match="ended before it answered"):
        await wake(EndedHandle())


async def ends_nobody() -> bool:
    return False


class Unwatched:
    """A server whose figures cannot be read."""

    def __init__(self) -> None:
        self.serving = self.service = self.config = self.workforce = self.router = self
        self.drain_timeout_s = 30.0

    def figures(self) -> None:
        raise LookupError("nobody counts")

    def check(self) -> None:
        """The server itself is well."""

    async def close(self) -> None: ...


async def test_a_replica_whose_task_has_failed_is_unhealthy() -> None:
    """Nobody used to look at the tasks: prefill was never called for again, unnoticed."""
    server: Any = Unwatched()
    streams = ClientStreams(server, cast(Handle, EndedHandle()), one_is_ended=ends_nobody)
    streams.check()
    await asyncio.sleep(0)
    with pytest.raises(EngineDiedError, match="lost contact") as caught:
        streams.check()
    assert isinstance(caught.value.__cause__, LookupError)
    await streams.close()

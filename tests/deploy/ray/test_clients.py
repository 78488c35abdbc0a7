"""A replica with clients detects that Serve is ending it, and requests prefill replicas that groups need."""

import asyncio
from typing import Any, cast

import pytest

from motet.deploy.ray.clients import (
    MIN_UNCHECKED_S,
    OVERDUE_S,
    POLL_S,
    ClientStreams,
    EndDetector,
    request_prefill,
    wake,
)
from motet.deploy.ray.directory import Handle
from motet.errors import DirectoryError, EngineDiedError, EngineError
from tests.deploy.ray.directories import ended

pytestmark = pytest.mark.anyio


class Serve:
    """Serve's controller, which is ending a replica or not. `now_s` is the time in seconds, counted by the replica."""

    def __init__(self) -> None:
        self.any_ending = True
        self.num_queries = 0
        self.now_s = 0
        self.events: dict[int, str] = {}
        self.detector = EndDetector(self._any_ending, sleep=self._sleep)

    async def _any_ending(self) -> bool:
        self.num_queries += 1
        return self.any_ending

    async def _sleep(self, seconds: float) -> None:
        assert seconds == 1.0
        self.now_s += 1
        match self.events.get(self.now_s):
            case "health check":
                self.detector.record_health_check()
            case "none ending":
                self.any_ending = False
            case "one ending":
                self.any_ending = True
        if self.now_s > 1000:
            await asyncio.Event().wait()


EVENTS: dict[str, tuple[dict[int, str], float, int]] = {
    "a replica without health checks is being ended": ({}, 30.0, 30),
    # counted from the last health check, in the 45th second
    "a replica with health checks stays": ({20: "health check", 45: "health check"}, 30.0, 74),
    "a controller that is unavailable ends no replica": ({10: "none ending", 500: "one ending"}, 30.0, 9 + 490 + 21),
    "the minimum time allows for a busy controller": ({}, 0.0, int(MIN_UNCHECKED_S)),
}
"""Events by second, the limit, and the second in which the replica detects its end."""


@pytest.mark.parametrize(("events", "limit_s", "detected_s"), EVENTS.values(), ids=EVENTS)
async def test_a_replica_detects_that_it_is_being_ended(
    events: dict[int, str], limit_s: float, detected_s: int
) -> None:
    serve = Serve()
    serve.detector.record_health_check()
    serve.events = events
    await serve.detector.wait(limit_s)
    assert serve.now_s == detected_s


async def test_only_a_replica_with_overdue_health_checks_queries_the_controller() -> None:
    """The controller's answer covers all replicas. If all replicas queried it at the same time, it would be busy."""
    serve = Serve()
    serve.detector.record_health_check()
    serve.events = dict.fromkeys(range(3, 60, 3), "health check")
    await serve.detector.wait(10.0)
    assert serve.now_s == 57 + 9
    assert serve.num_queries == 10 - OVERDUE_S


async def test_a_replica_without_a_first_health_check_is_still_starting() -> None:
    serve = Serve()
    waiting = asyncio.create_task(serve.detector.wait(30.0))
    while serve.now_s <= 1000:
        assert not waiting.done()
        await asyncio.sleep(0)
    await ended(waiting)
    assert waiting.cancelled()


class Prefill:
    """Counts calls for prefill, which `missed` groups lacked. `poll` lets the task under test check once."""

    def __init__(self) -> None:
        self.missed = 0
        self.calls = 0
        self.failing = False
        self.started = asyncio.Event()
        self.sleeps_s: list[float] = []
        self._poll = asyncio.Event()
        self._idle = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.sleeps_s.append(seconds)
        self._idle.set()
        await self._poll.wait()
        self._poll.clear()

    async def wake(self) -> None:
        self.calls += 1
        if self.failing:
            raise EngineError("no node has enough resources")
        self._idle.set()
        await self.started.wait()

    async def poll(self) -> None:
        """Lets the task check once, and returns when it waits for the next check or for prefill."""
        await self._idle.wait()
        self._idle.clear()
        self._poll.set()
        await self._idle.wait()

    async def start(self) -> None:
        """Ends the call for prefill, and returns when the task waits for its next check."""
        self._idle.clear()
        self.started.set()
        await self._idle.wait()

    def task(self) -> "asyncio.Task[None]":
        return asyncio.create_task(request_prefill(lambda: self.missed, self.wake, sleep=self.sleep))


async def test_prefill_is_not_requested_unless_groups_miss_it() -> None:
    prefill = Prefill()
    prefill.missed = 5  # missed before the task started
    task = prefill.task()
    await prefill.poll()
    await prefill.poll()
    await ended(task)
    assert (prefill.calls, set(prefill.sleeps_s)) == (0, {POLL_S})


async def test_one_call_waits_for_a_replica_for_any_number_of_groups() -> None:
    prefill = Prefill()
    task = prefill.task()
    await prefill.poll()
    prefill.missed = 1
    await prefill.poll()
    prefill.missed = 7
    assert prefill.calls == 1
    await prefill.start()
    await prefill.poll()
    assert prefill.calls == 1  # the groups missed prefill before it started
    prefill.missed = 8
    await prefill.poll()
    assert prefill.calls == 2  # prefill has ended again
    await ended(task)


async def test_a_failed_call_is_repeated_when_prefill_is_missed_again() -> None:
    prefill = Prefill()
    prefill.failing = True
    task = prefill.task()
    await prefill.poll()
    prefill.missed = 1
    await prefill.poll()
    assert prefill.calls == 1
    await prefill.poll()
    assert prefill.calls == 1
    prefill.missed = 2
    await prefill.poll()
    assert prefill.calls == 2
    await ended(task)


async def test_it_can_be_cancelled_while_its_call_waits() -> None:
    prefill = Prefill()
    task = prefill.task()
    await prefill.poll()
    prefill.missed = 1
    await prefill.poll()
    assert prefill.calls == 1
    await ended(task)


class EndedHandle:
    """A handle of a deployment that ends during the call, which Ray then cancels."""

    def __getattr__(self, name: str) -> Any:
        return self

    async def remote(self) -> None:
        raise asyncio.CancelledError


async def test_a_call_that_ends_with_its_deployment_counts_as_failed() -> None:
    """Regression: this ended the task, and prefill was never requested again."""
    with pytest.raises(DirectoryError, match="ended before it answered"):
        await wake(EndedHandle())


async def none_ending() -> bool:
    return False


class UnreadableServer:
    """A server whose figures cannot be read."""

    def __init__(self) -> None:
        self.serving = self.service = self.config = self.workforce = self.router = self
        self.drain_timeout_s = 30.0

    def figures(self) -> None:
        raise LookupError("no figures")

    def check(self) -> None:
        """The server itself is healthy."""

    async def close(self) -> None: ...


async def test_a_replica_whose_task_has_failed_is_unhealthy() -> None:
    """Regression: the tasks were not checked, and without them prefill was never requested again."""
    server: Any = UnreadableServer()
    streams = ClientStreams(server, cast(Handle, EndedHandle()), any_ending=none_ending)
    streams.check()
    await asyncio.sleep(0)
    with pytest.raises(EngineDiedError, match="lost contact") as caught:
        streams.check()
    assert isinstance(caught.value.__cause__, LookupError)
    await streams.close()

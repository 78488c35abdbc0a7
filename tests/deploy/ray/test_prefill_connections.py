"""Decode workers connect to prefill workers, in any order of starts, deaths and restarts."""

import asyncio
from collections.abc import Sequence

import pytest

from motet.deploy.ray.directory import Announcement, DirectoryCopy, DirectoryVersion, Listing, WorkerStage
from motet.deploy.ray.prefill_connections import PrefillConnections, until_connected
from motet.transfer.orders import FailureKind, TransferError
from motet.transfer.ticket import TransferAddress
from motet.types import Role
from tests.clock import settle
from tests.deploy.ray.directories import FakeDirectory, ended, worker

pytestmark = pytest.mark.anyio


class ListedWorkers:
    """A worker's copy of the directory, in which the test lists workers."""

    def __init__(self) -> None:
        self.copy = DirectoryCopy(FakeDirectory())
        self._number = 0

    def list(self, *workers: Announcement) -> None:
        self._number += 1
        self.copy.apply(Listing(version=DirectoryVersion("directory", self._number), settled=True, workers=workers))


class Decode(ListedWorkers):
    """A decode worker and its connections. Prefill engines in `hang` do not answer; engines in `refuse` refuse."""

    def __init__(self, *, hang: Sequence[str] = (), refuse: Sequence[str] = (), limit_s: float = 60.0) -> None:
        super().__init__()
        self.engine_id = "own"
        self.calls: list[str] = []
        """Engine ids of all calls to connect."""
        self.open = 0
        self.notifications = 0
        self._hang = hang
        self._refuse = refuse
        self._called = asyncio.Event()
        self._notified = asyncio.Event()
        self.connections = PrefillConnections(
            self._connect, lambda: self.engine_id, on_connected=self._notify, limit_s=limit_s
        )

    async def __aenter__(self) -> "Decode":
        self.keeping = asyncio.create_task(self.connections.keep(self.copy, poll_s=0.001))
        return self

    async def __aexit__(self, *_: object) -> None:
        await ended(self.keeping)
        assert self.open == 0

    async def until_called(self, *engine_ids: str) -> None:
        """Returns when these are the engine ids of all calls to connect."""
        while sorted(self.calls) != sorted(engine_ids):
            self._called.clear()
            await self._called.wait()

    async def until_no_call_is_open(self) -> None:
        while self.open:
            self._called.clear()
            await self._called.wait()

    async def until_connected(self, *engine_ids: str) -> None:
        while self.connected != engine_ids:
            self._notified.clear()
            await self._notified.wait()

    async def all_connected(self) -> tuple[str, ...]:
        await self.connections.all_connected(self.copy)
        return self.connected

    @property
    def connected(self) -> tuple[str, ...]:
        return self.connections.connected_of(self.copy.workers)

    def _notify(self) -> None:
        self.notifications += 1
        self._notified.set()

    async def _connect(self, address: TransferAddress) -> None:
        self.calls.append(address.engine_id)
        self._called.set()
        self.open += 1
        try:
            if address.engine_id in self._hang:
                await asyncio.Event().wait()
            if address.engine_id in self._refuse:
                raise TransferError("another cluster key", FailureKind.REFUSED)
        finally:
            self.open -= 1
            self._called.set()


def prefill(engine_id: str, stage: WorkerStage = WorkerStage.CONNECTING) -> Announcement:
    return worker(f"{engine_id}'s", Role.PREFILL, stage, engine_id=engine_id)


async def test_decode_connects_to_all_listed_prefill_workers_and_to_no_others() -> None:
    async with Decode() as decode:
        decode.list(
            prefill("a", WorkerStage.CONNECTING),
            prefill("b"),
            prefill("leaving", WorkerStage.LEAVING),
            worker("decode", Role.DECODE, engine_id="c"),
            worker("without", Role.PREFILL),
        )
        assert await decode.all_connected() == ("a", "b")
        assert (sorted(decode.calls), decode.notifications) == (["a", "b"], 2)


async def test_without_prefill_workers_decode_does_not_wait() -> None:
    async with Decode() as decode:
        assert await decode.all_connected() == ()


async def test_a_worker_that_comes_later_is_connected_once() -> None:
    async with Decode() as decode:
        decode.list(prefill("a"))
        await decode.all_connected()
        decode.list(prefill("a"), prefill("b", WorkerStage.CONNECTING))
        await decode.all_connected()
        decode.list(prefill("a"), prefill("b"))
        assert await decode.all_connected() == ("a", "b")
        assert decode.calls == ["a", "b"]


async def test_a_prefill_worker_with_a_new_engine_is_connected_again() -> None:
    async with Decode() as decode:
        decode.list(prefill("a"))
        await decode.all_connected()
        decode.list(prefill("a2"))
        assert await decode.all_connected() == ("a2",)


async def test_a_restarted_engine_of_the_worker_connects_to_all_again() -> None:
    async with Decode() as decode:
        decode.list(prefill("a"), prefill("b"))
        await decode.all_connected()
        decode.engine_id = "newer"
        await decode.until_called("a", "a", "b", "b")
        assert await decode.all_connected() == ("a", "b")


async def test_an_engine_that_dies_while_it_connects_has_no_connections(caplog: pytest.LogCaptureFixture) -> None:
    hang = ["a"]
    async with Decode(hang=hang) as decode:
        decode.list(prefill("a"))
        await decode.until_called("a")
        hang.clear()
        decode.engine_id = "newer"
        assert await decode.all_connected() == ("a",)
        assert (decode.calls, decode.notifications) == (["a", "a"], 1)
    assert caplog.text == ""


async def test_a_worker_that_does_not_answer_delays_no_other() -> None:
    """Regression: workers that came during this time waited until the connection timed out."""
    async with Decode(hang=["silent"]) as decode:
        decode.list(prefill("silent"), prefill("a"))
        await decode.until_connected("a")
        decode.list(prefill("silent"), prefill("a"), prefill("b"))
        await decode.until_connected("a", "b")


async def test_a_connection_without_an_answer_ends_after_its_limit(caplog: pytest.LogCaptureFixture) -> None:
    async with Decode(hang=["silent"], limit_s=0.01) as decode:
        decode.list(prefill("silent"))
        assert await decode.all_connected() == ("silent",)
    assert "cannot fetch from silent at 127.0.0.1:1: no answer within 0.01 s" in caplog.text


async def test_a_worker_that_refuses_is_not_called_again(caplog: pytest.LogCaptureFixture) -> None:
    async with Decode(refuse=["a"]) as decode:
        decode.list(prefill("a"))
        assert await decode.all_connected() == ("a",)
        decode.list(prefill("a"), worker("other"))
        await decode.all_connected()
        assert decode.calls == ["a"]
    assert "another cluster key" in caplog.text


async def test_decode_does_not_wait_for_a_worker_that_leaves_while_it_connects() -> None:
    async with Decode(hang=["a"]) as decode:
        decode.list(prefill("a"))
        waiting = asyncio.ensure_future(decode.all_connected())
        await decode.until_called("a")
        decode.list()
        assert await waiting == ()
        await decode.until_no_call_is_open()


async def test_no_call_is_open_after_the_end() -> None:
    async with Decode(hang=["a", "b"]) as decode:
        decode.list(prefill("a"), prefill("b"))
        await decode.until_called("a", "b")
        assert decode.open == 2
    assert (decode.open, decode.connected) == (0, ())


class Prefill(ListedWorkers):
    """A prefill worker that waits until all decode workers have connected to it."""

    def __init__(self, *, limit_s: float = 60.0) -> None:
        super().__init__()
        self.engine_id = "a"
        self._limit_s = limit_s

    def waiting(self) -> "asyncio.Task[None]":
        return asyncio.ensure_future(until_connected(lambda: self.engine_id, self.copy, limit_s=self._limit_s))


def decoding(*connected: str, stage: WorkerStage = WorkerStage.READY, id: str = "decode") -> Announcement:
    return worker(id, Role.DECODE, stage, connected=connected)


async def is_waiting(task: "asyncio.Task[None]") -> bool:
    await settle()
    return not task.done()


async def test_prefill_waits_for_every_decode_worker_that_stays() -> None:
    prefill = Prefill()
    prefill.list(decoding("other"), decoding("a", id="second"), decoding(id="leaving", stage=WorkerStage.LEAVING))
    task = prefill.waiting()
    assert await is_waiting(task)
    prefill.list(decoding("a", "other"), decoding("a", id="second"))
    await task


async def test_prefill_does_not_wait_without_decode_workers() -> None:
    prefill = Prefill()
    prefill.list(worker("gateway"), worker("itself", Role.PREFILL, engine_id="a"))
    await prefill.waiting()


async def test_prefill_stops_waiting_when_the_last_unconnected_worker_is_gone() -> None:
    prefill = Prefill()
    prefill.list(decoding())
    task = prefill.waiting()
    assert await is_waiting(task)
    prefill.list()
    await task


async def test_prefill_with_a_restarted_engine_waits_for_connections_to_that_engine() -> None:
    """Regression: it waited for connections to its former engine, for the maximum time."""
    prefill = Prefill()
    prefill.list(decoding())
    task = prefill.waiting()
    prefill.engine_id = "a2"
    prefill.list(decoding("a"))
    assert await is_waiting(task)
    prefill.list(decoding("a2"))
    await task


async def test_prefill_waits_at_most_until_its_limit(caplog: pytest.LogCaptureFixture) -> None:
    prefill = Prefill(limit_s=0.01)
    prefill.list(decoding(id="dead"))
    await prefill.waiting()
    assert "not connected within 0.01 s by dead: reports ready without them" in caplog.text


async def test_an_unexpected_error_ends_the_task() -> None:
    """The worker's health check fails then, and its replica is replaced."""

    async def connect(address: TransferAddress) -> None:
        raise ZeroDivisionError

    copy = DirectoryCopy(FakeDirectory())
    copy.apply(Listing(version=DirectoryVersion("directory", 1), settled=True, workers=(prefill("a"),)))
    connections = PrefillConnections(connect, lambda: "own")
    with pytest.raises(ExceptionGroup):
        await connections.keep(copy, poll_s=1.0)

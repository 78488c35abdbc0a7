"""Decode and prefill workers meet, in whatever order they come, die and are started again."""

import asyncio
from collections.abc import Sequence

import pytest

from motet.deploy.ray.directory import Announcement, DirectoryCopy, DirectoryVersion, Listing, WorkerStage
from motet.deploy.ray.meeting import PrefillConnections, until_met
from motet.transfer.orders import FailureKind, TransferError
from motet.transfer.ticket import TransferAddress
from motet.types import Role
from tests.deploy.ray.directories import FakeDirectory, ended, worker

pytestmark = pytest.mark.anyio


class Listens:
    """A worker that hears which workers are listed."""

    def __init__(self) -> None:
        self.following = DirectoryCopy(FakeDirectory())
        self._number = 0

    def list(self, *workers: Announcement) -> None:
        self._number += 1
        self.following.take(Listing(version=DirectoryVersion("directory", self._number), settled=True, workers=workers))


class Decode(Listens):
    """A decode worker's engine and its meeting. Prefill engines in `hang` do not answer, those in `refuse` say no."""

    def __init__(self, *, hang: Sequence[str] = (), refuse: Sequence[str] = (), limit_s: float = 60.0) -> None:
        super().__init__()
        self.engine_id = "own"
        self.connected: list[str] = []
        self.open = 0
        self.told = 0
        self._hang = hang
        self._refuse = refuse
        self._asked = asyncio.Event()
        self._news = asyncio.Event()
        self.meeting = PrefillConnections(self._connect, lambda: self.engine_id, on_met=self._tell, limit_s=limit_s)

    async def __aenter__(self) -> "Decode":
        self.keeping = asyncio.create_task(self.meeting.keep(self.following, look_s=0.001))
        return self

    async def __aexit__(self, *_: object) -> None:
        await ended(self.keeping)
        assert self.open == 0

    async def until_asked(self, *engine_ids: str) -> None:
        """Returns once it has begun to connect to these, each as often as it is named."""
        while sorted(self.connected) != sorted(engine_ids):
            self._asked.clear()
            await self._asked.wait()

    async def until_none_is_asked(self) -> None:
        while self.open:
            self._asked.clear()
            await self._asked.wait()

    async def until_met(self, *engine_ids: str) -> None:
        while self.met != engine_ids:
            self._news.clear()
            await self._news.wait()

    async def all_met(self) -> tuple[str, ...]:
        await self.meeting.all_met(self.following)
        return self.met

    @property
    def met(self) -> tuple[str, ...]:
        return self.meeting.met_of(self.following.workers)

    def _tell(self) -> None:
        self.told += 1
        self._news.set()

    async def _connect(self, address: TransferAddress) -> None:
        self.connected.append(address.engine_id)
        self._asked.set()
        self.open += 1
        try:
            if address.engine_id in self._hang:
                await asyncio.Event().wait()
            if address.engine_id in self._refuse:
                raise TransferError("another cluster key", FailureKind.REFUSED)
        finally:
            self.open -= 1
            self._asked.set()


def prefill(engine_id: str, stage: WorkerStage = WorkerStage.MEETING) -> Announcement:
    return worker(f"of {engine_id}", Role.PREFILL, stage, engine_id=engine_id)


async def test_all_listed_prefill_workers_are_met_and_nobody_else() -> None:
    async with Decode() as decode:
        decode.list(
            prefill("a", WorkerStage.MEETING),
            prefill("b"),
            prefill("leaving", WorkerStage.LEAVING),
            worker("decode", Role.DECODE, engine_id="c"),
            worker("without", Role.PREFILL),
        )
        assert await decode.all_met() == ("a", "b")
        assert (sorted(decode.connected), decode.told) == (["a", "b"], 2)


async def test_without_prefill_workers_there_is_nobody_to_wait_for() -> None:
    async with Decode() as decode:
        assert await decode.all_met() == ()


async def test_a_worker_that_comes_later_is_met_once() -> None:
    async with Decode() as decode:
        decode.list(prefill("a"))
        await decode.all_met()
        decode.list(prefill("a"), prefill("b", WorkerStage.MEETING))
        await decode.all_met()
        decode.list(prefill("a"), prefill("b"))
        assert await decode.all_met() == ("a", "b")
        assert decode.connected == ["a", "b"]


async def test_a_prefill_worker_with_a_new_engine_is_connected_again() -> None:
    async with Decode() as decode:
        decode.list(prefill("a"))
        await decode.all_met()
        decode.list(prefill("a2"))
        assert await decode.all_met() == ("a2",)


async def test_an_own_engine_that_was_started_again_meets_all_again() -> None:
    async with Decode() as decode:
        decode.list(prefill("a"), prefill("b"))
        await decode.all_met()
        decode.engine_id = "newer"
        await decode.until_asked("a", "a", "b", "b")
        assert await decode.all_met() == ("a", "b")


async def test_an_own_engine_that_dies_while_it_meets_has_met_nobody(caplog: pytest.LogCaptureFixture) -> None:
    hang = ["a"]
    async with Decode(hang=hang) as decode:
        decode.list(prefill("a"))
        await decode.until_asked("a")
        hang.clear()
        decode.engine_id = "newer"
        assert await decode.all_met() == ("a",)
        assert (decode.connected, decode.told) == (["a", "a"], 1)
    assert caplog.text == ""


async def test_a_worker_that_does_not_answer_holds_up_no_other() -> None:
    """Everybody who came meanwhile used to wait until it was given up, and so did those who waited to be met."""
    async with Decode(hang=["silent"]) as decode:
        decode.list(prefill("silent"), prefill("a"))
        await decode.until_met("a")
        decode.list(prefill("silent"), prefill("a"), prefill("b"))
        await decode.until_met("a", "b")


async def test_a_worker_that_does_not_answer_is_given_up_in_time(caplog: pytest.LogCaptureFixture) -> None:
    async with Decode(hang=["silent"], limit_s=0.01) as decode:
        decode.list(prefill("silent"))
        assert await decode.all_met() == ("silent",)
    assert "cannot fetch from silent at 127.0.0.1:1: no answer within 0.01 s" in caplog.text


async def test_a_worker_that_refuses_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    async with Decode(refuse=["a"]) as decode:
        decode.list(prefill("a"))
        assert await decode.all_met() == ("a",)
        decode.list(prefill("a"), worker("other"))
        await decode.all_met()
        assert decode.connected == ["a"]
    assert "another cluster key" in caplog.text


async def test_a_worker_that_leaves_while_it_is_met_is_not_waited_for() -> None:
    async with Decode(hang=["a"]) as decode:
        decode.list(prefill("a"))
        waiting = asyncio.ensure_future(decode.all_met())
        await decode.until_asked("a")
        decode.list()
        assert await waiting == ()
        await decode.until_none_is_asked()


async def test_nobody_is_being_met_once_the_meeting_has_ended() -> None:
    async with Decode(hang=["a", "b"]) as decode:
        decode.list(prefill("a"), prefill("b"))
        await decode.until_asked("a", "b")
        assert decode.open == 2
    assert (decode.open, decode.met) == (0, ())


class Prefill(Listens):
    """A prefill worker that waits until it is met."""

    def __init__(self, *, limit_s: float = 60.0) -> None:
        super().__init__()
        self.engine_id = "a"
        self._limit_s = limit_s

    def waiting(self) -> "asyncio.Task[None]":
        return asyncio.ensure_future(until_met(lambda: self.engine_id, self.following, limit_s=self._limit_s))


def decoding(*met: str, stage: WorkerStage = WorkerStage.READY, id: str = "decode") -> Announcement:
    return worker(id, Role.DECODE, stage, met=met)


async def is_waiting(task: "asyncio.Task[None]") -> bool:
    await asyncio.wait([task], timeout=0.01)
    return not task.done()


async def test_prefill_waits_for_every_decode_worker_that_stays() -> None:
    prefill = Prefill()
    prefill.list(decoding("other"), decoding("a", id="second"), decoding(id="leaving", stage=WorkerStage.LEAVING))
    task = prefill.waiting()
    assert await is_waiting(task)
    prefill.list(decoding("a", "other"), decoding("a", id="second"))
    await task


async def test_prefill_waits_for_nobody_where_nobody_fetches() -> None:
    prefill = Prefill()
    prefill.list(worker("gateway"), worker("itself", Role.PREFILL, engine_id="a"))
    await prefill.waiting()


async def test_prefill_stops_waiting_when_the_last_worker_that_has_not_met_it_is_gone() -> None:
    prefill = Prefill()
    prefill.list(decoding())
    task = prefill.waiting()
    assert await is_waiting(task)
    prefill.list()
    await task


async def test_prefill_whose_engine_was_started_again_waits_until_that_one_is_met() -> None:
    """It used to wait until its former engine was met, for as long as it may wait."""
    prefill = Prefill()
    prefill.list(decoding())
    task = prefill.waiting()
    prefill.engine_id = "a2"
    prefill.list(decoding("a"))
    assert await is_waiting(task)
    prefill.list(decoding("a2"))
    await task


async def test_prefill_does_not_wait_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    prefill = Prefill(limit_s=0.01)
    prefill.list(decoding(id="dead"))
    await prefill.waiting()
    assert "not met within 0.01 s by dead: reports ready without them" in caplog.text


async def test_an_unexpected_error_ends_the_meeting() -> None:
    """The worker sees the error, and its replica is replaced."""

    async def connect(address: TransferAddress) -> None:
        raise ZeroDivisionError

    following = DirectoryCopy(FakeDirectory())
    following.take(Listing(version=DirectoryVersion("directory", 1), settled=True, workers=(prefill("a"),)))
    meeting = PrefillConnections(connect, lambda: "own")
    with pytest.raises(ExceptionGroup):
        await meeting.keep(following, look_s=1.0)

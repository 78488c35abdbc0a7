"""Replicas that exchange KV meet before one of them reports ready, and again whenever the other side was started anew.

    decode     connects to every prefill worker that is announced, and announces whom it has met
    prefill    is ready when every decode worker that is announced has met it

Nobody waits for ever: one that cannot be met within `MEET_S` is logged and done without; what cannot be fetched is
computed. Nobody waits for another one to be met either: each is met by itself.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping

from motet.deploy.ray.directory import Announcement, Stage
from motet.deploy.ray.following import Following
from motet.deploy.stop import first_of
from motet.errors import MotetError
from motet.transfer.ticket import TransferAddress
from motet.types import Role

logger = logging.getLogger(__name__)

MEET_S = 20.0

Connect = Callable[[TransferAddress], Awaitable[None]]
"""Raises MotetError if that cannot be."""


class Meeting:
    """Of one decode worker: whom it has met."""

    def __init__(
        self,
        connect: Connect,
        own: Callable[[], str],
        *,
        on_met: Callable[[], None] = lambda: None,
        limit_s: float = MEET_S,
    ) -> None:
        """`own`: its engine's id. One that was started again has met nobody. `on_met`: called when `met` has grown."""
        self._connect = connect
        self._own = own
        self._on_met = on_met
        self._limit_s = limit_s
        self._met: set[str] = set()
        self._met_by = own()
        self._one_more = asyncio.Event()
        self._under_way: dict[str, asyncio.Task[None]] = {}

    def met_of(self, workers: Iterable[Announcement]) -> tuple[str, ...]:
        """Engine ids of those of them that wait to be met, and were, or were given up; sorted, so that equal sets are
        equal announcements."""
        waiting = [worker for worker in workers if worker.stage is Stage.MEETING]
        return tuple(sorted(self._met & _prefill(waiting).keys()))

    async def keep(self, following: Following, *, look_s: float) -> None:
        """Meets whoever comes, until it is cancelled. `look_s`: between two looks whether its own engine is another."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                revision = following.revision
                self._greet(_prefill(following.workers), tasks)
                await first_of(following.change(revision), timeout_s=look_s)

    async def all_met(self, following: Following) -> None:
        """While it is kept: returns once all who are there now have been met, given up, or are gone."""
        wanted = _prefill(following.workers).keys()
        while True:
            self._one_more.clear()
            revision = following.revision
            if not (wanted & _prefill(following.workers).keys()) - self._met:
                return
            await first_of(self._one_more.wait(), following.change(revision))

    def _greet(self, prefill: Mapping[str, TransferAddress], tasks: asyncio.TaskGroup) -> None:
        """Begins to meet whom of them it has not met yet; those that are gone are forgotten."""
        gone = self._under_way.keys() - prefill.keys()
        if self._met_by != self._own():
            self._met_by, self._met = self._own(), set()
            gone = set(self._under_way)
        for engine_id in gone:
            self._under_way.pop(engine_id).cancel()
        self._met &= prefill.keys()
        for engine_id in prefill.keys() - self._met - self._under_way.keys():
            self._under_way[engine_id] = tasks.create_task(self._meet(prefill[engine_id]))

    async def _meet(self, address: TransferAddress) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                await self._connect(address)
        except (MotetError, TimeoutError) as error:
            said = error.message if isinstance(error, MotetError) else f"no answer within {self._limit_s:g} s"
            logger.warning("cannot fetch from %s at %s:%d: %s", address.engine_id, address.host, address.port, said)
        del self._under_way[address.engine_id]
        self._met.add(address.engine_id)
        self._one_more.set()
        self._on_met()


async def until_met(own: Callable[[], str], following: Following, *, limit_s: float = MEET_S) -> None:
    """Returns once every decode worker that is announced has met this prefill worker, whose engine has the id `own`, or
    the time is up."""
    try:
        async with asyncio.timeout(limit_s):
            while True:
                revision = following.revision
                if not _strangers(own(), following.workers):
                    return
                await following.change(revision)
    except TimeoutError:
        names = ", ".join(worker.id for worker in _strangers(own(), following.workers))
        logger.warning("not met within %g s by %s: ready all the same", limit_s, names)


def _strangers(engine_id: str, workers: Iterable[Announcement]) -> list[Announcement]:
    fetching = [worker for worker in workers if worker.role is Role.DECODE and worker.stage is not Stage.LEAVING]
    return [worker for worker in fetching if engine_id not in worker.met]


def _prefill(workers: Iterable[Announcement]) -> Mapping[str, TransferAddress]:
    """Where KV can be fetched, by engine id."""
    staying = [worker for worker in workers if worker.role is Role.PREFILL and worker.stage is not Stage.LEAVING]
    return {worker.transfer.engine_id: worker.transfer for worker in staying if worker.transfer is not None}

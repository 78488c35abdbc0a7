"""Replicas that exchange KV meet before one of them reports ready, and again whenever the other side was restarted.

    decode     connects to every prefill worker that is announced, and announces which ones it has met
    prefill    is ready when every decode worker that is announced has met it

If a worker cannot be met within `MEET_S`, this is logged, and decode computes the KV that it cannot fetch. Each worker
is met by itself, so none waits for another.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping

from motet.deploy.cell import Cell, prefill_members
from motet.deploy.ray.directory import Announcement, DirectoryCopy, ListedWorkers, WorkerStage
from motet.deploy.server import Serving
from motet.deploy.shutdown import first_of
from motet.engines.http import server_client
from motet.errors import MotetError
from motet.settings.gateway_config import GatewayConfig
from motet.transfer.ticket import TransferAddress
from motet.types import Role

logger = logging.getLogger(__name__)

MEET_S = 20.0


class PrefillConnections:
    """Knows which prefill workers one decode worker has met."""

    def __init__(
        self,
        connect: Callable[[TransferAddress], Awaitable[None]],
        own: Callable[[], str],
        *,
        on_met: Callable[[], None] = lambda: None,
        limit_s: float = MEET_S,
    ) -> None:
        """`connect`: raises MotetError; `own`: returns its engine's id; `on_met`: called after each meeting."""
        self._connect = connect
        self._own = own
        self._on_met = on_met
        self._limit_s = limit_s
        self._met: set[str] = set()
        self._met_by = own()
        self._one_more = asyncio.Event()
        self._under_way: dict[str, asyncio.Task[None]] = {}

    def met_of(self, workers: Iterable[Announcement]) -> tuple[str, ...]:
        """Returns the sorted engine ids of the waiting workers that it has met or given up."""
        waiting = [worker for worker in workers if worker.stage is WorkerStage.MEETING]
        return tuple(sorted(self._met & _prefill(waiting).keys()))

    async def keep(self, following: DirectoryCopy, *, look_s: float) -> None:
        """Meets every newcomer, until it is cancelled. `look_s`: time between two checks of its own engine."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                revision = following.revision
                self._greet(_prefill(following.workers), tasks)
                await first_of(following.change(revision), timeout_s=look_s)

    async def all_met(self, following: DirectoryCopy) -> None:
        """Returns once all workers that are there now were met, given up, or are gone. `keep` must run meanwhile."""
        wanted = _prefill(following.workers).keys()
        while True:
            self._one_more.clear()
            revision = following.revision
            if not (wanted & _prefill(following.workers).keys()) - self._met:
                return
            await first_of(self._one_more.wait(), following.change(revision))

    def _greet(self, prefill: Mapping[str, TransferAddress], tasks: asyncio.TaskGroup) -> None:
        """Begins to meet workers that it has not met yet, and forgets those that are gone."""
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


async def until_met(own: Callable[[], str], following: DirectoryCopy, *, limit_s: float = MEET_S) -> None:
    """Returns once every announced decode worker has met the prefill engine `own`, or the time is up."""
    try:
        async with asyncio.timeout(limit_s):
            while True:
                revision = following.revision
                if not _strangers(own(), following.workers):
                    return
                await following.change(revision)
    except TimeoutError:
        names = ", ".join(worker.id for worker in _strangers(own(), following.workers))
        logger.warning("not met within %g s by %s: reports ready without them", limit_s, names)


def _strangers(engine_id: str, workers: Iterable[Announcement]) -> list[Announcement]:
    fetching = [worker for worker in workers if worker.role is Role.DECODE and worker.stage is not WorkerStage.LEAVING]
    return [worker for worker in fetching if engine_id not in worker.met]


def _prefill(workers: Iterable[Announcement]) -> Mapping[str, TransferAddress]:
    """Returns the addresses where KV can be fetched, by engine id."""
    staying = [worker for worker in workers if worker.role is Role.PREFILL and worker.stage is not WorkerStage.LEAVING]
    return {worker.transfer.engine_id: worker.transfer for worker in staying if worker.transfer is not None}


@contextlib.asynccontextmanager
async def prefill_replicas(
    serving: Serving[Cell], following: DirectoryCopy, *, config: GatewayConfig
) -> AsyncIterator[asyncio.Task[None]]:
    """Makes the prefill replicas workers of a decode replica that serves clients itself. They join and leave with the
    directory, in the task that it yields; those that are there have joined when it is entered."""
    async with server_client() as client:
        members = prefill_members(
            serving.workforce,
            client,
            config=config,
            worker_key=serving.service.config.worker_key,
            drain_s=serving.service.config.drain_timeout_s,
            introduces=False,
            listed=ListedWorkers(following, (Role.PREFILL,)),
        )
        try:
            async with members.watched() as watching:
                yield watching
        finally:
            await members.close()

"""Connects decode replicas to prefill replicas: before a replica reports ready, and again after a restart.

    decode     connects to every announced prefill worker, and announces the workers to which it has connected
    prefill    is ready when every announced decode worker has connected to it

If a connection fails or takes longer than `CONNECT_S`, this is logged, and decode computes the KV that it cannot fetch.
All connections are made at the same time."""

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

CONNECT_S = 20.0


class PrefillConnections:
    """The connections of one decode worker to prefill workers."""

    def __init__(
        self,
        connect: Callable[[TransferAddress], Awaitable[None]],
        engine_id: Callable[[], str],
        *,
        on_connected: Callable[[], None] = lambda: None,
        limit_s: float = CONNECT_S,
    ) -> None:
        """`connect`: raises MotetError; `engine_id`: returns the id of this worker's engine; `on_connected`: called
        after each connection or failure."""
        self._connect = connect
        self._engine_id = engine_id
        self._on_connected = on_connected
        self._limit_s = limit_s
        self._connected: set[str] = set()
        """Ids of prefill engines to which the worker has connected, or could not connect."""
        self._connected_by = engine_id()
        """Id of this worker's engine that made these connections."""
        self._any_connected = asyncio.Event()
        self._connecting: dict[str, asyncio.Task[None]] = {}

    def connected_of(self, workers: Iterable[Announcement]) -> tuple[str, ...]:
        """Returns the value of `Announcement.connected`: sorted engine ids. `workers`: the listed workers."""
        waiting = [worker for worker in workers if worker.stage is WorkerStage.CONNECTING]
        return tuple(sorted(self._connected & _prefill(waiting).keys()))

    async def keep(self, directory: DirectoryCopy, *, poll_s: float) -> None:
        """Connects to new prefill workers until it is cancelled. `poll_s`: time between two checks of the engine id."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                revision = directory.revision
                self._update(_prefill(directory.workers), tasks)
                await first_of(directory.change(revision), timeout_s=poll_s)

    async def all_connected(self, directory: DirectoryCopy) -> None:
        """Returns when each prefill worker that is listed now is connected, has failed, or has left; needs `keep`."""
        expected = _prefill(directory.workers).keys()
        while True:
            self._any_connected.clear()
            revision = directory.revision
            if not (expected & _prefill(directory.workers).keys()) - self._connected:
                return
            await first_of(self._any_connected.wait(), directory.change(revision))

    def _update(self, prefill: Mapping[str, TransferAddress], tasks: asyncio.TaskGroup) -> None:
        """Starts to connect to new prefill workers, and removes workers that have left."""
        gone = self._connecting.keys() - prefill.keys()
        if self._connected_by != self._engine_id():
            self._connected_by, self._connected = self._engine_id(), set()
            gone = set(self._connecting)
        for engine_id in gone:
            self._connecting.pop(engine_id).cancel()
        self._connected &= prefill.keys()
        for engine_id in prefill.keys() - self._connected - self._connecting.keys():
            self._connecting[engine_id] = tasks.create_task(self._connect_to(prefill[engine_id]))

    async def _connect_to(self, address: TransferAddress) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                await self._connect(address)
        except (MotetError, TimeoutError) as error:
            reason = error.message if isinstance(error, MotetError) else f"no answer within {self._limit_s:g} s"
            logger.warning("cannot fetch from %s at %s:%d: %s", address.engine_id, address.host, address.port, reason)
        del self._connecting[address.engine_id]
        self._connected.add(address.engine_id)
        self._any_connected.set()
        self._on_connected()


async def until_connected(
    engine_id: Callable[[], str], directory: DirectoryCopy, *, limit_s: float = CONNECT_S
) -> None:
    """Waits until every announced decode worker has connected to the prefill engine `engine_id`, at most `limit_s`."""
    try:
        async with asyncio.timeout(limit_s):
            while True:
                revision = directory.revision
                if not _unconnected(engine_id(), directory.workers):
                    return
                await directory.change(revision)
    except TimeoutError:
        names = ", ".join(worker.id for worker in _unconnected(engine_id(), directory.workers))
        logger.warning("not connected within %g s by %s: reports ready without them", limit_s, names)


def _unconnected(engine_id: str, workers: Iterable[Announcement]) -> list[Announcement]:
    """Returns the decode workers that have not connected to this prefill engine."""
    fetching = [worker for worker in workers if worker.role is Role.DECODE and worker.stage is not WorkerStage.LEAVING]
    return [worker for worker in fetching if engine_id not in worker.connected]


def _prefill(workers: Iterable[Announcement]) -> Mapping[str, TransferAddress]:
    """Returns the addresses of the prefill workers that stay, by engine id."""
    staying = [worker for worker in workers if worker.role is Role.PREFILL and worker.stage is not WorkerStage.LEAVING]
    return {worker.transfer.engine_id: worker.transfer for worker in staying if worker.transfer is not None}


@contextlib.asynccontextmanager
async def prefill_replicas(
    serving: Serving[Cell], directory: DirectoryCopy, *, config: GatewayConfig
) -> AsyncIterator[asyncio.Task[None]]:
    """Adds the prefill replicas to the workers of a decode replica that serves clients directly. Yields the task in
    which they join and leave with the directory; the replicas that are listed at the start have joined by then."""
    async with server_client() as client:
        members = prefill_members(
            serving.workforce,
            client,
            config=config,
            worker_key=serving.service.config.worker_key,
            drain_s=serving.service.config.drain_timeout_s,
            connects_workers=False,
            listed=ListedWorkers(directory, (Role.PREFILL,)),
        )
        try:
            async with members.watched() as watching:
                yield watching
        finally:
            await members.close()

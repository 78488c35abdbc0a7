"""Events about cached prompt blocks: servers publish them for their engines, and gateways follow them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from motet.engine_info import EngineKind
from motet.engines.wire import EngineReport
from motet.errors import ConfigError
from motet.kv_events.changes import BlockChange, BlockListener, Cleared, Removed, Stored
from motet.kv_events.event_schema import MAX_BLOCKS
from motet.kv_events.follower import BlockSource
from motet.kv_events.publisher import BlockPublisher, PublisherOptions
from motet.routing.workers.prefix_index import PrefixIndex
from motet.settings.server_config import KVEventsConfig

logger = logging.getLogger(__name__)

Follow = Callable[[BlockSource, BlockListener], Awaitable[None]]
"""Passes the events of a source to a listener until it is cancelled."""


class BlockEvents:
    """The publisher of one worker's events. It outlives the worker's engine, at whose end all blocks are cleared."""

    def __init__(self, config: KVEventsConfig, number: int = 0) -> None:
        """`number`: the worker's number. Events use the port --kv-events-port + 2 * number, replays the next one."""
        self._config = config
        self._number = number
        self._publisher: BlockPublisher | None = None

    def listener(self, block_size: int) -> BlockListener | None:
        """Returns the listener for an engine's blocks; None without events. Raises ConfigError if a port is taken."""
        config, port = self._config, self._config.kv_events_port
        if port is None:
            return None
        if self._publisher is None:
            port = port and port + 2 * self._number
            options = PublisherOptions(
                block_size=block_size, host=config.kv_events_host, port=port, topic=config.kv_events_topic
            )
            self._publisher = BlockPublisher(options)
        return self._publisher.publish

    @property
    def endpoint(self) -> str | None:
        """Address for subscribers; None if there are no events, or before the engine has started."""
        return None if self._publisher is None else self._publisher.endpoint

    async def close(self) -> None:
        """Must be called after the engine is closed. Can be called twice."""
        if self._publisher is not None:
            await self._publisher.close()


def indexing(index: PrefixIndex, id: str) -> BlockListener:
    """Returns a listener that updates the index for one worker, and clears a worker with more than `MAX_BLOCKS`."""

    def apply(changes: Sequence[BlockChange]) -> None:
        for change in changes:
            match change:
                case Stored() if index.blocks(id) + len(change.names) > MAX_BLOCKS:
                    index.cleared(id)
                case Stored():
                    index.stored(id, change.names)
                case Removed():
                    index.removed(id, change.names)
                case Cleared():
                    index.cleared(id)

    return apply


class WorkerEventFollower:
    """Follows the events of one worker on another server. If that fails, the worker continues to be used."""

    def __init__(self, id: str, index: PrefixIndex, *, follow: Follow) -> None:
        self._id = id
        self._index = index
        self._follow = follow
        self._followed: tuple[str, str] | None = None
        """Id and endpoint of the engine that is followed."""
        self._task: asyncio.Task[None] | None = None

    async def follow(self, report: EngineReport) -> None:
        """Follows the engine of this report from now on."""
        followed = None if report.block_events is None else (report.engine_id, report.block_events)
        if followed == self._followed:
            return
        await self.stop()
        self._index.cleared(self._id)
        self._followed = followed
        if (endpoint := report.block_events) is None:
            return
        is_motet = report.info.kind is EngineKind.MOTET  # replays use the next port; other kinds report an endpoint
        try:
            source = BlockSource.of_motet(endpoint) if is_motet else BlockSource(endpoint, report.block_replay)
        except ConfigError as error:
            logger.warning("%s: %s", self._id, error.message)
        else:
            self._task = asyncio.create_task(self._run(source))

    async def stop(self) -> None:
        self._followed = None
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self, source: BlockSource) -> None:
        try:
            await self._follow(source, indexing(self._index, self._id))
        except Exception:
            logger.exception("block events of %s are not followed any more", self._id)

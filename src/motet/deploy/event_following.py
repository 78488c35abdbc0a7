"""Follows the block events of one worker elsewhere, as long as it is the same: what it tells goes into the index."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from motet.deploy.block_index import indexing
from motet.engines.wire import EngineReport
from motet.errors import ConfigError
from motet.kv_events.changes import BlockListener
from motet.kv_events.subscription import BlockSource
from motet.routing.prefix_index import PrefixIndex
from motet.types import EngineKind

logger = logging.getLogger(__name__)

Follow = Callable[[BlockSource, BlockListener], Awaitable[None]]
"""Runs until it is cancelled."""


class EventFollowing:
    """Of one worker. Trouble with its events is never trouble for the worker: then less is known of its blocks."""

    def __init__(self, id: str, index: PrefixIndex, follow: Follow) -> None:
        self._id = id
        self._index = index
        self._follow = follow
        self._followed: tuple[str, str] | None = None
        """Start of the worker, and where it tells."""
        self._task: asyncio.Task[None] | None = None

    async def follow(self, report: EngineReport) -> None:
        """From now on the worker that reports so."""
        wanted = None if report.block_events is None else (report.engine_id, report.block_events)
        if wanted == self._followed:
            return
        await self.stop()
        self._index.cleared(self._id)
        self._followed = wanted
        try:
            source = _source(report)
        except ConfigError as error:
            logger.warning("%s: %s", self._id, error.message)
        else:
            if source is not None:
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


def _source(report: EngineReport) -> BlockSource | None:
    """Where it tells of its blocks. Our own servers replay at the port after; others say where, if they do."""
    if report.block_events is None:
        return None
    if report.info.kind is EngineKind.MOTET:
        return BlockSource.ours(report.block_events)
    return BlockSource(report.block_events, report.block_replay)

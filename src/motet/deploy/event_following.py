"""Follows the block events of one worker elsewhere, as long as it is the same: what it tells goes into the index."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from motet.deploy.block_index import indexing
from motet.errors import ConfigError
from motet.kv_events.changes import BlockListener
from motet.kv_events.subscription import BlockSource
from motet.routing.prefix_index import PrefixIndex

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

    async def follow(self, engine_id: str, endpoint: str | None) -> None:
        """From now on this start of the worker, which tells there; None: nowhere."""
        wanted = None if endpoint is None else (engine_id, endpoint)
        if wanted == self._followed:
            return
        await self.stop()
        self._index.cleared(self._id)
        self._followed = wanted
        if endpoint is None:
            return
        try:
            source = BlockSource.ours(endpoint)
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

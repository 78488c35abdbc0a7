"""Tells others which prompt blocks each engine of a server has: a publisher for each, as long as the server runs.

    worker k    block events at --kv-events-port + 2k, replays at the port after

A worker keeps its publisher when its engine is started again: an engine that ends has said that its blocks are gone.
"""

from collections.abc import Sequence
from typing import Protocol

from motet.config import KVEventsConfig
from motet.kv_events.changes import BlockListener
from motet.kv_events.publisher import BlockPublisher, PublisherOptions
from motet.types import EngineInfo


class TellsOfBlocks(Protocol):
    """What is needed of an engine (`NativeEngine`)."""

    @property
    def info(self) -> EngineInfo: ...

    def listen_to_blocks(self, listener: BlockListener) -> None:
        """Before it is given a group."""
        ...


class BlockEvents:
    """The publishers of a server. Belongs to one event loop."""

    def __init__(self, config: KVEventsConfig, worker_ids: Sequence[str]) -> None:
        """`worker_ids`: all that there may be, in an order that does not change from start to start."""
        self._config = config
        self._worker_ids = list(worker_ids)
        self._publishers: dict[str, BlockPublisher] = {}

    def publish(self, worker_id: str, engine: TellsOfBlocks) -> str | None:
        """From now on others are told of the engine's blocks; call it before the engine is given a group, and again for
        the one that takes its place. Returns the endpoint to subscribe to, None if nobody is to be told. Raises
        ConfigError if the ports cannot be had."""
        if self._config.kv_events_port is None:
            return None
        publisher = self._publishers.get(worker_id)
        if publisher is None:
            publisher = self._publishers[worker_id] = BlockPublisher(self._options(worker_id, engine.info.block_size))
        engine.listen_to_blocks(publisher.publish)
        return publisher.endpoint

    def endpoint(self, worker_id: str) -> str | None:
        """None: nobody is told of its blocks, or not yet."""
        publisher = self._publishers.get(worker_id)
        return None if publisher is None else publisher.endpoint

    async def close(self) -> None:
        """After the engines. May be called twice."""
        for publisher in self._publishers.values():
            await publisher.close()

    def _options(self, worker_id: str, block_size: int) -> PublisherOptions:
        config, port = self._config, self._config.kv_events_port or 0
        if port:
            port += 2 * self._worker_ids.index(worker_id)
        return PublisherOptions(
            block_size=block_size, host=config.kv_events_host, port=port, topic=config.kv_events_topic
        )

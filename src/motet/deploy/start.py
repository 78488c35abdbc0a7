"""Starts engine processes side by side: all of them, or none."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from motet.config import EngineConfig
from motet.engines.base import Engine
from motet.kv_events.changes import BlockListener
from motet.transfer.ticket import TransferAddress


class LocalEngine(Engine, Protocol):
    """An engine in a process that was started here."""

    @property
    def died(self) -> asyncio.Event:
        """Set when the process has ended by itself, or was ended because it hung."""
        ...

    def listen_to_blocks(self, listener: BlockListener) -> None:
        """`listener` is told which prompt blocks it has. To be called before it is given a group."""
        ...

    async def connect(self, address: TransferAddress) -> None:
        """Makes ready to fetch KV from there. Raises `TransferError`."""
        ...


StartEngine = Callable[[EngineConfig], Awaitable[LocalEngine]]


async def start_engines(configs: Mapping[str, EngineConfig], start_engine: StartEngine) -> dict[str, LocalEngine]:
    """By worker id, as in `configs`. The first that cannot start ends the others, and so does being cancelled."""
    starting = [asyncio.ensure_future(start_engine(config)) for config in configs.values()]
    try:
        # Not gather, which would cancel them too when it is cancelled: being cancelled twice cuts their endings short.
        done, _ = await asyncio.wait(starting, return_when=asyncio.FIRST_EXCEPTION)
        if failure := next((error for start in done if (error := start.exception())), None):
            raise failure
        return {name: start.result() for name, start in zip(configs, starting, strict=True)}
    except BaseException:
        for start in starting:
            start.cancel()
        outcomes = await asyncio.gather(*starting, return_exceptions=True)
        await asyncio.gather(*(engine.close() for engine in outcomes if not isinstance(engine, BaseException)))
        raise

"""Workers that exchange KV get to know each other before a request needs it."""

import asyncio
import logging
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from motet.engines.base import Worker
from motet.errors import MotetError
from motet.routing.pairs import pair_key
from motet.transfer.ticket import TransferAddress
from motet.types import Role

logger = logging.getLogger(__name__)


@runtime_checkable
class Connecting(Protocol):
    """An engine that can be told to get to know another one."""

    async def connect(self, address: TransferAddress) -> None:
        """Raises MotetError if that cannot be."""
        ...


async def meet_all(newcomer: Worker, others: Iterable[Worker]) -> None:
    """Of every pair of decode and prefill worker with `newcomer` in it whose KV is alike, decode connects to prefill,
    all at once.

    Never raises: what cannot be fetched is computed.
    """
    key = pair_key(newcomer.engine.info)
    others = [other for other in others if other.id != newcomer.id and pair_key(other.engine.info) == key]
    if newcomer.engine.info.role is Role.PREFILL:
        pairs = [(other, newcomer) for other in others if other.engine.info.role is Role.DECODE]
    else:
        pairs = [(newcomer, other) for other in others if other.engine.info.role is Role.PREFILL]
    await asyncio.gather(*(_meet(decode, prefill) for decode, prefill in pairs))


async def _meet(decode: Worker, prefill: Worker) -> None:
    address = prefill.engine.info.transfer
    if address is None or not isinstance(decode.engine, Connecting):
        return
    try:
        await decode.engine.connect(address)
    except MotetError as exc:
        logger.warning("%s cannot fetch from %s: %s", decode.id, prefill.id, exc)

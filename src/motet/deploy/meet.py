"""Workers that exchange KV get to know each other before a request needs it."""

import asyncio
import logging
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import msgspec

from motet.engines.base import Engine, Worker
from motet.errors import MotetError
from motet.ids import new_request_id
from motet.routing.pairs import fetches, pair_key
from motet.transfer.ticket import TransferAddress
from motet.types import EngineKind, GenerateRequest, Role, SamplingParams, choice_starts

logger = logging.getLogger(__name__)

FIRST_TRANSFER_S = 5.0


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
    info = newcomer.engine.info
    others = [other for other in others if other.id != newcomer.id and pair_key(other.engine.info) == pair_key(info)]
    if info.role is Role.PREFILL:
        pairs = [(other, newcomer) for other in others if fetches(other.engine.info)]
    elif fetches(info):
        pairs = [(newcomer, other) for other in others if other.engine.info.role is Role.PREFILL]
    else:
        pairs = []
    await asyncio.gather(*(_meet(decode, prefill) for decode, prefill in pairs))


async def _meet(decode: Worker, prefill: Worker) -> None:
    address = prefill.engine.info.transfer
    try:
        if address is not None and isinstance(decode.engine, Connecting):
            await decode.engine.connect(address)
        elif decode.engine.info.kind is EngineKind.VLLM:
            async with asyncio.timeout(FIRST_TRANSFER_S):
                await _first_transfer(decode.engine, prefill.engine)
    except (MotetError, TimeoutError) as error:
        said = error.message if isinstance(error, MotetError) else f"nothing came within {FIRST_TRANSFER_S:g} s"
        logger.warning("%s cannot fetch from %s: %s", decode.id, prefill.id, said)


async def _first_transfer(decode: Engine, prefill: Engine) -> None:
    """Others' engines know no other way to meet than a transfer. Before it, one of vLLM's that is idle tells prefill of
    a ticket that nobody will use only when it is given something else to do: the prompt stays until its lease ends."""
    request = GenerateRequest(
        request_id=new_request_id("meet"),
        model=decode.info.model,
        prompt=(1, 2),
        choices=choice_starts(1, 0),
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        seeded=False,
    )
    ticket = await prefill.prefill(request)
    stream = decode.generate(msgspec.structs.replace(request, ticket=ticket))
    try:
        async for _ in stream:
            pass
    finally:
        await stream.aclose()
        await decode.release(ticket)

"""Connects workers that exchange KV before a request needs the connection."""

import asyncio
import logging
from collections.abc import Iterable

import msgspec

from motet.engine import ANSWERING, ControlledEngine, Engine, Worker
from motet.engine_info import EngineKind
from motet.engine_orders import Connect
from motet.errors import MotetError
from motet.ids import new_request_id
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.worker_facts import can_fetch, pair_key
from motet.types import GenerateRequest, Role, SamplingParams, choice_starts

logger = logging.getLogger(__name__)

FIRST_TRANSFER_S = 5.0


async def connect_to_fleet(worker: Worker, fleet: Fleet) -> None:
    """Connects a new worker to the workers that answer now. A connection to a dead worker would delay it."""
    answering = [member.worker for member in fleet.members if member.state in ANSWERING]
    await connect_pairs(worker, [other for other in answering if other is not None])


async def connect_pairs(worker: Worker, others: Iterable[Worker]) -> None:
    """Connects decode to prefill in every pair of `worker` and another worker that can exchange KV. Never raises."""
    info = worker.engine.info
    others = [other for other in others if other.id != worker.id and _can_pair(worker, other)]
    if info.role is Role.PREFILL:
        pairs = [(other, worker) for other in others if can_fetch(other.engine.info)]
    elif can_fetch(info):
        pairs = [(worker, other) for other in others if other.engine.info.role is Role.PREFILL]
    else:
        pairs = []
    await asyncio.gather(*(_connect(decode, prefill) for decode, prefill in pairs))


def _can_pair(worker: Worker, other: Worker) -> bool:
    """Returns True if the two can exchange KV. Warns if only their transports differ."""
    here, there = worker.engine.info, other.engine.info
    if pair_key(here)._replace(transfer_backend=there.transfer_backend) != pair_key(there):
        return False
    if here.transfer_backend == there.transfer_backend:
        return True
    if {here.role, there.role} == {Role.PREFILL, Role.DECODE}:
        logger.warning(
            "%s moves KV with %s, %s with %s, so they exchange none: give all workers the same --kv-transfer-backend",
            *(worker.id, here.transfer_backend, other.id, there.transfer_backend),
        )
    return False


async def _connect(decode: Worker, prefill: Worker) -> None:
    address = prefill.engine.info.transfer
    try:
        if address is not None and isinstance(decode.engine, ControlledEngine):
            await decode.engine.send(Connect(address))
        elif decode.engine.info.kind is EngineKind.VLLM:
            async with asyncio.timeout(FIRST_TRANSFER_S):
                await _first_transfer(decode.engine, prefill.engine)
    except (MotetError, TimeoutError) as error:
        reason = error.message if isinstance(error, MotetError) else f"no answer within {FIRST_TRANSFER_S:g} s"
        logger.warning("%s cannot fetch from %s: %s", decode.id, prefill.id, reason)


async def _first_transfer(decode: Engine, prefill: Engine) -> None:
    """Connects two vLLM engines by a transfer, since vLLM has no other way to connect them."""
    id = new_request_id("connect")
    request = GenerateRequest(
        request_id=id,
        trace=id,
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
        await decode.release(ticket, trace=request.trace)

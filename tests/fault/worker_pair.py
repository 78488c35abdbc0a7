"""A prefill and a decode engine in processes of their own, with NIXL between them, for tests of faults."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from motet.engine import Engine
from motet.engine_orders import Connect
from motet.engines.native.client import NativeEngine
from motet.engines.native.spawn import Spawn
from motet.errors import EngineError
from motet.metrics.stats import EngineStats
from motet.transfer.orders import FailureKind
from motet.transfer.ticket import Ticket, TransferAddress
from motet.types import GenerateRequest, Role
from tests.engines.native.drive import make_core, run
from tests.patience import PATIENCE_S
from tests.tiny_engine import engine_config


@dataclass
class WorkerPair:
    """P is the prefill engine, D the decode engine; `folder` has the model, `spawn` starts engine processes."""

    folder: Path
    spawn: Spawn
    p: NativeEngine
    d: NativeEngine
    started: list[NativeEngine] = field(default_factory=list)

    async def ticket(self, request: GenerateRequest, *, readers: int = 1) -> GenerateRequest:
        """Prefills the prompt on P, and returns the request with its ticket."""
        return msgspec.structs.replace(request, ticket=await self.p.prefill(request, readers=readers))

    async def meet(self) -> None:
        """Connects the two, as a cell does when it starts."""
        assert self.p.info.transfer is not None
        await self.d.send(Connect(self.p.info.transfer))

    async def pull_posted(self) -> None:
        """Waits until D's transfer thread has started the pull. The thread carries out orders in sequence, and polls
        every pull between two orders that arrived separately."""
        await until(self.d, lambda stats: stats.pulls_open == 1)
        with pytest.raises(EngineError, match="no address"):
            await self.d.send(Connect(TransferAddress("no-worker", "no address", 1)))

    async def start(self, role: Role, **changes: object) -> NativeEngine:
        """Starts another engine, which is closed with the others."""
        engine = await start(self.folder, self.spawn, role, **changes)
        self.started.append(engine)
        return engine

    async def check_decode(self, *, failure: FailureKind | None = None) -> EngineStats:
        """Checks that D holds nothing, and that one pull failed for this reason; without a reason, that no pull
        failed."""
        stats = await until(self.d, lambda s: s.pulls_open == 0)
        assert (stats.blocks_used, stats.blocks_pulling, stats.groups_running, stats.groups_waiting) == (0, 0, 0, 0)
        assert stats.transfer_failures == ({} if failure is None else {failure: 1})
        return stats

    async def check_prefill(self) -> EngineStats:
        """Checks that P keeps nothing for any reader."""
        stats = await until(self.p, lambda s: s.leases == 0)
        assert (stats.blocks_used, stats.groups_running, stats.groups_waiting) == (0, 0, 0)
        return stats


@asynccontextmanager
async def worker_pair(
    folder: Path, spawn: Spawn, *, prefill: dict[str, object] | None = None, decode: dict[str, object] | None = None
) -> AsyncIterator[WorkerPair]:
    """Starts both engines with these changed settings, and ends them afterwards."""
    engines = await asyncio.gather(
        start(folder, spawn, Role.PREFILL, **(prefill or {})),
        start(folder, spawn, Role.DECODE, **(decode or {})),
    )
    pair = WorkerPair(folder, spawn, *engines, started=[*engines])
    try:
        yield pair
    finally:
        for engine in pair.started:
            if not engine.died.is_set():
                send(engine, signal.SIGCONT)
        await asyncio.gather(*(engine.close() for engine in pair.started))


async def start(folder: Path, spawn: Spawn, role: Role, **changes: object) -> NativeEngine:
    """Starts an engine with time limits that are longer than a test, unless the test changes them."""
    fields = {"pull_timeout_s": PATIENCE_S, "heartbeat_timeout_s": 120.0, **changes}
    return await NativeEngine.start(engine_config(folder, role=role, **fields), spawn=spawn)


def send(engine: NativeEngine, number: signal.Signals) -> None:
    """Sends a signal to the engine's process."""
    assert engine.info.pid is not None
    os.kill(engine.info.pid, number)


def stop(engine: NativeEngine) -> None:
    """Stops the process, and returns when it has stopped: on a busy machine its threads run for some time after the
    signal."""
    send(engine, signal.SIGSTOP)
    assert engine.info.pid is not None
    os.waitid(os.P_PID, engine.info.pid, os.WSTOPPED)


async def kill(engine: NativeEngine) -> None:
    """Kills the process, and returns when its client knows that it is dead."""
    send(engine, signal.SIGKILL)
    await engine.died.wait()


async def until(engine: NativeEngine, holds: Callable[[EngineStats], bool]) -> EngineStats:
    """Polls the engine's figures until `holds` returns True, and returns them. The engine checks its state each
    time."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds(stats := await engine.stats(check=True)):
            pass  # each call waits for an answer of the engine
    return stats


async def answer(engine: Engine, request: GenerateRequest) -> dict[int, list[int]]:
    """Returns the tokens that the client of a group reads, by choice."""
    tokens: dict[int, list[int]] = {start.index: [] for start in request.choices}
    async with asyncio.timeout(PATIENCE_S):
        async for delta in engine.generate(request):
            for choice in delta.choices:
                tokens[choice.index] += choice.token_ids
    return tokens


def undisturbed(folder: Path, request: GenerateRequest, *, dtype: str = "float32") -> dict[int, list[int]]:
    """Returns the tokens that the client should get: the output of an engine without faults."""
    plain = msgspec.structs.replace(request, ticket=None)
    return run(make_core(folder, dtype=dtype), [plain])[request.request_id].tokens


def ticket_of(request: GenerateRequest) -> Ticket:
    assert request.ticket is not None
    return request.ticket

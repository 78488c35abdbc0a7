"""A prefill and a decode engine in processes of their own, with NIXL between them, for tests that break things."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from motet.engines.base import Engine
from motet.engines.native.client import NativeEngine
from motet.engines.native.spawn import Spawn
from motet.errors import EngineError
from motet.transfer.orders import FailureKind
from motet.transfer.ticket import Ticket, TransferAddress
from motet.types import EngineStats, GenerateRequest, Role
from tests.engines.native.drive import make_core, run
from tests.patience import PATIENCE_S
from tests.tiny_engine import engine_config

SECONDS = PATIENCE_S
"""Whatever goes wrong, a client has its answer by then on a busy machine too, and before a forgotten lease would end by
itself."""


@dataclass
class WorkerPair:
    """P and D; `folder` is the model, `spawn` starts engine processes."""

    folder: Path
    spawn: Spawn
    p: NativeEngine
    d: NativeEngine
    started: list[NativeEngine] = field(default_factory=list)

    async def ticket(self, request: GenerateRequest, *, readers: int = 1) -> GenerateRequest:
        """The request with its ticket, so that only decoding is left to do."""
        return msgspec.structs.replace(request, ticket=await self.p.prefill(request, readers=readers))

    async def meet(self) -> None:
        """Connects the two, as a cell does when it starts."""
        assert self.p.info.transfer is not None
        await self.d.connect(self.p.info.transfer)

    async def pull_posted(self) -> None:
        """D has ordered a pull, and its transfer thread has got round to it: the thread obeys in order, and looks at
        every pull between two orders that did not come together."""
        await until(self.d, lambda stats: stats.pulls_open == 1)
        with pytest.raises(EngineError, match="no address"):
            await self.d.connect(TransferAddress("nobody", "no address", 1))

    async def start(self, role: Role, **changes: object) -> NativeEngine:
        """Another engine, closed with the others."""
        engine = await start(self.folder, self.spawn, role, **changes)
        self.started.append(engine)
        return engine

    async def check_decode(self, *, failure: FailureKind | None = None) -> EngineStats:
        """D holds nothing, and has failed to pull for the reason given, once, or never."""
        stats = await until(self.d, lambda s: s.pulls_open == 0)
        assert (stats.blocks_used, stats.blocks_pulling, stats.groups_running, stats.groups_waiting) == (0, 0, 0, 0)
        assert stats.transfer_failures == ({} if failure is None else {failure: 1})
        return stats

    async def check_prefill(self) -> EngineStats:
        """P keeps nothing for anybody."""
        stats = await until(self.p, lambda s: s.leases == 0)
        assert (stats.blocks_used, stats.groups_running, stats.groups_waiting) == (0, 0, 0)
        return stats


@asynccontextmanager
async def worker_pair(
    folder: Path, spawn: Spawn, *, prefill: dict[str, object] | None = None, decode: dict[str, object] | None = None
) -> AsyncIterator[WorkerPair]:
    """Both started, and whatever is left of them ended; settings beside the default ones for each."""
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
    """With more patience than a test takes: what the other worker makes of one that is stopped is asked here."""
    fields = {"pull_timeout_s": 30.0, "heartbeat_timeout_s": 120.0, **changes}
    return await NativeEngine.start(engine_config(folder, role=role, **fields), spawn=spawn)


def send(engine: NativeEngine, number: signal.Signals) -> None:
    """A signal to an engine's process."""
    assert engine.info.pid is not None
    os.kill(engine.info.pid, number)


def stop(engine: NativeEngine) -> None:
    """Returns when it stands still: on a busy machine its threads go on for a while after the signal was sent."""
    send(engine, signal.SIGSTOP)
    assert engine.info.pid is not None
    os.waitid(os.P_PID, engine.info.pid, os.WSTOPPED)


async def kill(engine: NativeEngine) -> None:
    """Returns when it is gone, and known to be."""
    send(engine, signal.SIGKILL)
    await engine.died.wait()


async def until(engine: NativeEngine, holds: Callable[[EngineStats], bool]) -> EngineStats:
    """The first figures for which `holds` is true; the engine's own checks pass in each."""
    async with asyncio.timeout(SECONDS):
        while not holds(stats := await engine.stats(check=True)):
            pass  # each look is a question to the engine and waits for its answer
    return stats


async def answer(engine: Engine, request: GenerateRequest) -> dict[int, list[int]]:
    """What the client of a group sees, choice by choice."""
    tokens: dict[int, list[int]] = {start.index: [] for start in request.choices}
    async with asyncio.timeout(SECONDS):
        async for delta in engine.generate(request):
            for choice in delta.choices:
                tokens[choice.index] += choice.token_ids
    return tokens


def undisturbed(folder: Path, request: GenerateRequest, *, dtype: str = "float32") -> dict[int, list[int]]:
    """What it should see."""
    plain = msgspec.structs.replace(request, ticket=None)
    return run(make_core(folder, dtype=dtype), [plain])[request.request_id].tokens


def ticket_of(request: GenerateRequest) -> Ticket:
    assert request.ticket is not None
    return request.ticket

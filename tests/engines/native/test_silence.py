"""Engine processes that hang or only seem to hang, with real processes, real signals and a tiny model."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from motet.engines.native.client import NativeEngine
from motet.engines.native.spawn import Spawn
from motet.errors import EngineDiedError, EngineSilentError
from motet.types import Role
from tests.engines.native.drive import group, prompt_of
from tests.engines.native.test_process import engine, idle, parent_of, pipe_folders, tokens_of
from tests.forked import ForkingProcess
from tests.patience import PATIENCE_S
from tests.tiny_engine import engine_config
from tests.tiny_models import save_tiny_model

Tiny = Callable[[str], Path]
pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SILENCE_S = 1.0
LONG_PROMPT = 16_000
"""Number of tokens of a prompt whose prefill, in one step, takes seconds."""


def stop(native: NativeEngine) -> None:
    """Stops the engine process, and returns when it has stopped."""
    assert native.info.pid is not None
    os.kill(native.info.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, native.info.pid, os.WSTOPPED)


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model for long prompts."""
    folder = save_tiny_model("llama", tmp_path_factory.mktemp("long"))
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"max_position_embeddings": 1024', '"max_position_embeddings": 16384'))
    return folder


@asynccontextmanager
async def in_one_step(
    folder: Path, spawn: Spawn, *, heartbeat_timeout_s: float, **changes: object
) -> AsyncIterator[NativeEngine]:
    """Starts an engine that runs a long prompt in a single step."""
    async with engine(
        folder,
        spawn=spawn,
        max_model_len=16384,
        max_num_batched_tokens=16384,
        kv_cache_gb=0.05,
        kernels="torch",
        heartbeat_timeout_s=heartbeat_timeout_s,
        **changes,
    ) as native:
        yield native


async def test_groups_and_orders_of_a_stopped_engine_end_and_it_is_killed(
    tiny: Tiny, forking: ForkingProcess, caplog: pytest.LogCaptureFixture
) -> None:
    silence_s = 5.0
    async with engine(tiny("llama"), spawn=forking.spawn, heartbeat_timeout_s=silence_s, role=Role.PREFILL) as native:
        stream = native.generate(group("g", prompt_of(20), n=3, max_tokens=450))
        await anext(stream)
        stopped_s = time.monotonic()
        stop(native)
        orders = [
            asyncio.ensure_future(native.stats()),
            asyncio.ensure_future(native.prefill(group("p", prompt_of(40)))),
        ]
        with pytest.raises(EngineSilentError, match=rf"process {native.info.pid} has sent no heartbeat for \d+\.\d s"):
            async for _ in stream:
                pass
        assert silence_s / 2 < time.monotonic() - stopped_s < PATIENCE_S
        for outcome in await asyncio.gather(*orders, return_exceptions=True):
            assert isinstance(outcome, EngineSilentError)
        await asyncio.wait_for(native.died.wait(), PATIENCE_S)
        assert native.info.pid is not None and not psutil.pid_exists(native.info.pid)
        with pytest.raises(EngineDiedError):
            await native.stats()
        (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert str(native.info.pid) in record.getMessage()


async def test_an_engine_that_continues_in_time_is_not_killed(tiny: Tiny, forking: ForkingProcess) -> None:
    async with engine(tiny("llama"), spawn=forking.spawn, heartbeat_timeout_s=60.0) as native:
        answer = asyncio.ensure_future(tokens_of(native, group("g", prompt_of(20), n=2, max_tokens=400)))
        stop(native)
        os.kill(native.info.pid or 0, signal.SIGCONT)
        assert [len(tokens) for tokens in (await answer).values()] == [400, 400]
        assert await idle(native)


async def test_a_stopped_engine_can_be_closed(tiny: Tiny, forking: ForkingProcess) -> None:
    async with engine(tiny("llama"), spawn=forking.spawn, heartbeat_timeout_s=60.0) as native:
        stop(native)
        await native.close(timeout_s=SILENCE_S)
        assert not native.died.is_set()


@pytest.mark.long
async def test_an_engine_in_a_long_step_is_not_killed(long_model: Path, forking: ForkingProcess) -> None:
    async with in_one_step(long_model, forking.spawn, heartbeat_timeout_s=SILENCE_S) as native:
        started_s = time.monotonic()
        tokens = await tokens_of(native, group("long", prompt_of(LONG_PROMPT), max_tokens=2))
        assert time.monotonic() - started_s > 2 * SILENCE_S, "the step is too short for this test"
        assert len(tokens[0]) == 2


async def test_an_engine_whose_step_does_not_end_is_killed(long_model: Path, forking: ForkingProcess) -> None:
    async with in_one_step(long_model, forking.spawn, heartbeat_timeout_s=60.0, step_timeout_s=0.5) as native:
        with pytest.raises(EngineSilentError, match=r"has been in one step for \d"):
            await tokens_of(native, group("long", prompt_of(LONG_PROMPT), max_tokens=2))
        await asyncio.wait_for(native.died.wait(), PATIENCE_S)


async def test_a_parent_that_was_busy_or_stopped_does_not_kill_its_engine(tiny: Tiny, forking: ForkingProcess) -> None:
    silence_s = 3.0
    async with parent_of(engine_config(tiny("llama"), heartbeat_timeout_s=silence_s), forking) as (parent, child):
        assert parent.stdin is not None and parent.stdout is not None
        parent.stdin.write(b"busy\n")
        assert await parent.stdout.readline() == b"False\n"
        assert psutil.pid_exists(child)
        os.kill(parent.pid, signal.SIGSTOP)
        await asyncio.sleep(1.5 * silence_s)  # this time passes for the engine, but not for its parent
        os.kill(parent.pid, signal.SIGCONT)
        parent.stdin.write(b"check\n")
        parent.stdin.write_eof()
        assert await parent.stdout.read() == b"False\nFalse\n"
        assert await parent.wait() == 0
    assert not pipe_folders(parent.pid)

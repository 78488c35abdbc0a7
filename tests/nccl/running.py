"""Runs a trainer beside a test, and looks at what a server keeps for it."""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from motet.config import environment
from tests.nccl.trainer import Plan

ROOT = Path(__file__).parents[2]


class RunningTrainer:
    """The process of a trainer."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def says(self, line: str) -> None:
        """Returns when it has said this line, which must be the next one."""
        assert self._process.stdout is not None
        assert (await self._process.stdout.readline()).decode().strip() == line

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()


@contextlib.asynccontextmanager
async def trainer(plan: Plan) -> AsyncIterator[RunningTrainer]:
    """Starts a trainer, which is killed at the end."""
    command = (sys.executable, "-m", "tests.nccl.trainer")
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, cwd=ROOT, env=environment())
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(plan) + b"\n")
    running = RunningTrainer(process)
    try:
        yield running
    finally:
        await running.kill()
        process.stdin.close()


def open_files() -> int:
    """Returns the number of files in memory that this process has open."""
    return sum("memfd:motet" in os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())

"""Runs a trainer next to a test."""

import contextlib
from asyncio.subprocess import Process
from collections.abc import AsyncIterator

import msgspec

from tests.forked import ForkingProcess
from tests.nccl.trainer import Plan


class RunningTrainer:
    """A trainer in a process of its own."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def prints(self, line: str) -> None:
        """Waits for the next line of the trainer, which must be this one."""
        assert self._process.stdout is not None
        assert (await self._process.stdout.readline()).decode().strip() == line

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


@contextlib.asynccontextmanager
async def trainer(plan: Plan, forking: ForkingProcess) -> AsyncIterator[RunningTrainer]:
    """Runs a trainer with this plan, and kills it at the end."""
    process = await forking.start_module("tests.nccl.trainer")
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(plan) + b"\n")
    running = RunningTrainer(process)
    try:
        yield running
    finally:
        await running.kill()
        process.stdin.close()

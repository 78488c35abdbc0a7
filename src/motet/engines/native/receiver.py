"""The server's side of the process that receives tensors over NCCL (`engines.native.cuda.receive`).

The server itself stays without torch and NCCL, and whatever happens to a trainer ends that process and nothing else:

    join      an old process is ended, a new one is started and joins the trainer's group
    receive   it writes what the trainer broadcasts to a file in the server's memory
    close     it is killed. So it is if it fails, if it takes too long, or if nobody waits for it any more

If this process ends, however it does, the other sees its standard input end and goes too.
"""

import asyncio
import contextlib
import sys
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from motet.engine import TrainerGroup, Workers
from motet.engines.native.spawn import engine_environ
from motet.errors import EngineError
from motet.models.checkpoint import TensorFacts
from motet.settings.server_config import environment

LIBRARY = "libnccl.so.2"
"""The name under which torch for CUDA has loaded it."""
TIMEOUT_S = 300.0
"""Seconds for all ranks to meet, and for the tensors of one announcement to come; vLLM's trainers wait as long."""
PROGRAM = "motet.engines.native.cuda.receive"


class Join(msgspec.Struct, frozen=True, tag=True):
    """Comes first, and once."""

    group: TrainerGroup
    device: str
    library: str
    timeout_s: float


class Receive(msgspec.Struct, frozen=True, tag=True):
    """The trainer broadcasts these tensors next."""

    tensors: tuple[TensorFacts, ...]
    path: str
    """The file that they are written to."""
    at: int
    """Where in it the first one begins."""


Order = Join | Receive


class Answer(msgspec.Struct, frozen=True):
    """Says that an order is done."""

    error: str | None = None
    """What went wrong."""


async def start_receiving() -> Process:
    """Starts the process. Raises EngineError."""
    try:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", PROGRAM),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=engine_environ(environment()),
        )
    except OSError as error:
        raise EngineError(f"the process that receives cannot be started: {error}") from error


def cuda_device(workers: Workers) -> str | None:
    """Returns the device on which tensors for these engines are received: that of one here, or the first GPU of this
    machine if only engines elsewhere have one. None if no engine runs on a GPU."""
    for report in workers.reports():
        if report.worker is not None and report.worker.engine.info.device.startswith("cuda"):
            return report.worker.engine.info.device if report.worker.local else "cuda"
    return None


class NcclReceiver:
    """The receiver of one server. It has a process from `join` to `close`."""

    def __init__(
        self,
        choose_device: Callable[[], str | None],
        *,
        library: str = LIBRARY,
        timeout_s: float = TIMEOUT_S,
        start: Callable[[], Awaitable[Process]] = start_receiving,
    ) -> None:
        """`choose_device`: returns the device that receives; None if there is none that could."""
        self._choose_device = choose_device
        self._library = library
        self._timeout_s = timeout_s
        self._start = start
        self._process: Process | None = None
        self._one_at_a_time = asyncio.Lock()
        self.joined = False
        """True from a join to `close`, even if the group has broken meanwhile."""

    @property
    def device(self) -> str | None:
        return self._choose_device()

    @property
    def pid(self) -> int | None:
        """That of its process, if there is one."""
        return None if self._process is None else self._process.pid

    async def join(self, group: TrainerGroup) -> None:
        """Leaves the group before, and returns when all ranks of the new one have met. Raises EngineError."""
        await self.close()
        async with self._one_at_a_time:
            await self.close()
            if (device := self.device) is None:
                raise EngineError("no engine of this server runs on a GPU")
            self._process = await self._start()
            await self._ask(Join(group, device, self._library, self._timeout_s))
            self.joined = True

    async def receive(self, tensors: Sequence[TensorFacts], path: Path, *, at: int) -> None:
        """Returns when the trainer has sent all these tensors and they are in the file from `at` on. Raises
        EngineError; then the group is broken."""
        async with self._one_at_a_time:
            await self._ask(Receive(tuple(tensors), str(path), at))

    async def close(self) -> None:
        """Leaves the group. What waits for the trainer fails. May be called at any time, twice too."""
        self.joined = False
        await self._end()

    async def _ask(self, order: Order) -> None:
        process = self._process
        if process is None:
            raise EngineError("the group with the trainer has ended: POST /init_weight_transfer_engine makes a new one")
        assert process.stdin is not None and process.stdout is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                process.stdin.write(msgspec.json.encode(order) + b"\n")
                with contextlib.suppress(ConnectionError):  # it has ended, and has perhaps said why
                    await process.stdin.drain()
                line = await process.stdout.readline()
            error = msgspec.json.decode(line, type=Answer).error if line else "the process that receives has ended"
        except TimeoutError:
            error = f"the trainer has not done its part within {self._timeout_s:g} s"
        except BaseException:
            await self._end()
            raise
        if error is not None:
            await self._end()
            raise EngineError(error)

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()

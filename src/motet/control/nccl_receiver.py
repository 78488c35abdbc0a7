"""The server's side of the process that receives a trainer's tensors over NCCL (`engines.native.cuda.receive`).

The server itself loads neither torch nor NCCL. A fault of a trainer ends the receiving process and nothing else:

    join      ends an old process, and starts a new one, which joins the trainer's group
    receive   makes the process write the tensors that the trainer broadcasts to a file in the server's memory
    close     kills the process. It is also killed if it fails, takes too long, or the caller is cancelled

If the server ends in any way, the process's standard input ends, and the process ends too."""

import asyncio
import contextlib
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from motet.engine import WorkerReport
from motet.errors import EngineError
from motet.models.checkpoint import TensorFacts
from motet.models.trainer_group import JoinGroup, ReceiverAnswer, ReceiverOrder, ReceiveTensors, TrainerGroup

LIBRARY = "libnccl.so.2"
"""The name under which torch for CUDA has loaded NCCL."""
TIMEOUT_S = 300.0
"""Seconds in which all ranks must join, or the tensors of one announcement arrive; vLLM's trainers wait as long."""


def cuda_device(workers: Iterable[WorkerReport]) -> str | None:
    """Returns the device on which tensors for these workers are received: the device of a local engine, or the first
    GPU of this machine if only engines on other servers have a GPU. Returns None if no engine runs on a GPU."""
    for report in workers:
        if report.worker is not None and report.worker.engine.info.device.startswith("cuda"):
            return report.worker.engine.info.device if report.worker.local else "cuda"
    return None


class NcclReceiver:
    """The receiver of one server. It has a process from `join` to `close`."""

    def __init__(
        self,
        choose_device: Callable[[], str | None],
        *,
        start: Callable[[], Awaitable[Process]],
        library: str = LIBRARY,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`choose_device`: returns the device that receives; None if no engine of the server runs on a GPU."""
        self._choose_device = choose_device
        self._start = start
        self._library = library
        self._timeout_s = timeout_s
        self._process: Process | None = None
        self._one_at_a_time = asyncio.Lock()
        self.joined = False
        """True from `join` to `close`, even if the group has failed since."""

    @property
    def device(self) -> str | None:
        return self._choose_device()

    @property
    def pid(self) -> int | None:
        """Process id of the receiving process, or None if it does not run."""
        return None if self._process is None else self._process.pid

    async def join(self, group: TrainerGroup) -> None:
        """Leaves the previous group, and waits until all ranks of the new group have joined. Raises EngineError."""
        await self.close()
        async with self._one_at_a_time:
            await self.close()
            if (device := self.device) is None:
                raise EngineError("no engine of this server runs on a GPU")
            self._process = await self._start()
            await self._send(JoinGroup(group, device, self._library, self._timeout_s))
            self.joined = True

    async def receive(self, tensors: Sequence[TensorFacts], path: Path, *, at: int) -> None:
        """Waits until all tensors are in the file, from offset `at` on. Raises EngineError, which ends the group."""
        async with self._one_at_a_time:
            await self._send(ReceiveTensors(tuple(tensors), str(path), at))

    async def close(self) -> None:
        """Leaves the group. A join or receive that is running fails. Can be called at any time, and twice."""
        self.joined = False
        await self._end()

    async def _send(self, order: ReceiverOrder) -> None:
        process = self._process
        if process is None:
            raise EngineError("the group with the trainer has ended: POST /init_weight_transfer_engine makes a new one")
        assert process.stdin is not None and process.stdout is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                process.stdin.write(msgspec.json.encode(order) + b"\n")
                with contextlib.suppress(ConnectionError):  # the process has ended, and can have reported the reason
                    await process.stdin.drain()
                line = await process.stdout.readline()
            error = msgspec.json.decode(line, type=ReceiverAnswer).error if line else "the receiving process has ended"
        except TimeoutError:
            error = f"the trainer did not do its part within {self._timeout_s:g} s"
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

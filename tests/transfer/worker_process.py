"""A worker in a separate process, which tests stop and kill. Its argument is a `WorkerSettings`.

1. It prints its `WorkerDescription` as one line of JSON.
2. It polls every millisecond, and prints each message that it receives.
3. For each description of another worker on standard input it reads all blocks of that worker, and prints `arriving`
   when the first bytes have arrived.
4. It ends when its standard input is closed.
"""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from motet.transfer.transport import PostedRead, RegisteredMemory
from tests.forked import ForkingProcess
from tests.patience import PATIENCE_S
from tests.transfer.memory import EVERY_TRANSPORT, KVMemory, Side


class WorkerSettings(msgspec.Struct):
    """Settings with which a worker starts."""

    name: str
    transport: str
    """A key of `EVERY_TRANSPORT`."""
    block_bytes: int
    seed: int


class WorkerDescription(msgspec.Struct):
    """Description and memory that other workers need to read from a worker."""

    description: bytes
    memory: RegisteredMemory


class WorkerProcess:
    """A test's handle on a worker."""

    def __init__(self, forking: ForkingProcess, settings: WorkerSettings) -> None:
        command = [sys.executable, "-m", "tests.transfer.worker_process", msgspec.json.encode(settings).decode()]
        self._process = forking.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.description = msgspec.json.decode(self.line(), type=WorkerDescription)

    def line(self) -> str:
        """Waits for the next line that the worker prints. Returns an empty line if it has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def read_from(self, other: WorkerDescription) -> None:
        """Makes the worker read all blocks of another worker."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(other).decode() + "\n")
        self._process.stdin.flush()

    def signal(self, number: int) -> None:
        """Sends a signal. After SIGSTOP, waits until all threads of the worker have stopped."""
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def wait(self) -> int:
        return self._process.wait(timeout=PATIENCE_S)

    def end(self) -> None:
        """Ends the worker, whether it is stopped, dead or alive."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


@contextmanager
def worker_process(forking: ForkingProcess, settings: WorkerSettings) -> Iterator[WorkerProcess]:
    process = WorkerProcess(forking, settings)
    try:
        yield process
    finally:
        process.end()


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1], type=WorkerSettings)
    kv = KVMemory(block_bytes=settings.block_bytes, seed=settings.seed)
    side = Side(EVERY_TRANSPORT[settings.transport]()(settings.name, kv.memory), kv)
    write_line(msgspec.json.encode(WorkerDescription(side.transport.describe(), kv.memory)).decode())
    reads: list[PostedRead] = []
    before = kv.blocks[0, 0].copy()
    while True:
        side.poll()
        while side.inbox:
            write_line(side.inbox.pop(0).decode())
        if reads and (kv.blocks[0, 0] != before).any():
            write_line("arriving")
            before = kv.blocks[0, 0].copy()
        if select.select([0], [], [], 0.001)[0]:
            line = os.read(0, 1_000_000)
            if not line:
                break
            owner = msgspec.json.decode(line, type=WorkerDescription)
            name = side.transport.connect(owner.description, owner.memory)
            reads.append(side.read(name, [(block, block) for block in range(kv.memory.num_blocks)]))
    side.transport.close()


def write_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()

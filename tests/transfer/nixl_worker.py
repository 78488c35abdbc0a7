"""A worker in a process of its own, which tests stop and kill. Its argument is an `Order`.

It says who it is in one line of JSON, polls every millisecond, and prints each message it gets. Told about another
worker on standard input, it reads that one's blocks, and prints `landing` when the first bytes are here. It ends when
standard input does.
"""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from motet.transfer.nixl import NixlTransport
from motet.transfer.transport import PostedRead, RegisteredMemory
from tests.forked import ForkingProcess
from tests.patience import PATIENCE_S
from tests.transfer.memory import KVMemory, Side


class Order(msgspec.Struct):
    """The settings with which a worker starts."""

    name: str
    ucx: dict[str, str]
    block_bytes: int
    seed: int


class Introduction(msgspec.Struct):
    """The description and memory that others need to read from a worker."""

    description: bytes
    memory: RegisteredMemory


class WorkerProcess:
    """The test's handle on a worker."""

    def __init__(self, forking: ForkingProcess, order: Order) -> None:
        command = [sys.executable, "-m", "tests.transfer.nixl_worker", msgspec.json.encode(order).decode()]
        self._process = forking.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.introduction = msgspec.json.decode(self.line(), type=Introduction)

    def line(self) -> str:
        """Waits for the next line it prints; empty if it has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def tell(self, other: Introduction) -> None:
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
def worker_process(forking: ForkingProcess, order: Order) -> Iterator[WorkerProcess]:
    process = WorkerProcess(forking, order)
    try:
        yield process
    finally:
        process.end()


def main() -> None:
    order = msgspec.json.decode(sys.argv[1], type=Order)
    kv = KVMemory(block_bytes=order.block_bytes, seed=order.seed)
    side = Side(NixlTransport(order.name, kv.memory, ucx=order.ucx), kv)
    say(msgspec.json.encode(Introduction(side.transport.describe(), kv.memory)).decode())
    reads: list[PostedRead] = []
    before = kv.blocks[0, 0].copy()
    while True:
        side.attend()
        while side.inbox:
            say(side.inbox.pop(0).decode())
        if reads and (kv.blocks[0, 0] != before).any():
            say("landing")
            before = kv.blocks[0, 0].copy()
        if select.select([0], [], [], 0.001)[0]:
            line = os.read(0, 1_000_000)
            if not line:
                break
            owner = msgspec.json.decode(line, type=Introduction)
            name = side.transport.connect(owner.description, owner.memory)
            reads.append(side.read(name, [(block, block) for block in range(kv.memory.num_blocks)]))
    side.transport.close()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()

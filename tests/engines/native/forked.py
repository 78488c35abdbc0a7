"""Engine processes that are forked from one that has imported everything, for tests that start many.

    test ──socket──► forking process ──fork──► one that ends at once ──fork──► engine

Nine tenths of an engine's start are imports. What is forked runs what `python -m motet.engines.native` runs, is a child
of the test like any engine, and ends with its standard input. It is adopted: as the one between ends, its child becomes
the child of the nearest ancestor that said it would be (PR_SET_CHILD_SUBREAPER).

Tests of how an engine process begins use `spawn` itself.
"""

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

from motet.config import environment
from motet.engines.native.protocol import Launch
from motet.engines.native.spawn import with_short_waits

ROOT = Path(__file__).parents[3]
PR_SET_CHILD_SUBREAPER = 36
"""Of <sys/prctl.h>."""
MESSAGE_BYTES = 2**17
"""More than an environment has."""


class ForkingProcess:
    """From `with` to its end. `spawn` stands for that of `motet.engines.native.spawn`."""

    def __enter__(self) -> "ForkingProcess":
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.engines.native.forked", str(theirs.fileno())],
                cwd=ROOT,
                env=with_short_waits(environment()),
                pass_fds=(theirs.fileno(),),
                stdout=subprocess.DEVNULL,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        assert self._process.wait() == 0

    async def spawn(self, launch: Launch) -> "ForkedProcess":
        theirs, stdin = os.pipe()
        try:
            os.write(stdin, msgspec.json.encode(launch) + b"\n")
            pid = await asyncio.to_thread(self._fork, theirs)
        except BaseException:
            os.close(stdin)
            raise
        finally:
            os.close(theirs)
        return ForkedProcess(pid, stdin)

    def _fork(self, stdin: int) -> int:
        with self._lock, adopting():
            socket.send_fds(self._socket, [msgspec.json.encode(environment())], [stdin])
            return int(self._socket.recv(MESSAGE_BYTES))


class ForkedProcess:
    """An `EngineProcess`, which lives as long as `stdin` is open, or less."""

    def __init__(self, pid: int, stdin: int) -> None:
        self.pid = pid
        self._stdin = stdin
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._take_end)

    @property
    def returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        if not self._ended.done():
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _take_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        os.close(self._stdin)
        _, status = os.waitpid(self.pid, 0)
        self._ended.set_result(os.waitstatus_to_exitcode(status))


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Whoever loses its parent meanwhile becomes a child of this process."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0)


def fork_when_asked(orders: socket.socket) -> int:
    """Returns an exit code: in this process when nobody can ask any more, in each engine when that has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as engines do; whoever asks will hang up
    gc.disable()
    from motet.engines.native.process import main as run_engine

    gc.freeze()
    gc.enable()
    while True:
        environ, descriptors, _, _ = socket.recv_fds(orders, MESSAGE_BYTES, 1)
        if not environ:
            return 0
        (stdin,) = descriptors
        pid = fork_orphan()
        if not pid:
            orders.close()
            become(stdin, msgspec.json.decode(environ, type=dict[str, str]))
            return run_engine()
        os.close(stdin)
        orders.send(str(pid).encode())


def fork_orphan() -> int:
    """0 in the new process; its pid here, once it has been adopted."""
    reading, writing = os.pipe()
    if between := os.fork():
        os.close(writing)
        os.waitpid(between, 0)
        with open(reading) as pipe:
            return int(pipe.read())
    if pid := os.fork():
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.close(reading)
    os.close(writing)
    return 0


def become(stdin: int, environ: dict[str, str]) -> None:
    """This process is given what it would have begun with."""
    os.dup2(stdin, sys.stdin.fileno())
    os.close(stdin)
    os.environ.clear()  # noqa: TID251  of a process that begins
    os.environ.update(environ)  # noqa: TID251


if __name__ == "__main__":
    sys.exit(fork_when_asked(socket.socket(fileno=int(sys.argv[1]))))

"""Engines and servers that are forked from one process that has imported everything, for tests that start many.

    test ──socket──► forking process ──fork──► one that ends at once ──fork──► engine, or server
                                               server ──socket──► a forking process of its own ──fork──► ... ► engine

Nine tenths of a start are imports. What is forked runs what `python -m motet.engines.native` or `python -m motet` runs,
or a module of the tests, with its own environment, pid, pipes and signals. It is a child of whoever asked for it: as
the one between ends, its child becomes the child of the nearest ancestor that said it would adopt it
(PR_SET_CHILD_SUBREAPER).

Tests of how a process begins start it themselves.
"""

import asyncio
import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from motet.config import environment
from motet.deploy.child import ChildServer
from motet.engines.native.client import NativeEngine
from motet.engines.native.protocol import Launch
from motet.engines.native.spawn import with_short_waits

ROOT = Path(__file__).parents[1]
PR_SET_CHILD_SUBREAPER = 36
"""Of <sys/prctl.h>."""
CLONE_NEWNET = 0x40000000
"""Of <sched.h>."""
STARTED = ("motet.cli", "motet.engines.native.process")
LATER = ("motet.transfer.nixl", "transformers.modeling_layers", "transformers.processing_utils")
"""Imported when a role is known, and by the first model."""
MESSAGE_BYTES = 2**17
"""More than an environment has."""
IN_NAMESPACE = ["ip", "netns", "exec"]


class Order(msgspec.Struct, frozen=True):
    """What a new process has beside its standard streams: those of a server are sent along, and an engine's input."""

    environ: dict[str, str]
    arguments: list[str] | None = None
    """Those behind the command; None for an engine."""
    module: str = "motet"
    """What the command runs: `motet`, or a module of the tests, whose `main` returns when it ends."""
    namespace: str = ""
    """Name of the network namespace it runs in, if not in this one."""


class ForkingProcess:
    """From `with` to its end. `spawn` stands for that of `motet.engines.native.spawn`."""

    def __enter__(self) -> "ForkingProcess":
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            self._start(theirs)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        assert self._wait() == 0

    def _start(self, theirs: socket.socket) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(theirs.fileno())],
            cwd=ROOT,
            env=with_short_waits(environment()),
            pass_fds=(theirs.fileno(),),
            stdout=subprocess.DEVNULL,
        )

    def _wait(self) -> int:
        return self._process.wait()

    def server(self, arguments: Sequence[str], **settings: Any) -> ChildServer:
        """`settings`: those of a `ChildServer`."""
        return ChildServer(arguments, popen=self.popen, **settings)

    def popen(self, command: Sequence[str], **streams: Any) -> "ForkedServer":
        return ForkedServer(self, command, **streams)

    @property
    def instead(self) -> list[tuple[dict[str, Any], str, object]]:
        """Defaults by which all that a process starts is forked: the dictionary each is in, its name there, and it."""
        return [
            (vars(NativeEngine)["start"].__func__.__kwdefaults__, "spawn", self.spawn),
            (vars(ChildServer)["__init__"].__kwdefaults__, "popen", self.popen),
        ]

    async def spawn(self, launch: Launch) -> "ForkedEngine":
        theirs, stdin = os.pipe()
        os.write(stdin, msgspec.json.encode(launch) + b"\n")
        forking = asyncio.create_task(asyncio.to_thread(self.fork, Order(dict(environment())), theirs))
        try:
            pid = await asyncio.shield(forking)
        except BaseException:
            os.close(stdin)
            await asyncio.wait((forking,))  # its thread goes on when this is cancelled, and sends what is closed here
            raise
        finally:
            os.close(theirs)
        return ForkedEngine(pid, stdin)

    def fork(self, order: Order, *streams: int) -> int:
        """The pid of the new process, a child of this one."""
        with self._lock, adopting():
            socket.send_fds(self._socket, [msgspec.json.encode(order)], streams)
            return int(self._socket.recv(MESSAGE_BYTES))


class ForkedForkingProcess(ForkingProcess):
    """Of a server that was forked itself, and has done nothing yet."""

    def _start(self, theirs: socket.socket) -> None:
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
            sys.exit(fork_when_asked(theirs))

    def _wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


class ForkedEngine(asyncio.subprocess.Process):
    """The process of an engine, which lives as long as `stdin` is open, or less."""

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
        status = 0
        with contextlib.suppress(ChildProcessError):  # a child of another process, which alone learns how it ended
            _, status = os.waitpid(self.pid, 0)
        self._ended.set_result(os.waitstatus_to_exitcode(status))


class ForkedServer(subprocess.Popen[str]):
    """`motet`, or a module of the tests, with some arguments. All but its beginning is that of any child."""

    def __init__(self, forking: ForkingProcess, command: Sequence[str], **streams: Any) -> None:
        """Called as `subprocess.Popen` is; standard input and output are given."""
        self._forking = forking
        super().__init__(command, **streams)

    def _execute_child(self, command: list[str], *given: Any) -> None:
        """In place of the method that would fork and exec here; `given`: its other parameters, in their order."""
        environ, (stdin, in_pipe, out_pipe, stdout, err_pipe, stderr) = given[5], given[9:15]
        begin = command.index(sys.executable)
        under, (dash_m, module, *arguments) = command[:begin], command[begin + 1 :]
        assert dash_m == "-m"
        assert under[:-1] == (IN_NAMESPACE if under else [])
        order = Order(dict(environ or environment()), arguments, module, namespace="".join(under[-1:]))
        try:
            self.pid = self._forking.fork(order, stdin, stdout, sys.stderr.fileno() if stderr == -1 else stderr)
            self._child_created = True
        finally:
            for theirs, pipe in ((stdin, in_pipe), (stdout, out_pipe), (stderr, err_pipe)):
                if pipe != -1:
                    os.close(theirs)


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Whoever loses its parent meanwhile becomes a child of this process."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0)


def import_everything() -> None:
    """The collector rests meanwhile: what is imported stays, and need not be gone through again and again."""
    gc.disable()
    for module in (*STARTED, *LATER):
        importlib.import_module(module)
    load_ucx()
    gc.freeze()
    gc.enable()


def load_ucx() -> None:
    """UCX patches functions of the C library while it is loaded, and takes 0.4 s of computing for it."""
    api = sys.modules[sys.modules["nixl"].nixl_agent.__module__]
    package = Path(api.__file__ or "").parent
    for plugin in package.parent.glob(f".{package.name}.*/plugins/libplugin_UCX.so"):
        ctypes.CDLL(str(plugin))


def fork_when_asked(orders: socket.socket) -> int:
    """Returns an exit code: in this process when nobody can ask any more, in each new one when that has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as engines do; whoever asks will hang up
    while True:
        message, streams, _, _ = socket.recv_fds(orders, MESSAGE_BYTES, 3)
        if not message:
            return 0
        order = msgspec.json.decode(message, type=Order)
        if order.module != "motet":
            importlib.import_module(order.module)  # once for all that run it
        pid = fork_orphan()
        if not pid:
            orders.close()
            become(order, streams)
            return run_engine() if order.arguments is None else run_command(order.module, order.arguments)
        for stream in streams:
            os.close(stream)
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


def become(order: Order, streams: Sequence[int]) -> None:
    """This process is given what it would have begun with."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()  # noqa: TID251  of a process that begins
    os.environ.update(order.environ)  # noqa: TID251
    tempfile.tempdir = None
    if order.namespace:
        with open(Path("/run/netns", order.namespace)) as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), CLONE_NEWNET) == 0


def run_engine() -> int:
    from motet.engines.native.process import main

    return main()


def run_command(module: str, arguments: list[str]) -> int:
    """With these. What `motet` starts is forked too."""
    from motet.cli import app

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [module, *arguments]
    if module != "motet":
        importlib.import_module(module).main()
        return 0
    with ForkedForkingProcess() as forking:
        for defaults, name, ours in forking.instead:
            defaults[name] = ours
        app()
    return 0


def leave(code: object) -> NoReturn:
    """Ends this process as the interpreter does, but does not take apart what was imported: that touches every object,
    so all the memory that is shared with the other processes would be copied first, half a second's work."""
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  waits for threads, as the interpreter does
    atexit._run_exitfuncs()  # noqa: SLF001
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    import_everything()
    try:
        ended = fork_when_asked(socket.socket(fileno=int(sys.argv[1])))
    except SystemExit as exit:
        leave(exit.code)
    leave(ended)

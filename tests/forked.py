"""Forks engines and servers from one process that has imported everything, for tests that start many of them.

    test ──socket──► forking process ──fork──► process that ends at once ──fork──► engine, or server
                                               server ──socket──► a forking process of its own ──fork──► ... ► engine

Imports take nine tenths of a start. A forked process runs what `python -m motet.engines.native` or `python -m motet`
runs, or a module of the tests, with its own environment, pid, pipes and signals. It is a child of the process that
asked for it: when the process between them ends, its child goes to the nearest ancestor that has said that it adopts
children (PR_SET_CHILD_SUBREAPER).

Tests of how a process begins start it without forking.
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

from motet.deploy.child import ChildServer
from motet.engines.native.client import NativeEngine
from motet.engines.native.protocol import Launch
from motet.engines.native.spawn import engine_environ
from motet.settings.server_config import environment

ROOT = Path(__file__).parents[1]
PR_SET_CHILD_SUBREAPER = 36
"""The value in <sys/prctl.h>."""
CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x20000
"""The values in <sched.h>."""
MS_BIND, MS_REC, MS_SLAVE = 2**12, 2**14, 2**19
"""The values in <sys/mount.h>."""
MADV_COLLAPSE = 25
"""The value in <linux/mman.h>."""
LARGE_PAGE = 2**21
STARTED = ("motet.cli", "motet.engines.native.process")
LATER = ("motet.transfer.nixl", "transformers.modeling_layers", "transformers.processing_utils")
"""Modules that a process imports later: when its role is known, or with its first model."""
MESSAGE_BYTES = 2**17
"""Size of a buffer that is larger than any environment."""
IN_NAMESPACE = ["ip", "netns", "exec"]


class Order(msgspec.Struct, frozen=True):
    """Everything that a new process gets besides its standard streams, which are sent with the order."""

    environ: dict[str, str]
    arguments: list[str] | None = None
    """Arguments of the command; None for an engine."""
    module: str = "motet"
    """The module that the command runs: `motet`, or a module of the tests whose `main` returns when it ends."""
    namespace: str = ""
    """Name of the network namespace in which it runs; empty for this one."""


class ForkingProcess:
    """Runs inside `with`. `spawn` replaces the function of that name in `motet.engines.native.spawn`."""

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
            env=engine_environ(environment()),
            pass_fds=(theirs.fileno(),),
            stdout=subprocess.DEVNULL,
        )

    def _wait(self) -> int:
        return self._process.wait()

    def server(self, arguments: Sequence[str], **settings: Any) -> ChildServer:
        """Makes a forked `ChildServer` with these settings."""
        return ChildServer(arguments, popen=self.popen, **settings)

    def popen(self, command: Sequence[str], **streams: Any) -> "ForkedServer":
        return ForkedServer(self, command, **streams)

    @property
    def instead(self) -> list[tuple[dict[str, Any], str, object]]:
        """Returns the defaults that make a process fork what it starts: (dictionary, name in it, new value)."""
        return [
            (vars(NativeEngine)["start"].__func__.__kwdefaults__, "spawn", self.spawn),
            (vars(ChildServer)["__init__"].__kwdefaults__, "popen", self.popen),
        ]

    async def spawn(self, launch: Launch) -> "ForkedEngine":
        theirs, stdin = os.pipe()
        os.write(stdin, msgspec.json.encode(launch) + b"\n")
        try:
            pid = await self._fork_beside(Order(dict(environment())), theirs)
        except BaseException:
            os.close(stdin)
            raise
        finally:
            os.close(theirs)
        return ForkedEngine(pid, stdin)

    async def talking(self, module: str) -> "TalkingProcess":
        """Forks a process that runs this module, whose standard input and output are at hand."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = await self._fork_beside(Order(dict(environment()), [], module), *[theirs.fileno()] * 2)
            except BaseException:
                ours.close()
                raise
        return TalkingProcess(pid, *await asyncio.open_connection(sock=ours))

    async def _fork_beside(self, order: Order, *streams: int) -> int:
        """Forks a process as `fork` does, while other tasks go on."""
        forking = asyncio.create_task(asyncio.to_thread(self.fork, order, *streams))
        try:
            return await asyncio.shield(forking)
        except BaseException:
            await asyncio.wait((forking,))  # its thread goes on when this is cancelled, and sends what is closed next
            raise

    def fork(self, order: Order, *streams: int) -> int:
        """Forks a process, which is a child of this one, and returns its pid."""
        with self._lock, adopting():
            socket.send_fds(self._socket, [msgspec.json.encode(order)], streams)
            return int(self._socket.recv(MESSAGE_BYTES))


class ForkedForkingProcess(ForkingProcess):
    """The forking process of a server that was forked itself and has done nothing yet."""

    def _start(self, theirs: socket.socket) -> None:
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
            sys.exit(fork_when_asked(theirs))

    def _wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


class ForkedProcess(asyncio.subprocess.Process):
    """A process with this pid, which is a child of this one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
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
        status = 0
        with contextlib.suppress(ChildProcessError):  # a child of another process, which alone gets its status
            _, status = os.waitpid(self.pid, 0)
        self._ended.set_result(os.waitstatus_to_exitcode(status))


class ForkedEngine(ForkedProcess):
    """The process of an engine, which ends at the latest when `stdin` is closed."""

    def __init__(self, pid: int, stdin: int) -> None:
        super().__init__(pid)
        self._stdin = stdin

    def _take_end(self) -> None:
        os.close(self._stdin)
        super()._take_end()


class TalkingProcess(ForkedProcess):
    """A process with both of these streams."""

    def __init__(self, pid: int, stdout: asyncio.StreamReader, stdin: asyncio.StreamWriter) -> None:
        super().__init__(pid)
        self.stdout, self.stdin = stdout, stdin


class ForkedServer(subprocess.Popen[str]):
    """A process that runs `motet` or a module of the tests. Only its beginning differs from that of any `Popen`."""

    def __init__(self, forking: ForkingProcess, command: Sequence[str], **streams: Any) -> None:
        """Takes the arguments of `subprocess.Popen`; standard input and output must be given."""
        self._forking = forking
        super().__init__(command, **streams)

    def _execute_child(self, command: list[str], *given: Any) -> None:
        """Replaces the method of `Popen` that forks and executes; `given`: its other parameters, in their order."""
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
    """Makes this process adopt descendants that lose their parent meanwhile."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0)


def import_everything() -> None:
    """Imports all modules, without the garbage collector: what is imported stays, so it need not go through it."""
    gc.disable()
    for module in (*STARTED, *LATER):
        importlib.import_module(module)
    load_ucx()
    gc.freeze()
    gc.enable()
    collapse_pages()


def collapse_pages() -> None:
    """Makes large pages of this process's memory, where the kernel does so when asked. A fork copies a table of pages,
    and now takes a third of the time."""
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, file, *_ = line.split()
        begin, end = (int(address, 16) for address in place.split("-"))
        if file == "0" and rights == "rw-p":
            for page in range(-(-begin // LARGE_PAGE) * LARGE_PAGE, end - LARGE_PAGE + 1, LARGE_PAGE):
                libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(LARGE_PAGE), MADV_COLLAPSE)


def load_ucx() -> None:
    """Loads UCX, which takes 0.4 s to patch functions of the C library."""
    api = sys.modules[sys.modules["nixl"].nixl_agent.__module__]
    package = Path(api.__file__ or "").parent
    for plugin in package.parent.glob(f".{package.name}.*/plugins/libplugin_UCX.so"):
        ctypes.CDLL(str(plugin))


def fork_when_asked(orders: socket.socket) -> int:
    """Follows orders. Returns an exit code in this process when nobody can ask any more, in a new one when it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as engines do; the end of the socket ends this process
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
    """Forks twice. Returns 0 in the new process, and its pid here once it has been adopted."""
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
    """Gives this process the streams, environment and namespace of the order."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()  # noqa: TID251  this process begins anew
    os.environ.update(order.environ)  # noqa: TID251
    tempfile.tempdir = None
    if order.namespace:
        enter(order.namespace)


def enter(name: str) -> None:
    """Makes this process one of the network namespace, as `ip netns exec` does: files in /etc/netns replace others."""
    libc = ctypes.CDLL(None)
    with open(Path("/run/netns", name)) as namespace:
        assert libc.setns(namespace.fileno(), CLONE_NEWNET) == 0
    if own := list(Path("/etc/netns", name).glob("*")):
        assert libc.unshare(CLONE_NEWNS) == 0
        assert libc.mount(b"", b"/", None, MS_SLAVE | MS_REC, None) == 0
        for file in own:
            assert libc.mount(bytes(file), bytes(Path("/etc", file.name)), None, MS_BIND, None) == 0


def run_engine() -> int:
    from motet.engines.native.process import main

    return main()


def run_command(module: str, arguments: list[str]) -> int:
    """Runs a module with these arguments. Whatever `motet` starts is forked too."""
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
    """Ends this process as the interpreter does, but without taking apart what was imported: that would touch every
    object, and so copy all memory that is shared with other processes, which takes half a second."""
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

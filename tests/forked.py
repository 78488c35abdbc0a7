"""Forks engines and servers from one process that has imported everything, for tests that start many of them.

    test ──socket──► forking process ──fork──► process that ends at once ──fork──► engine, or server
                                               server ──socket──► a forking process of its own ──fork──► ... ► engine

Imports take nine tenths of a start. A forked process runs the same code as `python -m motet.engines.native` or
`python -m motet`, or a module of the tests, with its own environment, pid, pipes and signals. It is a child of the
process that requested it: when the process between them ends, the kernel gives its child to the nearest ancestor that
adopts orphans (PR_SET_CHILD_SUBREAPER).

Tests of how a process starts do not use this module.
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
STARTED_MODULES = ("motet.cli.main", "motet.cli.server_commands", "motet.cli.servers", "motet.engines.native.process")
IMPORTED_LATER = ("motet.transfer.backends.nixl", "transformers.modeling_layers", "transformers.processing_utils")
"""Modules that a process imports when its role is known, or with its first model."""
HIDDEN_MODULES = "HIDDEN_MODULES"
"""Environment variable with modules that a forked process cannot import, separated by spaces."""
USED_KV = "USED_KV"
"""Environment variable with which a forked engine holds its complete KV cache in memory, as after a long run."""
MESSAGE_BYTES = 2**17
"""Size of a buffer that is larger than any environment."""
IN_NAMESPACE = ["ip", "netns", "exec"]


class Order(msgspec.Struct, frozen=True):
    """The request for a new process. Its standard streams are sent with the order."""

    environ: dict[str, str]
    arguments: list[str] | None = None
    """Arguments of the command; None for an engine."""
    module: str = "motet"
    """The module that the command runs: `motet`, or a module of the tests with a function `main`."""
    namespace: str = ""
    """Name of the network namespace of the process; empty for the namespace of this process."""


class ForkingProcess:
    """A process that forks others, while the `with` lasts. `spawn` replaces the function of that name in
    `motet.engines.native.spawn`."""

    def __enter__(self) -> "ForkingProcess":
        self._socket, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with child_end:
            self._start(child_end)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        assert self._wait() == 0

    def _start(self, child_end: socket.socket) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(child_end.fileno())],
            cwd=ROOT,
            env=engine_environ(environment()),
            pass_fds=(child_end.fileno(),),
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
    def replaced_defaults(self) -> list[tuple[dict[str, Any], str, object]]:
        """Returns the default arguments to replace, so that this process forks all engines and servers that it starts:
        (dictionary, name in it, new value)."""
        return [
            (vars(NativeEngine)["start"].__func__.__kwdefaults__, "spawn", self.spawn),
            (vars(ChildServer)["__init__"].__kwdefaults__, "popen", self.popen),
        ]

    async def spawn(self, launch: Launch) -> "ForkedEngine":
        child_end, stdin = os.pipe()
        os.write(stdin, msgspec.json.encode(launch) + b"\n")
        try:
            pid = await self._fork_in_thread(Order(dict(environment())), child_end)
        except BaseException:
            os.close(stdin)
            raise
        finally:
            os.close(child_end)
        return ForkedEngine(pid, stdin)

    async def start_module(self, module: str) -> "ModuleProcess":
        """Forks a process that runs this module. The caller gets its standard input and output."""
        own_end, child_end = socket.socketpair()
        with child_end:
            try:
                pid = await self._fork_in_thread(Order(dict(environment()), [], module), *[child_end.fileno()] * 2)
            except BaseException:
                own_end.close()
                raise
        return ModuleProcess(pid, *await asyncio.open_connection(sock=own_end))

    async def _fork_in_thread(self, order: Order, *streams: int) -> int:
        """Forks a process as `fork` does, without blocking the event loop."""
        forking = asyncio.create_task(asyncio.to_thread(self.fork, order, *streams))
        try:
            return await asyncio.shield(forking)
        except BaseException:
            await asyncio.wait(
                (forking,)
            )  # a cancellation does not stop the thread, which sends streams that are closed next
            raise

    def fork(self, order: Order, *streams: int) -> int:
        """Forks a process, which is a child of this one, and returns its pid."""
        with self._lock, adopting():
            socket.send_fds(self._socket, [msgspec.json.encode(order)], streams)
            return int(self._socket.recv(MESSAGE_BYTES))


class ForkedForkingProcess(ForkingProcess):
    """The forking process of a server that was forked itself. It must be made before the server starts anything."""

    def _start(self, child_end: socket.socket) -> None:
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            with open(os.devnull, "w") as null:
                os.dup2(null.fileno(), sys.stdout.fileno())
            sys.exit(fork_on_orders(child_end))

    def _wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


class ForkedProcess(asyncio.subprocess.Process):
    """A child of this process, by its pid."""

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
        with contextlib.suppress(ChildProcessError):  # only the parent of a process gets its status
            _, status = os.waitpid(self.pid, 0)
        self._ended.set_result(os.waitstatus_to_exitcode(status))


class ForkedEngine(ForkedProcess):
    """The process of an engine. It ends when `stdin` is closed, if not earlier."""

    def __init__(self, pid: int, stdin: int) -> None:
        super().__init__(pid)
        self._stdin = stdin

    def _take_end(self) -> None:
        os.close(self._stdin)
        super()._take_end()


class ModuleProcess(ForkedProcess):
    """A process that runs a module of the tests, with its standard streams."""

    def __init__(self, pid: int, stdout: asyncio.StreamReader, stdin: asyncio.StreamWriter) -> None:
        super().__init__(pid)
        self.stdout, self.stdin = stdout, stdin


class ForkedServer(subprocess.Popen[str]):
    """A process that runs `motet` or a module of the tests. It differs from `Popen` only in how the process starts."""

    def __init__(self, forking: ForkingProcess, command: Sequence[str], **streams: Any) -> None:
        """Takes the arguments of `subprocess.Popen`; standard input and output must be given."""
        self._forking = forking
        super().__init__(command, **streams)

    def _execute_child(self, command: list[str], *parameters: Any) -> None:
        """Replaces the method of `Popen` that forks and executes; `parameters`: its other parameters, in order."""
        environ, (stdin, in_pipe, out_pipe, stdout, err_pipe, stderr) = parameters[5], parameters[9:15]
        start = command.index(sys.executable)
        prefix, (dash_m, module, *arguments) = command[:start], command[start + 1 :]
        assert dash_m == "-m"
        assert prefix[:-1] == (IN_NAMESPACE if prefix else [])
        order = Order(dict(environ or environment()), arguments, module, namespace="".join(prefix[-1:]))
        try:
            self.pid = self._forking.fork(order, stdin, stdout, sys.stderr.fileno() if stderr == -1 else stderr)
            self._child_created = True
        finally:
            for child_end, pipe in ((stdin, in_pipe), (stdout, out_pipe), (stderr, err_pipe)):
                if pipe != -1:
                    os.close(child_end)


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Makes this process the parent of descendants whose parent ends during the context."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0)


def import_everything() -> None:
    """Imports all modules, without garbage collection: imported objects are never freed, so that it need
    not visit them."""
    gc.disable()
    for module in (*STARTED_MODULES, *IMPORTED_LATER):
        importlib.import_module(module)
    load_ucx()
    gc.freeze()
    gc.enable()
    collapse_pages()


def collapse_pages() -> None:
    """Collapses this process's memory into large pages, if the kernel supports that. A fork copies the
    page table, so it takes a third of the time afterwards."""
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, file, *_ = line.split()
        start, end = (int(address, 16) for address in addresses.split("-"))
        if file == "0" and rights == "rw-p":
            for page in range(-(-start // LARGE_PAGE) * LARGE_PAGE, end - LARGE_PAGE + 1, LARGE_PAGE):
                libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(LARGE_PAGE), MADV_COLLAPSE)


def load_ucx() -> None:
    """Loads UCX, which takes 0.4 s to patch functions of the C library."""
    api = sys.modules[sys.modules["motet.transfer.backends.nixl"].nixl.nixl_agent.__module__]
    package = Path(api.__file__ or "").parent
    for plugin in package.parent.glob(f".{package.name}.*/plugins/libplugin_UCX.so"):
        ctypes.CDLL(str(plugin))


def fork_on_orders(orders: socket.socket) -> int:
    """Forks a process for each order. Returns an exit code: in this process when the socket is closed, and in a forked
    process when it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as engines do; the end of the socket ends this process
    while True:
        message, streams, _, _ = socket.recv_fds(orders, MESSAGE_BYTES, 3)
        if not message:
            return 0
        order = msgspec.json.decode(message, type=Order)
        if order.module != "motet":
            importlib.import_module(order.module)  # once, for all processes that run it
        pid = fork_orphan()
        if not pid:
            orders.close()
            apply_order(order, streams)
            return run_engine() if order.arguments is None else run_command(order.module, order.arguments)
        for stream in streams:
            os.close(stream)
        orders.send(str(pid).encode())


def fork_orphan() -> int:
    """Forks twice. Returns 0 in the new process, and its pid in this process, once the new process has been adopted."""
    reading, writing = os.pipe()
    if middle := os.fork():
        os.close(writing)
        os.waitpid(middle, 0)
        with open(reading) as pipe:
            return int(pipe.read())
    if pid := os.fork():
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.close(reading)
    os.close(writing)
    return 0


def apply_order(order: Order, streams: Sequence[int]) -> None:
    """Gives this process the streams, environment and namespace of the order."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()  # noqa: TID251  this process starts again
    os.environ.update(order.environ)  # noqa: TID251
    tempfile.tempdir = None
    for module in order.environ.get(HIDDEN_MODULES, "").split():
        sys.modules[module] = None  # type: ignore[assignment]  # an import of it raises ModuleNotFoundError
    if USED_KV in order.environ:
        storage = vars(importlib.import_module("motet.engines.native.kv.storage"))
        reserve = storage["huge_pages"]
        storage["huge_pages"] = lambda num_bytes: reserve(num_bytes).zero_()
    if order.namespace:
        enter(order.namespace)


def enter(name: str) -> None:
    """Moves this process into the network namespace, as `ip netns exec` does: files in /etc/netns replace files in
    /etc."""
    libc = ctypes.CDLL(None)
    with open(Path("/run/netns", name)) as namespace:
        assert libc.setns(namespace.fileno(), CLONE_NEWNET) == 0
    if files := list(Path("/etc/netns", name).glob("*")):
        assert libc.unshare(CLONE_NEWNS) == 0
        assert libc.mount(b"", b"/", None, MS_SLAVE | MS_REC, None) == 0
        for file in files:
            assert libc.mount(bytes(file), bytes(Path("/etc", file.name)), None, MS_BIND, None) == 0


def run_engine() -> int:
    from motet.engines.native.__main__ import read_launch
    from motet.engines.native.process import main

    return main(read_launch())


def run_command(module: str, arguments: list[str]) -> int:
    """Runs a module with these arguments. All processes that `motet` starts are forked too."""
    from motet.cli.main import app

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [module, *arguments]
    if module != "motet":
        importlib.import_module(module).main()
        return 0
    with ForkedForkingProcess() as forking:
        for defaults, name, replacement in forking.replaced_defaults:
            defaults[name] = replacement
        app()
    return 0


def leave(code: object) -> NoReturn:
    """Ends this process as the interpreter does, but without freeing the imported modules. That would write to every
    object, and so copy all memory that is shared with other processes, which takes half a second."""
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  waits for threads, as the interpreter does
    atexit._run_exitfuncs()  # noqa: SLF001
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    import_everything()
    try:
        code = fork_on_orders(socket.socket(fileno=int(sys.argv[1])))
    except SystemExit as exit:
        leave(exit.code)
    leave(code)

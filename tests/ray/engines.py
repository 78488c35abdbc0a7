"""Engines are forked from one process that has imported all modules, and is not a child of the processes that use them.

    test, or replica ──socket──► forking process ──fork──► engine

Cells on Ray start twenty engines, and nine tenths of the time of a start are imports. An engine runs as `tests.forked`
runs engines, and ends with its standard input, which the requesting process holds. Replicas use the forking process if
the environment of their cluster names it (`fork_hook`).

python -m tests.ray.engines LISTENING FOLDER    makes a tiny llama in FOLDER, and forks until standard input ends
"""

import contextlib
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import psutil

from motet.engines.native.spawn import engine_environ
from motet.settings.server_config import environment
from tests.forked import MESSAGE_BYTES, ROOT, ForkingProcess, Order, apply_order, import_everything, leave, run_engine

STDERR = 2
NAME = "engine-{}"
"""Name of an engine's process, with the pid of the process that requested it. The system keeps 15 characters."""


class Engines(ForkingProcess):
    """Starts engines, in any process that knows the address of the forking process."""

    def __init__(self, at: str) -> None:
        self.at = at

    def fork(self, order: Order, *streams: int) -> int:
        """Forks an engine that writes its errors to the standard error of this process."""
        return int(self._request(msgspec.json.encode(order), *streams, STDERR, STDERR))

    def folder(self) -> Path:
        """Returns the folder of a tiny llama with a tokenizer."""
        return Path(self._request(b"folder"))

    def _request(self, message: bytes, *streams: int) -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(self.at)
            socket.send_fds(connection, [message], streams)
            return connection.recv(MESSAGE_BYTES).decode()


@contextlib.contextmanager
def running_engines() -> Iterator[Engines]:
    """Runs the forking process while the `with` lasts."""
    temporary = Path(tempfile.mkdtemp(prefix="motet-engines-"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(temporary / "socket"))
        listening.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(listening.fileno()), str(temporary / "llama")],
            cwd=ROOT,
            env=engine_environ(environment()),
            pass_fds=(listening.fileno(),),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
    try:
        yield Engines(str(temporary / "socket"))
    finally:
        process.communicate()
        shutil.rmtree(temporary)
    assert process.returncode == 0


def engines_of(replicas: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Returns the engine processes of these replicas, if they were forked."""
    names = {NAME.format(replica.pid) for replica in replicas}
    found = [one for one in psutil.process_iter(["name", "status"]) if one.info["name"] in names]
    return [one for one in found if one.info["status"] != psutil.STATUS_ZOMBIE]


def fork_for_all(listening: socket.socket, folder: Path) -> int:
    """Returns an exit code: in this process when its standard input has ended, in each engine when the engine has
    ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: reap())
    while True:
        if sys.stdin in select.select([sys.stdin, listening], [], [])[0]:
            return 0
        with listening.accept()[0] as connection:
            message, streams, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
            pid = os.fork() if streams else 0
            if streams and not pid:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listening.close()
                (client, _, _) = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                Path("/proc/self/comm").write_text(NAME.format(client))
                apply_order(msgspec.json.decode(message, type=Order), streams)
                break
            with contextlib.suppress(BrokenPipeError):  # the requesting process has been killed
                connection.send(str(pid or folder).encode())
            for stream in streams:
                os.close(stream)
    return run_engine()


def reap() -> None:
    """Waits for each engine that has ended: until then it would be listed as a running process."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main(listening: int, folder: Path) -> int:
    import_everything()
    from transformers.utils.logging import disable_progress_bar  # loaded already

    from tests.tiny_models import save_tiny_model
    from tests.tiny_tokenizer import save_tiny_tokenizer

    disable_progress_bar()  # type: ignore[no-untyped-call]
    save_tiny_tokenizer(save_tiny_model("llama", folder))
    return fork_for_all(socket.socket(fileno=listening), folder)


if __name__ == "__main__":
    try:
        ended = main(int(sys.argv[1]), Path(sys.argv[2]))
    except SystemExit as exit:
        leave(exit.code)
    leave(ended)

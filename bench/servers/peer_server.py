"""Starts a third-party server to compare with, and ends it with all its processes.

Motet depends on none of these servers: `bench.servers.vllm` and `bench.servers.llama` have the command and the fastest
settings of each.
"""

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Protocol

import httpx
import psutil

from bench.servers.ports import free_port
from motet.errors import StartupError
from motet.system.machine import described_end

START_S = 300.0
POLL_S = 0.5
STOP_S = 30.0
ORPHANS_S = 2.0
SHOWN_LOG_LINES = 80
"""Lines of a log that an error shows: the cause of an error in a process of vLLM is followed by two tracebacks."""


class PeerSetup(Protocol):
    """Command and environment of a server to start."""

    @property
    def name(self) -> str:
        """Name of the server in messages."""

    def command(self, port: int) -> list[str]: ...

    def environment(self) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class PeerServer:
    """A server that was started, but is possibly not ready yet."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    log: IO[bytes]

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if (code := self.process.poll()) is not None:
                raise StartupError(f"{self.name} {described_end(code)} before it was ready:\n{self._last_lines()}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health").status_code == httpx.codes.OK:
                    return
            time.sleep(POLL_S)
        raise StartupError(f"{self.name} was not ready after {START_S:.0f} s:\n{self._last_lines()}")

    def pin(self, cores: Sequence[int]) -> None:
        """Pins all threads of the server. With a KV connector, vLLM moves some of them to other cores at its start."""
        server = psutil.Process(self.process.pid)
        for process in (server, *server.children(recursive=True)):
            for thread in process.threads():
                with contextlib.suppress(ProcessLookupError):  # the thread has ended since it was listed
                    os.sched_setaffinity(thread.id, cores)

    def _last_lines(self) -> str:
        self.log.seek(0)
        return "\n".join(self.log.read().decode(errors="replace").splitlines()[-SHOWN_LOG_LINES:])


@contextlib.contextmanager
def peer_server(setup: PeerSetup) -> Iterator[PeerServer]:
    """Starts a server, and ends it at the end of the context, also after an error."""
    port = free_port()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(setup.command(port), env=setup.environment(), stdout=log, stderr=log)
        try:
            yield PeerServer(setup.name, f"http://127.0.0.1:{port}", process, log)
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a server with its engine and workers, which outlive a server that had to be killed."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for orphan in psutil.wait_procs(family, timeout=ORPHANS_S)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            orphan.kill()


def all_cores() -> list[int]:
    """Returns the cores on which this process is allowed to run."""
    return sorted(os.sched_getaffinity(0))

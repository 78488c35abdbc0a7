"""Runs `bench.frontend.measured_server` in a child process, and measures its CPU time."""

import subprocess
import sys
from collections.abc import Mapping
from typing import Literal

import psutil

from motet.errors import StartupError

STOP_S = 60.0

ServerKind = Literal["motet", "bare", "real"]


class ServerProcess:
    """A server of one kind, in a process that runs inside the `with` block."""

    def __init__(self, kind: ServerKind, *arguments: str) -> None:
        self._command = [sys.executable, "-m", "bench.frontend.measured_server", kind, *arguments]
        self._environ: Mapping[str, str] | None = None

    def __enter__(self) -> "ServerProcess":
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self._environ,
            text=True,
        )
        lines = self._process.stdout or ()
        self.url = next((line.strip() for line in lines if line.startswith("http")), "")
        if not self.url:
            raise StartupError(f"the server ended before it was ready; see {' '.join(self._command)}")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=STOP_S)  # closes its standard input, which ends it

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def cpu_s(self) -> float:
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system

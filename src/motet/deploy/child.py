"""A server in a child process, for programs that bring their own: the demo, the chat, benchmarks, tests.

It takes a free port unless told which, says in its ready line where it is, and ends with whoever started it, who holds
the other end of its standard input.
"""

import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType

from motet.deploy.ready import url_in
from motet.errors import StartupError

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
SHOWN_LOG_LINES = 20


class ChildServer:
    """`motet serve`, or another command that serves, from `with` to its end. `url` is known once it is entered."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        command: str = "serve",
        port: int = 0,
        environ: Mapping[str, str] | None = None,
        under: Sequence[str] = (),
    ) -> None:
        """`environ`: in place of this process's environment. `under`: a command that becomes the one behind it, with
        something changed, as `taskset` and `ip netns exec` do."""
        self.url = ""
        self._environ = environ
        self._command = [
            *under, sys.executable, "-m", "motet", command, *arguments, "--port", str(port), "--stop-with-stdin"
        ]  # fmt: skip

    def __enter__(self) -> "ChildServer":
        self._log = tempfile.TemporaryFile(mode="w+")
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=self._environ, text=True
        )
        try:
            self.url = self._wait_until_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """The exit code, once it has ended by itself or by a signal."""
        return self._process.wait(timeout_s)

    @property
    def log(self) -> str:
        """All it has logged so far."""
        self._log.seek(0)
        return self._log.read()

    def _wait_until_ready(self) -> str:
        if self._process.stdout is None:
            raise StartupError("the server has no standard output")
        deadline = threading.Timer(START_TIMEOUT_S, self._process.kill)
        deadline.start()
        try:
            for line in self._process.stdout:
                if url := url_in(line):
                    return url
        finally:
            deadline.cancel()
        code = self._process.wait()
        last_lines = "\n".join(self.log.splitlines()[-SHOWN_LOG_LINES:])
        raise StartupError(f"the server ended with exit code {code} before it was ready:\n{last_lines}")

    def _end(self) -> None:
        self._process.terminate()
        try:
            # Closes standard input too, which ends a server that still drains.
            self._process.communicate(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._log.close()

"""A server in a child process, for programs that start their own: the demo, the chat, benchmarks, tests.

The server uses a free port unless `port` is given, prints its URL in its ready line, and ends with the program that
started it, which has the other end of its standard input. `read_figures` reads the costs of requests from /metrics."""

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import httpx
from prometheus_client.parser import text_string_to_metric_families

from motet.deploy.shutdown import url_in
from motet.errors import (
    ConfigError,
    EngineError,
    KVMemoryError,
    ModelLoadError,
    StartupError,
    UnsupportedModelError,
)
from motet.metrics.declare import PREFIX
from motet.system.machine import described_end

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
SHOWN_LOG_LINES = 20
STARTUP_ERRORS = {kind.exit_code: kind for kind in (ConfigError, ModelLoadError, UnsupportedModelError, KVMemoryError)}
"""Errors of a server that ends before it is ready, by its exit code."""
CACHE_FACTS = f"{PREFIX}cache_config_info"


class ChildServer:
    """`motet serve`, or another command that serves, as a context manager. `url` is known inside the context."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        command: str = "serve",
        port: int = 0,
        environ: Mapping[str, str] | None = None,
        under: Sequence[str] = (),
        popen: Callable[..., "subprocess.Popen[str]"] = subprocess.Popen,
        start_timeout_s: float = START_TIMEOUT_S,
        timeout_name: str = "",
    ) -> None:
        """`environ`: by default this process's environment; `under`: a command that runs the child, e.g. `taskset`.
        `timeout_name`: the user's setting for `start_timeout_s`, for errors."""
        self._popen = popen
        self.url = ""
        self._environ = environ
        self._start_timeout_s, self._timeout_name = start_timeout_s, timeout_name
        self._command = [
            *under, sys.executable, "-m", "motet", command, *arguments, "--port", str(port), "--stop-with-stdin"
        ]  # fmt: skip

    def __enter__(self) -> "ChildServer":
        self._log = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")
        # In a session of its own, Ctrl-C in the terminal of this program does not reach the server.
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log}
        self._process = self._popen(self._command, **streams, env=self._environ, text=True, start_new_session=True)
        try:
            self.url = self._wait_until_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code of a server that has ended, negative for a signal; None while it runs."""
        return self._process.poll()

    def release(self) -> None:
        """Closes this process's end of the server's standard input, in a process that was forked from the one that
        started the server. Otherwise the server would run until both have ended."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Waits until the server has ended without `__exit__`, for example by a signal. Returns its exit code."""
        return self._process.wait(timeout_s)

    def read_output(self) -> str:
        """Returns what a server that has ended printed after its ready line."""
        return "" if self._process.stdout is None else self._process.stdout.read()

    @property
    def log(self) -> str:
        """Returns the complete log of the server so far."""
        self._log.seek(0)
        return self._log.read()

    def _wait_until_ready(self) -> str:
        if self._process.stdout is None:
            raise StartupError("the server has no standard output")
        timeout_s, started_s = self._start_timeout_s, time.monotonic()
        deadline = threading.Timer(timeout_s, self._process.kill)
        deadline.start()
        try:
            for line in self._process.stdout:
                if url := url_in(line):
                    return url
        finally:
            deadline.cancel()
        code = self._process.wait()
        is_late = time.monotonic() - started_s >= timeout_s
        named = f" ({self._timeout_name})" if self._timeout_name else ""
        how = f"was not ready after {timeout_s:g} s{named}" if is_late else f"{described_end(code)} before it was ready"
        last_lines = "\n".join(self.log.splitlines()[-SHOWN_LOG_LINES:])
        raise STARTUP_ERRORS.get(code, StartupError)(f"the server {how}:\n{last_lines}")

    def _end(self) -> None:
        try:
            # Closes standard input, which ends the server at once, as two signals would. Windows has no such signals.
            self._process.communicate(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._log.close()


@dataclass(frozen=True)
class CounterSnapshot:
    """Counters at one moment, summed over the workers. The difference of two snapshots is the work between them."""

    prompt_tokens: int
    prefill_tokens: int
    generation_tokens: int
    forced_tokens: int
    spec_decode_num_draft_tokens: int
    spec_decode_num_accepted_tokens: int
    forks: int
    blocks_shared: int
    bytes_saved: int
    trunk_tokens_read: int
    trunk_tokens_unshared: int
    prefills: int
    kv_transfers: int
    kv_transfer_bytes: int
    recomputed_tokens: int

    def __sub__(self, earlier: "CounterSnapshot") -> "CounterSnapshot":
        return CounterSnapshot(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})


@dataclass(frozen=True)
class BlockSize:
    """KV block size of the workers, the same for all, since they exchange KV."""

    tokens: int
    bytes: int

    def bytes_of(self, num_tokens: int) -> int:
        """Returns the KV bytes of the blocks that hold this number of tokens."""
        return -(-num_tokens // self.tokens) * self.bytes


def read_figures(client: httpx.Client) -> CounterSnapshot:
    return figures_in(read_metrics(client))


def read_block_size(client: httpx.Client) -> BlockSize:
    return block_size_in(read_metrics(client))


def read_metrics(client: httpx.Client) -> str:
    response = client.get("/metrics")
    if response.status_code != httpx.codes.OK:
        raise EngineError(f"/metrics answered {response.status_code}")
    return response.text


def figures_in(exposition: str) -> CounterSnapshot:
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return CounterSnapshot(**{f.name: int(values[f"{PREFIX}{f.name}_total"]) for f in fields(CounterSnapshot)})


def block_size_in(exposition: str) -> BlockSize:
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name == CACHE_FACTS:
                return BlockSize(int(sample.labels["block_size"]), int(sample.labels["bytes_per_block"]))
    raise EngineError(f"/metrics has no {CACHE_FACTS}")

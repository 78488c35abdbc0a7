"""Communication between a server and the program that started it: signals that end the server, and its ready line.

The first SIGTERM or SIGINT makes the server drain, the second one makes it stop at once. On Windows only the console
sends them, for Ctrl-C and Ctrl-Break: a program that ends another one there kills it."""

import asyncio
import contextlib
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from typing import TextIO

import msgspec

from motet.engine import Worker, WorkerReport, WorkerState
from motet.system.machine import GIB
from motet.types import Role

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGBREAK") if hasattr(signal, name))
READY = re.compile(r"^Motet(?: gateway| on Ray)? is ready: .* at (?P<url>https?://\S+) ")
"""The line with which a server reports that it is ready, for people and for programs that started it."""


class ReadyObject(msgspec.Struct):
    """The ready line with `--log-format json`."""

    message: str = ""


class StopSignals:
    """Turns signals into two events while the context is entered."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.at_once = asyncio.Event()

    def receive(self) -> None:
        """Called for each signal: the first one requests draining, the second one stopping at once."""
        if self.drain.is_set():
            self.at_once.set()
        self.drain.set()

    def watch_stdin(self, stdin: TextIO) -> None:
        """Stops at once when the program at the other end of standard input has ended. A thread reads it, since event
        loops on Windows cannot wait for a pipe."""

        def stop() -> None:
            self.drain.set()
            self.at_once.set()

        def read() -> None:
            while os.read(descriptor, 4096):
                pass
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(stop)

        loop, descriptor = asyncio.get_running_loop(), stdin.fileno()
        threading.Thread(target=read, name="standard input", daemon=True).start()

    def take(self) -> None:
        """Handles the signals from now on, replacing any other handler."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            try:
                loop.add_signal_handler(number, self.receive)
            except NotImplementedError:  # on Windows; the loop wakes up for the interpreter's own handler
                signal.signal(number, lambda *_: loop.call_soon_threadsafe(self.receive))

    def __enter__(self) -> "StopSignals":
        self.take()
        return self

    def __exit__(self, *error: object) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            try:
                loop.remove_signal_handler(number)
            except NotImplementedError:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


async def first_of(*waits: Awaitable[object], timeout_s: float | None = None) -> None:
    """Returns when one wait is done, or after `timeout_s`; cancels the others. Raises the error of the wait."""
    futures = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            future.result()
    finally:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)


def ready_line(url: str, workers: Sequence[Worker]) -> str:
    """Returns the ready line of a server, with its local workers, at least one."""
    info = workers[-1].engine.info
    tokens, gib = info.num_blocks * info.block_size, info.num_blocks * info.bytes_per_block / GIB
    blocks = f"{info.num_blocks:,} KV blocks of {info.block_size} tokens: {tokens:,} tokens, {gib:.2f} GiB"
    return f"Motet is ready: {info.model} at {url} ({roles_of(workers)}{blocks})"


def gateway_ready_line(url: str, models: Sequence[str], *, workers: Sequence[WorkerReport]) -> str:
    """Returns the ready line of a gateway, with the workers that are ready."""
    ready = [worker.id for worker in workers if worker.state is WorkerState.READY]
    counted = f"{len(ready)} worker{'s' * (len(ready) != 1)}: {', '.join(ready)}"
    return f"Motet gateway is ready: {', '.join(models)} at {url} ({counted})"


def ray_ready_line(model: str, url: str, *, replicas: Mapping[str, int]) -> str:
    """Returns the ready line of a cell on Ray, with the number of replicas of each deployment."""
    counted = ", ".join(f"{number} {name}" for name, number in replicas.items())
    return f"Motet on Ray is ready: {model} at {url} ({counted})"


def roles_of(workers: Sequence[Worker]) -> str:
    """Returns `2 prefill and 1 decode engines, each with `; empty for one engine with both roles."""
    roles = [worker.engine.info.role for worker in workers]
    if roles == [Role.BOTH]:
        return ""
    return f"{roles[0]} server, " if len(roles) == 1 else f"{roles_in(workers)}, each with "


def roles_in(workers: Sequence[Worker]) -> str:
    """Returns the number of engines by role: `1 engine`, `2 engines`, or `2 prefill and 1 decode engines`."""
    roles = Counter(worker.engine.info.role for worker in workers)
    named = " and ".join(f"{roles[role]} {role}" for role in (Role.PREFILL, Role.DECODE) if roles[role])
    return f"{named or roles[Role.BOTH]} engine{'s' * (len(workers) != 1)}"


def url_in(line: str) -> str | None:
    """Returns the URL in a ready line, in text or as a JSON object; None if the line is not a ready line."""
    if line.startswith("{"):
        with contextlib.suppress(msgspec.MsgspecError):
            line = msgspec.json.decode(line, type=ReadyObject).message
    found = READY.match(line)
    return found["url"] if found else None

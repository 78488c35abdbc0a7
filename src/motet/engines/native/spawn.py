"""Starts an engine process and waits until it can serve, or has said why it cannot."""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec

from motet.config import environment
from motet.engines.native.pipes import Pipes
from motet.engines.native.protocol import Beat, Event, Launch, Ready, Unable
from motet.errors import StartupError
from motet.types import EngineInfo


class EngineProcess(Protocol):
    """An `asyncio.subprocess.Process`, or what a test starts in its place."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def kill(self) -> None: ...


Spawn = Callable[[Launch], Awaitable[EngineProcess]]
"""Starts a process that has `launch` to read on its standard input, which stays open as long as it may live."""


async def spawn(launch: Launch) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "motet.engines.native",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        env=with_short_waits(environment()),
    )
    if process.stdin is None:
        raise StartupError("the engine process has no standard input")
    process.stdin.write(msgspec.json.encode(launch) + b"\n")
    with contextlib.suppress(ConnectionError):  # it has ended already, which its caller finds out
        await process.stdin.drain()
    return process


def with_short_waits(environ: Mapping[str, str]) -> dict[str, str]:
    """Threads of OpenMP that wait for each other spin for microseconds and then sleep, unless the user chose otherwise.

    By default they spin for long; where another process wants a core, a spinning thread keeps it from the very thread
    it waits for, and a step takes 10 to 40 times as long. Sleeping at once costs a fifth where nobody disturbs
    (docs/log.md has the figures).
    """
    chosen = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environ.keys()
    return {**environ} if chosen else {**environ, "GOMP_SPINCOUNT": "1000"}


async def first_event(pipes: Pipes, process: EngineProcess) -> EngineInfo:
    """Waits for Ready; whichever comes first of an event and the process's end decides."""
    event, end = asyncio.ensure_future(_first_but_beats(pipes)), asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait((event, end), return_when=asyncio.FIRST_COMPLETED)
        if not event.done():
            raise StartupError(f"the engine process ended with exit code {end.result()} before it was ready")
        match event.result():
            case Ready(info):
                return info
            case Unable(error):
                raise error.error()
            case other:
                raise StartupError(f"the engine process began with {type(other).__name__}")
    finally:
        for future in (event, end):
            future.cancel()
        await asyncio.gather(event, end, return_exceptions=True)


async def _first_but_beats(pipes: Pipes) -> Event:
    while isinstance(event := await pipes.receive(), Beat):
        pass
    return event

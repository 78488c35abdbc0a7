"""Starts an engine process and waits until it can serve, or has said why it cannot."""

import asyncio
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from motet.engines.native.protocol import Event, Heartbeat, Launch, Pipes, Ready, StartFailed
from motet.errors import StartupError
from motet.settings.server_config import environment
from motet.types import EngineInfo

LAST_WORDS_S = 1.0
"""Seconds from the end of a process that has said nothing until it is given up."""
Spawn = Callable[[Launch], Awaitable[Process]]
"""Starts a process that reads `launch` from its standard input, which stays open as long as the process may live."""


async def spawn(launch: Launch) -> Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "motet.engines.native",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        env=engine_environ(environment()),
    )
    if process.stdin is None:
        raise StartupError("the engine process has no standard input")
    # Not drained: a start that was cancelled while the process does not read yet would leave it to nobody.
    process.stdin.write(msgspec.json.encode(launch) + b"\n")
    return process


def engine_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of an engine process: what the user set, and what follows where it does not say else.

    GOMP_SPINCOUNT      OpenMP threads that wait for each other spin for microseconds and then sleep. By default they
                        spin for long. If another process wants a core, a spinning thread may hold the core that the
                        thread it waits for needs, and a step takes 10 to 40 times as long. Sleeping at once costs a
                        fifth if nothing else runs (docs/log.md has the figures).
    MALLOC_ARENA_MAX    All threads take memory from one arena of glibc. By default those that compile grammars and
                        transfer KV have one each, which keeps what their largest piece of work took.
    """
    ours = {"MALLOC_ARENA_MAX": "1"}
    if "OMP_WAIT_POLICY" not in environ:
        ours["GOMP_SPINCOUNT"] = "1000"
    return ours | dict(environ)


async def first_event(pipes: Pipes, process: Process) -> EngineInfo:
    """Waits for Ready. If the process ends first, its last words may still be on their way through ZeroMQ's thread."""
    event, end = asyncio.ensure_future(_first_but_beats(pipes)), asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait((event, end), return_when=asyncio.FIRST_COMPLETED)
        if not event.done():
            await asyncio.wait((event,), timeout=LAST_WORDS_S)
        if not event.done():
            raise StartupError(f"the engine process ended with exit code {end.result()} before it was ready")
        match event.result():
            case Ready(info):
                return info
            case StartFailed(error):
                raise error.error()
            case other:
                raise StartupError(f"the engine process began with {type(other).__name__}")
    finally:
        for future in (event, end):
            future.cancel()
        await asyncio.gather(event, end, return_exceptions=True)


async def _first_but_beats(pipes: Pipes) -> Event:
    while isinstance(event := await pipes.receive(), Heartbeat):
        pass
    return event


BEAT_S = 0.5
"""Most seconds between two beats, and between two looks at the process."""
BEATS_A_TIMEOUT = 4
"""The longest allowed silence has time for at least this many beats."""


def beat_every_s(silence_s: float) -> float:
    return min(BEAT_S, silence_s / BEATS_A_TIMEOUT)


class LivenessCheck:
    """Decides if an engine process is still alive: `heard` is called at every event, `look` every `look_every_s`.

    A silence counts only if this process was listening. If a look comes late, this process was itself stopped or too
    busy to read, and begins to count again.
    """

    def __init__(self, silence_s: float, step_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`silence_s`: longest time without a sign of life; `step_s`: longest time of one step."""
        self.look_every_s = beat_every_s(silence_s)
        self._silence_s = silence_s
        self._step_s = step_s
        self._clock = clock
        self._heard_s = self._looked_s = clock()
        self._busy_s = 0.0

    def heard(self, busy_s: float = 0.0) -> None:
        """Notes a sign of life; `busy_s`: time that its present step has taken so far."""
        self._heard_s = self._clock()
        self._busy_s = busy_s

    def look(self) -> str | None:
        """Returns what is wrong with the process, if anything is."""
        now_s = self._clock()
        if now_s - self._looked_s > 2 * self.look_every_s:
            self._heard_s = now_s
        self._looked_s = now_s
        if self._busy_s > self._step_s:
            return f"has been in one step for {self._busy_s:.1f} s"
        if now_s - self._heard_s > self._silence_s:
            return f"has given no sign of life for {now_s - self._heard_s:.1f} s"
        return None

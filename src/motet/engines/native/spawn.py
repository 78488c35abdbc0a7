"""Starts an engine process, and waits until it can serve or has reported why it cannot. Also starts the process that
receives a trainer's tensors (`cuda.receive`)."""

import asyncio
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from motet.engine_info import EngineInfo
from motet.engines.native.protocol import Event, Heartbeat, Launch, Pipes, Ready, StartFailed
from motet.errors import EngineError, StartupError
from motet.settings.server_config import environment
from motet.system.machine import described_end, torch_environ

LAST_EVENT_S = 1.0
"""Time in seconds after the end of a process in which its last event can still arrive."""
RECEIVER = "motet.engines.native.cuda.receive"
"""The program that receives a trainer's tensors."""

Spawn = Callable[[Launch], Awaitable[Process]]
"""Starts a process that reads `launch` from its standard input, which stays open as long as the process can live."""


async def spawn(launch: Launch) -> Process:
    """Starts the engine process, in a session of its own: a terminal sends Ctrl-C to all processes of a session, which
    the engine could not ignore from its first moment on."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "motet.engines.native",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        env=torch_environ(engine_environ(environment()), launch.folder),
        start_new_session=True,
    )
    if process.stdin is None:
        raise StartupError("the engine process has no standard input")
    # Not drained: a start that is cancelled while the process does not read yet would leave the process without owner.
    process.stdin.write(msgspec.json.encode(launch) + b"\n")
    return process


async def spawn_receiver() -> Process:
    """Starts the process that receives a trainer's tensors. Raises EngineError."""
    try:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", RECEIVER),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=engine_environ(environment()),
            start_new_session=True,
        )
    except OSError as error:
        raise EngineError(f"the receiving process cannot be started: {error}") from error


def engine_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of an engine process: the user's variables, and these unless the user has set them.

    GOMP_SPINCOUNT      OpenMP threads that wait for each other spin for microseconds and then sleep. By default they
                        spin for a long time. If another process needs a core, a spinning thread can hold the core that
                        the thread it waits for needs, and a step takes 10 to 40 times as long. Sleeping at once costs
                        a fifth if nothing else runs (docs/log.md has the figures).
    MALLOC_ARENA_MAX    All threads take memory from one arena of glibc. By default the threads that compile grammars
                        and transfer KV have one each, which keeps the memory of their largest piece of work.
    """
    defaults = {"MALLOC_ARENA_MAX": "1"}
    if "OMP_WAIT_POLICY" not in environ:
        defaults["GOMP_SPINCOUNT"] = "1000"
    return defaults | dict(environ)


async def first_event(pipes: Pipes, process: Process) -> EngineInfo:
    """Waits for Ready, and returns the engine's facts. Raises StartupError. If the process ends first, ZeroMQ's thread
    can still deliver its last event."""
    event, end = asyncio.ensure_future(_first_but_heartbeats(pipes)), asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait((event, end), return_when=asyncio.FIRST_COMPLETED)
        if not event.done():
            await asyncio.wait((event,), timeout=LAST_EVENT_S)
        if not event.done():
            raise StartupError(f"the engine process {described_end(end.result())} before it was ready")
        match event.result():
            case Ready(info):
                return info
            case StartFailed(error):
                raise error.error()
            case other:
                raise StartupError(f"the first event of the engine process is {type(other).__name__}, not Ready")
    finally:
        for future in (event, end):
            future.cancel()
        await asyncio.gather(event, end, return_exceptions=True)


async def _first_but_heartbeats(pipes: Pipes) -> Event:
    while isinstance(event := await pipes.receive(), Heartbeat):
        pass
    return event


MAX_HEARTBEAT_GAP_S = 0.5
"""Maximum time in seconds between two heartbeats, and between two checks of the process."""
HEARTBEATS_PER_TIMEOUT = 4
"""Minimum number of heartbeats in the longest silence that is allowed."""


def heartbeat_every_s(silence_s: float) -> float:
    return min(MAX_HEARTBEAT_GAP_S, silence_s / HEARTBEATS_PER_TIMEOUT)


class LivenessCheck:
    """Decides if an engine process is alive. `record_event` is called at every event, `problem` every `check_every_s`.

    Silence of the engine process counts only while the API process reads. If a check is late, the API process itself
    was stopped or too busy to read, and the time of silence starts again."""

    def __init__(self, silence_s: float, step_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`silence_s`: maximum time without an event; `step_s`: maximum time of one step."""
        self.check_every_s = heartbeat_every_s(silence_s)
        self._silence_s = silence_s
        self._step_s = step_s
        self._clock = clock
        self._last_event_s = self._checked_s = clock()
        self._busy_s = 0.0

    def record_event(self, busy_s: float = 0.0) -> None:
        """Records an event. `busy_s`: duration of the current step so far."""
        self._last_event_s = self._clock()
        self._busy_s = busy_s

    def problem(self) -> str | None:
        """Returns the problem with the process as the end of a sentence, or None."""
        now_s = self._clock()
        if now_s - self._checked_s > 2 * self.check_every_s:
            self._last_event_s = now_s
        self._checked_s = now_s
        if self._busy_s > self._step_s:
            return f"has been in one step for {self._busy_s:.1f} s"
        if now_s - self._last_event_s > self._silence_s:
            return f"has sent no heartbeat for {now_s - self._last_event_s:.1f} s"
        return None

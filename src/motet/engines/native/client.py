"""The engine as the API process sees it: a child process behind two pipes.

Who ends what: `close` ends the process, the pipes and their folder, and every open group with EngineClosedError. If the
process ends by itself, every open group ends with EngineDiedError, and so does every later one. If this process ends,
however it does, the child sees its standard input end and goes too.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from itertools import count

import msgspec
import zmq
import zmq.asyncio

from motet.config import EngineConfig, environment
from motet.engines.native.protocol import (
    Abort,
    AskStats,
    Close,
    Command,
    Event,
    Launch,
    Ready,
    Stats,
    Stepped,
    StopChoice,
    Submit,
    Unable,
)
from motet.engines.native.stream import PipeStream
from motet.errors import EngineClosedError, EngineDiedError, MotetError, StartupError
from motet.ids import RequestId
from motet.types import EngineInfo, EngineStats, GenerateRequest

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""A process that does not end by then, e.g. in the middle of a very long step, is killed."""


class NativeEngine:
    """An `Engine` in a process of its own. Made by `start`."""

    def __init__(self, pipes: "Pipes", process: asyncio.subprocess.Process, info: EngineInfo) -> None:
        self.died = asyncio.Event()
        """Set when the process has ended without being asked to."""
        self._pipes = pipes
        self._process = process
        self._info = info
        self._streams: dict[RequestId, PipeStream] = {}
        self._asked: dict[int, asyncio.Future[EngineStats]] = {}
        self._numbers = count()
        self._over: MotetError | None = None
        self._tasks = [asyncio.create_task(self._read_events()), asyncio.create_task(self._watch_process())]

    @classmethod
    async def start(cls, config: EngineConfig) -> "NativeEngine":
        """Starts the process and waits until it can serve. Raises the StartupError it could not start with."""
        launch = Launch(config, tempfile.mkdtemp(prefix=f"motet-{os.getpid()}-"))  # only this user may enter it
        pipes = Pipes(launch)
        process = None
        try:
            process = await _spawn(launch)
            return cls(pipes, process, await _first_event(pipes, process))
        except BaseException:
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
            pipes.close()
            raise

    @property
    def info(self) -> EngineInfo:
        return self._info

    def generate(self, request: GenerateRequest) -> PipeStream:
        stream = PipeStream(request, self._abort)
        if self._over is not None:
            stream.fail(self._over)
            return stream
        self._streams[request.request_id] = stream
        self._send(Submit(request))
        return stream

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return
        self._send(StopChoice(request_id, index))
        stream.choice_ended(index)
        if stream.ended:
            del self._streams[request_id]

    async def stats(self, *, check: bool = False) -> EngineStats:
        """Figures of this moment, between two steps. With `check`, a broken invariant ends the engine process."""
        if self._over is not None:
            raise self._over
        number = next(self._numbers)
        future: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        self._send(AskStats(number, check))
        try:
            return await future
        finally:
            self._asked.pop(number, None)

    async def close(self) -> None:
        if isinstance(self._over, EngineClosedError):
            return
        already_dead = self._over is not None
        self._end_all(EngineClosedError("the engine was closed"))
        if not already_dead:
            self._send(Close())
        try:
            await asyncio.wait_for(self._process.wait(), CLOSE_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._pipes.close()

    def _abort(self, request_id: RequestId) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._send(Abort(request_id))

    def _send(self, command: Command) -> None:
        self._pipes.send(command)

    async def _read_events(self) -> None:
        try:
            while True:
                self._take(await self._pipes.receive())
        except msgspec.DecodeError:
            logger.exception("the engine process %d sent what is no event; it is ended", self._process.pid)
            self._process.kill()

    def _take(self, event: Event) -> None:
        match event:
            case Stepped(deltas, failures):
                for delta in deltas:
                    if stream := self._streams.get(delta.request_id):
                        stream.feed(delta)
                        if stream.ended:
                            del self._streams[delta.request_id]
                for request_id, failure in failures.items():
                    if failed := self._streams.pop(request_id, None):
                        failed.fail(failure.error())
            case Stats(number, stats):
                if (future := self._asked.get(number)) and not future.done():
                    future.set_result(stats)

    async def _watch_process(self) -> None:
        code = await self._process.wait()
        if self._over is None:
            self._end_all(EngineDiedError(f"the engine process {self._process.pid} ended with exit code {code}"))
            self.died.set()

    def _end_all(self, error: MotetError) -> None:
        self._over = error
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(error)


class Pipes:
    """This side's ends."""

    def __init__(self, launch: Launch) -> None:
        self._folder = launch.folder
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._async_context = zmq.asyncio.Context(self._context)
        self._commands = self._context.socket(zmq.PUSH)
        # What an engine has not taken yet is kept here: groups are bounded by admission, not by this pipe.
        self._commands.set_hwm(0)
        self._commands.setsockopt(zmq.LINGER, 0)
        self._commands.bind(launch.commands_address)
        self._events = self._async_context.socket(zmq.PULL)
        self._events.bind(launch.events_address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)

    def send(self, command: Command) -> None:
        """Never blocks."""
        with contextlib.suppress(zmq.Again):  # nobody at the other end: its death is reported elsewhere
            self._commands.send(self._encoder.encode(command), zmq.NOBLOCK)

    async def receive(self) -> Event:
        return self._decoder.decode(await self._events.recv())

    def close(self) -> None:
        self._commands.close(linger=0)
        self._events.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)


async def _spawn(launch: Launch) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "motet.engines.native.process",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        env=_with_short_waits(environment()),
    )
    if process.stdin is None:
        raise StartupError("the engine process has no standard input")
    process.stdin.write(msgspec.json.encode(launch) + b"\n")
    await process.stdin.drain()
    return process


def _with_short_waits(environ: Mapping[str, str]) -> dict[str, str]:
    """Threads of OpenMP that wait for each other spin for microseconds and then sleep, unless the user chose otherwise.

    By default they spin for long; where another process wants a core, a spinning thread keeps it from the very thread
    it waits for, and a step takes 10 to 40 times as long. Sleeping at once costs a fifth where nobody disturbs
    (docs/log.md has the figures).
    """
    chosen = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environ.keys()
    return {**environ} if chosen else {**environ, "GOMP_SPINCOUNT": "1000"}


async def _first_event(pipes: Pipes, process: asyncio.subprocess.Process) -> EngineInfo:
    """Waits for Ready; whichever comes first of an event and the process's end decides."""
    event, end = asyncio.ensure_future(pipes.receive()), asyncio.ensure_future(process.wait())
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

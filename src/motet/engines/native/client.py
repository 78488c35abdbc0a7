"""The engine as the API process sees it: a child process behind two pipes.

Who ends what: `close` ends the process, the pipes and their folder, and every open group with EngineClosedError. If the
process ends by itself, every open group ends with EngineDiedError, and so does every later one. If it hangs, it is
killed, and they end with EngineSilentError. If this process ends, however it does, the child sees its standard input
end and goes too. The folder goes before all that, once the process is connected: both may be killed at once.
"""

import asyncio
import contextlib
import logging
import os
import tempfile
from collections.abc import Sequence
from itertools import count

import msgspec

from motet.config import EngineConfig
from motet.engines.native.pipes import Pipes
from motet.engines.native.protocol import (
    Abort,
    AskStats,
    Beat,
    Close,
    Command,
    Connect,
    Connected,
    Event,
    Launch,
    Prefill,
    Release,
    Stats,
    Stepped,
    StopChoice,
    Submit,
)
from motet.engines.native.pulse import Patience, Pulse
from motet.engines.native.questions import Questions
from motet.engines.native.spawn import EngineProcess, Spawn, first_event, spawn
from motet.engines.native.stream import PipeStream
from motet.errors import EngineClosedError, EngineDiedError, EngineSilentError, MotetError, StartupError
from motet.ids import RequestId
from motet.kv_events.changes import BlockChange, BlockListener, Cleared
from motet.transfer.base import TransferError
from motet.transfer.ticket import Ticket, TransferAddress
from motet.types import EngineInfo, EngineStats, GenerateRequest

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""A process that does not end by then, e.g. in the middle of a very long step, is killed."""


class NativeEngine:
    """An `Engine` in a process of its own. Made by `start`."""

    def __init__(self, pipes: Pipes, process: EngineProcess, info: EngineInfo, patience: Patience) -> None:
        self.died = asyncio.Event()
        """Set when the process has ended without being asked to, by itself or because it hung."""
        self._pipes = pipes
        self._process = process
        self._info = info
        self._pulse = Pulse(patience)
        self._streams: dict[RequestId, PipeStream] = {}
        self._stats: Questions[int, EngineStats] = Questions()
        self._tickets: Questions[RequestId, Ticket] = Questions()
        self._connections: Questions[int, None] = Questions()
        self._numbers = count()
        self._stored = False
        """Whether the engine's prefix cache has told of blocks."""
        self._block_listeners: list[BlockListener] = []
        self._over: MotetError | None = None
        self._tasks = [
            asyncio.create_task(watch) for watch in (self._read_events(), self._watch_process(), self._watch_pulse())
        ]

    @classmethod
    async def start(cls, config: EngineConfig, *, spawn: Spawn = spawn) -> "NativeEngine":
        """Starts the process and waits until it can serve. Raises the StartupError it could not start with."""
        try:
            return await cls._start(config, spawn)
        except OSError as error:  # no process, no memory or no file to be had
            raise StartupError(f"the engine process cannot be started: {error}") from error

    @classmethod
    async def _start(cls, config: EngineConfig, spawn: Spawn) -> "NativeEngine":
        launch = Launch(config, tempfile.mkdtemp(prefix=f"motet-{os.getpid()}-"))  # only this user may enter it
        pipes = Pipes(launch)
        process = None
        try:
            process = await spawn(launch)
            patience = Patience(config.heartbeat_timeout_s, config.step_timeout_s)
            return cls(pipes, process, await first_event(pipes, process), patience)
        except BaseException:
            try:
                if process is not None and process.returncode is None:
                    process.kill()
                    await process.wait()
            finally:  # who cancels a start may do so twice
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

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        self._check_alive()
        with self._tickets.asked(request.request_id) as answer:
            self._send(Prefill(request, readers))
            try:
                return await answer
            except asyncio.CancelledError:
                self._send(Abort(request.request_id))  # or ends the lease, if it has been granted meanwhile
                raise

    async def release(self, ticket: Ticket) -> None:
        if self._over is None:
            self._send(Release(ticket))

    async def connect(self, address: TransferAddress) -> None:
        """Gets to know another worker before it is needed. TransferError if that cannot be."""
        self._check_alive()
        number = next(self._numbers)
        with self._connections.asked(number) as answer:
            self._send(Connect(number, address))
            await answer

    def listen_to_blocks(self, listener: BlockListener) -> None:
        """From now on `listener` is told what becomes of the blocks that the prefix cache can find, and that none can
        be found any more when the engine ends. Call it before the engine is given a group: of blocks that are there
        already nothing is known here."""
        if self._stored:
            raise RuntimeError("the engine has stored blocks already")
        self._block_listeners.append(listener)

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
        self._check_alive()
        number = next(self._numbers)
        with self._stats.asked(number) as answer:
            self._send(AskStats(number, check))
            return await answer

    async def close(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """A process that has not ended by itself by then is killed."""
        if isinstance(self._over, EngineClosedError):
            return
        already_dead = self._over is not None
        self._end_all(EngineClosedError("the engine was closed"))
        if not already_dead:
            self._send(Close())
        try:
            await asyncio.wait_for(self._process.wait(), timeout_s)
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
        self._pulse.heard(event.busy_s if isinstance(event, Beat) else 0.0)
        match event:
            case Beat():
                self._pipes.beaten()
            case Stepped():
                self._take_step(event)
            case Stats(number, stats):
                self._stats.answer(number, stats)
            case Connected(number, failure):
                if failure is None:
                    self._connections.answer(number, None)
                else:
                    self._connections.fail(number, TransferError(failure.message, failure.kind))

    def _tell_of_blocks(self, changes: Sequence[BlockChange]) -> None:
        self._stored = True
        for listener in self._block_listeners:
            listener(changes)

    def _take_step(self, step: Stepped) -> None:
        if step.blocks:
            self._tell_of_blocks(step.blocks)
        for delta in step.deltas:
            if stream := self._streams.get(delta.request_id):
                stream.feed(delta)
                if stream.ended:
                    del self._streams[delta.request_id]
        for request_id, ticket in step.tickets.items():
            self._tickets.answer(request_id, ticket)
        for request_id, failure in step.failures.items():
            self._tickets.fail(request_id, failure.error())
            if failed := self._streams.pop(request_id, None):
                failed.fail(failure.error())

    async def _watch_process(self) -> None:
        code = await self._process.wait()
        if self._over is None:
            self._end_all(EngineDiedError(f"the engine process {self._process.pid} ended with exit code {code}"))
        if not isinstance(self._over, EngineClosedError):
            self.died.set()

    async def _watch_pulse(self) -> None:
        while self._over is None:
            if (seen := self._pulse.look()) is not None:
                error = EngineSilentError(f"the engine process {self._process.pid} {seen}; it was killed")
                logger.error("%s", error)
                self._end_all(error)
                self._process.kill()  # ends a stopped process too
            else:
                await asyncio.sleep(self._pulse.look_every_s)

    def _check_alive(self) -> None:
        if self._over is not None:
            raise self._over

    def _end_all(self, error: MotetError) -> None:
        self._over = error
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()
        self._stats.fail_all(error)
        self._tickets.fail_all(error)
        self._connections.fail_all(error)
        if self._stored:
            self._tell_of_blocks([Cleared()])

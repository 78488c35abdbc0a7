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
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import count
from typing import Generic, TypeVar

import msgspec

from motet.engine import PreparedWeights
from motet.engines.native import protocol
from motet.engines.native.protocol import Pipes
from motet.engines.native.spawn import LivenessCheck, Spawn, first_event, spawn
from motet.errors import EngineClosedError, EngineDiedError, EngineError, EngineSilentError, MotetError, StartupError
from motet.ids import RequestId
from motet.kv_events.changes import BlockChange, BlockListener, Cleared
from motet.metrics.stats import EngineStats
from motet.models.checkpoint import Checkpoint
from motet.settings.server_config import EngineConfig
from motet.transfer.ticket import Ticket, TransferAddress
from motet.types import FIRST_VERSION, EngineInfo, GenerateRequest, GroupDelta

Name = TypeVar("Name", bound=Hashable)
Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""After so many seconds a process that does not end, for instance in a very long step, is killed."""


class NativeEngine:
    """An `Engine` in a process of its own. Made by `start`."""

    def __init__(self, pipes: Pipes, process: Process, *, info: EngineInfo, pulse: LivenessCheck) -> None:
        self.died = asyncio.Event()
        """Set when the process has ended without being asked to, by itself or because it hung."""
        self._pipes = pipes
        self._process = process
        self.info = info
        self._pulse = pulse
        self._streams: dict[RequestId, PipeStream] = {}
        self._stats: Questions[int, EngineStats] = Questions()
        self._tickets: Questions[RequestId, Ticket] = Questions()
        self._connections: Questions[int, None] = Questions()
        self._prepared: Questions[int, protocol.WeightsPrepared] = Questions()
        self._renewed: Questions[int, EngineInfo | None] = Questions()
        self._sums: Questions[int, dict[str, str]] = Questions()
        self._obeyed: Questions[int, None] = Questions()
        self._numbers = count()
        self._stored = False
        """True once the engine's prefix cache has reported blocks."""
        self._block_listeners: list[BlockListener] = []
        self._over: MotetError | None = None
        self._tasks = [
            asyncio.create_task(watch) for watch in (self._read_events(), self._watch_process(), self._watch_pulse())
        ]

    @classmethod
    async def start(cls, config: EngineConfig, *, spawn: Spawn = spawn) -> "NativeEngine":
        """Starts the process and waits until it can serve. Raises the StartupError it could not start with."""
        try:
            launch = protocol.Launch(config, tempfile.mkdtemp(prefix=f"motet-{os.getpid()}-"))  # of this user alone
            async with contextlib.AsyncExitStack() as undo:
                pipes = Pipes(launch)
                undo.callback(pipes.close)
                process = await spawn(launch)
                undo.push_async_callback(end, process)
                info = await first_event(pipes, process)
                undo.pop_all()
        except OSError as error:  # the system has no process, memory or file for it
            raise StartupError(f"the engine process cannot be started: {error}") from error
        return cls(pipes, process, info=info, pulse=LivenessCheck(config.heartbeat_timeout_s, config.step_timeout_s))

    def generate(self, request: GenerateRequest) -> "PipeStream":
        resumed = any(start.output_tokens for start in request.choices)  # perhaps after tokens of other weights
        version = self.info.weight_version if resumed or self.info.weight_version != FIRST_VERSION else ""
        stream = PipeStream(request, self._abort, version=version)
        if self._over is not None:
            stream.fail(self._over)
            return stream
        self._streams[request.request_id] = stream
        self._pipes.send(protocol.Submit(request))
        return stream

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        try:
            return await self._ask(self._tickets, request.request_id, question=protocol.Prefill(request, readers))
        except asyncio.CancelledError:
            self._pipes.send(protocol.Abort(request.request_id))  # also ends a lease that was granted meanwhile
            raise

    async def release(self, ticket: Ticket, *, trace: str = "") -> None:
        if self._over is None:
            self._pipes.send(protocol.Release(ticket))

    async def connect(self, address: TransferAddress) -> None:
        """Connects to another worker before it is needed. Raises EngineError if that cannot be."""
        number = next(self._numbers)
        await self._ask(self._connections, number, question=protocol.Connect(number, address))

    def listen_to_blocks(self, listener: BlockListener) -> None:
        """Passes changes of the prefix cache's blocks to `listener` from now on, and at the engine's end that there are
        none. Must be called before the engine gets a group: older blocks are not known here."""
        if self._stored:
            raise RuntimeError("the engine has stored blocks already")
        self._block_listeners.append(listener)

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return
        self._pipes.send(protocol.StopChoiceCommand(request_id, index))
        stream.choice_ended(index)
        if stream.ended:
            del self._streams[request_id]

    async def stats(self, *, check: bool = False) -> EngineStats:
        """Returns the figures of this moment, between two steps. With `check`, a broken invariant ends the process."""
        number = next(self._numbers)
        return await self._ask(self._stats, number, question=protocol.AskStats(number, check))

    async def prepare_weights(self, checkpoint: Checkpoint) -> PreparedWeights:
        """Reads new weights while the old ones serve. Raises RequestError, which names the tensor or the file, if they
        cannot be used."""
        number = next(self._numbers)
        order = protocol.PrepareWeights(number, checkpoint.kind, tuple(map(str, checkpoint.paths)))
        answer = await self._ask(self._prepared, number, question=order)
        if answer.facts is None:
            raise answer.failure.error() if answer.failure is not None else EngineError("no weights were prepared")
        return answer.facts

    async def apply_weights(self, version: str) -> None:
        """Puts the prepared weights in the place of the old ones. What its groups write from then on comes after this,
        and `info` tells of the new weights. Raises EngineError if none are prepared."""
        number = next(self._numbers)
        if await self._ask(self._renewed, number, question=protocol.ApplyWeights(number, version)) is None:
            raise EngineError("no new weights are prepared")

    async def name_weights(self, version: str) -> None:
        """Calls the weights that serve by another version."""
        number = next(self._numbers)
        await self._ask(self._renewed, number, question=protocol.NameWeights(number, version))

    async def checksums(self) -> dict[str, str]:
        """Returns the SHA-256 of what the engine has in place of each tensor of a checkpoint. It must get no new
        weights meanwhile."""
        number = next(self._numbers)
        return await self._ask(self._sums, number, question=protocol.SumWeights(number))

    def drop_weights(self) -> None:
        """Forgets prepared weights."""
        if self._over is None:
            self._pipes.send(protocol.DropWeights())

    async def hold(self, held: bool) -> None:
        """Stops all groups between two steps, or lets them go on. They keep all they have."""
        number = next(self._numbers)
        await self._ask(self._obeyed, number, question=protocol.Hold(number, held))

    async def forget_prefixes(self, *, anew: bool) -> None:
        """Empties the prefix cache. Groups under way keep their KV, or compute it `anew`."""
        number = next(self._numbers)
        await self._ask(self._obeyed, number, question=protocol.ForgetPrefixes(number, anew))

    async def sleep(self, *, weights: bool) -> None:
        """Gives the memory of the KV cache back to the system, and with `weights` theirs: then all tensors must be
        brought before it goes on. The engine must be held."""
        number = next(self._numbers)
        await self._ask(self._obeyed, number, question=protocol.Sleep(number, weights))

    async def wake(self) -> None:
        """Takes the memory of the KV cache again."""
        number = next(self._numbers)
        await self._ask(self._obeyed, number, question=protocol.Wake(number))

    def kill(self) -> None:
        """Ends the process with SIGKILL, as if it had died by itself."""
        if self._process.returncode is None:
            self._process.kill()

    async def close(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Ends the process; it is killed if it has not ended by itself after `timeout_s`, or when this is cancelled."""
        if self._over is None:  # else it keeps the reason for which it ended, which moves groups elsewhere
            self._end_all(EngineClosedError("the engine was closed"))
            self._pipes.send(protocol.Close())
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._process.wait()
        finally:
            await end(self._process)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._pipes.close()

    def _abort(self, request_id: RequestId) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._pipes.send(protocol.Abort(request_id))

    async def _read_events(self) -> None:
        try:
            while True:
                self._take(await self._pipes.receive())
        except Exception:  # as it is, nothing that the process says from now on would be heard
            logger.exception("the engine process %d sent an event that cannot be taken; it is ended", self._process.pid)
            self._process.kill()

    def _take(self, event: protocol.Event) -> None:
        self._pulse.heard(event.busy_s if isinstance(event, protocol.Heartbeat) else 0.0)
        match event:
            case protocol.Heartbeat():
                self._pipes.beaten()
            case protocol.StepReport():
                self._take_step(event)
            case protocol.Stats(number, stats):
                self._stats.answer(number, stats)
            case protocol.WeightsPrepared(number):
                self._prepared.answer(number, event)
            case protocol.Renewed(number, info):
                self._renew(info)
                self._renewed.answer(number, info)
            case protocol.Checksums(number, sums):
                self._sums.answer(number, sums)
            case protocol.Obeyed(number):
                self._obeyed.answer(number, None)
            case protocol.Connected(number, failure):
                if failure is None:
                    self._connections.answer(number, None)
                else:
                    self._connections.fail(number, EngineError(failure))

    def _renew(self, info: EngineInfo | None) -> None:
        if info is not None:
            self.info = info
            for stream in self._streams.values():
                stream.version = info.weight_version

    def _tell_of_blocks(self, changes: Sequence[BlockChange]) -> None:
        self._stored = True
        for listener in self._block_listeners:
            listener(changes)

    def _take_step(self, step: protocol.StepReport) -> None:
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

    async def _ask(self, questions: "Questions[Name, Answer]", name: Name, *, question: protocol.Command) -> Answer:
        if self._over is not None:
            raise self._over
        with questions.ask(name) as answer:
            self._pipes.send(question)
            return await answer

    def _end_all(self, error: MotetError) -> None:
        self._over = error
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()
        self._stats.fail_all(error)
        self._tickets.fail_all(error)
        self._connections.fail_all(error)
        self._prepared.fail_all(error)
        self._renewed.fail_all(error)
        self._sums.fail_all(error)
        self._obeyed.fail_all(error)
        if self._stored:
            self._tell_of_blocks([Cleared()])


async def end(process: Process) -> None:
    """Kills a process that has not ended."""
    if process.returncode is None:
        process.kill()
        await process.wait()


class PipeStream:
    """The deltas of one group, between the pipe and their reader: a `GroupStream` that is fed from outside. A slow
    reader leaves at most the whole answers here, `max_tokens` for each choice."""

    def __init__(self, request: GenerateRequest, abort: Callable[[RequestId], None], *, version: str = "") -> None:
        self.version = version
        """The version of the weights, if the next delta is the first to tell it; else empty."""
        self._request_id = request.request_id
        self._abort = abort
        self._open = {start.index for start in request.choices}
        self._deltas: deque[GroupDelta] = deque()
        self._error: MotetError | None = None
        self._loop = asyncio.get_running_loop()  # a system call in Python 3.11, so not once a step
        self._reader: asyncio.Future[None] | None = None
        """What the reader awaits. An `asyncio.Event` would do, at a third more for each step of a group."""

    @property
    def ended(self) -> bool:
        """True if nothing more will be fed."""
        return not self._open or self._error is not None

    def feed(self, delta: GroupDelta) -> None:
        if self.version:
            delta, self.version = msgspec.structs.replace(delta, weight_version=self.version), ""
        self._deltas.append(delta)
        for choice in delta.choices:
            if choice.finish is not None:
                self._open.discard(choice.index)
        self._wake()

    def fail(self, error: MotetError) -> None:
        """Ends the stream with `error`, after the deltas that came before."""
        self._error = error
        self._wake()

    def choice_ended(self, index: int) -> None:
        """Called when the reader has ended this choice itself."""
        self._open.discard(index)
        self._wake()

    def __aiter__(self) -> "PipeStream":
        return self

    async def __anext__(self) -> GroupDelta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._reader = self._loop.create_future()
            await self._reader
        return self._deltas.popleft()

    async def aclose(self) -> None:
        self._deltas.clear()
        self._open.clear()
        self._abort(self._request_id)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Questions(Generic[Name, Answer]):
    """Questions to an engine process that wait for their answer, by name. Other answers are dropped."""

    def __init__(self) -> None:
        self._open: dict[Name, asyncio.Future[Answer]] = {}

    @contextlib.contextmanager
    def ask(self, name: Name) -> Iterator[asyncio.Future[Answer]]:
        """Yields the future answer, and forgets it at the end of the block."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._open[name] = answer
        try:
            yield answer
        finally:
            self._open.pop(name, None)
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # marks it as seen, also if nobody waits for it any more

    def answer(self, name: Name, answer: Answer) -> None:
        if (question := self._open.get(name)) and not question.done():
            question.set_result(answer)

    def fail(self, name: Name, error: MotetError) -> None:
        if (question := self._open.get(name)) and not question.done():
            question.set_exception(error)

    def fail_all(self, error: MotetError) -> None:
        for name in self._open:
            self.fail(name, error)

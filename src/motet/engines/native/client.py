"""The engine as the API process sees it: a child process at the other end of two pipes.

`close` ends the process, the pipes and their folder, and every open group with EngineClosedError. If the engine process
ends by itself, all open and later groups end with EngineDiedError. If it hangs, it is killed, and they end with
EngineSilentError. If the API process ends in any way, the standard input of the engine process ends, and so the engine
process ends too. The folder is removed as soon as the engine process is connected, since both processes can be killed
at the same time.
"""

import asyncio
import contextlib
import logging
import os
import tempfile
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import msgspec

from motet.engine_info import FIRST_VERSION, EngineInfo, adapter_in, version_of
from motet.engine_orders import EngineFacts, EngineFigures, EngineOrder, OrderAnswer, ReadStats
from motet.engines.native import protocol
from motet.engines.native.protocol import Pipes
from motet.engines.native.spawn import LivenessCheck, Spawn, first_event, spawn
from motet.errors import EngineClosedError, EngineDiedError, EngineSilentError, MotetError, RequestError, StartupError
from motet.ids import RequestId
from motet.kv_events.changes import BlockChange, BlockListener, Cleared
from motet.metrics.stats import EngineStats
from motet.settings.engine_config import EngineConfig
from motet.system.machine import described_end
from motet.transfer.ticket import Ticket
from motet.types import GenerateRequest, GroupDelta

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""Time in seconds after which a process that does not end, for instance in a very long step, is killed."""


class NativeEngine:
    """An `Engine` in its own process. Made by `start`."""

    def __init__(self, pipes: Pipes, process: Process, *, info: EngineInfo, liveness: LivenessCheck) -> None:
        self.died = asyncio.Event()
        """Set when the process has ended without `close`: by itself, or because it hung and was killed."""
        self.info = info
        self._pipes = pipes
        self._process = process
        self._liveness = liveness
        self._streams: dict[RequestId, PipeStream] = {}
        self._pending = PendingAnswers()
        self._stored = False
        """True once the engine's prefix cache has reported blocks."""
        self._block_listeners: list[BlockListener] = []
        self._over: MotetError | None = None
        """The error with which groups and orders end from now on; None while the process lives."""
        self._tasks = [
            asyncio.create_task(watch) for watch in (self._read_events(), self._watch_process(), self._watch_liveness())
        ]

    @classmethod
    async def start(cls, config: EngineConfig, *, spawn: Spawn = spawn) -> "NativeEngine":
        """Starts the process and waits until it can serve. Raises the StartupError with which it ends otherwise."""
        try:
            launch = protocol.Launch(config, tempfile.mkdtemp(prefix=f"motet-{os.getpid()}-"))  # for this user alone
            async with contextlib.AsyncExitStack() as undo:
                pipes = Pipes(launch)
                undo.callback(pipes.close)
                process = await spawn(pipes.launch)
                undo.push_async_callback(end, process)
                info = await first_event(pipes, process)
                undo.pop_all()
        except OSError as error:  # the system has no free process, memory or file
            raise StartupError(f"the engine process cannot be started: {error}") from error
        liveness = LivenessCheck(config.heartbeat_timeout_s, config.step_timeout_s)
        return cls(pipes, process, info=info, liveness=liveness)

    def generate(self, request: GenerateRequest) -> "PipeStream":
        resumed = any(start.output_tokens for start in request.choices)  # perhaps after tokens of other weights
        version = version_of(self.info, request.model)
        stream = PipeStream(request, self._abort, version=version, is_new=resumed or version != FIRST_VERSION)
        if self._over is not None:
            stream.fail(self._over)
            return stream
        if request.sampling.extra_args:
            message = "Unsupported parameter: 'extra_args' is for vLLM workers: the model is on a Motet engine."
            stream.fail(RequestError(message, param="extra_args", code="unsupported_parameter"))
            return stream
        self._streams[request.request_id] = stream
        self._pipes.send(protocol.Submit(request))
        return stream

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        try:
            ticket = await self._answer_to(protocol.Prefill(request, readers), request.request_id)
        except asyncio.CancelledError:
            self._pipes.send(protocol.Abort(request.request_id))  # also ends a lease that has just been granted
            raise
        assert isinstance(ticket, Ticket)
        return ticket

    async def release(self, ticket: Ticket, *, trace: str = "") -> None:
        if self._over is None:
            self._pipes.send(protocol.Release(ticket))

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return
        self._pipes.send(protocol.StopChoiceCommand(request_id, index))
        stream.end_choice(index)
        if stream.ended:
            del self._streams[request_id]

    async def send(self, order: EngineOrder) -> OrderAnswer:
        """Sends an order, and returns the answer when the engine has carried out the order. Raises the error with which
        the engine refuses it. Deltas after new `EngineFacts` are generated with the weights that the facts name."""
        number = next(self._pending.order_numbers)
        answer = await self._answer_to(protocol.NumberedOrder(number, order), number)
        assert not isinstance(answer, Ticket)
        return answer

    async def stats(self, *, check: bool = False) -> EngineStats:
        """Returns the current figures, between two steps. With `check`, a broken invariant ends the process."""
        answer = await self.send(ReadStats(check))
        assert isinstance(answer, EngineFigures)
        return answer.stats

    def listen_to_blocks(self, listener: BlockListener) -> None:
        """Passes changes of the prefix cache's blocks to `listener` from now on; at the engine's end, passes `Cleared`.
        Must be called before the engine gets a group: this object does not know earlier blocks."""
        if self._stored:
            raise RuntimeError("the engine has stored blocks already")
        self._block_listeners.append(listener)

    def kill(self) -> None:
        """Ends the process with SIGKILL, as if it had died by itself."""
        if self._process.returncode is None:
            self._process.kill()

    async def close(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Ends the process. Kills it if it has not ended after `timeout_s`, or if the caller is cancelled."""
        if self._over is None:  # otherwise the earlier error is kept, which moves groups to other workers
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

    async def _answer_to(self, command: protocol.Command, key: "AnswerKey") -> "PendingAnswer":
        if self._over is not None:
            raise self._over
        with self._pending.expect(key) as answer:
            self._pipes.send(command)
            return await answer

    def _abort(self, request_id: RequestId) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._pipes.send(protocol.Abort(request_id))

    async def _read_events(self) -> None:
        try:
            while True:
                self._take(await self._pipes.receive())
        except Exception:  # otherwise later events of the process would be lost without notice
            logger.exception("the engine process %d sent an invalid event; it is killed", self._process.pid)
            self._process.kill()

    def _take(self, event: protocol.Event) -> None:
        self._liveness.record_event(event.busy_s if isinstance(event, protocol.Heartbeat) else 0.0)
        match event:
            case protocol.Heartbeat():
                self._pipes.record_heartbeat()
            case protocol.StepReport():
                self._take_step(event)
            case protocol.NumberedAnswer(number, answer, error):
                if isinstance(answer, EngineFacts):
                    self.info = answer.info
                    for stream in self._streams.values():
                        stream.use_version_of(answer.info)
                if answer is not None:
                    self._pending.answer(number, answer)
                elif error is not None:
                    self._pending.fail(number, error.error())

    def _take_step(self, step: protocol.StepReport) -> None:
        if step.blocks:
            self._report_blocks(step.blocks)
        for delta in step.deltas:
            if stream := self._streams.get(delta.request_id):
                stream.feed(delta)
                if stream.ended:
                    del self._streams[delta.request_id]
        for request_id, ticket in step.tickets.items():
            self._pending.answer(request_id, ticket)
        for request_id, failure in step.failures.items():
            self._pending.fail(request_id, failure.error())
            if failed := self._streams.pop(request_id, None):
                failed.fail(failure.error())

    def _report_blocks(self, changes: Sequence[BlockChange]) -> None:
        self._stored = True
        for listener in self._block_listeners:
            listener(changes)

    async def _watch_process(self) -> None:
        code = await self._process.wait()
        if self._over is None:
            self._end_all(EngineDiedError(f"the engine process {self._process.pid} {described_end(code)}"))
        if not isinstance(self._over, EngineClosedError):
            self.died.set()

    async def _watch_liveness(self) -> None:
        while self._over is None:
            if (problem := self._liveness.problem()) is not None:
                error = EngineSilentError(f"the engine process {self._process.pid} {problem}; it was killed")
                logger.error("%s", error)
                self._end_all(error)
                self._process.kill()  # ends a stopped process too
            else:
                await asyncio.sleep(self._liveness.check_every_s)

    def _end_all(self, error: MotetError) -> None:
        self._over = error
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()
        self._pending.fail_all(error)
        if self._stored:
            self._report_blocks([Cleared()])


async def end(process: Process) -> None:
    """Kills a process that has not ended."""
    if process.returncode is None:
        process.kill()
        await process.wait()


class PipeStream:
    """The deltas of one group, between the pipe and their reader: a `GroupStream` that the engine feeds. If the reader
    is slow, the stream stores at most the complete answers: `max_tokens` for each choice."""

    def __init__(
        self,
        request: GenerateRequest,
        abort: Callable[[RequestId], None],
        *,
        version: str = FIRST_VERSION,
        is_new: bool = False,
    ) -> None:
        """`version`: version of the weights. `is_new`: True if the first delta must report it."""
        self._version = version
        self._new_version = version if is_new else ""
        """Version of the weights if the next delta is the first with these weights, otherwise empty."""
        self._request_id = request.request_id
        self._model = request.model
        self._abort = abort
        self._open = {start.index for start in request.choices}
        self._deltas: deque[GroupDelta] = deque()
        self._error: MotetError | None = None
        self._loop = asyncio.get_running_loop()  # a system call in Python 3.11, so not at every step
        self._reader: asyncio.Future[None] | None = None
        """The future that the reader awaits. An `asyncio.Event` would cost a third more for each step of a group."""

    @property
    def ended(self) -> bool:
        return not self._open or self._error is not None

    def use_version_of(self, info: EngineInfo) -> None:
        """Called with new facts about the engine. A group of an adapter that was unloaded keeps its version."""
        if self._model in ("", info.model) or adapter_in(info, self._model) is not None:
            version = version_of(info, self._model)
            if version != self._version:
                self._version = self._new_version = version

    def feed(self, delta: GroupDelta) -> None:
        if self._new_version:
            delta, self._new_version = msgspec.structs.replace(delta, weight_version=self._new_version), ""
        self._deltas.append(delta)
        for choice in delta.choices:
            if choice.finish is not None:
                self._open.discard(choice.index)
        self._wake()

    def fail(self, error: MotetError) -> None:
        """Ends the stream with `error`, after the deltas that it already has."""
        self._error = error
        self._wake()

    def end_choice(self, index: int) -> None:
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


AnswerKey = int | RequestId
"""The number of an order, or the id of a request to prefill."""
PendingAnswer = OrderAnswer | Ticket


class PendingAnswers:
    """The orders and prefills that wait for an answer of the engine process. Other answers are dropped."""

    def __init__(self) -> None:
        self.order_numbers = count()
        self._futures: dict[AnswerKey, asyncio.Future[PendingAnswer]] = {}

    @contextlib.contextmanager
    def expect(self, key: AnswerKey) -> Iterator[asyncio.Future[PendingAnswer]]:
        """Yields the future of an answer, and removes it at the end of the block."""
        future: asyncio.Future[PendingAnswer] = asyncio.get_running_loop().create_future()
        self._futures[key] = future
        try:
            yield future
        finally:
            self._futures.pop(key, None)
            if not future.cancel() and not future.cancelled():
                future.exception()  # marks the exception as retrieved, even if no caller reads it

    def answer(self, key: AnswerKey, answer: PendingAnswer) -> None:
        if (future := self._futures.get(key)) and not future.done():
            future.set_result(answer)

    def fail(self, key: AnswerKey, error: MotetError) -> None:
        if (future := self._futures.get(key)) and not future.done():
            future.set_exception(error)

    def fail_all(self, error: MotetError) -> None:
        for key in self._futures:
            self.fail(key, error)

"""Completes a batch: every line of the input gets a result in the output file or an error in the errors file.

    1  windows        the lines without a result, in the order in which they are sent (`requests`)
    2  concurrency    a request is sent when fewer than the limit are in progress
    3  attempts       it is sent until its response is final (`engines.refusals`), with growing pauses
    4  files          the response becomes a line at once; the files are synced at intervals

A request that fails is a line of the errors file. What concerns all requests ends the run with BatchStoppedError: a
server that is gone for too long, an API key that is refused, a file that cannot be written. Results so far remain, and
the next run continues after them."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus

from motet.batch.concurrency import ConcurrencyLimit
from motet.batch.lines import BatchLine, LineError, error_line, result_line
from motet.batch.output_file import OutputFile
from motet.batch.requests import NumberedLine
from motet.batch.sender import RequestSender, ServerReply, total_tokens
from motet.batch.server_watch import ServerWatch, Sleep
from motet.engines.refusals import ReplyVerdict, growing_pauses
from motet.errors import BatchStoppedError, MotetError
from motet.log import escaped, notice

SYNC_INTERVAL_S = 2.0
MAX_BROKEN_ATTEMPTS = 5
"""Number of times that a request is sent although its connection breaks or the server fails."""
MAX_OPEN_BYTES = 64 * 2**20
"""Size of the bodies of requests in progress from which on no other request is sent."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


@dataclass
class BatchProgress:
    """Counts of lines, updated by the run and read by the display."""

    num_lines: int
    """Lines of the input that are not blank."""
    num_before: int = 0
    """Lines that had a result at the start."""
    num_completed: int = 0
    """Lines with a result of this run."""
    num_failed: int = 0
    """Lines in the file of errors."""
    first_failure: str = ""
    """The first request of this run that failed, and the reason; empty before it."""
    num_tokens: int = 0
    """Prompt and output tokens of the results of this run."""
    num_retries: int = 0
    num_in_progress: int = 0
    limit: int = 0
    """Maximum number of requests in progress."""

    @property
    def num_done(self) -> int:
        return self.num_before + self.num_completed + self.num_failed

    @property
    def num_left(self) -> int:
        return max(self.num_lines - self.num_done, 0)


@dataclass
class RunTimes:
    """The clock of a run, and its times in seconds."""

    server_timeout_s: float = 600.0
    """Maximum time without a server, and in which a server refuses a request because of its load."""
    stop_s: float = 10.0
    """Time for requests in progress to finish after `BatchFileRun.stop`."""
    sleep: Sleep = asyncio.sleep
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = field(default=random.random)
    """Returns a number from 0 to 1, which varies the pauses so that requests are not sent again at once."""


class BatchFileRun:
    """One run. `progress` has its figures at any time."""

    def __init__(
        self,
        sender: RequestSender,
        watch: ServerWatch,
        *,
        output: OutputFile,
        errors: OutputFile,
        progress: BatchProgress,
        limit: ConcurrencyLimit,
        times: RunTimes,
    ) -> None:
        self.progress = progress
        self._sender = sender
        self._watch = watch
        self._output = output
        self._errors = errors
        self._limit = limit
        self._times = times
        self._running: dict[asyncio.Task[None], int] = {}
        """The task of each request in progress, with the size of its body."""
        self._waiting: set[asyncio.Task[None]] = set()
        """Running tasks that only wait."""
        self._stopping = asyncio.Event()
        self._freed = asyncio.Event()
        """Set when the number of requests in progress or the limit has changed."""
        self._last_result_s = times.clock()

    def stop(self) -> None:
        """Sends no more requests. Those in progress have some seconds to finish; those that wait end at once, without
        a line."""
        self._stopping.set()
        self._freed.set()
        for task in self._waiting:
            task.cancel()

    async def run(self, windows: Iterator[Sequence[NumberedLine]]) -> None:
        """Sends all lines, and returns when each is in a file, or after `stop`. Raises BatchStoppedError, or
        StartupError if a server cannot be started again."""
        try:
            async with asyncio.TaskGroup() as group:
                syncing = group.create_task(self._sync_at_intervals())
                await self._send_all(windows, group=group)
                await self._wait_for_running()
                syncing.cancel()
        except* MotetError as stopped:
            raise _first(stopped) from None
        finally:
            await self._watch.close()
            self._sync()

    async def _wait_for_server(self, group: asyncio.TaskGroup) -> None:
        """Returns when the server answers, or after `stop`. Called before the first request."""
        checking = group.create_task(self._watch.check())
        self._waiting.add(checking)
        await asyncio.wait([checking])
        self._waiting.discard(checking)

    async def _send_all(self, windows: Iterator[Sequence[NumberedLine]], *, group: asyncio.TaskGroup) -> None:
        has_started = False
        while not self._stopping.is_set() and (window := await asyncio.to_thread(next, windows, None)):
            for numbered in window:
                if isinstance(numbered.line, LineError):
                    self._fail(error_line(numbered.line, number=numbered.number))
                    continue
                if not has_started and not self._stopping.is_set():
                    await self._wait_for_server(group)
                    has_started = True
                await self._wait_for_place()
                if self._stopping.is_set():
                    return
                self._start(numbered.line, group=group)

    async def _wait_for_place(self) -> None:
        while self._is_full() and not self._stopping.is_set():
            self._freed.clear()
            await self._freed.wait()

    def _is_full(self) -> bool:
        return len(self._running) >= self._limit.limit or sum(self._running.values()) >= MAX_OPEN_BYTES

    async def _wait_for_running(self) -> None:
        while self._running and not self._stopping.is_set():
            self._freed.clear()
            await self._freed.wait()
        if self._running:
            _, late = await asyncio.wait(list(self._running), timeout=self._times.stop_s)
            for task in late:
                task.cancel()

    def _start(self, line: BatchLine, *, group: asyncio.TaskGroup) -> None:
        task = group.create_task(self._complete(line))
        self._running[task] = len(line.body)
        task.add_done_callback(self._end)
        self._limit.sent(len(self._running), now_s=self._times.clock())
        self._show()

    def _end(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        self._freed.set()
        self._show()

    def _show(self) -> None:
        self.progress.num_in_progress, self.progress.limit = len(self._running), self._limit.limit

    async def _complete(self, line: BatchLine) -> None:
        """Sends a request until its response is final, and writes its line."""
        attempts = Attempts(self._times)
        while True:
            async with self._interruptible():
                await self._watch.passage()
            reply = await self._sender.send(line)
            now_s = self._times.clock()
            verdict = attempts.verdict(reply, now_s=now_s)
            if verdict is ReplyVerdict.UNAUTHORIZED:
                raise BatchStoppedError(f"the server refuses the API key: {reply.shown}")
            if verdict in (ReplyVerdict.COMPLETED, ReplyVerdict.FAILED):
                self._write(line, reply, now_s=now_s)
                return
            if verdict is ReplyVerdict.BUSY:
                if reply.verdict is ReplyVerdict.BUSY:
                    self._limit.refused(now_s=now_s)
                if attempts.is_over(now_s):
                    self._refused(line, reply, since_s=attempts.refused_since_s)
                    return
            self.progress.num_retries += 1
            if self._stopping.is_set():
                return
            pause_s = attempts.pause_s(reply)
            del reply  # its body, which can be large, is not kept during the pause
            async with self._interruptible():
                if verdict is not ReplyVerdict.BUSY:
                    await self._watch.check()
                await self._times.sleep(pause_s)

    @contextlib.asynccontextmanager
    async def _interruptible(self) -> AsyncIterator[None]:
        """Lets `stop` cancel the task in this context, in which it only waits."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            yield
        finally:
            self._waiting.discard(task)

    def _write(self, line: BatchLine, reply: ServerReply, *, now_s: float) -> None:
        """Writes the line of a final response."""
        self._last_result_s = now_s
        if reply.verdict is not ReplyVerdict.COMPLETED:
            self._fail_request(line, reply)
            return
        tokens = total_tokens(reply.body)
        self._output.append(_result(line, reply))
        self.progress.num_completed += 1
        self.progress.num_tokens += tokens
        self._limit.finished(tokens or 1, now_s=now_s)

    def _refused(self, line: BatchLine, reply: ServerReply, *, since_s: float) -> None:
        """Handles a request that the server has refused for the maximum time: if it refused all others too, the run
        ends."""
        if self._last_result_s < since_s:
            raise BatchStoppedError(
                f"the server has refused all requests for {self._times.server_timeout_s:g} s (--server-timeout): "
                f"{reply.shown}. Run the same command again to continue."
            )
        self._fail_request(line, reply)

    def _fail_request(self, line: BatchLine, reply: ServerReply) -> None:
        if not self.progress.first_failure:
            self.progress.first_failure = f"{escaped(line.custom_id)} failed: {reply.shown}"
            notice(f"{self.progress.first_failure} ({self._errors.path} has all failures)")
        self._fail(failure_line(line, reply))

    def _fail(self, line: bytes) -> None:
        self._errors.append(line)
        self.progress.num_failed += 1

    async def _sync_at_intervals(self) -> None:
        while True:
            await asyncio.sleep(SYNC_INTERVAL_S)
            await asyncio.to_thread(self._sync)

    def _sync(self) -> None:
        self._output.sync()
        self._errors.sync()


@dataclass
class Attempts:
    """The attempts of one request."""

    times: RunTimes
    refused_since_s: float = 0.0
    """Time of the first of the last refusals in a row; 0 if the last attempt was not refused."""
    _num_broken: int = 0
    _pauses: Iterator[float] = field(default_factory=partial(growing_pauses, FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S))

    def verdict(self, reply: ServerReply, *, now_s: float) -> ReplyVerdict:
        """Returns the verdict on a response, which is FAILED after too many broken attempts. A server that answers
        without a worker is a busy one: its restart is waited for in the same way."""
        verdict = reply.verdict
        if verdict is ReplyVerdict.AWAY and reply.status:
            verdict = ReplyVerdict.BUSY
        self.refused_since_s = (self.refused_since_s or now_s) if verdict is ReplyVerdict.BUSY else 0.0
        if verdict is ReplyVerdict.BROKEN:
            self._num_broken += 1
            return ReplyVerdict.FAILED if self._num_broken >= MAX_BROKEN_ATTEMPTS else verdict
        return verdict

    def is_over(self, now_s: float) -> bool:
        return now_s - self.refused_since_s >= self.times.server_timeout_s

    def pause_s(self, reply: ServerReply) -> float:
        """Returns the time before the next attempt."""
        pause_s = next(self._pauses)
        if reply.retry_after_s is not None:
            pause_s = min(max(reply.retry_after_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        return pause_s * (1 + self.times.jitter()) / 2


def failure_line(line: BatchLine, reply: ServerReply) -> bytes:
    """Returns the line of a failed request: with the server's response, or an error if there is none in JSON."""
    if reply.status >= HTTPStatus.MULTIPLE_CHOICES and not reply.reason:
        return _result(line, reply)
    if reply.status:
        code, message = "invalid_response", reply.reason or "The response is not JSON."
    else:
        code, message = "no_response", f"No response after {MAX_BROKEN_ATTEMPTS} attempts: {reply.reason}."
    return error_line(LineError(code, message, custom_id=line.custom_id), line_id=line.id)


def _result(line: BatchLine, reply: ServerReply) -> bytes:
    return result_line(
        line.id, custom_id=line.custom_id, status_code=reply.status, request_id=reply.request_id, body=reply.body
    )


def _first(stopped: ExceptionGroup[MotetError]) -> BaseException:
    error: BaseException = stopped
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

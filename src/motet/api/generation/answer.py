"""The response to a request that generates, streamed or not. It owns the groups of the request from start to end.

    1. open the groups                 all or none. Until the headers are sent, an error has its HTTP status
    2. wait for the first step         and for the client to disconnect. If a stream waits for `--sse-ping` seconds, its
                                       headers and a comment are sent, and further comments while it has nothing to send
    3. send headers, then the bytes that the writer makes of each step, in one message that bypasses the middleware
    4. close the groups                in any case: end, error, client disconnected, server stopping

The response is an object and not a generator, because a generator that never starts never cleans up."""

import asyncio
import logging
import operator
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial, reduce
from typing import Generic

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from motet.api.generation.answer_writer import AnswerWriter
from motet.api.generation.groups import AnswerGroup, StepT, UsedT
from motet.api.http.admission import AdmissionSlot, KeySlot
from motet.api.http.event_stream import PING, Pings, with_escaped_line_ends
from motet.api.http.failure import CLIENT_GONE, PREFILL_HEADER, WORKER_HEADER, MakeNames, renamed
from motet.api.http.long_work import in_thread, work_client
from motet.api.http.streaming import ResponseSender, while_client_stays
from motet.api.service import Service
from motet.errors import MotetError, RequestError
from motet.loop_budget import within_loop_budget
from motet.merge import BATCH, Merge, Take, in_batches
from motet.metrics.group_metrics import SENT

log = logging.getLogger("motet.api")

HELD_STEPS = 32
"""Maximum number of unread steps of several groups, or two for each group if that is more. Above it, groups wait."""


class GeneratedResponse(Response, Generic[StepT, UsedT]):
    """Runs the groups of a request and sends the bytes of its writer."""

    def __init__(
        self,
        service: Service,
        groups: Sequence[AnswerGroup[StepT, UsedT]],
        *,
        writer: AnswerWriter[StepT, UsedT],
        client: str | None,
        num_choices: int,
        names: MakeNames | None = None,
    ) -> None:
        """`client`: the client whose limits apply; None if another Motet server has counted the choices. `names`:
        returns the client's names for fields in an engine's errors; None if they are the same."""
        self.status_code = 200
        self.background = None
        self.init_headers(
            {"content-type": writer.content_type, "cache-control": "no-cache", "x-accel-buffering": "no"}
            if writer.sends_events
            else {"content-type": writer.content_type}
        )
        self._service = service
        self._groups = groups
        self._writer = writer
        self._names = names
        self._key_slot = KeySlot(service.key_limits, client, num_choices=num_choices)
        self._slots: list[AdmissionSlot] = []
        self._status = CLIENT_GONE
        self._merged: Merge[StepT] | None = None
        """The steps of all groups. None if the only group is read without a merge."""
        self._failure: Exception | None = None
        """An error before the headers were sent: it becomes the response, with its own status."""

    @property
    def started(self) -> bool:
        """True once the headers have been sent. Must not be read before the response is called."""
        return self._sender.started

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._sender = ResponseSender(scope, send)
        try:
            await while_client_stays(receive, self._answer(work_client(scope)))
            if self._failure is not None:
                raise self._failure
        finally:
            with anyio.CancelScope(shield=True):
                await self._close()

    async def _answer(self, client: str) -> None:
        """Runs the groups and sends the answer. `client`: client in whose turns long work is done (`long_work`)."""
        try:
            await self._open()
            if self._writer.starts_at_once:
                await self._start()
            async with Pings(self._service.config.sse_ping_s if self._writer.sends_events else 0, self._ping) as pings:
                await self._run(self._take_steps(client, pings))
            await self._finish(client)
        except Exception as error:
            await self._fail(error)

    async def _open(self) -> None:
        """Admits and submits all groups. Raises `OverloadedError` and the like before the engine receives any."""
        self._key_slot.enter()
        sizes = (group.num_prompts for group in self._groups)
        self._slots = self._service.admission.admit(*sizes, client=self._key_slot.client)
        async for group, slot in in_batches(zip(self._groups, self._slots, strict=True)):
            group.open(slot)

    async def _run(self, take: Take[StepT]) -> None:
        """Runs all groups to their ends. A single group needs neither a task nor a queue."""
        if len(self._groups) == 1 and not self._writer.takes_all_steps:
            await _run(self._groups[0], take)
            return
        self._merged = merged = Merge[StepT](max(2 * len(self._groups), HELD_STEPS))
        async for group in in_batches(self._groups):
            merged.add(partial(_run, group))
        while steps := await merged.read(BATCH):
            if (taking := take(steps)) is not None:
                await taking

    def _take_steps(self, client: str, pings: Pings) -> Take[StepT]:
        """Returns the function that sends the bytes of each step. It runs for every token, so its attributes are looked
        up in advance. `client`: see `in_thread`."""
        writer, usage, sender, divide = self._writer, self._usage, self._sender, self._writer.divide
        sends_events = writer.sends_events
        feed, write = self._feed_and_count if writer.keeps_answer else writer.feed, sender.write

        def send(data: bytes) -> Awaitable[None] | None:
            if not data:
                return None
            pings.idle = False
            if sends_events and not data.isascii():
                data = with_escaped_line_ends(data)
            return write(data) if sender.started else self._send_first(data)

        def take(steps: Sequence[StepT]) -> Awaitable[None] | None:
            return send(feed(steps, usage))

        if divide is None:
            return take
        in_clients_turn = partial(in_thread, client=client)

        async def take_in_parts(steps: Sequence[StepT]) -> None:
            for part in divide(steps):
                run = in_clients_turn if writer.feed_is_long(part) else within_loop_budget
                if (sending := send(await run(partial(feed, part, usage)))) is not None:
                    await sending

        return take_in_parts

    def _feed_and_count(self, steps: Sequence[StepT], usage: Callable[[], UsedT]) -> bytes:
        """Feeds a writer that keeps the answer, and counts its memory. Raises the errors of `AnswerMemory.grow`."""
        data = self._writer.feed(steps, usage)
        self._key_slot.answer_bytes.set(self._writer.held_bytes)
        return data

    async def _send_first(self, data: bytes) -> None:
        await self._start()
        await self._sender.send(data)

    async def _ping(self) -> None:
        await self._start()
        await self._sender.send(PING)

    async def _finish(self, client: str) -> None:
        close = partial(self._writer.close, self._usage())
        pieces = await in_thread(close, client=client) if self._writer.close_is_long else close()
        pieces = map(self._escaped, pieces)
        if not self._sender.started:
            pieces = [*pieces]
            self.headers["content-length"] = str(sum(map(len, pieces)))
            await self._start()
        last = b""
        for piece in pieces:
            if last:
                await self._sender.send(last)
                await asyncio.sleep(0)  # other streams are served, also if the client reads fast
            last = piece
        await self._end(last)
        self._status = SENT

    async def _fail(self, error: Exception) -> None:
        if isinstance(error, RequestError) and self._names is not None:
            error = renamed(error, self._names())
        self._status = error.status if isinstance(error, MotetError) else 500
        if not (self._sender.started and self._writer.streams):
            self._failure = error
            return
        if not isinstance(error, MotetError):
            log.error("a stream failed", exc_info=error)
        await self._end(self._escaped(self._writer.fail(error)))

    def _usage(self) -> UsedT:
        """Returns the usage of the request so far."""
        return reduce(operator.add, [group.usage for group in self._groups])

    async def _start(self) -> None:
        if workers := dict.fromkeys(group.worker for group in self._groups if group.worker):
            self.headers[WORKER_HEADER] = ", ".join(workers)
        if workers := dict.fromkeys(group.prefill_worker for group in self._groups if group.prefill_worker):
            self.headers[PREFILL_HEADER] = ", ".join(workers)
        await self._sender.start(self.raw_headers)

    async def _end(self, piece: bytes) -> None:
        """Sends the last piece. The request stops counting against the client's limits first, since the client can send
        its next request as soon as it has this piece."""
        self._key_slot.leave()
        await self._sender.end(piece)

    def _escaped(self, piece: bytes) -> bytes:
        return with_escaped_line_ends(piece) if self._writer.sends_events else piece

    async def _close(self) -> None:
        """Ends all groups, including groups that were not opened or only in part."""
        if self._status == CLIENT_GONE and self._writer.complete:
            self._status = SENT
        if self._merged is not None:
            await self._merged.aclose()
        async with AsyncExitStack() as closing:  # an error in one callback does not skip the others
            closing.callback(self._key_slot.leave)
            for slot in self._slots:
                closing.callback(slot.leave)
            for number, group in enumerate(reversed(self._groups)):
                if number % BATCH == 0:
                    closing.push_async_callback(asyncio.sleep, 0)  # other tasks run
                closing.push_async_callback(group.close, status=self._status)


async def _run(group: AnswerGroup[StepT, UsedT], take: Take[StepT]) -> None:
    """Runs a group to its end, and stores the error that ends it."""
    try:
        await group.run(take)
    except MotetError as error:
        group.error = error
        raise

"""The response of a request that generates, streamed or whole: it owns the groups from the first to the last moment.

    1. open the groups                 all or none; an error here, or at the first step, still has its HTTP status
    2. wait for the first step         and meanwhile, as all along, for the client to leave
    3. send headers, then what the writer makes of each step, in one message a step and past all layers of the app
    4. close the groups                in any case: end, error, client gone, server stopping

It is an object and not a generator, since a generator that was never started never cleans up.
"""

import asyncio
import logging
import operator
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial, reduce
from typing import Generic

import anyio
from msgspec.json import encode as json_bytes
from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from motet.api.generation.groups import SENT, AnswerGroup, StepT, UsedT
from motet.api.generation.plan import AnswerHead, Plan
from motet.api.http.admission import ANOTHER_SERVER, AdmissionSlot
from motet.api.http.body import in_turn
from motet.api.http.failure import CLIENT_GONE, error_json
from motet.api.http.streaming import body_send, body_write, while_client_stays
from motet.api.service import Service
from motet.errors import MotetError, RequestError
from motet.merge import BATCH, Merge, Take, in_batches
from motet.policies.steering import GroupReport
from motet.text.choice import ChoiceEvent
from motet.text.text_group import GroupStep
from motet.transfer.ticket import Ticket
from motet.types import Usage

log = logging.getLogger("motet.api")

HELD_STEPS = 32
"""Minimum number of unread steps of several groups above which the groups wait for the reader; at least two a group."""
WORKER_HEADER = "x-motet-worker"
EVENTS = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
END = b"}\n\n"


class AnswerWriter(ABC, Generic[StepT, UsedT]):
    """Turns the steps of one request into bytes. Pure: one writer an answer, fed in order."""

    content_type = EVENTS
    streams = True
    """True if there are bytes before the end; if not, an error at any time still has its HTTP status."""
    starts_at_once = False
    """True if the headers go out as soon as the groups are open, and later all that has come since the last send."""

    @abstractmethod
    def feed(self, steps: Sequence[StepT], usage: Callable[[], UsedT]) -> bytes:
        """`usage`: returns the usage of the request so far; called only for a chunk with it, since it adds up all
        choices."""

    @abstractmethod
    def close(self, usage: UsedT) -> Sequence[bytes]:
        """Returns what ends a stream, or the whole answer: pieces, which are sent one by one, so that others get their
        turn."""

    def as_asked(self, error: RequestError) -> RequestError:
        """Returns an engine's error with the client's names of the fields that it names."""
        return error

    def fail(self, error: Exception) -> bytes:
        """Returns how a stream that has begun ends when it cannot go on."""
        return b"data: " + error_json(error) + b"\n\n" + DONE

    @property
    def is_long(self) -> bool:
        """True if `close` may take so long that it must not hold up the streams of others."""
        return False

    @property
    def complete(self) -> bool:
        """True if a client that leaves now has its whole answer, though not the end of the body."""
        return False


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
    ) -> None:
        """`client`: the client whose limits count; None if another server of ours has counted the choices."""
        self.status_code = 200
        self.background = None
        self.init_headers(
            {"content-type": writer.content_type, "cache-control": "no-cache", "x-accel-buffering": "no"}
            if writer.content_type == EVENTS
            else {"content-type": writer.content_type}
        )
        self._service = service
        self._groups = groups
        self._writer = writer
        self._client = client
        self._num_choices = num_choices
        self._counted = False
        """True from when the choices count against the client's limits."""
        self._places: list[AdmissionSlot] = []
        self._started = False
        self._status = CLIENT_GONE
        self._merged: Merge[StepT] | None = None
        """The steps of all groups, if they have to be merged."""
        self._failure: Exception | None = None
        """An error before anything was sent, which is answered with its own status."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send_start, self._send_body, self._write = send, body_send(scope), body_write(scope)
        try:
            await while_client_stays(receive, self._answer())
            if self._failure is not None:
                raise self._failure
        finally:
            with anyio.CancelScope(shield=True):
                await self._close()

    async def _answer(self) -> None:
        try:
            await self._open()
            if self._writer.starts_at_once:
                await self._start()
            await self._run(self._passing_on())
            await self._finish()
        except Exception as error:
            await self._fail(error)

    async def _open(self) -> None:
        """Admits and submits all groups; raises `OverloadedError` and the like before the engine has seen any."""
        if self._client is not None:
            self._service.key_limits.enter(self._client, self._num_choices)
            self._counted = True
        self._places = self._service.admission.admit(
            *(group.num_prompts for group in self._groups), client=self._client or ANOTHER_SERVER
        )
        async for group, place in in_batches(zip(self._groups, self._places, strict=True)):
            group.open(place)

    async def _run(self, take: Take[StepT]) -> None:
        """Runs all groups to their ends. A single group needs neither a task nor a queue in between."""
        if len(self._groups) == 1 and not self._writer.starts_at_once:
            await self._groups[0].run(take)
            return
        self._merged = merged = Merge[StepT](max(2 * len(self._groups), HELD_STEPS))
        async for group in in_batches(self._groups):
            merged.add(group.run)
        while steps := await merged.read(BATCH):
            if (taking := take(steps)) is not None:
                await taking

    def _passing_on(self) -> Take[StepT]:
        """Returns what sends the bytes of each step. Every token passes there, so it has all that it needs at hand."""
        feed, usage, write = self._writer.feed, self._usage, self._write

        def pass_on(steps: Sequence[StepT]) -> Awaitable[None] | None:
            if not (data := feed(steps, usage)):
                return None
            return write(data) if self._started else self._begin(data)

        return pass_on

    async def _begin(self, data: bytes) -> None:
        await self._start()
        await self._send(data, more=True)

    async def _finish(self) -> None:
        close = partial(self._writer.close, self._usage())
        pieces = await in_turn(close) if self._writer.is_long else close()
        if not self._started:
            self.headers["content-length"] = str(sum(map(len, pieces)))
            await self._start()
        for piece in pieces[:-1]:
            await self._send(piece, more=True)
        self._uncount()
        await self._send(pieces[-1] if pieces else b"")
        self._status = SENT

    async def _fail(self, error: Exception) -> None:
        if isinstance(error, RequestError):
            error = self._writer.as_asked(error)
        self._status = error.status if isinstance(error, MotetError) else 500
        if not (self._started and self._writer.streams):
            self._failure = error
            return
        if not isinstance(error, MotetError):
            log.error("a stream failed", exc_info=error)
        self._uncount()
        await self._send(self._writer.fail(error))

    def _uncount(self) -> None:
        """Takes the choices off the client's limits: before the last byte, since with that it may ask for more."""
        if self._counted:
            self._counted = False
            self._service.key_limits.leave(self._client or "", self._num_choices)

    def _usage(self) -> UsedT:
        """Returns the usage of the whole request so far."""
        return reduce(operator.add, [group.usage for group in self._groups])

    async def _start(self) -> None:
        self._started = True
        if workers := dict.fromkeys(group.worker for group in self._groups if group.worker):
            self.headers[WORKER_HEADER] = ", ".join(workers)
        await self._send_start({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

    async def _send(self, data: bytes, *, more: bool = False) -> None:
        await self._send_body({"type": "http.response.body", "body": data, "more_body": more})

    async def _close(self) -> None:
        """Ends all groups, also if opening failed half way or never came."""
        if self._status == CLIENT_GONE and self._writer.complete:
            self._status = SENT
        if self._merged is not None:
            await self._merged.aclose()
        async with AsyncExitStack() as closing:  # one that fails does not keep the others open
            closing.callback(self._uncount)
            for place in self._places:
                closing.callback(place.leave)
            for number, group in enumerate(reversed(self._groups)):
                if number % BATCH == 0:
                    closing.push_async_callback(asyncio.sleep, 0)  # others' turn
                closing.push_async_callback(group.close, status=self._status)


GroupsWriter = AnswerWriter[GroupStep, Usage]


def head_json(head: AnswerHead, kind: str) -> bytes:
    """Returns the beginning of every object of one answer, without the closing brace."""
    fields: dict[str, str | int] = {"id": head.id, "object": kind, "created": head.created, "model": head.model}
    if head.fingerprint:
        fields["system_fingerprint"] = head.fingerprint
    return json_bytes(fields)[:-1]


class EventWriter(AnswerWriter[StepT, UsedT]):
    """Server-sent events from prepared bytes: what is the same in every chunk of an answer is written as JSON once.

        data: {"id":"chatcmpl-1","object":"chat.completion.chunk", ... ,"choices":[{"index":  2 ... }]  }\\n\\n
        └─────────────────────────────── opening, once an answer ───────────────────────────┘         └ closing

    Only strings that change go through a JSON encoder. The order of the keys is that of OpenAI's own chunks."""

    def __init__(self, head: bytes, *, usage_json: Callable[[UsedT], bytes], include_usage: bool) -> None:
        """`head`: what every chunk begins with, less its closing brace. `include_usage`: one chunk at the end tells it,
        and it is null in all others."""
        self._constant = b"data: " + head
        self._opening = self._constant + b',"choices":[{"index":'
        self._usage_json = usage_json
        self._include_usage = include_usage
        self._without_usage = b',"usage":null' + END if include_usage else END
        """The end of a chunk after its choices."""
        self._reports: dict[int, GroupReport] = {}
        """Number of the prompt -> the report on its group, for those with a policy that are over."""

    def close(self, usage: UsedT) -> Sequence[bytes]:
        """Returns the chunks without choices, with the reports and the usage if there are any, and the end of the
        stream."""
        last = DONE
        if self._include_usage:
            last = self._constant + b',"choices":[],"usage":' + self._usage_json(usage) + END + DONE
        if not self._reports:
            return [last]
        reports = [self._reports[number] for number in sorted(self._reports)]
        return [self._constant + b',"choices":[],"groups":' + json_bytes(reports) + self._without_usage, last]


class CountingWriter(EventWriter[GroupStep, Usage]):
    """Server-sent events of tokens, of which every chunk may tell the usage so far."""

    def __init__(self, head: bytes, plan: Plan, *, usage_json: Callable[[Usage], bytes]) -> None:
        super().__init__(head, usage_json=usage_json, include_usage=plan.include_usage)
        self._continuous_usage = plan.continuous_usage
        self._num_sent = 0
        """Tokens in the chunks so far. The engine is ahead of them: the text of its last tokens may be held back."""

    def _note_reports(self, steps: Sequence[GroupStep]) -> None:
        self._reports |= {step.group: step.report for step in steps if step.report is not None}

    def _told(self, usage: Callable[[], Usage]) -> Usage | None:
        """Returns the usage for the chunks of these steps if they tell it; it is added up over all choices."""
        return usage() if self._continuous_usage else None

    def _closing(self, told: Usage | None, *, num_new: int = 0) -> bytes:
        """Returns the end of a chunk after its choices. `num_new`: the tokens in it."""
        if told is None:
            return self._without_usage
        self._num_sent += num_new
        thoughts = min(told.reasoning_tokens or 0, self._num_sent)
        sent = replace(told, completion_tokens=self._num_sent, reasoning_tokens=thoughts)
        return b',"usage":' + self._usage_json(sent) + END


class TokenChunks(CountingWriter):
    """Streamed groups of tokens: one choice a chunk, all chunks of a step in one piece. Most chunks are a text between
    bytes that are ready."""

    def __init__(
        self, plan: Plan, kind: str, *, usage_json: Callable[[Usage], bytes], before: bytes, after: bytes, plain: bool
    ) -> None:
        """`before`, `after`: what stands around texts; `plain`: nothing stands beside one before its choice ends."""
        super().__init__(head_json(plan.head, kind), plan, usage_json=usage_json)
        self._size = plan.group_size
        num_first = None if plan.policy is None else plan.policy.start
        self._indices = [start.index for start in plan.groups[0].choices[:num_first]]
        """The choices of each prompt that begin with it."""
        self._begun: set[int] = set()
        """Prompts whose first step has come."""
        self._before_text = {
            (told := number * self._size + start.index): b"%b%d%b" % (self._opening, told, before)
            for number, group in enumerate(plan.groups)
            for start in group.choices
        }
        """What comes before the text of each choice; the choices of each prompt follow those of the one before."""
        self._after_text = after + self._without_usage if plain and not self._continuous_usage else None
        """What follows the text of most chunks; None where that changes from chunk to chunk."""

    def feed(self, steps: Sequence[GroupStep], usage: Callable[[], Usage]) -> bytes:
        before_text, after_text, told = self._before_text, self._after_text, self._told(usage)
        if len(steps) == 1 and len(events := steps[0].events) == 1 and after_text is not None:
            event, group = events[0], steps[0].group
            if event.finish is None and event.parts is None and group in self._begun:
                return b"".join((before_text[group * self._size + event.index], json_bytes(event.text), after_text))
        chunks: list[bytes] = []
        for step in steps:
            group = step.group
            if group not in self._begun:
                self._begun.add(group)
                chunks += self._openings(step, self._indices, closing=self._closing(told))
            first = group * self._size
            for event in step.events:
                if after_text is not None and event.finish is None and event.parts is None:
                    chunks += before_text[first + event.index], json_bytes(event.text), after_text
                else:
                    closing = ticket_before(self._closing(told, num_new=len(event.token_ids)), step.ticket)
                    chunks += self._chunks(event, group, closing=closing)
            if step.started:
                chunks += self._openings(step, step.started, closing=self._closing(told))
        self._note_reports(steps)
        return b"".join(chunks)

    @abstractmethod
    def _openings(self, step: GroupStep, indices: Sequence[int], *, closing: bytes) -> list[bytes]:
        """Returns the chunks that come before the first of a choice, about each of the choices `indices`."""

    @abstractmethod
    def _chunks(self, event: ChoiceEvent, group: int, *, closing: bytes) -> list[bytes]:
        """Returns the chunks of an event with more to say than its text."""


def ticket_before(closing: bytes, ticket: Ticket | None) -> bytes:
    """Returns the end of a chunk after its choices, with a ticket if there is one."""
    return closing if ticket is None else b',"kv_transfer_params":' + json_bytes(ticket) + closing


def spans_before(closing: bytes, event: ChoiceEvent) -> bytes:
    """Returns the end of a chunk's choice, with the versions of the weights that have written it if that is told."""
    spans = event.weight_versions
    return b',"weight_versions":' + json_bytes(spans) + closing if spans else closing

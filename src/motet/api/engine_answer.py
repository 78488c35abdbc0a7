"""The answer to `POST /engine/generate`: the deltas of one group as frames, as long as the connection lasts.

    1. check, find a place, submit     an error up to here has its HTTP status, and the group's ticket is given back
    2. headers                         the sender knows that the group is here
    3. frames                          what the engine has told since the last send, in one send
    4. close the group                 whatever happened: end, error, sender gone, server stopping

An error after the headers is the last frame. A slow reader holds the group's stream back, at `HOLD_BACK_BYTES`.
"""

import asyncio
import logging
from dataclasses import dataclass

import anyio
from anyio.abc import TaskGroup
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from motet.api.answer import CLIENT_GONE, SENT
from motet.api.engine_body import check_group
from motet.api.failure import INTERNAL
from motet.api.group_course import GroupCourse
from motet.api.request_id import straight_send
from motet.api.served import ServedModel
from motet.api.service import Service
from motet.api.while_client_stays import while_client_stays
from motet.engines.base import GroupStream
from motet.engines.wire import FRAMES, CarriedError, frame
from motet.errors import EngineError, MotetError, OverloadedError
from motet.ids import RequestId
from motet.types import ChoiceDelta, FinishReason, GenerateRequest, GroupDelta

log = logging.getLogger("motet.api")

HOLD_BACK_BYTES = 256 * 1024


class EngineAnswer(Response):
    """Owns one group from its first to its last moment. `ids`: of the groups that such answers have open."""

    def __init__(self, service: Service, served: ServedModel, request: GenerateRequest, ids: set[RequestId]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"content-type": FRAMES})
        self._service = service
        self._served = served
        self._request = request
        self._ids = ids
        self._group: OpenEngineGroup | None = None
        self._outbox = Outbox(HOLD_BACK_BYTES)
        self._status = CLIENT_GONE
        self._failure: Exception | None = None
        """What went wrong before the headers: to be answered with its own status."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send_start, self._send = send, straight_send(scope)
        try:
            await while_client_stays(receive, self._answer)
            if self._failure is not None:
                raise self._failure
        finally:
            with anyio.CancelScope(shield=True):
                await self._close()

    async def _answer(self, tasks: TaskGroup) -> None:
        try:
            self._group = group = self._open()
            await self._send_start({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            tasks.start_soon(group.read_into, self._outbox)
            await self._write()
            self._status = SENT
        except Exception as error:
            self._status = error.status if isinstance(error, MotetError) else 500
            if self._group is None:
                self._failure = error
            else:
                await self._send({"type": "http.response.body", "body": _last_frame(error), "more_body": False})

    def _open(self) -> "OpenEngineGroup":
        """Raises what the group is refused for."""
        service, served, request = self._service, self._served, self._request
        check_group(served, request)
        if request.request_id in self._ids:
            raise OverloadedError(f"The group {request.request_id} is still open here. Try again, or another worker.")
        (place,) = service.admission.admit(1)
        try:
            stream = served.engine.generate(request)
        except BaseException:
            place.leave()
            raise
        self._ids.add(request.request_id)
        return OpenEngineGroup(stream, GroupCourse(service, served, request, place), request)

    async def _write(self) -> None:
        while True:
            data = await self._outbox.take()
            over = self._outbox.over
            await self._send({"type": "http.response.body", "body": data, "more_body": not over})
            if over:
                return

    async def _close(self) -> None:
        ticket = self._request.ticket
        if self._group is not None:
            self._ids.discard(self._request.request_id)
            if self._status == CLIENT_GONE and self._outbox.empty and self._group.finished:
                self._status = SENT  # who reads that the last choice has ended need not wait for the end of the body
            await self._group.close(status=self._status)
        elif ticket is not None:
            await self._served.engine.release(ticket)


@dataclass(frozen=True, slots=True)
class Shown:
    """What a step brought of a choice, for the books."""

    index: int
    finish: FinishReason | None


class OpenEngineGroup:
    """A group that the engine has, and the books of its course."""

    def __init__(self, stream: GroupStream, course: GroupCourse, request: GenerateRequest) -> None:
        self._stream = stream
        self._course = course
        self._unfinished = {start.index for start in request.choices}
        self._tokens: dict[int, int] = {}
        self._cached_tokens = 0

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return not self._unfinished

    async def read_into(self, outbox: "Outbox") -> None:
        """Everything until the end of the stream."""
        try:
            async for delta in self._stream:
                self._note(delta)
                await outbox.put(frame(delta))
            outbox.end()
        except Exception as error:  # raised again where it is taken out
            outbox.end(error)

    async def close(self, *, status: int) -> None:
        self._course.end(status=status, tokens=self._tokens, cached_tokens=self._cached_tokens)
        await self._stream.aclose()

    def _note(self, delta: GroupDelta) -> None:
        tokens = self._tokens
        for choice in delta.choices:
            tokens[choice.index] = tokens.get(choice.index, 0) + len(choice.token_ids)
            if choice.finish is not None:
                self._unfinished.discard(choice.index)
        if delta.prompt is not None:
            self._cached_tokens = delta.prompt.cached_tokens
        self._course.step([_shown(choice) for choice in delta.choices])


class Outbox:
    """Bytes between who makes them and who sends them, in one piece whatever has gathered. One of each."""

    def __init__(self, hold_back_bytes: int) -> None:
        self._limit = hold_back_bytes
        self._parts: list[bytes] = []
        self._size = 0
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._ended = False
        self._error: Exception | None = None

    async def put(self, data: bytes) -> None:
        """Returns when there is room for more."""
        self._parts.append(data)
        self._size += len(data)
        self._filled.set()
        if self._size >= self._limit:
            self._emptied.clear()
            await self._emptied.wait()

    def end(self, error: Exception | None = None) -> None:
        """Nothing more will be put in; `error` is raised behind what is there."""
        self._ended, self._error = True, error
        self._filled.set()

    async def take(self) -> bytes:
        """All there is; waits for it, unless the end has come."""
        while not self._parts and not self._ended:
            self._filled.clear()
            await self._filled.wait()
        if not self._parts and self._error is not None:
            raise self._error
        data = b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        self._emptied.set()
        return data

    @property
    def empty(self) -> bool:
        return not self._parts

    @property
    def over(self) -> bool:
        """Whether all has been taken, and well."""
        return self._ended and not self._parts and self._error is None


def _shown(choice: ChoiceDelta) -> Shown:
    return Shown(choice.index, choice.finish.reason if choice.finish else None)


def _last_frame(error: Exception) -> bytes:
    if not isinstance(error, MotetError):
        log.error("a group failed", exc_info=error)
        error = EngineError(INTERNAL.message)
    return frame(CarriedError.of(error))

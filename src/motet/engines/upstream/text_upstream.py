"""A text upstream as routing sees it: generates groups, and ends them when the server is lost.

The abilities of a model are probed once, in the background (`upstream_server.probe`). The only model of a server is
probed at the start (`learn_abilities`). If a server has several models, a model is probed at its first request with
several choices, because some servers load a model only at a request, and some charge for each request. Until the
abilities are known, choices are requested one by one, which every server supports. A probe uses the operator's key and
never a client's, so no client pays for other clients.

A group is one request if the server honours n, else one request for each choice, and is read as one stream:

    requests ──► `max_singles` at a time, a task each ──► Merge ──► read()
                 pieces, as they arrive                   bounded: a slow reader slows the server's streams down

If choices start and end separately (`TextRequest.start`), every choice is a request of its own, whatever the abilities
of the server. Closing its request ends a choice; a choice that has not started is not requested.

The first error ends the group, with two exceptions. A single request that fails before its first piece is sent once
more if other choices have pieces; if no choice has any, `routing.text_router` sends the complete group again. A group
that a server refuses as one request is sent as single requests, since servers limit n.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from motet import errors
from motet.engines.http import NOT_TAKEN
from motet.engines.openai import DONE, EventSplitter
from motet.engines.upstream.bodies import PieceReader, UpstreamCall, aborted, joint_call, single_calls, usage_of
from motet.engines.upstream.text_source import TextRequest, TextRoute, TextStep, may_go_elsewhere
from motet.engines.upstream.upstream_server import Abilities, RouteAbilities, UpstreamReply, UpstreamServer, probe
from motet.engines.wire import EngineReport
from motet.merge import Merge, Take
from motet.session_ids import SESSION_HEADER
from motet.tracing.context import headers_of
from motet.types import FinishReason, Usage

PROBE_AGAIN_S = 60.0
"""Seconds from a probe without a result to the next probe."""


class TextUpstream:
    """A server that takes texts. Its keeper makes this object from the server's first report, and closes it."""

    def __init__(
        self, server: UpstreamServer, report: EngineReport, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.engine_id = report.engine_id
        self.server = server
        self._bases: dict[str, str] = {card.name: card.parent or card.name for card in report.models}
        """Base model of each model; a model that is not an adapter is its own base."""
        self._abilities: dict[str, Abilities] = {}
        """The known abilities of each base model."""
        self._probe_again_s: dict[str, float] = {}
        """Earliest time of the next probe of each base model whose last probe had no result."""
        self._probing: dict[str, asyncio.Task[None]] = {}
        self._groups: set[UpstreamGroup] = set()
        self._clock = clock

    async def learn_abilities(self) -> None:
        """Probes the server's model, if it has only one."""
        base, *others = set(self._bases.values())
        if not others and (task := self._start_probe(base)):
            await asyncio.wait([task])

    def generate(self, request: TextRequest) -> "UpstreamGroup":
        base = self._bases.get(request.model, request.model)
        known = self._abilities.get(base)
        ability = RouteAbilities() if known is None else known[request.route]
        if not ability.exists:
            raise errors.NotFoundError(
                f"The model `{request.model}` is not available on {request.route}: its server has no such route.",
                code="unknown_url",
            )
        several, steered = request.num_choices > 1, request.start is not None
        if known is None and several:
            self._start_probe(base)
        plan = single_calls if steered or (several and not ability.honours_n) else joint_call
        calls = plan(request, include_usage=ability.takes_usage)
        group = UpstreamGroup(self.server, request, calls=calls, on_end=self._groups.discard)
        self._groups.add(group)
        return group

    def lost(self, error: errors.MotetError) -> None:
        """Ends all groups with `error`. Removes the known abilities, since another server can start at this address."""
        for group in list(self._groups):
            group.fail(error)
        for task in self._probing.values():
            task.cancel()  # its failure would not apply to the next server
        self._abilities.clear()
        self._probe_again_s.clear()

    async def close(self) -> None:
        self.lost(errors.EngineClosedError(f"{self.server.name} is not used any more."))
        await asyncio.gather(*self._probing.values(), return_exceptions=True)

    def check(self) -> None:
        """Raises unless every group has ended."""
        if self._groups:
            raise AssertionError(f"{self.server.name}: {len(self._groups)} groups left")

    def _start_probe(self, model: str) -> asyncio.Task[None] | None:
        """Starts to probe a model. Returns the task; None if the abilities are known, or were probed recently."""
        if model in self._probing or model in self._abilities or self._clock() < self._probe_again_s.get(model, 0.0):
            return self._probing.get(model)
        self._probing[model] = task = asyncio.create_task(self._probe(model))
        task.add_done_callback(lambda _: self._probing.pop(model))  # runs even if the task never started
        return task

    async def _probe(self, model: str) -> None:
        if (abilities := await probe(self.server, model)) is None:
            self._probe_again_s[model] = self._clock() + PROBE_AGAIN_S
        else:
            self._abilities[model] = abilities


NOT_ELSEWHERE = "No other server can continue an answer that a text upstream has started."


class UpstreamGroup:
    """A `TextGroupStream`: one request for all choices, or one for each. `aclose` ends the requests."""

    worker = ""
    """Always empty, since only the router knows the id of the worker."""

    def __init__(
        self,
        server: UpstreamServer,
        request: TextRequest,
        *,
        calls: Sequence[UpstreamCall],
        on_end: Callable[["UpstreamGroup"], None],
    ) -> None:
        self._server = server
        self._request = request
        self._held = {call.first: call for call in calls}
        """Requests for choices that have not started, by first choice."""
        self._calls: dict[int, UpstreamCall] = {}
        """Requests that were sent or are due, by first choice."""
        self._due: deque[UpstreamCall] = deque()
        """Requests that wait until fewer than `max_singles` other requests are in progress."""
        self._on_end = on_end
        self._steps = Merge[TextStep](2 * server.options.max_singles)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Tasks of the requests in progress, by first choice."""
        self._ended: set[int] = set()
        """Choices that were ended by `end_choice`."""
        self._shown: set[int] = set()
        """Choices with a piece that has been read, if choices start and end separately."""
        self._started = False
        """True once a piece of any choice has arrived."""
        self._usages: dict[int, Usage] = {}
        self.start([call.first for call in calls] if request.start is None else request.start)

    @property
    def usage(self) -> Usage | None:
        return usage_of(list(self._calls.values()), self._usages)

    def start(self, indices: Sequence[int]) -> None:
        calls = {index: self._held.pop(index) for index in indices}
        self._calls |= calls
        self._due += calls.values()

    def end_choice(self, index: int) -> None:
        self._ended.add(index)
        if (task := self._tasks.pop(index, None)) is not None:
            task.cancel()
        elif any(call.first == index for call in self._due):
            self._due.remove(self._calls.pop(index))
        self._steps.put_nowait([TextStep((aborted(self._request, index, shown=index in self._shown),))])

    async def read(self) -> Sequence[TextStep]:
        self._send_due()
        while read := await self._steps.read():
            if steps := [step for received in read if (step := self._without_ended(received)) is not None]:
                return steps
        return []

    def fail(self, error: errors.MotetError) -> None:
        self._steps.fail(error)

    async def aclose(self) -> None:
        self.fail(errors.EngineClosedError("the group was closed"))
        try:
            await self._steps.aclose()
        finally:
            self._on_end(self)

    def _send_due(self) -> None:
        while self._due and len(self._tasks) < self._server.options.max_singles and not self._steps.over:
            call = self._due.popleft()
            self._tasks[call.first] = self._steps.add(partial(self._run, call))

    def _without_ended(self, step: TextStep) -> TextStep | None:
        """Returns the step without the server's pieces of choices that were ended by `end_choice`, but with the last
        pieces that `end_choice` made; None if no piece is left."""
        if self._request.start is None:
            return step
        ended, abort = self._ended, FinishReason.ABORT
        pieces = tuple(piece for piece in step.pieces if piece.index not in ended or piece.finish is abort)
        self._shown.update(piece.index for piece in pieces)
        return TextStep(pieces, step.extras) if pieces else None

    async def _run(self, call: UpstreamCall, take: Take[TextStep]) -> None:
        """Sends a request and delivers its answer, then sends the next due request. The first error ends the group,
        unless the choices of the request can be requested one by one instead."""
        try:
            await self._answer(call, take)
        except errors.UpstreamRefusalError as error:
            if not self._again_singly(call, error):
                raise
        self._tasks.pop(call.first, None)
        self._send_due()

    def _again_singly(self, call: UpstreamCall, error: errors.UpstreamRefusalError) -> bool:
        """Returns True if the choices of a refused request are now requested one by one."""
        if self._started or call.count == 1 or error.status not in NOT_TAKEN:
            return False
        try:
            calls = single_calls(self._request, include_usage=call.include_usage)
        except errors.RequestError:
            return False
        self._held = {call.first: call for call in calls}
        self._calls.clear()
        self.start(range(self._request.num_choices))
        return True

    async def _answer(self, call: UpstreamCall, take: Take[TextStep], *, tries: int = 2) -> None:
        """Sends a request, and delivers its answer. Sends it once more if it fails before its first piece, and pieces
        of other choices have arrived."""
        with contextlib.closing(UpstreamAnswer(self._server, call)) as answer:
            try:
                while steps := await answer.read():
                    self._started = True
                    if (taking := take(steps)) is not None:
                        await taking
            except errors.UpstreamRefusalError as error:
                raise (error.of(call.name.capitalize()) if self._started else error) from error
            except errors.MotetError as error:
                if tries == 1 or answer.started or not self._started or not may_go_elsewhere(error):
                    raise
            else:
                if answer.pieces.usage is not None:
                    self._usages[call.first] = answer.pieces.usage
                return
        await self._answer(call, take, tries=tries - 1)


class UpstreamAnswer:
    """One request and its answer, as pieces of the group's choices. One task owns this object, and reads the answer to
    its end or closes it, which ends the request at the server."""

    def __init__(self, server: UpstreamServer, call: UpstreamCall) -> None:
        self.started = False
        """True once a piece has arrived. Before that, the request can be sent again."""
        self.pieces = PieceReader(call.first, call.count, chat=call.request.route is TextRoute.CHAT)
        self._server = server
        self._call = call
        self._reply: UpstreamReply | None = None
        self._events = EventSplitter()
        self._done = False

    async def read(self) -> list[TextStep]:
        """Returns the next steps; none at the end. Raises MotetError, which names the server and the choice."""
        try:
            if self._reply is None:
                self._reply = await self._open()
            read = self._read_events if self._call.request.stream else self._read_body
            steps = await read(self._reply)
        except errors.UpstreamRefusalError:
            raise  # with the server's message
        except errors.EngineDiedError as error:
            raise self._named(error, kind=type(error)) from error
        except errors.EngineError as error:
            raise self._named(error, kind=errors.EngineError) from error
        self.started = self.started or bool(steps)
        return steps

    def close(self) -> None:
        if self._reply is not None:
            self._reply.close()

    def _named(self, error: errors.EngineError, *, kind: type[errors.EngineError]) -> errors.EngineError:
        """Returns an error that names the server and the choice. Its message for clients names only the choice."""
        message = error.message if self._server.name in error.message else f"{self._server.name}: {error.message}"
        what = f"{self._call.name.capitalize()} of the request failed"
        is_over = self.started and issubclass(kind, errors.EngineDiedError)
        named = kind(f"{what}: {message}. {NOT_ELSEWHERE}" if is_over else f"{what}: {message}")
        named.client_message = f"{what}. {NOT_ELSEWHERE if is_over else kind.remote_message}"
        return named

    async def _open(self) -> UpstreamReply:
        request = self._call.request
        headers = {
            "x-request-id": request.trace,
            SESSION_HEADER: request.session_id,
            "authorization": request.authorization,
            **headers_of(request.traceparent),
        }
        reply = await self._server.post(request.route, self._call.body(), headers=headers)
        if request.stream and not reply.is_stream:
            reply.close()
            raise errors.WorkerFaultError("it did not answer with a stream, which was requested")
        return reply

    async def _read_body(self, reply: UpstreamReply) -> list[TextStep]:
        if self.started:
            return []
        step = self.pieces.body(await reply.read_all())
        self.pieces.close()
        return [step]

    async def _read_events(self, reply: UpstreamReply) -> list[TextStep]:
        steps: list[TextStep] = []
        while not steps and not self._done:
            try:
                data = await reply.read()
            except errors.EngineDiedError:
                if self.pieces.unfinished:
                    raise
                data = b""  # the connection was lost after all choices had ended
            self._done = not data
            for event in self._events.feed(data):
                if self._done or event == DONE:
                    self._done = True
                elif (step := self.pieces.chunk(event)) is not None:
                    steps.append(step)
        if not steps:
            self.pieces.close()
            await reply.end()
        return steps

"""A text upstream as routing sees it: it takes groups, and ends them when it is lost.

The abilities of a model are probed once, in the background (`server.probe`). If a server has one model, `learn` does it
at the start; if it has several, the first request with several choices does it (some servers load a model only then,
some take money for each request). Until they are known, choices are requested one by one, which every server
understands. A probe has the key that the operator gave, and never a client's: nobody pays for what others gain.

A group is one request if n is honoured, else one for each choice, a few at a time, and is read as one stream:

    requests ──► a task each, `max_singles` at most ──► queue ──► read()
                 pieces, as they come                   bounded: a slow reader holds the server's streams back

Where choices begin and end by themselves (`TextRequest.start`), a group is single requests whatever the server can do.
A choice is ended by closing its request; one that has not begun is not asked for.

The first error ends all, except in two cases. If a single request fails before it has sent anything, but others of the
group have sent something, it is sent once more (before that, `text_routed` tries the whole group again). If a server
refuses a group in one request, it is sent as single requests: servers honour n within limits of their own.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from motet.engines.http import NOT_TAKEN
from motet.engines.openai import DONE, EventSplitter
from motet.engines.upstream.bodies import PieceReader, UpstreamCall, aborted, ask_at_once, ask_singly, usage_of
from motet.engines.upstream.text_source import TextRequest, TextRoute, TextStep, may_go_elsewhere
from motet.engines.upstream.upstream_server import Abilities, RouteAbilities, UpstreamReply, UpstreamServer, probe
from motet.engines.wire import EngineReport
from motet.errors import (
    EngineClosedError,
    EngineDiedError,
    EngineError,
    MotetError,
    NotFoundError,
    RequestError,
    UpstreamRefusalError,
    WorkerFaultError,
)
from motet.merge import Merge, Take
from motet.tracing.context import headers_of
from motet.types import FinishReason, Usage

AGAIN_S = 60.0
"""Seconds from a probe without a result to the next one."""


class TextUpstream:
    """Made from the first report of a server; owned by its keeper, which closes it."""

    def __init__(
        self, server: UpstreamServer, report: EngineReport, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.engine_id = report.engine_id
        self.server = server
        self._bases: dict[str, str] = {card.name: card.parent or card.name for card in report.models}
        """For each model the one that it adapts, or itself."""
        self._abilities: dict[str, Abilities] = {}
        """The known abilities of each base model."""
        self._ask_again_s: dict[str, float] = {}
        self._probing: dict[str, asyncio.Task[None]] = {}
        self._groups: set[UpstreamGroup] = set()
        self._clock = clock

    async def learn(self) -> None:
        """Probes its model, if it has just one."""
        base, *others = set(self._bases.values())
        if not others and (task := self._learn(base)):
            await asyncio.wait([task])

    def generate(self, request: TextRequest) -> "UpstreamGroup":
        base = self._bases.get(request.model, request.model)
        known = self._abilities.get(base)
        ability = RouteAbilities() if known is None else known[request.route]
        if not ability.there:
            raise NotFoundError(
                f"The model `{request.model}` is not available on {request.route}: its server has no such route.",
                code="unknown_url",
            )
        several, steered = request.num_choices > 1, request.start is not None
        if known is None and several:
            self._learn(base)
        plan = ask_singly if steered or (several and not ability.honours_n) else ask_at_once
        calls = plan(request, wants_usage=ability.takes_usage)
        group = UpstreamGroup(self.server, request, calls=calls, on_end=self._groups.discard)
        self._groups.add(group)
        return group

    def lost(self, error: MotetError) -> None:
        """Ends all groups with `error`. Abilities are forgotten: it may come back as another server."""
        for group in list(self._groups):
            group.fail(error)
        for task in self._probing.values():
            task.cancel()  # its failure would say nothing of the server that comes
        self._abilities.clear()
        self._ask_again_s.clear()

    async def close(self) -> None:
        self.lost(EngineClosedError(f"{self.server.name} is not used any more."))
        await asyncio.gather(*self._probing.values(), return_exceptions=True)

    def check(self) -> None:
        """Raises unless every group has ended."""
        if self._groups:
            raise AssertionError(f"{self.server.name}: {len(self._groups)} groups left")

    def _learn(self, model: str) -> asyncio.Task[None] | None:
        """Returns the probe's task; None if the model is known, or was probed a moment ago."""
        if model in self._probing or model in self._abilities or self._clock() < self._ask_again_s.get(model, 0.0):
            return self._probing.get(model)
        self._probing[model] = task = asyncio.create_task(self._probe(model))
        task.add_done_callback(lambda _: self._probing.pop(model))  # also if it never began
        return task

    async def _probe(self, model: str) -> None:
        found = await probe(self.server, model)
        if found is None:
            self._ask_again_s[model] = self._clock() + AGAIN_S
        else:
            self._abilities[model] = found


NOT_ELSEWHERE = "An answer that a text upstream has begun cannot go on elsewhere."


class UpstreamGroup:
    """A `TextGroupStream`: one request for all choices, or one for each. `aclose` ends them and their connections."""

    worker = ""
    """Empty: the router of the group knows the worker."""

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
        """Requests for choices that have not started, by their first choices."""
        self._calls: dict[int, UpstreamCall] = {}
        """Requests that were sent or are due, by their first choices."""
        self._due: deque[UpstreamCall] = deque()
        """Requests that wait until fewer than `max_singles` others are under way."""
        self._on_end = on_end
        self._steps = Merge[TextStep](2 * server.options.max_singles)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Tasks of the requests under way, by their first choices."""
        self._ended: set[int] = set()
        """Choices that were ended by `end_choice`."""
        self._shown: set[int] = set()
        """Choices with a piece that has been read, if choices start and end by themselves."""
        self._begun = False
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
            if steps := [step for one in read if (step := self._without_ended(one)) is not None]:
                return steps
        return []

    def fail(self, error: MotetError) -> None:
        self._steps.fail(error)

    async def aclose(self) -> None:
        self.fail(EngineClosedError("the group was closed"))
        try:
            await self._steps.aclose()
        finally:
            self._on_end(self)

    def _send_due(self) -> None:
        while self._due and len(self._tasks) < self._server.options.max_singles and not self._steps.over:
            call = self._due.popleft()
            self._tasks[call.first] = self._steps.add(partial(self._run, call))

    def _without_ended(self, step: TextStep) -> TextStep | None:
        """Returns the step without what the server sent of choices that were ended here; None if nothing else is left.
        Their last pieces, which were made here, stay."""
        if self._request.start is None:
            return step
        ended, abort = self._ended, FinishReason.ABORT
        pieces = tuple(piece for piece in step.pieces if piece.index not in ended or piece.finish is abort)
        self._shown.update(piece.index for piece in pieces)
        return TextStep(pieces, step.extras) if pieces else None

    async def _run(self, call: UpstreamCall, take: Take[TextStep]) -> None:
        """Sends a request and delivers its answer, then sends the next one that is due. The first error ends the group,
        unless the choices of the request are requested singly after it."""
        try:
            await self._answer(call, take)
        except UpstreamRefusalError as error:
            if not self._again_singly(call, error):
                raise
        self._tasks.pop(call.first, None)
        self._send_due()

    def _again_singly(self, call: UpstreamCall, error: UpstreamRefusalError) -> bool:
        """Returns True if the choices of a refused request are requested one by one instead."""
        if self._begun or call.count == 1 or error.status not in NOT_TAKEN:
            return False
        try:
            singly = ask_singly(self._request, wants_usage=call.wants_usage)
        except RequestError:
            return False
        self._held = {call.first: call for call in singly}
        self._calls.clear()
        self.start(range(self._request.num_choices))
        return True

    async def _answer(self, call: UpstreamCall, take: Take[TextStep], *, tries: int = 2) -> None:
        with contextlib.closing(UpstreamAnswer(self._server, call)) as answer:
            try:
                while (step := await answer.read()) is not None:
                    self._begun = True
                    if (taking := take((step,))) is not None:
                        await taking
            except UpstreamRefusalError as error:
                raise (error.of(call.name.capitalize()) if self._begun else error) from error
            except MotetError as error:
                if tries == 1 or answer.begun or not self._begun or not may_go_elsewhere(error):
                    raise
            else:
                if answer.merge.usage is not None:
                    self._usages[call.first] = answer.merge.usage
                return
        await self._answer(call, take, tries=tries - 1)


class UpstreamAnswer:
    """One request and its answer, as pieces of the group's choices. One task owns it, and reads it to its end or closes
    it early, which ends the request there."""

    def __init__(self, server: UpstreamServer, ask: UpstreamCall) -> None:
        self.begun = False
        """True once something has come; before that, the request may be sent once more."""
        self.merge = PieceReader(ask.first, ask.count, chat=ask.request.route is TextRoute.CHAT)
        self._server = server
        self._ask = ask
        self._reply: UpstreamReply | None = None
        self._events = EventSplitter()
        self._steps: deque[TextStep] = deque()
        self._done = False

    async def read(self) -> TextStep | None:
        """Returns None at the end. Raises MotetError, with the server and the choice named in it."""
        try:
            if self._reply is None:
                self._reply = await self._open()
            step = await (self._next(self._reply) if self._ask.request.stream else self._whole(self._reply))
        except UpstreamRefusalError:
            raise  # with its own message
        except EngineDiedError as error:
            after = f". {NOT_ELSEWHERE}" if self.begun else ""
            raise type(error)(f"{self._named(error)}{after}") from error
        except EngineError as error:
            raise EngineError(self._named(error)) from error
        self.begun = self.begun or step is not None
        return step

    def close(self) -> None:
        if self._reply is not None:
            self._reply.close()

    def _named(self, error: EngineError) -> str:
        said = error.message if self._server.name in error.message else f"{self._server.name}: {error.message}"
        return f"{self._ask.name.capitalize()} of the request failed: {said}"

    async def _open(self) -> UpstreamReply:
        request = self._ask.request
        headers = {
            "x-request-id": request.trace,
            "x-session-id": request.session_id,
            "authorization": request.authorization,
            **headers_of(request.traceparent),
        }
        reply = await self._server.post(request.route, self._ask.body(), headers=headers)
        if request.stream and not reply.is_stream:
            reply.close()
            raise WorkerFaultError("it answered a request for a stream with something else")
        return reply

    async def _whole(self, reply: UpstreamReply) -> TextStep | None:
        if self.begun:
            return None
        step = self.merge.body(await reply.whole())
        self.merge.close()
        return step

    async def _next(self, reply: UpstreamReply) -> TextStep | None:
        while not self._steps and not self._done:
            try:
                data = await reply.read()
            except EngineDiedError:
                if self.merge.unfinished:
                    raise
                data = b""  # cut off after all choices had ended
            self._done = not data
            for event in self._events.feed(data):
                if self._done or event == DONE:
                    self._done = True
                elif (step := self.merge.chunk(event)) is not None:
                    self._steps.append(step)
        if self._steps:
            return self._steps.popleft()
        self.merge.close()
        await reply.end()
        return None

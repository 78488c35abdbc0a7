"""Spans: what happened to a request, from when to when, as a tree.

Whoever has a span makes its children of it, and whoever has only a `GenerateRequest` makes them of its `traceparent`:

    Span        no traces: all it does is to carry on what the client sent. It costs a call for each moment, no token
    OpenSpan    traces are on, and this one is recorded; `end` hands its record to the tracer

A span that never ends leaves no record. Records are sent some at a time, by a process of their own (`sender`): to make
OpenTelemetry's objects here would take a tenth of the API process's time.
"""

import random
import time
from asyncio import CancelledError
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import TypeVar

import msgspec

from motet.tracing.context import SAMPLED, TraceContext
from motet.tracing.variables import Sampling

Value = str | int | float | bool | tuple[str, ...]
Attributes = Mapping[str, Value | None]
"""What is None is left out."""


class SpanKind(IntEnum):
    """OpenTelemetry's numbers in its protocol."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


class ChildSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A span inside another one, which has none inside itself. Its id is drawn where it is sent."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes
    event: tuple[str, int] | None = None
    """Name and Unix time in nanoseconds."""
    error: str = ""


class SpanRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A span that is over."""

    name: str
    kind: SpanKind
    trace_id: str
    span_id: str
    parent_id: str
    """Empty for the first span of a trace."""
    flags: int
    state: str
    start_ns: int
    """Unix time."""
    end_ns: int
    attributes: dict[str, Value | None]
    events: list[tuple[str, int]]
    """Name and Unix time in nanoseconds."""
    inner: list[ChildSpan]
    error: str = ""
    """Why it failed; empty if it did not."""


R = TypeVar("R", bound=msgspec.Struct)


class Span:
    """The span of a request that leaves no trace here. `context` is the client's, if it sent one, for the next hop."""

    __slots__ = ("context",)

    def __init__(self, context: TraceContext | None = None) -> None:
        self.context = context

    def child(
        self,
        name: str,
        attributes: Attributes | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> "Span":
        """Begins a span inside this one."""
        return self

    def add(self, inner: ChildSpan) -> None:
        """Adds a span inside this one, which has not ended."""

    def note(self, attributes: Attributes) -> None:
        """Adds attributes."""

    def event(self, name: str) -> None:
        """Notes that something happens now."""

    def rename(self, name: str) -> None:
        """Names it: of a request the route is known only later."""

    def end(self, *, error: str = "") -> None:
        """Ends it; a second call changes nothing. `error`: why it failed."""

    def fail(self, error: BaseException | None) -> None:
        """Ends it, with an error if there is one: to be cancelled is none. Only its class is told: a message may quote
        what a client sent."""
        self.end(error="" if error is None or isinstance(error, CancelledError) else type(error).__name__)

    def placed(self, request: R) -> R:
        """Returns the request with this span as its place in the trace: what is done for it are children of this."""
        return request if self.context is None else msgspec.structs.replace(request, traceparent=self.context)

    @property
    def recorded(self) -> bool:
        return False

    @property
    def start_ns(self) -> int:
        """Unix time of its beginning."""
        return 0


NO_SPAN = Span()


class Tracer:
    """Makes no spans: the tracer of a server without traces."""

    def request(self, sent: TraceContext | None) -> Span:
        """Begins the span of a request. `sent`: the span of the client, if it sent one."""
        return NO_SPAN if sent is None else Span(sent)

    def of(self, context: TraceContext | None) -> Span:
        """Returns what makes children of a span that somebody else ends."""
        return NO_SPAN


NO_TRACES = Tracer()
ALL_TRACES = Sampling()
"""Records all traces but those whose client says that they are not recorded."""


class RecordingTracer(Tracer):
    """Makes spans of the requests that are sampled. Those that are not tell the next server so."""

    def __init__(
        self,
        take: Callable[[SpanRecord], None],
        *,
        sampling: Sampling = ALL_TRACES,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.take = take
        self.clock_ns = clock_ns
        self.draw = random.Random(random.SystemRandom().getrandbits(128)).getrandbits
        self._sampling = sampling

    def request(self, sent: TraceContext | None) -> Span:
        trace_id = f"{self.draw(128) or 1:032x}" if sent is None else sent.trace_id
        if self._sampling.keeps(trace_id, sent):
            return OpenSpan(self, "", trace_id=trace_id, parent=sent, kind=SpanKind.SERVER)
        return Span(TraceContext(trace_id, self.new_id(), 0) if sent is None else sent.unsampled)

    def new_id(self) -> str:
        """Returns the id of a new span."""
        return f"{self.draw(64) or 1:016x}"

    def of(self, context: TraceContext | None) -> Span:
        return NO_SPAN if context is None or not context.sampled else _RemoteSpan(self, context)


class _RemoteSpan(Span):
    """A span of which only children are made here."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: RecordingTracer, context: TraceContext) -> None:
        super().__init__(context)
        self._recorder = recorder

    def child(
        self,
        name: str,
        attributes: Attributes | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        mine = self.context
        assert mine is not None  # whoever makes children has one
        return OpenSpan(self._recorder, name, trace_id=mine.trace_id, parent=mine, kind=kind, attributes=attributes)


class OpenSpan(_RemoteSpan):
    """A span that is recorded."""

    __slots__ = ("_attributes", "_events", "_inner", "_kind", "_name", "_over", "_parent_id", "_start_ns")

    def __init__(
        self,
        recorder: RecordingTracer,
        name: str,
        *,
        trace_id: str,
        parent: TraceContext | None,
        kind: SpanKind,
        attributes: Attributes | None = None,
    ) -> None:
        self._parent_id, flags, state = "", SAMPLED, ""
        if parent is not None:
            self._parent_id, flags, state = parent.span_id, parent.flags | SAMPLED, parent.state
        super().__init__(recorder, TraceContext(trace_id, recorder.new_id(), flags, state))
        self._name = name
        self._kind = kind
        self._attributes: dict[str, Value | None] = {} if attributes is None else dict(attributes)
        self._events: list[tuple[str, int]] = []
        self._inner: list[ChildSpan] = []
        self._over = False
        self._start_ns = recorder.clock_ns()

    def add(self, inner: ChildSpan) -> None:
        self._inner.append(inner)

    def note(self, attributes: Attributes) -> None:
        self._attributes.update(attributes)

    def event(self, name: str) -> None:
        self._events.append((name, self._recorder.clock_ns()))

    def rename(self, name: str) -> None:
        self._name = name

    def end(self, *, error: str = "") -> None:
        if self._over:
            return
        self._over = True
        mine, recorder = self.context, self._recorder
        assert mine is not None  # an open span has one
        recorder.take(
            SpanRecord(
                self._name,
                self._kind,
                mine.trace_id,
                mine.span_id,
                self._parent_id,
                mine.flags,
                mine.state,
                self._start_ns,
                recorder.clock_ns(),
                self._attributes,
                self._events,
                self._inner,
                error,
            )
        )

    @property
    def recorded(self) -> bool:
        return True

    @property
    def start_ns(self) -> int:
        return self._start_ns

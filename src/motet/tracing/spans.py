"""Spans: the stages of a request with their start and end times, as a tree.

Code that has a span makes children from it; code that only has a `GenerateRequest` makes them from its `traceparent`:

    Span        no traces: it only passes on the client's context. It costs one call per stage, and none per token
    OpenSpan    traces are on, and this span is recorded; `end` passes its record to the tracer

A span that never ends leaves no record. Records are sent in batches by a separate process (`sender`): creating
OpenTelemetry's objects here would take a tenth of the API process's time."""

import random
from asyncio import CancelledError
from collections.abc import Callable, Mapping
from enum import IntEnum
from time import time_ns
from typing import TypeVar

import msgspec

from motet.tracing.context import SAMPLED, TraceContext
from motet.tracing.variables import Sampling

Value = str | int | float | bool | tuple[str, ...]
Attributes = Mapping[str, Value | None]
"""Attributes by name. Those that are None are left out."""


class SpanKind(IntEnum):
    """The kind of a span, with OpenTelemetry's numbers."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


class ChildSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A child span without children of its own. Its id is generated where it is sent."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes
    event: tuple[str, int] | None = None
    """Name and Unix time in nanoseconds."""
    error: str = ""


class SpanRecord(msgspec.Struct, array_like=True, gc=False):
    """A span, filled by its `OpenSpan` until it ends."""

    name: str
    kind: SpanKind
    trace_id: str
    span_id: str
    parent_id: str
    """Empty for the first span of a trace."""
    flags: int
    state: str
    start_ns: int
    """Unix time in nanoseconds."""
    end_ns: int = 0
    """Unix time in nanoseconds; 0 before the end."""
    attributes: dict[str, Value | None] = {}
    events: list[tuple[str, int]] = []
    """Names and Unix times in nanoseconds."""
    children: list[ChildSpan] = []
    error: str = ""
    """Reason for the failure; empty if it did not fail."""


R = TypeVar("R", bound=msgspec.Struct)


class Span:
    """The span of a request that is not recorded. `context`, the client's if it sent one, is for the next server."""

    __slots__ = ("context",)

    def __init__(self, context: TraceContext | None = None) -> None:
        self.context = context

    def child(self, name: str, attributes: Attributes | None = None, *, kind: SpanKind = SpanKind.INTERNAL) -> "Span":
        """Starts a child span."""
        return self

    def add(self, child: ChildSpan) -> None:
        """Adds a child span that has ended. This span must not have ended."""

    def note(self, attributes: Attributes) -> None:
        """Adds attributes."""

    def event(self, name: str) -> None:
        """Adds an event with the current time."""

    def rename(self, name: str) -> None:
        """Renames the span. A request's route is known only after matching."""

    def end(self, *, error: str = "") -> None:
        """Ends the span; a second call has no effect. `error`: reason for the failure."""

    def fail(self, error: BaseException | None) -> None:
        """Ends the span, with an error if there is one; cancellation is not an error. Only the class of the error is
        recorded: a message can quote the client."""
        self.end(error="" if error is None or isinstance(error, CancelledError) else type(error).__name__)

    def placed(self, request: R) -> R:
        """Returns the request with this span as its parent in the trace."""
        return request if self.context is None else msgspec.structs.replace(request, traceparent=self.context)

    @property
    def recorded(self) -> bool:
        return False

    @property
    def start_ns(self) -> int:
        """Unix time of the start, in nanoseconds."""
        return 0


NO_SPAN = Span()


class Tracer:
    """Makes no spans; the tracer of a server without traces."""

    def request(self, sent: TraceContext | None) -> Span:
        """Starts the span of a request. `sent`: the client's context, if it sent one."""
        return NO_SPAN if sent is None else Span(sent)

    def of(self, context: TraceContext | None) -> Span:
        """Returns a span for making children of a span that ends in another place."""
        return NO_SPAN


NO_TRACES = Tracer()
ALL_TRACES = Sampling()
"""Records all traces except those that the client has marked as not recorded."""


class RecordingTracer(Tracer):
    """Makes spans of sampled requests. Spans of other requests pass on to the next server that they are not sampled."""

    def __init__(self, take: Callable[[SpanRecord], None], *, sampling: Sampling = ALL_TRACES) -> None:
        self.take = take
        self.draw = random.Random(random.SystemRandom().getrandbits(128)).getrandbits
        self._sampling = sampling

    def request(self, sent: TraceContext | None) -> Span:
        trace_id = f"{self.draw(128) or 1:032x}" if sent is None else sent.trace_id
        if self._sampling.keeps(trace_id, sent):
            return OpenSpan(self, "", trace_id=trace_id, parent=sent, kind=SpanKind.SERVER)
        return Span(TraceContext(trace_id, self.new_id(), 0) if sent is None else sent.unsampled)

    def new_id(self) -> str:
        return f"{self.draw(64) or 1:016x}"

    def of(self, context: TraceContext | None) -> Span:
        return NO_SPAN if context is None or not context.sampled else _ParentSpan(self, context)


class _ParentSpan(Span):
    """A span that ends in another place. Only children are made from it here."""

    __slots__ = ("_parent", "_tracer")

    def __init__(self, tracer: RecordingTracer, parent: TraceContext) -> None:
        super().__init__(parent)
        self._parent = parent
        self._tracer = tracer

    def child(
        self, name: str, attributes: Attributes | None = None, *, kind: SpanKind = SpanKind.INTERNAL
    ) -> "OpenSpan":
        trace_id = self._parent.trace_id
        return OpenSpan(self._tracer, name, trace_id=trace_id, parent=self._parent, kind=kind, attributes=attributes)


class OpenSpan(Span):
    """A span that is recorded."""

    __slots__ = ("_own", "_record", "_tracer")

    def __init__(
        self,
        tracer: RecordingTracer,
        name: str,
        *,
        trace_id: str,
        parent: TraceContext | None,
        kind: SpanKind,
        attributes: Attributes | None = None,
    ) -> None:
        id, parent_id, flags, state = tracer.new_id(), "", SAMPLED, ""
        if parent is not None:
            parent_id, flags, state = parent.span_id, parent.flags | SAMPLED, parent.state
        self._own = TraceContext(trace_id, id, flags, state)
        super().__init__(self._own)
        self._tracer = tracer
        self._record = SpanRecord(
            name, kind, trace_id, id, parent_id, flags, state, time_ns(), attributes=dict(attributes or {})
        )

    def child(
        self, name: str, attributes: Attributes | None = None, *, kind: SpanKind = SpanKind.INTERNAL
    ) -> "OpenSpan":
        own = self._own
        return OpenSpan(self._tracer, name, trace_id=own.trace_id, parent=own, kind=kind, attributes=attributes)

    def add(self, child: ChildSpan) -> None:
        self._record.children.append(child)

    def note(self, attributes: Attributes) -> None:
        self._record.attributes.update(attributes)

    def event(self, name: str) -> None:
        self._record.events.append((name, time_ns()))

    def rename(self, name: str) -> None:
        self._record.name = name

    def end(self, *, error: str = "") -> None:
        if self._record.end_ns == 0:
            self._record.end_ns, self._record.error = time_ns(), error
            self._tracer.take(self._record)

    @property
    def recorded(self) -> bool:
        return True

    @property
    def start_ns(self) -> int:
        return self._record.start_ns

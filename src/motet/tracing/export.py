"""The process that sends spans to a collector, over OTLP. Its parent is a server of ours.

It reads an `ExportSettings` and then lists of `SpanRecord`s, each as a frame, and ends when its standard input does:
then it has `ExportSettings.close_s` to send what is left. Signals that reach all processes of a server do not end it.

OpenTelemetry's own variables are in force here: OTEL_EXPORTER_OTLP_HEADERS, _CERTIFICATE, _COMPRESSION and _TIMEOUT,
OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_BSP_SCHEDULE_DELAY and the like. The server itself reads those that
say what is recorded, and over which protocol it is sent (`variables`).
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO
from urllib.parse import urlsplit

import msgspec
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from motet.log import setup_logging
from motet.tracing.sender import LENGTH, ExportSettings
from motet.tracing.spans import Attributes, SpanRecord, Value
from motet.tracing.spans import SpanKind as Kind
from motet.tracing.variables import Protocol

logger = logging.getLogger("motet.tracing")

TRACES_PATH = "/v1/traces"
SERVICE = "motet"
UNNAMED = "unknown_service"
"""Begins the name that OpenTelemetry gives to a service without one."""
IDS = RandomIdGenerator()
KINDS = {Kind.INTERNAL: SpanKind.INTERNAL, Kind.SERVER: SpanKind.SERVER, Kind.CLIENT: SpanKind.CLIENT}
QUIET_S = 60.0
"""Seconds after a line of OpenTelemetry's in which there is no other: a collector that is away would fill the log."""


def main() -> None:
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    pipe = sys.stdin.buffer
    order = msgspec.msgpack.decode(frame_of(pipe) or b"", type=ExportSettings)
    log_as(order.log_format)
    resource = resource_of(order)
    scope = InstrumentationScope(SERVICE, order.attributes.get("service.version"))
    try:
        processor = BatchSpanProcessor(exporter_of(order))
    except Exception as error:  # whatever a variable of OpenTelemetry's makes of the library
        logger.error("spans cannot be sent: %s: %s", type(error).__name__, error)
        sys.exit(1)
    decoder = msgspec.msgpack.Decoder(list[SpanRecord])
    while (frame := frame_of(pipe)) is not None:
        for record in decoder.decode(frame):
            for span in spans_of(record, resource, scope=scope):
                processor.on_end(span)
    last = threading.Timer(order.close_s, give_up)  # whatever the exporter does: a collector may be away
    last.daemon = True
    last.start()
    processor.shutdown()  # type: ignore[no-untyped-call]


def give_up() -> None:
    logger.warning("the collector has not taken the last spans in time: they are lost")
    os._exit(1)


class ThrottleFilter(logging.Filter):
    """Lets one line of OpenTelemetry's pass, and then none for `QUIET_S`."""

    def __init__(self) -> None:
        super().__init__()
        self._next_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith("opentelemetry"):
            return True
        passes = time.monotonic() >= self._next_s
        if passes:
            self._next_s = time.monotonic() + QUIET_S
        return passes


def log_as(log_format: str) -> None:
    """Writes the lines of OpenTelemetry in the form of the server's own."""
    setup_logging(format=log_format)
    theirs = logging.getLogger("opentelemetry")
    theirs.handlers, theirs.propagate = logging.getLogger("motet").handlers, False
    for handler in theirs.handlers:
        handler.addFilter(ThrottleFilter())


def frame_of(pipe: BinaryIO) -> bytes | None:
    """Returns None at the end of the pipe."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    frame = pipe.read(size)
    return frame if len(frame) == size else None


def exporter_of(order: ExportSettings) -> SpanExporter:
    if order.protocol is Protocol.GRPC:
        # Here, since only one of the two packages need be installed, and gRPC takes its time to load.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=order.endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=traces_url(order.endpoint))


def traces_url(endpoint: str) -> str:
    """Returns where spans are posted: at the usual path, unless the endpoint has one."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + TRACES_PATH


def resource_of(order: ExportSettings) -> Resource:
    """Returns what all spans are of: what the environment says, and what it leaves open."""
    told = Resource.create()
    unnamed = str(told.attributes.get(SERVICE_NAME, UNNAMED)).startswith(UNNAMED)
    return told.merge(Resource({SERVICE_NAME: SERVICE, **order.attributes} if unnamed else dict(order.attributes)))


def spans_of(record: SpanRecord, resource: Resource, *, scope: InstrumentationScope) -> Iterator[ReadableSpan]:
    """Yields the span of a record, and those inside it."""
    trace_id, parent = int(record.trace_id, 16), None
    flags, state = TraceFlags(record.flags), TraceState.from_header([record.state] if record.state else [])

    def context(span_id: int) -> SpanContext:
        return SpanContext(trace_id, span_id, is_remote=False, trace_flags=flags, trace_state=state)

    if record.parent_id:
        parent = SpanContext(trace_id, int(record.parent_id, 16), is_remote=record.kind is Kind.SERVER)
    own = context(int(record.span_id, 16))
    make = partial(ReadableSpan, resource=resource, instrumentation_scope=scope)
    for inner in record.inner:
        yield make(
            inner.name,
            context=context(IDS.generate_span_id()),
            parent=own,
            attributes=told(inner.attributes),
            events=[] if inner.event is None else [Event(inner.event[0], timestamp=inner.event[1])],
            kind=SpanKind.INTERNAL,
            status=status_of(inner.error),
            start_time=inner.start_ns,
            end_time=inner.end_ns,
        )
    yield make(
        record.name,
        context=own,
        parent=parent,
        attributes=told(record.attributes),
        events=[Event(name, timestamp=when_ns) for name, when_ns in record.events],
        kind=KINDS[record.kind],
        status=status_of(record.error),
        start_time=record.start_ns,
        end_time=record.end_ns,
    )


def told(attributes: Attributes) -> dict[str, Value]:
    return {name: value for name, value in attributes.items() if value is not None}


def status_of(error: str) -> Status:
    return Status(StatusCode.ERROR, error) if error else Status(StatusCode.UNSET)


if __name__ == "__main__":
    main()

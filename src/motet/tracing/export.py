"""The process that sends spans to a collector, over OTLP. Its parent is a Motet server.

It reads an `ExportSettings` and then lists of `SpanRecord`s, each as a frame, and ends when its standard input ends. It
then has `ExportSettings.close_s` to send the remaining spans. Signals to all processes of a server do not end it.

OpenTelemetry's own variables apply here: OTEL_EXPORTER_OTLP_HEADERS, _CERTIFICATE, _COMPRESSION and _TIMEOUT,
OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_BSP_SCHEDULE_DELAY and so on. The server itself reads the variables
that determine which traces are recorded, and over which protocol they are sent (`variables`)."""

import logging
import os
import signal
import sys
import threading
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

from motet.log import RepeatFilter, setup_logging
from motet.tracing.sender import LENGTH, ExportSettings
from motet.tracing.spans import Attributes, SpanRecord, Value
from motet.tracing.spans import SpanKind as Kind
from motet.tracing.variables import Protocol

logger = logging.getLogger("motet.tracing")

TRACES_PATH = "/v1/traces"
SERVICE = "motet"
UNNAMED = "unknown_service"
"""Prefix of the name that OpenTelemetry gives to a service without a name."""
IDS = RandomIdGenerator()
KINDS = {Kind.INTERNAL: SpanKind.INTERNAL, Kind.SERVER: SpanKind.SERVER, Kind.CLIENT: SpanKind.CLIENT}


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    pipe = sys.stdin.buffer
    settings = msgspec.msgpack.decode(frame_of(pipe) or b"", type=ExportSettings)
    use_log_format(settings.log_format)
    resource = resource_of(settings)
    scope = InstrumentationScope(SERVICE, settings.attributes.get("service.version"))
    try:
        processor = BatchSpanProcessor(exporter_of(settings))
    except Exception as error:  # the library can raise any error for an invalid variable of OpenTelemetry
        logger.error("spans cannot be sent: %s: %s", type(error).__name__, error)
        sys.exit(1)
    decoder = msgspec.msgpack.Decoder(list[SpanRecord])
    while (frame := frame_of(pipe)) is not None:
        for record in decoder.decode(frame):
            for span in spans_of(record, resource, scope=scope):
                processor.on_end(span)
    deadline = threading.Timer(settings.close_s, give_up)  # the exporter can block on an unavailable collector
    deadline.daemon = True
    deadline.start()
    processor.shutdown()  # type: ignore[no-untyped-call]


def give_up() -> None:
    logger.warning("the last spans could not be sent to the collector in time and are lost")
    os._exit(1)


def use_log_format(log_format: str) -> None:
    """Logs OpenTelemetry's lines like Motet's, at most one a minute: an unavailable collector would fill the log."""
    setup_logging(format=log_format)
    library = logging.getLogger("opentelemetry")
    library.handlers, library.propagate = logging.getLogger("motet").handlers, False
    for handler in library.handlers:
        handler.addFilter(RepeatFilter(lambda line: "" if line.name.startswith("opentelemetry") else None))


def frame_of(pipe: BinaryIO) -> bytes | None:
    """Returns None at the end of the pipe."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    frame = pipe.read(size)
    return frame if len(frame) == size else None


def exporter_of(settings: ExportSettings) -> SpanExporter:
    if settings.protocol is Protocol.GRPC:
        # Imported here, since only one of the two packages has to be installed, and gRPC loads slowly.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=settings.endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=traces_url(settings.endpoint))


def traces_url(endpoint: str) -> str:
    """Returns the URL for spans: the endpoint with the standard path, unless the endpoint has a path."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + TRACES_PATH


def resource_of(settings: ExportSettings) -> Resource:
    """Returns the resource of all spans: attributes from the environment, and the server's for those that it lacks."""
    resource = Resource.create()
    unnamed = str(resource.attributes.get(SERVICE_NAME, UNNAMED)).startswith(UNNAMED)
    attributes = {SERVICE_NAME: SERVICE, **settings.attributes} if unnamed else dict(settings.attributes)
    return resource.merge(Resource(attributes))


def spans_of(record: SpanRecord, resource: Resource, *, scope: InstrumentationScope) -> Iterator[ReadableSpan]:
    """Yields the span of a record, and its child spans."""
    trace_id, parent = int(record.trace_id, 16), None
    flags, state = TraceFlags(record.flags), TraceState.from_header([record.state] if record.state else [])

    def context(span_id: int) -> SpanContext:
        return SpanContext(trace_id, span_id, is_remote=False, trace_flags=flags, trace_state=state)

    if record.parent_id:
        parent = SpanContext(trace_id, int(record.parent_id, 16), is_remote=record.kind is Kind.SERVER)
    own = context(int(record.span_id, 16))
    make = partial(ReadableSpan, resource=resource, instrumentation_scope=scope)
    for child in record.children:
        yield make(
            child.name,
            context=context(IDS.generate_span_id()),
            parent=own,
            attributes=present(child.attributes),
            events=[] if child.event is None else [Event(child.event[0], timestamp=child.event[1])],
            kind=SpanKind.INTERNAL,
            status=status_of(child.error),
            start_time=child.start_ns,
            end_time=child.end_ns,
        )
    yield make(
        record.name,
        context=own,
        parent=parent,
        attributes=present(record.attributes),
        events=[Event(name, timestamp=when_ns) for name, when_ns in record.events],
        kind=KINDS[record.kind],
        status=status_of(record.error),
        start_time=record.start_ns,
        end_time=record.end_ns,
    )


def present(attributes: Attributes) -> dict[str, Value]:
    return {name: value for name, value in attributes.items() if value is not None}


def status_of(error: str) -> Status:
    return Status(StatusCode.ERROR, error) if error else Status(StatusCode.UNSET)


if __name__ == "__main__":
    main()

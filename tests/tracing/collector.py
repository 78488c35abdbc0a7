"""Collectors of traces on a real socket: they parse spans with OpenTelemetry's own classes, and wait for them."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from tests.patience import PATIENCE_S


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as received by a collector."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    state: str
    error: str
    attributes: dict[str, Any]
    events: dict[str, int]
    service: dict[str, Any] = field(repr=False)
    """Attributes of the server that sent the span."""


class Spans:
    """The spans that a collector has received."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.paths: set[str] = set()
        self.headers: dict[str, str] = {}
        """Headers of the last request; names in lower case."""
        self._changed = threading.Condition()

    def take(self, path: str, headers: Iterable[tuple[str, str]], request: ExportTraceServiceRequest) -> None:
        with self._changed:
            self.paths.add(path)
            self.headers = {name.lower(): value for name, value in headers}
            self.spans += spans_in(request)
            self._changed.notify_all()

    def until(self, complete: Callable[[list[ReceivedSpan]], bool]) -> list[ReceivedSpan]:
        """Returns all spans when `complete` is true for them."""
        end_s = time.monotonic() + PATIENCE_S
        with self._changed:
            while not complete(self.spans):
                assert self._changed.wait(end_s - time.monotonic()), [(one.name, one.parent_id) for one in self.spans]
            return list(self.spans)


class Collector(Spans):
    """Receives OTLP over HTTP while the `with` lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.status = 200
        """Status of its answers. Spans of refused requests are not kept."""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if collector.status == 200:
                    collector.take(self.path, self.headers.items(), ExportTraceServiceRequest.FromString(body))
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Logs nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "Collector":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class GrpcCollector(Spans, TraceServiceServicer):
    """Receives OTLP over gRPC while the `with` lasts."""

    def __init__(self) -> None:
        super().__init__()
        self._server = grpc.server(ThreadPoolExecutor(1))
        add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def Export(self, request: ExportTraceServiceRequest, context: grpc.ServicerContext) -> ExportTraceServiceResponse:
        self.take("", context.invocation_metadata(), request)
        return ExportTraceServiceResponse()

    def __enter__(self) -> "GrpcCollector":
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()


def spans_in(request: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for resource in request.resource_spans:
        service = {one.key: plain(one.value) for one in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    span.name,
                    span.kind,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.trace_state,
                    span.status.message if span.status.code == span.status.STATUS_CODE_ERROR else "",
                    {one.key: plain(one.value) for one in span.attributes},
                    {one.name: one.time_unix_nano for one in span.events},
                    service,
                )


def plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(one) for one in value.array_value.values]
    return getattr(value, kind) if kind else None

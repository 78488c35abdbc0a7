"""A collector of traces on a real socket: it reads what comes with OpenTelemetry's own classes, and waits for spans."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from tests.patience import PATIENCE_S


@dataclass(frozen=True)
class Seen:
    """A span as it came."""

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
    """The attributes of the server that sent it."""


class Collector:
    """Listens inside `with`."""

    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self.paths: set[str] = set()
        self._changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                collector.take(self.path, self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Writes nothing."""

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

    def take(self, path: str, body: bytes) -> None:
        with self._changed:
            self.paths.add(path)
            self.spans += spans_in(ExportTraceServiceRequest.FromString(body))
            self._changed.notify_all()

    def until(self, there: Callable[[list[Seen]], bool]) -> list[Seen]:
        """Returns all spans once `there` is true of them."""
        end_s = time.monotonic() + PATIENCE_S
        with self._changed:
            while not there(self.spans):
                assert self._changed.wait(end_s - time.monotonic()), [(one.name, one.parent_id) for one in self.spans]
            return list(self.spans)


def spans_in(request: ExportTraceServiceRequest) -> Iterator[Seen]:
    for of_one in request.resource_spans:
        service = {one.key: plain(one.value) for one in of_one.resource.attributes}
        for scope in of_one.scope_spans:
            for span in scope.spans:
                yield Seen(
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

"""A proxy between a client and the server that keeps what the client sent.

The requests of a run are what the fast tests send again (`tests/api/test_recorded_clients.py`), so nobody has to guess
what a client really writes.
"""

import json
import threading
from collections.abc import Mapping
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

CHUNK_BYTES = 2**16
TIMEOUT_S = 300.0
MOST_LETTERS = 120
"""The longest text in a recording."""


class Recorder:
    """Passes requests to the server at `target` inside `with`; `url` is where clients find it."""

    def __init__(self, target: str) -> None:
        self.exchanges: list[dict[str, Any]] = []
        """What was sent since `begin`, in order: `method`, `path`, `body` if it is JSON, and the answer's `status`."""
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self, urlsplit(target).netloc))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "Recorder":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def begin(self) -> None:
        """Forgets the requests of earlier clients."""
        self.exchanges.clear()

    def add(self, exchange: dict[str, Any]) -> None:
        with self._lock:
            self.exchanges.append(exchange)

    def refused(self) -> list[dict[str, Any]]:
        """Returns the requests that did not get 200."""
        return [exchange for exchange in self.exchanges if exchange["status"] != 200]

    def save(self, path: Path, source: Mapping[str, str], *, hidden: str) -> None:
        """Writes the requests with a body as JSON, each shape of them once, below what they came from.

        Long texts are cut, since only their kind matters. `hidden` is a folder whose name must not stay in them.
        """
        requests: dict[object, dict[str, Any]] = {}
        for exchange in self.exchanges:
            if exchange["body"]:
                request = {"path": exchange["path"], "body": shortened(exchange["body"], hidden)}
                requests.setdefault(json.dumps(shape(request), sort_keys=True), request)
        lines = ",\n".join(json.dumps(request, ensure_ascii=False) for request in requests.values())
        head = json.dumps(dict(source), ensure_ascii=False).removesuffix("}")
        path.write_text(f'{head},\n"requests": [\n{lines}\n]}}\n')


def shortened(value: Any, hidden: str) -> Any:
    """Returns the value with its long strings cut, and without the folder's name."""
    if isinstance(value, str):
        text = value.replace(hidden, "/home/somebody")
        return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}..."
    if isinstance(value, dict):
        return {name: shortened(inner, hidden) for name, inner in value.items()}
    return [shortened(inner, hidden) for inner in value] if isinstance(value, list) else value


def shape(value: Any) -> Any:
    """Returns the value with 0 for each number and the empty text for each string; its fields and booleans stay.

    A list of numbers has the shape of one of them, so prompts of token ids have the same shape, whatever their lengths.
    """
    if isinstance(value, dict):
        return {name: value[name] if name == "path" else shape(value[name]) for name in value}
    if isinstance(value, list):
        shapes = [shape(inner) for inner in value]
        return [0] if shapes and all(inner == 0 and inner is not False for inner in shapes) else shapes
    return "" if isinstance(value, str) else value if value is None or isinstance(value, bool) else 0


def _handler(recorder: Recorder, address: str) -> type[BaseHTTPRequestHandler]:
    class Passing(BaseHTTPRequestHandler):
        """Passes one connection's requests on, each on a connection of its own."""

        def do_GET(self) -> None:
            self._pass_on()

        def do_POST(self) -> None:
            self._pass_on()

        def log_message(self, format: str, *args: object) -> None:
            """Prints nothing: pytest shows what a client said, if it failed."""

        def _pass_on(self) -> None:
            sent = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
            upstream = HTTPConnection(address, timeout=TIMEOUT_S)
            upstream.request(self.command, self.path, body=sent, headers=headers | {"Connection": "close"})
            answer = upstream.getresponse()
            body = json.loads(sent) if sent and self.headers.get_content_type() == "application/json" else None
            recorder.add({"method": self.command, "path": self.path, "body": body, "status": answer.status})
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            while piece := answer.read1(CHUNK_BYTES):
                self.wfile.write(piece)
                self.wfile.flush()
            upstream.close()

    return Passing

"""A proxy between a client and the server that records the client's requests.

The fast tests send the recorded requests again (`tests/api/test_recorded_clients.py`), so they test the requests of
real clients.
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
MAX_LETTERS = 120
"""Maximum length of a text in a recording."""


class Recorder:
    """Forwards requests to the server at `target` while the `with` lasts. Clients connect to `url`."""

    def __init__(self, target: str) -> None:
        self.exchanges: list[dict[str, Any]] = []
        """The requests since `clear`, in order: `method`, `path`, `body` if it is JSON, and the `status` of the
        answer."""
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

    def clear(self) -> None:
        """Removes the requests of earlier clients."""
        self.exchanges.clear()

    def add(self, exchange: dict[str, Any]) -> None:
        with self._lock:
            self.exchanges.append(exchange)

    def refused(self) -> list[dict[str, Any]]:
        """Returns the requests whose answer was not a 200."""
        return [exchange for exchange in self.exchanges if exchange["status"] != 200]

    def save(self, path: Path, source: Mapping[str, str], *, hidden: str) -> None:
        """Writes the requests with a body as JSON, one of each shape, after the fields of `source`.

        Long texts are cut, since only their form matters. The path of the folder `hidden` is replaced.
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
    """Returns the value with its long strings cut, and the folder's path replaced."""
    if isinstance(value, str):
        text = value.replace(hidden, "/home/user")
        return text if len(text) <= MAX_LETTERS else f"{text[:MAX_LETTERS]}..."
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
    class Forwarding(BaseHTTPRequestHandler):
        """Forwards the requests of one connection, each on a connection of its own."""

        def do_GET(self) -> None:
            self._forward()

        def do_POST(self) -> None:
            self._forward()

        def log_message(self, format: str, *args: object) -> None:
            """Prints nothing: pytest shows the output of a client that fails."""

        def _forward(self) -> None:
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
            while chunk := answer.read1(CHUNK_BYTES):
                self.wfile.write(chunk)
                self.wfile.flush()
            upstream.close()

    return Forwarding

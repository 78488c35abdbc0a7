"""A Hugging Face hub on loopback: the routes with which its client lists and downloads the files of a model."""

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
INVALID_TOKEN = "invalid"
"""A token that the hub does not know."""


@dataclass
class FakeHub:
    """Serves models while the `with` lasts."""

    models: Mapping[str, Mapping[str, bytes]]
    """Content of each file, by the name of the model."""
    gated: Mapping[str, str] = field(default_factory=dict)
    """Token with which a model can be read, by its name."""
    cut: int = 0
    """Number of bytes after which the connection of a large file breaks, each time; 0 if it never breaks."""
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Path and Range header of each GET of a file."""

    def __enter__(self) -> "FakeHub":
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub.answer(self, sends_body=False)

            def do_GET(self) -> None:
                hub.answer(self, sends_body=True)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, handler: BaseHTTPRequestHandler, *, sends_body: bool) -> None:
        path = urlsplit(handler.path).path
        parts = path.strip("/").split("/")
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        files = self.models.get(name)
        if path == "/":
            self._send(handler, 200, b"hub", sends_body=sends_body)
        elif handler.headers.get("Authorization") == f"Bearer {INVALID_TOKEN}":
            refusal = {"X-Error-Message": "Invalid credentials in Authorization header"}
            self._send(handler, 401, b"{}", refusal, sends_body=sends_body)
        elif files is None:
            self._send(handler, 404, b"{}", {"X-Error-Code": "RepoNotFound"}, sends_body=sends_body)
        elif name in self.gated and handler.headers.get("Authorization") != f"Bearer {self.gated[name]}":
            self._send(handler, 403, b"{}", {"X-Error-Code": "GatedRepo"}, sends_body=sends_body)
        elif parts[0] == "api" and "tree" in parts:
            tree = [{"type": "file", "path": f, "size": len(c), "oid": etag(c)} for f, c in files.items()]
            self._send(handler, 200, json.dumps(tree).encode(), sends_body=sends_body)
        elif parts[0] == "api":
            model = {"id": name, "modelId": name, "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]}
            self._send(handler, 200, json.dumps(model).encode(), sends_body=sends_body)
        else:
            self._send_file(handler, path, files[parts[-1]], sends_body=sends_body)

    def _send_file(self, handler: BaseHTTPRequestHandler, path: str, content: bytes, *, sends_body: bool) -> None:
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag(content)}"', "Accept-Ranges": "bytes"}
        range = handler.headers.get("Range", "")
        start = int(range.removeprefix("bytes=").partition("-")[0] or 0)
        if sends_body:
            self.requests.append((path, range))
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        end = start + self.cut if self.cut else len(content)
        status = 206 if start else 200
        self._send(handler, status, content[start:], headers, sends_body=sends_body, sent=content[start:end])

    @staticmethod
    def _send(
        handler: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        sends_body: bool,
        sent: bytes | None = None,
    ) -> None:
        """`sent`: the start of the body that is sent; the complete body by default."""
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if sends_body:
            handler.wfile.write(body if sent is None else sent)


def etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()

"""A server that answers like a Motet server, except where a test makes it lie."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from motet.deploy.discover import read_files
from motet.engine import WorkerState
from motet.engines.wire import EngineReport
from motet.metrics.stats import EngineStats
from motet.testing.fake_engine import fake_info
from motet.types import GenerateRequest

REPORT = EngineReport(version="0", engine_id="lying", state=WorkerState.READY, info=fake_info(), stats=EngineStats())


class LyingServer:
    """`report`: body of the answer to a request for its report. `answer`: returns the bytes of the answer to a group,
    after which the connection stays open. `files`: files of the tokenizer that replace those in the folder."""

    def __init__(
        self,
        folder: Path,
        *,
        report: bytes,
        answer: Callable[[GenerateRequest], bytes],
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self.url = ""
        self.groups: list[GenerateRequest] = []
        """Requests of groups that it has received."""
        self.num_reports = 0
        """Number of requests for its report."""
        self._files = msgspec.msgpack.encode({**read_files(folder), **(files or {})})
        self._report = report
        self._answer = answer

    @property
    def id(self) -> str:
        return self.url.removeprefix("http://")

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError), contextlib.closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ", 2)[1]
            length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), b":0")
            body = await reader.readexactly(int(length.partition(b":")[2]))
            if path == b"/engine/generate":
                self.groups.append(msgspec.msgpack.decode(body, type=GenerateRequest))
                writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + self._answer(self.groups[-1]))
                await reader.read()  # until the other side closes
            else:
                self.num_reports += path == b"/engine"
                answer = self._report if path == b"/engine" else self._files
                writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(answer))
                writer.write(answer)
                await writer.drain()


@asynccontextmanager
async def lying(
    folder: Path,
    *,
    report: EngineReport | bytes = REPORT,
    answer: Callable[[GenerateRequest], bytes] = lambda _: b"",
    files: Mapping[str, bytes] | None = None,
) -> AsyncIterator[LyingServer]:
    body = report if isinstance(report, bytes) else msgspec.msgpack.encode(report)
    server = LyingServer(folder, report=body, answer=answer, files=files)
    async with await asyncio.start_server(server.handle, "127.0.0.1", 0) as listener:
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        yield server

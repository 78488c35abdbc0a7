"""A batch with real files and a scripted server. Pauses take no time; the test's clock advances by them."""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec

from motet.batch.concurrency import ConcurrencyLimit
from motet.batch.lines import BATCH_URLS, BatchLine
from motet.batch.requests import windows
from motet.batch.run import BatchFileRun, BatchProgress, RunTimes
from motet.batch.sender import ServerReply
from motet.batch.server_watch import ServerWatch
from motet.cli.batch.files import BatchFiles, errors_path
from tests.clock import Clock

Answer = Callable[[BatchLine, int], ServerReply]
CHAT = BATCH_URLS[0]


def request(custom_id: str, prompt: str = "Hi", **changed: object) -> bytes:
    """Returns an input line."""
    body = {"messages": [{"role": "user", "content": prompt}]}
    line = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body} | changed
    return json.dumps(line).encode() + b"\n"


def requests(count: int, *, start: int = 0) -> bytes:
    return b"".join(request(f"id-{number}", f"prompt {number}") for number in range(start, start + count))


def echo(line: BatchLine, attempt: int) -> ServerReply:
    """The default answer: a function of the request."""
    body = {"answer_to": msgspec.json.decode(line.body), "usage": {"total_tokens": 10}}
    return ServerReply(200, msgspec.json.encode(body), request_id=f"req-{line.custom_id}")


def refusal(status: int, code: str = "", *, retry_after_s: int | None = None) -> ServerReply:
    body = msgspec.json.encode({"error": {"message": "no", "code": code}})
    return ServerReply(status, body, retry_after_s=retry_after_s)


def found(number: int) -> ServerReply:
    """The default answer to a probe."""
    return ServerReply(200)


class ScriptedServer:
    """Answers requests as `answer(line, attempt)`, attempts counting from 1."""

    def __init__(self, answer: Answer = echo, *, probe: Callable[[int], ServerReply] = found) -> None:
        """`probe`: returns the answer to a probe, counting from 1."""
        self.sent: list[str] = []
        self.most_in_progress = 0
        self.num_probes = 0
        self._answer = answer
        self._probe = probe
        self._attempts: Counter[str] = Counter()
        self._in_progress = 0

    async def send(self, line: BatchLine) -> ServerReply:
        self.sent.append(line.custom_id)
        self._attempts[line.custom_id] += 1
        self._in_progress += 1
        self.most_in_progress = max(self.most_in_progress, self._in_progress)
        try:
            await asyncio.sleep(0)
            return self._answer(line, self._attempts[line.custom_id])
        finally:
            self._in_progress -= 1

    async def probe(self) -> ServerReply:
        self.num_probes += 1
        return self._probe(self.num_probes)


class BatchScene:
    """The files of one batch, and its runs."""

    def __init__(self, folder: Path, lines: bytes, *, params: Mapping[str, object] | None = None) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.errors = errors_path(self.output)
        self._params = params or {}
        self.input.write_bytes(lines)
        self.clock = Clock()
        self.progress = BatchProgress(0)

    async def run(
        self,
        server: ScriptedServer | None = None,
        *,
        concurrency: int | None = 4,
        server_timeout_s: float = 600.0,
        stop_s: float = 10.0,
        revive: Callable[[], Awaitable[None]] | None = None,
    ) -> ScriptedServer:
        """Runs the batch until its end, and returns the server. `during` is called after the start of the run."""
        server = server or ScriptedServer()
        times = RunTimes(server_timeout_s, stop_s, self._sleep, self.clock, jitter=lambda: 1.0)
        watch = ServerWatch(server, timeout_s=server_timeout_s, revive=revive, sleep=self._sleep, clock=self.clock)
        with ExitStack() as stack:
            files = self.open(stack)
            self.progress = BatchProgress(files.survey.num_lines, num_before=files.survey.num_finished)
            self._run = BatchFileRun(
                server,
                watch,
                output=files.output,
                errors=files.errors,
                progress=self.progress,
                limit=ConcurrencyLimit(fixed=concurrency),
                times=times,
            )
            await self._run.run(windows(files.lines, files.ids))
            files.finish(self.progress)
        return server

    def open(self, stack: ExitStack) -> BatchFiles:
        return BatchFiles.open(self.input, self.output, errors=self.errors, params=self._params, stack=stack)

    def stop(self) -> None:
        """Stops the run. For scripts of a server."""
        self._run.stop()

    async def _sleep(self, seconds: float) -> None:
        self.clock.now_s += seconds
        await asyncio.sleep(0)

    def results(self) -> dict[str, object]:
        """The responses by id. Fails if an id has two results, or if a line is not complete JSON."""
        lines = [json.loads(line) for line in self.output.read_bytes().splitlines(keepends=True)]
        responses = {line["custom_id"]: line["response"] for line in lines}
        assert len(responses) == len(lines)
        return responses

    def failures(self) -> dict[str | None, object]:
        """The codes or status codes of the failed lines by id."""
        if not self.errors.exists():
            return {}
        lines = [json.loads(line) for line in self.errors.read_bytes().splitlines()]
        return {
            line["custom_id"]: (line["error"] or {}).get("code") or line["response"]["status_code"] for line in lines
        }

"""An OpenAI-compatible server on a real socket, which can deviate as other servers do (`openai_script`)."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

from tests.peers.openai_script import Behaviour, FixedAnswer, OpenAIRequest, Script


class FakeOpenAI:
    """A fake server that runs while the `async with` lasts."""

    def __init__(self, behaviour: Behaviour | None = None, *, tls: ssl.SSLContext | None = None) -> None:
        self.behaviour = behaviour or Behaviour()
        self.requests: list[OpenAIRequest] = []
        """All requests for choices, in order."""
        self.num_listings = 0
        """Number of times that a client listed the models."""
        self.running = 0
        self.max_running = 0
        self.arrived = asyncio.Semaphore(0)
        self.gate: asyncio.Semaphore | None = None
        self._tls = tls
        self._connections: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()

    async def __aenter__(self) -> "FakeOpenAI":
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self._tls)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stops the server and breaks every connection. A second call changes nothing."""
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close_gate(self) -> asyncio.Semaphore:
        """Makes each following chunk of a stream, and each complete answer, wait for a permit of the returned gate."""
        self.arrived = asyncio.Semaphore(0)
        self.gate = asyncio.Semaphore(0)
        return self.gate

    async def until_idle(self) -> None:
        """Waits until no request is being answered. The test's time-out is the limit."""
        while self.running:
            self._idle.clear()
            await self._idle.wait()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client has disconnected, or the test has ended
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serves one request. Returns True if the connection stays open."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        line, *lines = head.strip().split("\r\n")
        method, path, _ = line.split()
        headers = {name.lower(): value.strip() for name, _, value in (item.partition(":") for item in lines)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if method == "GET":
            self.num_listings += 1
            models = {"object": "list", "data": [{"object": "model", **card} for card in self.behaviour.models]}
            await _send(
                writer,
                self._key_error(headers) or self.behaviour.listing or FixedAnswer(200, json.dumps(models).encode()),
            )
            return True
        request = OpenAIRequest(path, headers, json.loads(body))
        self.requests.append(request)
        self.arrived.release()
        if error := self._error(request):
            await _send(writer, error)
            return True
        with self._counted_as_running():
            return await self._while_connected(reader, self._answer(request, writer))

    @contextlib.contextmanager
    def _counted_as_running(self) -> Iterator[None]:
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            yield
        finally:
            self.running -= 1
            self._idle.set()

    async def _while_connected(self, reader: asyncio.StreamReader, answer: Coroutine[Any, Any, bool]) -> bool:
        """Stops answering when the client disconnects, as servers do."""
        answering = asyncio.ensure_future(answer)
        disconnected = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait([answering, disconnected], return_when=asyncio.FIRST_COMPLETED)
            return bool(answering.done() and answering.result())
        finally:
            answering.cancel()
            disconnected.cancel()
            await asyncio.gather(answering, disconnected, return_exceptions=True)

    def _key_error(self, headers: dict[str, str]) -> FixedAnswer | None:
        if self.behaviour.key is not None and headers.get("authorization") != f"Bearer {self.behaviour.key}":
            return FixedAnswer.error(401, "Incorrect API key provided.", code="invalid_api_key")
        return None

    def _error(self, request: OpenAIRequest) -> FixedAnswer | None:
        if error := self._key_error(request.headers):
            return error
        if self.behaviour.next_errors:
            return self.behaviour.next_errors.pop(0)
        if request.path in self.behaviour.no_routes:
            return FixedAnswer(404, b'{"detail":"Not Found"}')
        for name in sorted(self.behaviour.refuses):
            if request.body.get(name) is not None and not (name == "n" and request.body["n"] == 1):
                return FixedAnswer.error(400, f"no {name} here", param=name, code="unsupported_value")
        return None

    async def _answer(self, request: OpenAIRequest, writer: asyncio.StreamWriter) -> bool:
        script = Script(request, self.behaviour)
        if not request.body.get("stream"):
            await self._wait_for_gate()
            if script.hangs:
                await asyncio.Event().wait()
            if any(choice.breaks for choice in script.choices):
                await _send(writer, FixedAnswer.error(500, "the model failed"))
                return False
            headers = (("content-type", "application/json"), ("connection", "close"))
            await _send(writer, FixedAnswer(200, json.dumps(script.complete()).encode(), headers))
            return False
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        async for event in self._paced(script):
            if event is None:
                return False
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return False

    async def _paced(self, script: Script) -> AsyncIterator[bytes | None]:
        for event in script.events():
            await self._wait_for_gate()
            yield event
            if script.hangs:
                await asyncio.Event().wait()

    async def _wait_for_gate(self) -> None:
        if self.gate is not None:
            await self.gate.acquire()


async def _send(writer: asyncio.StreamWriter, answer: FixedAnswer) -> None:
    headers = "".join(f"{name}: {value}\r\n" for name, value in answer.headers)
    head = f"HTTP/1.1 {answer.status} Status\r\ncontent-length: {len(answer.body)}\r\n{headers}\r\n"
    writer.write(head.encode() + answer.body)
    await writer.drain()

"""An OpenAI-compatible server on a real socket, which can deviate as other servers do (`openai_script`)."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

from tests.peers.openai_script import Asked, Manners, Refused, Script


class FakeOpenAI:
    """A played server that runs while the `async with` lasts."""

    def __init__(self, manners: Manners | None = None, *, tls: ssl.SSLContext | None = None) -> None:
        self.manners = manners or Manners()
        self.asked: list[Asked] = []
        """All requests for choices, in order."""
        self.listed = 0
        """Number of times that a client asked for its models."""
        self.running = 0
        self.most_running = 0
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
        """Stops the server and breaks every connection. May be called twice."""
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def shut(self) -> asyncio.Semaphore:
        """Makes each piece of a stream, and each whole answer, wait for the gate from now on."""
        self.arrived = asyncio.Semaphore(0)
        self.gate = asyncio.Semaphore(0)
        return self.gate

    async def until_idle(self) -> None:
        """Waits until no answer is under way; the test's time-out is the limit."""
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
            pass  # the other side has gone, or the test has ended
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
            self.listed += 1
            listed = {"object": "list", "data": [{"object": "model", **card} for card in self.manners.models]}
            await _send(
                writer, self._locked(headers) or self.manners.listing or Refused(200, json.dumps(listed).encode())
            )
            return True
        asked = Asked(path, headers, json.loads(body))
        self.asked.append(asked)
        self.arrived.release()
        if refused := self._refusal(asked):
            await _send(writer, refused)
            return True
        with self._under_way():
            return await self._while_connected(reader, self._answer(asked, writer))

    @contextlib.contextmanager
    def _under_way(self) -> Iterator[None]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            yield
        finally:
            self.running -= 1
            self._idle.set()

    async def _while_connected(self, reader: asyncio.StreamReader, answer: Coroutine[Any, Any, bool]) -> bool:
        """Stops when the other side goes, as servers do."""
        answering = asyncio.ensure_future(answer)
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait([answering, gone], return_when=asyncio.FIRST_COMPLETED)
            return bool(answering.done() and answering.result())
        finally:
            answering.cancel()
            gone.cancel()
            await asyncio.gather(answering, gone, return_exceptions=True)

    def _locked(self, headers: dict[str, str]) -> Refused | None:
        if self.manners.key is not None and headers.get("authorization") != f"Bearer {self.manners.key}":
            return Refused.openai(401, "Incorrect API key provided.", code="invalid_api_key")
        return None

    def _refusal(self, asked: Asked) -> Refused | None:
        if locked := self._locked(asked.headers):
            return locked
        if self.manners.not_ok:
            return self.manners.not_ok.pop(0)
        if asked.path in self.manners.no_routes:
            return Refused(404, b'{"detail":"Not Found"}')
        for name in sorted(self.manners.refuses):
            if asked.body.get(name) is not None and not (name == "n" and asked.body["n"] == 1):
                return Refused.openai(400, f"no {name} here", param=name, code="unsupported_value")
        return None

    async def _answer(self, asked: Asked, writer: asyncio.StreamWriter) -> bool:
        script = Script(asked, self.manners)
        if not asked.body.get("stream"):
            await self._step()
            if script.hangs:
                await asyncio.Event().wait()
            if any(choice.breaks for choice in script.choices):
                await _send(writer, Refused.openai(500, "the model fell over"))
                return False
            headers = (("content-type", "application/json"), ("connection", "close"))
            await _send(writer, Refused(200, json.dumps(script.whole()).encode(), headers))
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
            await self._step()
            yield event
            if script.hangs:
                await asyncio.Event().wait()

    async def _step(self) -> None:
        if self.gate is not None:
            await self.gate.acquire()


async def _send(writer: asyncio.StreamWriter, answer: Refused) -> None:
    headers = "".join(f"{name}: {value}\r\n" for name, value in answer.headers)
    head = f"HTTP/1.1 {answer.status} Told\r\ncontent-length: {len(answer.body)}\r\n{headers}\r\n"
    writer.write(head.encode() + answer.body)
    await writer.drain()

"""A vLLM 0.32 server that is played on a real socket, in the test's own loop.

    async with FakeVLLM(network=network, stepped=True) as server:
        ...                                   # ask server.url
        await server.until(lambda: server.open == 1)
        server.step(3)                        # every open request writes three more tokens a choice
        server.run()                          # from now on nothing waits for steps
        ...
        server.check()                        # nothing is open, pinned or wrong

`vllm_tokens.py` has what it writes, `vllm_asked.py` what it refuses. Servers with the same `Network` can fetch KV from
each other. `switches` make it an older server, one with other settings, or one that fails.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple
from uuid import uuid4

from aiohttp import web

from tests.peers.vllm_asked import Asked, Refused, check, completion_asked, generate_asked
from tests.peers.vllm_books import Books
from tests.peers.vllm_engine import BROKEN, PlayedEngine
from tests.peers.vllm_shapes import Json, Shapes, event
from tests.peers.vllm_switches import Switches
from tests.peers.vllm_tickets import Network

MODEL = "smollm2"
TURNS_TO_LET_IN = 3
"""Turns of the loop that a new connection takes until the server lists it. If asyncio closed it earlier, it would
neither be answered nor broken."""


class Named(NamedTuple):
    """The names that the headers of a request give it."""

    request_id: str | None
    session_id: str | None
    traceparent: str | None = None


@dataclass
class FakeVLLM(PlayedEngine):
    """A played server that runs while the `async with` lasts. `kill` and `start` in between keep its port."""

    model: str = MODEL
    adapters: tuple[str, ...] = ()
    max_model_len: int = 4096
    block_size: int = 16
    num_blocks: int = 1000
    network: Network = field(default_factory=Network)
    switches: Switches = field(default_factory=Switches)
    stepped: bool = False
    port: int = 0

    def __post_init__(self) -> None:
        books = Books(self.model, self.block_size, self.num_blocks)
        super().__init__(books, self.network, self.switches, self.max_model_len, stepped=self.stepped)
        self.asked: list[Asked] = []
        """All requests for tokens that were not refused."""
        self.named: list[Named] = []
        """The names of all requests with a prompt, also of refused ones."""

    async def __aenter__(self) -> "FakeVLLM":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def open(self) -> int:
        """Number of requests for tokens that are not answered yet."""
        return self.books.open

    @property
    def models(self) -> list[str]:
        return [self.model, *self.adapters]

    def check(self) -> None:
        """Checks that nothing is left of any request, and that no client did what corrupts KV."""
        assert self.network.faults == []
        assert (self.open, self.network.pulling, self.network.pinned) == (0, 0, [])

    async def start(self) -> None:
        app = web.Application(middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/version", self._version),
                web.get("/kv_event_sources", self._event_sources),
                web.get("/v1/models", self._models),
                web.post("/tokenize", self._tokenize),
                web.post("/v1/completions", self._completions),
                web.post("/inference/v1/generate", self._generate),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.0)
        await self._runner.setup()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        await web.SockSite(self._runner, self._listener).start()
        self.id = str(uuid4())
        self.books.begin()

    async def kill(self) -> None:
        """Acts as after SIGKILL: connections break and everything held is lost. May be called twice."""
        if self._listener.fileno() < 0:
            return
        asyncio.get_running_loop().remove_reader(self._listener)
        for _ in range(TURNS_TO_LET_IN):
            await asyncio.sleep(0)
        server = self._runner.server
        for connection in list(server.connections) if server else ():
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()
        self.network.lose(self.id)
        self.changed()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        await self.until_awake()
        key = self.switches.api_key
        guarded = request.path.startswith(("/v1", "/inference"))
        if guarded and key is not None and request.headers.get("authorization") != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            return await handler(request)
        except Refused as refused:
            return web.json_response(refused.body, status=refused.status)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.switches.healthy else 503)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _metrics(self, _: web.Request) -> web.Response:
        pinned_blocks, tells_blocks = self.pinned_blocks(), self.switches.tells_blocks
        return web.Response(text=self.books.text(pinned_blocks=pinned_blocks, tells_blocks=tells_blocks))

    async def _event_sources(self, _: web.Request) -> web.Response:
        if self.switches.event_sources is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response(self.switches.event_sources)

    async def _tokenize(self, _: web.Request) -> web.Response:
        tokens = self.switches.tokens_of_text
        if tokens is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens})

    async def _models(self, _: web.Request) -> web.Response:
        base: Json = {"id": self.model, "root": f"/models/{self.model}", "parent": None}
        cards = [{**base, "max_model_len": self.max_model_len}]
        cards += [
            {"id": name, "root": f"/adapters/{name}", "parent": self.model, "max_model_len": None}
            for name in self.adapters
        ]
        common: Json = {"object": "model", "created": 1795305094, "owned_by": "vllm", "permission": []}
        return web.json_response({"object": "list", "data": [common | card for card in cards]})

    def _record_names(self, request: web.Request) -> None:
        names = map(request.headers.get, ("x-request-id", "x-session-id", "traceparent"))
        self.named.append(Named(*names))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        self._record_names(request)
        body = await request.json()
        try:
            asked = completion_asked(body)
            self._let_in(asked)
        except Refused:
            ticket = body.get("kv_transfer_params")
            if self.switches.connector and isinstance(ticket, dict) and ticket.get("do_remote_prefill"):
                self.network.refuse(ticket)  # vLLM tells the prefill server; clients release tickets so
                self.changed()
            raise
        return await self._answer(request, asked)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self._record_names(request)
        if not self.switches.scale_out:
            raise Refused(403, "This endpoint needs --enable-scale-out.", kind="Forbidden")
        asked = generate_asked(await request.json())
        self._let_in(asked)
        return await self._answer(request, asked)

    def _let_in(self, asked: Asked) -> None:
        if not self.switches.healthy:
            raise BROKEN
        if self.switches.too_busy:
            self.switches.too_busy -= 1
            raise Refused(503, "The server is overloaded.", kind="ServiceUnavailableError")
        if self.switches.refuses_priority and asked.body.get("priority", 0) != 0:
            raise Refused(400, "Got priority but priority scheduling is not enabled.")
        models = [model for model in self.models if model not in self.switches.lost]
        check(asked, models=models, max_model_len=self.max_model_len)
        self.asked.append(asked)

    async def _answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        async with self.booked(asked) as before:
            id = f"generate-tokens-{uuid4().hex[:16]}" if asked.scale_out else f"cmpl-{uuid4().hex[:16]}"
            shapes = Shapes(id, asked.model or self.model, asked, self.switches.token_ids)
            if asked.stream:
                return await self._stream(request, shapes, before)
            async for children in self.write(asked, before):
                if all(child.finish_reason for child in children):
                    break
            return web.json_response(shapes.whole(children, self.ticket(asked)))

    async def _stream(self, request: web.Request, shapes: Shapes, before: int) -> web.StreamResponse:
        asked = shapes.asked
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        try:
            async for children in self.write(asked, before):
                for child in children:
                    full = len(child.tokens) - child.told >= self.switches.tokens_a_chunk
                    if full or (child.finish_reason and child.told < len(child.tokens)):
                        await response.write(event(shapes.piece(child)))
            if asked.include_usage:
                await response.write(event(shapes.last_piece(children)))
        except Refused as refused:
            await response.write(event(dict(refused.body)))
        await response.write(b"data: [DONE]\n\n")
        return response

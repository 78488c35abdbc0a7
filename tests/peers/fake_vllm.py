"""A fake vLLM 0.32 server on a real socket, in the test's own event loop.

    async with FakeVLLM(network=network, stepped=True) as server:
        ...                                   # requests to server.url
        await server.until(lambda: server.open == 1)
        server.step(3)                        # every choice of every open request gets three tokens
        server.run()                          # from now on no request waits for steps
        ...
        server.check()                        # no request is open, no KV is pinned, no fault was seen

`vllm_tokens.py` generates its tokens, `vllm_requests.py` checks its requests. Servers with the same `Network` can fetch
KV from each other. With `switches` it behaves as an older server, as one with other settings, or as one that fails.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple
from uuid import uuid4

from aiohttp import web

from tests.peers.vllm_counters import VLLMCounters
from tests.peers.vllm_engine import BROKEN, FakeVLLMEngine
from tests.peers.vllm_requests import RequestRefused, VLLMRequest, check, parse_completion, parse_generate
from tests.peers.vllm_shapes import Json, Shapes, event
from tests.peers.vllm_switches import Switches
from tests.peers.vllm_tickets import Network

MODEL = "smollm2"
TURNS_TO_ACCEPT = 3
"""Number of iterations of the event loop until the server lists a new connection. If asyncio closed it earlier, the
client would see neither an answer nor a broken connection."""


class RequestNames(NamedTuple):
    """The ids in the headers of a request."""

    request_id: str | None
    session_id: str | None
    traceparent: str | None = None


@dataclass
class FakeVLLM(FakeVLLMEngine):
    """A fake server that runs while the `async with` lasts. `kill` and `start` in between keep its port."""

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
        counters = VLLMCounters(self.model, self.block_size, self.num_blocks)
        super().__init__(counters, self.network, self.switches, self.max_model_len, stepped=self.stepped)
        self.requests: list[VLLMRequest] = []
        """All requests for tokens that were not refused, in order."""
        self.adapter_paths: dict[str, str] = {}
        """Paths of the adapters that were loaded at run time."""
        self.request_names: list[RequestNames] = []
        """The ids of all requests with a prompt, including refused requests."""

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
        """Number of requests for tokens without a complete answer."""
        return self.counters.open

    @property
    def models(self) -> list[str]:
        return [self.model, *self.adapters]

    def check(self) -> None:
        """Fails if anything is left of a request, or if a client did something that corrupts KV."""
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
                web.post("/v1/load_lora_adapter", self._load_adapter),
                web.post("/v1/unload_lora_adapter", self._unload_adapter),
                web.post("/tokenize", self._tokenize),
                web.post("/v1/completions/render", self._render),
                web.post("/v1/completions", self._completions),
                web.post("/inference/v1/generate", self._generate_route),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.0)
        await self._runner.setup()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        await web.SockSite(self._runner, self._listener).start()
        self.id = str(uuid4())
        self.counters.reset()

    async def kill(self) -> None:
        """Simulates SIGKILL: connections break, and all KV that was held is lost. A second call changes nothing."""
        if self._listener.fileno() < 0:
            return
        asyncio.get_running_loop().remove_reader(self._listener)
        for _ in range(TURNS_TO_ACCEPT):
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
        except RequestRefused as refused:
            return web.json_response(refused.body, status=refused.status)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.switches.healthy else 503)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _metrics(self, _: web.Request) -> web.Response:
        pinned_blocks, reports_blocks = self.pinned_blocks(), self.switches.reports_blocks
        return web.Response(text=self.counters.text(pinned_blocks=pinned_blocks, reports_blocks=reports_blocks))

    async def _event_sources(self, _: web.Request) -> web.Response:
        if self.switches.event_sources is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response(self.switches.event_sources)

    async def _tokenize(self, _: web.Request) -> web.Response:
        tokens = self.switches.tokens_of_text
        if tokens is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens})

    async def _render(self, request: web.Request) -> web.Response:
        if self.switches.defaults is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        body = await request.json()
        free = self.max_model_len - len(body["prompt"])
        params = {"max_tokens": free, **self.switches.defaults}
        return web.json_response([{"token_ids": body["prompt"], "model": self.model, "sampling_params": params}])

    async def _models(self, _: web.Request) -> web.Response:
        base: Json = {"id": self.model, "root": f"/models/{self.model}", "parent": None}
        cards = [{**base, "max_model_len": self.max_model_len}]
        cards += [
            {"id": name, "root": f"/adapters/{name}", "parent": self.model, "max_model_len": None}
            for name in self.adapters
        ]
        common: Json = {"object": "model", "created": 1795305094, "owned_by": "vllm", "permission": []}
        return web.json_response({"object": "list", "data": [common | card for card in cards]})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await self._adapter_body(request)
        name, path = str(body["lora_name"]), str(body["lora_path"])
        if path in self.switches.unreadable:
            raise RequestRefused(400, f"No adapter found for {path}")
        if name in self.adapters and not body.get("load_inplace", False):
            raise RequestRefused(400, f"The lora adapter '{name}' has already been loaded.")
        self.adapters = (*(other for other in self.adapters if other != name), name)
        self.adapter_paths[name] = path
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        name = (await self._adapter_body(request))["lora_name"]
        if name not in self.adapters:
            raise RequestRefused(404, f"The lora adapter '{name}' cannot be found.", kind="NotFoundError")
        self.adapters = tuple(other for other in self.adapters if other != name)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _adapter_body(self, request: web.Request) -> Json:
        if not self.switches.changes_adapters:
            raise web.HTTPNotFound
        body: Json = await request.json()
        return body

    def _record_names(self, request: web.Request) -> None:
        names = map(request.headers.get, ("x-request-id", "x-session-id", "traceparent"))
        self.request_names.append(RequestNames(*names))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        self._record_names(request)
        body = await request.json()
        try:
            parsed = parse_completion(body)
            self._admit(parsed)
        except RequestRefused:
            ticket = body.get("kv_transfer_params")
            if self.switches.connector and isinstance(ticket, dict) and ticket.get("do_remote_prefill"):
                self.network.refuse(ticket)  # vLLM notifies the prefill server; clients release tickets in this way
                self.changed()
            raise
        return await self._answer(request, parsed)

    async def _generate_route(self, request: web.Request) -> web.StreamResponse:
        self._record_names(request)
        if not self.switches.scale_out:
            raise RequestRefused(403, "This endpoint needs --enable-scale-out.", kind="Forbidden")
        parsed = parse_generate(await request.json())
        self._admit(parsed)
        return await self._answer(request, parsed)

    def _admit(self, parsed: VLLMRequest) -> None:
        if not self.switches.healthy:
            raise BROKEN
        if self.switches.too_busy:
            self.switches.too_busy -= 1
            raise RequestRefused(503, "The server is overloaded.", kind="ServiceUnavailableError")
        if self.switches.refuses_priority and parsed.body.get("priority", 0) != 0:
            raise RequestRefused(400, "Got priority but priority scheduling is not enabled.")
        models = [model for model in self.models if model not in self.switches.lost]
        check(parsed, models=models, max_model_len=self.max_model_len)
        self.requests.append(parsed)

    async def _answer(self, request: web.Request, parsed: VLLMRequest) -> web.StreamResponse:
        async with self.counted(parsed) as before:
            id = f"generate-tokens-{uuid4().hex[:16]}" if parsed.scale_out else f"cmpl-{uuid4().hex[:16]}"
            shapes = Shapes(id, parsed.model or self.model, parsed, self.switches.token_ids)
            if parsed.stream:
                return await self._stream(request, shapes, before)
            async for children in self.generate(parsed, before):
                if all(child.finish_reason for child in children):
                    break
            return web.json_response(shapes.complete(children, self.ticket(parsed)))

    async def _stream(self, request: web.Request, shapes: Shapes, before: int) -> web.StreamResponse:
        parsed = shapes.request
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        try:
            async for children in self.generate(parsed, before):
                for child in children:
                    full = len(child.tokens) - child.num_sent >= self.switches.tokens_a_chunk
                    if full or (child.finish_reason and child.num_sent < len(child.tokens)):
                        await response.write(event(shapes.chunk(child)))
            if parsed.include_usage:
                await response.write(event(shapes.usage_chunk(children)))
        except RequestRefused as refused:
            await response.write(event(dict(refused.body)))
        await response.write(b"data: [DONE]\n\n")
        return response

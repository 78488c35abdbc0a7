"""Servers that answer by heart, on real sockets."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from motet.engines.calls import server_client
from motet.engines.vllm.server import VLLMServer


@dataclass
class Canned:
    """`answers`: status and body of each path; 404 for the others."""

    answers: dict[str, tuple[int, bytes]]
    url: str = ""
    asked: list[tuple[str, Mapping[str, str], bytes]] = field(default_factory=list)
    """Path, headers and body of each question."""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, request.headers.copy(), await request.read()))
        status, body = self.answers.get(request.path, (404, b'{"detail":"Not Found"}'))
        return web.Response(status=status, body=body)


@asynccontextmanager
async def canned(answers: dict[str, tuple[int, bytes]]) -> AsyncIterator[Canned]:
    server = Canned(answers)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield server
    finally:
        await runner.cleanup()


@asynccontextmanager
async def asking(url: str, *, api_key: str | None = None) -> AsyncIterator[VLLMServer]:
    """The side of a gateway."""
    async with server_client() as client:
        yield VLLMServer(url, client, api_key=api_key)

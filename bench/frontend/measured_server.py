"""The server that `bench.frontend` measures: Motet's API process over a scripted engine, or a bare application.

    motet   the server as `motet serve` runs it, with the scripted engine instead of the engine process
    real    the same with the default model
    bare    a bare ASGI application under the same uvicorn. It replays, message by message and at the same pace, the
            answer of Motet to the first request with the same body

Prints its URL, and ends with the process that started it.
"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bench.client.fresh_prompts import TEXT
from bench.frontend.scripted_engine import Pulse, PulsedEngine
from bench.program.command_line import benchmark_parser
from motet.api.app import create_app
from motet.api.served import one_model
from motet.api.service import Service
from motet.deploy.cell import Cell, StartEngine
from motet.deploy.listen import HttpServer, listen, url_of
from motet.deploy.server import Serving, favour_streams, run_server
from motet.deploy.server_plan import ServerPlan
from motet.deploy.shutdown import StopSignals
from motet.engines.native.client import NativeEngine
from motet.log import setup_logging
from motet.models.model_source import resolve
from motet.routing.workers.fleet import Fleet
from motet.settings.engine_config import EngineConfig
from motet.settings.server_config import RoutingConfig, ServerConfig, cache_folder, environment
from motet.text.tokenizer import Tokenizer

MODEL = "smollm2"


class Replay:
    """A bare ASGI application that repeats recorded messages."""

    def __init__(self, original: ASGIApp, pulse: Pulse) -> None:
        self._original = original
        self._pulse = pulse
        self._known: dict[bytes, list[Message]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await body_of(receive)
        if body not in self._known:
            self._known[body] = await recorded(self._original, scope, body)
        start, *parts, last = self._known[body]
        await self._pulse.next(None)
        await send(start)
        for number, part in enumerate(parts):
            if number:
                await self._pulse.next(None)
            await send(part)
        await send(last)


async def body_of(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message["body"]
        more = message["more_body"]
    return body


async def recorded(app: ASGIApp, scope: Scope, body: bytes) -> list[Message]:
    """Returns the messages that an application sends in answer to a request."""
    messages: list[Message] = []
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not unread:
            await asyncio.Event().wait()  # cancelled when the answer has ended
        return unread.pop()

    async def send(message: Message) -> None:
        messages.append(message)

    await app({**scope, "extensions": {}}, receive, send)  # so that the application sends all bytes as messages
    return messages


async def serve_motet(plan: ServerPlan, start: StartEngine) -> None:
    def on_ready(serving: Serving[Cell]) -> None:
        favour_streams()
        print(serving.url, flush=True)

    with StopSignals() as signals:
        signals.watch_stdin(sys.stdin)
        await run_server(plan, start_engine=start, on_ready=on_ready, signals=signals)


async def serve_bare(plan: ServerPlan, engine: PulsedEngine) -> None:
    tokenizer = Tokenizer.load(plan.tokenizer_path)
    models = one_model(plan.server.served_model_name, engine, tokenizer=tokenizer)
    app = create_app(Service(models, plan.server, Fleet().reports))
    with listen(plan.server.host, plan.server.port) as listener, StopSignals() as signals:
        signals.watch_stdin(sys.stdin)
        server = HttpServer(Replay(app, engine.pulse))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        favour_streams()
        print(url_of(listener), flush=True)
        await signals.drain.wait()
        server.stop()
        await serving


@dataclass(frozen=True)
class Limits:
    """Limits of the server, and of its scripted engine."""

    max_choices: int = ServerConfig.max_choices
    max_waiting_groups: int = ServerConfig.max_waiting_groups
    queue_timeout_s: float = RoutingConfig.queue_timeout_s
    max_num_seqs: int = 1024
    """Number of choices that the scripted engine runs at once."""


STANDARD = Limits()


def plan_of(limits: Limits, *, otlp_endpoint: str | None = None) -> ServerPlan:
    folder = resolve(MODEL, cache=cache_folder(environment()))
    return ServerPlan(
        EngineConfig(model_path=str(folder), model_name=MODEL),
        ServerConfig(
            port=0,
            served_model_name=MODEL,
            max_choices=limits.max_choices,
            max_waiting_groups=limits.max_waiting_groups,
            otlp_endpoint=otlp_endpoint,
        ),
        tokenizer_path=folder,
        chat_template=None,
        routing=RoutingConfig(queue_timeout_s=limits.queue_timeout_s),
    )


async def serve(
    kind: str,
    *,
    burst: int = 0,
    rest_s: float = 0.0,
    limits: Limits = STANDARD,
    otlp_endpoint: str | None = None,
) -> None:
    plan = plan_of(limits, otlp_endpoint=otlp_endpoint)
    tokens = Tokenizer.load(plan.tokenizer_path).encode(TEXT)
    engine = PulsedEngine(tokens, Pulse(burst=burst, rest_s=rest_s), max_num_seqs=limits.max_num_seqs)
    if kind == "bare":
        await serve_bare(plan, engine)
        return

    async def start(_: EngineConfig) -> PulsedEngine:
        return engine

    await serve_motet(plan, start)


async def serve_real(limits: Limits, *, otlp_endpoint: str | None = None) -> None:
    """Serves the default model."""
    await serve_motet(plan_of(limits, otlp_endpoint=otlp_endpoint), NativeEngine.start)


def main(argv: Sequence[str]) -> None:
    parser = benchmark_parser("bench.frontend.measured_server", __doc__)
    parser.add_argument("kind", choices=("motet", "bare", "real"), help="server to run")
    parser.add_argument("--burst", type=int, default=0, help="number of steps taken at once before a rest; 0: no rest")
    parser.add_argument("--rest-s", type=float, default=0.0, help="length of a rest in seconds")
    parser.add_argument("--otlp-endpoint", help="collector to which the server sends its traces")
    arguments = parser.parse_args(argv)
    setup_logging()
    endpoint = arguments.otlp_endpoint
    if arguments.kind == "real":
        uvloop.run(serve_real(STANDARD, otlp_endpoint=endpoint))
        return
    uvloop.run(serve(arguments.kind, burst=arguments.burst, rest_s=arguments.rest_s, otlp_endpoint=endpoint))


if __name__ == "__main__":
    main(sys.argv[1:])

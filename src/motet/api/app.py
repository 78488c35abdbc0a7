"""The HTTP application: routes, what surrounds them, and how errors look.

RequestIds ─► CORS ─► Gate ─► BodyLimit ─► routes
id, last      browsers  401, 403  413, 503  chat, completions, responses, messages, generate, render,
resort 500                                     tokens, models, page, admin, membership, engine
"""

from fastapi import APIRouter, FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from motet.api.anthropic.messages import messages_router
from motet.api.generation.answer import WORKER_HEADER
from motet.api.http.caller import HEADER, MESSAGE_HEADER, RequestIds, new_router
from motet.api.http.failure import ErrorResponse, add_error_handlers, body_too_large
from motet.api.http.gate import Gate
from motet.api.openai.chat import chat_router
from motet.api.openai.completions import completion_router
from motet.api.openai.group_routes import group_router
from motet.api.openai.models import models_router
from motet.api.openai.responses import responses_router
from motet.api.openapi import openapi_router
from motet.api.operators.admin import admin_router, membership_router
from motet.api.page import page_router
from motet.api.service import Service
from motet.api.sglang.sglang_routes import sglang_router
from motet.api.trainers.incoming_weights import takes_tensors
from motet.api.trainers.rollouts import rollout_router
from motet.api.trainers.server_info import server_info_router
from motet.api.trainers.sleep_routes import sleep_router
from motet.api.trainers.weight_routes import transfer_router, weight_router
from motet.api.vllm.generate import generate_router
from motet.api.vllm.render import render_router
from motet.api.worker.engine_routes import engine_router
from motet.api.worker.engine_weights import engine_weight_router

ROUTERS = (
    chat_router,
    completion_router,
    responses_router,
    messages_router,
    generate_router,
    group_router,
    render_router,
    models_router,
    openapi_router,
    page_router,
    admin_router,
    membership_router,
    rollout_router,
    weight_router,
    transfer_router,
    engine_weight_router,
    sleep_router,
    server_info_router,
    sglang_router,
    engine_router,
)

SMALL_BODY_BYTES = 64 * 1024
"""Uvicorn reads as much of a body before anybody asks for it."""
NO_ROOM = "The bodies of requests under way fill the memory that this server has for them. Try again later."


class App(FastAPI):
    """Keeps the server's own `send`, so that tokens need not pass the layers (`caller.body_send`). The layers see only
    HTTP requests; whoever mounts the app, as Ray Serve does, may run its lifespan too."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.router(scope, receive, send)
            return
        scope.setdefault("state", {})["send"] = send
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the server that has called this sends no body
        await super().__call__(scope, receive, send)


def create_app(service: Service, router: APIRouter | None = None) -> FastAPI:
    """Returns an app of its own for each service; two in one process share nothing. `router`: from `create_router`."""
    app = App(
        title="Motet",
        openapi_url=None,
        middleware=_middleware(service),
        redirect_slashes=False,
        strict_content_type=False,
    )
    add_error_handlers(app)
    app.router.routes.extend((router or create_router(service)).routes)
    return app


def create_router(service: Service) -> APIRouter:
    """Returns all routes of a service. Making them takes longer than answering a request, so tests reuse them."""
    every = new_router()
    for make_router in ROUTERS:
        every.routes.extend(make_router(service).routes)
    return every


def _middleware(service: Service) -> list[Middleware]:
    """Returns the layers around the routes, the outermost first."""
    config = service.config
    layers = [Middleware(RequestIds, metrics=service.metrics, tracer=service.tracer)]
    if config.cors_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.cors_origins),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=[HEADER, MESSAGE_HEADER, WORKER_HEADER, "retry-after"],
            )
        )
    layers.append(Middleware(Gate, config=config))
    layers.append(Middleware(BodyLimit, max_bytes=config.max_body_bytes, max_open_bytes=config.max_open_body_bytes))
    return layers


class BodyLimit:
    """ASGI middleware. Refuses a body that is too large: before a byte is read if its length is announced. All bodies
    together have `max_open_bytes`; the first `SMALL_BODY_BYTES` of each do not count, so that short requests get in
    while others send long ones."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, max_open_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._free_bytes = max_open_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if takes_tensors(scope["path"], headers):  # they are written to memory of their own as they come
            await self._app(scope, receive, send)
            return
        announced = headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await ErrorResponse(body_too_large(self._max_bytes))(scope, receive, send)
            return
        num_read = num_held = 0

        async def receive_counted() -> Message:
            """Raises HTTPException to whoever reads the body: the framework turns any other error into a 400."""
            nonlocal num_read, num_held
            message = await receive()
            num_read += len(message.get("body", b""))
            if num_read > self._max_bytes:
                raise HTTPException(413, body_too_large(self._max_bytes).message)
            if (more := num_read - SMALL_BODY_BYTES - num_held) > 0:
                if more > self._free_bytes:
                    raise HTTPException(503, NO_ROOM)
                self._free_bytes -= more
                num_held += more
            return message

        def release() -> None:
            nonlocal num_held
            self._free_bytes += num_held
            num_held = 0

        scope["state"]["release_body"] = release
        try:
            await self._app(scope, receive_counted, send)
        finally:
            release()

"""The HTTP application: its routes and its middleware.

RequestIds ─► CORS ─► Gate ─► UnknownFields ─► BodyLimit ─► routes
id, last      browsers  401, 403  names them     413, 503  chat, completions, responses, messages, generate, render,
resort 500                                                 tokens, models, page, admin, membership, engine
"""

from fastapi import APIRouter, FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from motet.api.anthropic.messages import messages_router
from motet.api.batches.batch_routes import batch_router
from motet.api.batches.file_routes import file_router
from motet.api.generation.plan import CAPPED_HEADER
from motet.api.http.body import BodyLimit
from motet.api.http.caller import HEADER
from motet.api.http.dialect import route_of
from motet.api.http.failure import PREFILL_HEADER, WORKER_HEADER, add_error_handlers
from motet.api.http.gate import Gate
from motet.api.http.paths import usual_path
from motet.api.http.request_ids import MESSAGE_HEADER, RequestIds
from motet.api.http.routes import new_router
from motet.api.http.unknown_fields import IGNORED_HEADER, UnknownFields
from motet.api.openai.chat_completions import chat_router
from motet.api.openai.completions import completion_router
from motet.api.openai.group_routes import group_router
from motet.api.openai.models import models_router
from motet.api.openai.responses import responses_router
from motet.api.openapi import openapi_router
from motet.api.operators.adapter_routes import adapter_router
from motet.api.operators.admin import admin_router, membership_router
from motet.api.page import PAGE_ROUTES, page_router
from motet.api.scoring.decisions import decision_router
from motet.api.scoring.scores import score_router
from motet.api.service import Service
from motet.api.sglang.sglang_generate import sglang_generate_router
from motet.api.sglang.sglang_routes import sglang_router
from motet.api.trainers.rollouts import rollout_router, sleep_router
from motet.api.trainers.server_info import server_info_router
from motet.api.trainers.weight_routes import transfer_router, weight_router
from motet.api.vllm.derender import derender_router
from motet.api.vllm.generate import generate_router
from motet.api.vllm.render import render_router
from motet.api.worker.engine_routes import engine_router, order_router
from motet.session_ids import SessionHeaders

ROUTERS = (
    chat_router,
    completion_router,
    responses_router,
    messages_router,
    score_router,
    decision_router,
    generate_router,
    group_router,
    file_router,
    batch_router,
    render_router,
    derender_router,
    models_router,
    openapi_router,
    page_router,
    admin_router,
    membership_router,
    adapter_router,
    rollout_router,
    weight_router,
    transfer_router,
    order_router,
    sleep_router,
    server_info_router,
    sglang_generate_router,
    sglang_router,
    engine_router,
)


class App(FastAPI):
    """Keeps the HTTP server's own `send`, so that tokens can bypass the middleware (`http.streaming`). The middleware
    sees only HTTP requests; a framework that mounts the app, as Ray Serve does, can run its lifespan too."""

    mounted_at: str = ""
    """Path that a proxy can leave in front of the paths of routes."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.router(scope, receive, send)
            return
        scope.setdefault("state", {})["send"] = send
        if self.mounted_at:
            scope["root_path"] = self.mounted_at
        if (usual := usual_path(path := route_of(scope))) != path:  # before the keys of its route are checked
            scope = {**scope, "path": scope["path"].removesuffix(path) + usual}
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the HTTP server sends no body
        await super().__call__(scope, receive, send)


def create_app(service: Service, router: APIRouter | None = None) -> FastAPI:
    """Returns the app of a service. Two apps in one process share nothing. `router`: from `create_router`."""
    layers = _middleware(service)
    app = App(title="Motet", openapi_url=None, middleware=layers, redirect_slashes=False, strict_content_type=False)
    app.mounted_at = service.config.root_path
    add_error_handlers(app)
    app.router.routes.extend((router or create_router(service)).routes)
    return app


def create_router(service: Service) -> APIRouter:
    """Returns all routes of a service. They take longer to make than a request takes, so tests reuse them."""
    router = new_router()
    for make_router in ROUTERS:
        router.routes.extend(make_router(service).routes)
    return router


def _middleware(service: Service) -> list[Middleware]:
    """Returns the middleware, the outermost first."""
    config = service.config
    sessions = SessionHeaders(config.session_headers)
    layers = [Middleware(RequestIds, metrics=service.metrics, tracer=service.tracer, sessions=sessions)]
    if config.cors_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.cors_origins),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=[
                    *(HEADER, MESSAGE_HEADER, WORKER_HEADER, PREFILL_HEADER, CAPPED_HEADER, IGNORED_HEADER),
                    "retry-after",
                ],
            )
        )
    layers.append(Middleware(Gate, config=config, page_routes=PAGE_ROUTES))
    layers.append(Middleware(UnknownFields, ignore=config.unknown_fields == "warn"))
    layers.append(Middleware(BodyLimit, max_bytes=config.max_body_bytes, max_open_bytes=config.max_open_body_bytes))
    return layers

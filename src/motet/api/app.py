"""The HTTP application: routes, what surrounds them, and how errors look.

RequestIds ─► CORS ─► ApiKeys ─► BodyLimit ─► routes
id, last      browsers  401        413          chat, completions, responses, generate, tokens, models,
resort 500                                     admin, membership, engine
"""

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from motet.api.admin import admin_router
from motet.api.answer import WORKER_HEADER
from motet.api.auth import ApiKeys
from motet.api.body_limit import BodyLimit
from motet.api.chat import chat_router
from motet.api.completion import completion_router
from motet.api.engine_routes import engine_router
from motet.api.failure import add_error_handlers
from motet.api.generate import generate_router
from motet.api.membership_routes import membership_router
from motet.api.models import models_router
from motet.api.request_id import HEADER, RequestIds
from motet.api.responses import responses_router
from motet.api.service import Service
from motet.api.tokens import token_router


def create_app(service: Service) -> FastAPI:
    """An app of its own for each service; two in one process share nothing."""
    app = FastAPI(
        title="Motet",
        openapi_url=None,
        middleware=_middleware(service),
        redirect_slashes=False,
        strict_content_type=False,
    )
    add_error_handlers(app)
    for make_router in (
        chat_router,
        completion_router,
        responses_router,
        generate_router,
        token_router,
        models_router,
        admin_router,
        membership_router,
        engine_router,
    ):
        app.include_router(make_router(service))
    return app


def _middleware(service: Service) -> list[Middleware]:
    """Outermost first."""
    config = service.config
    layers = [Middleware(RequestIds, metrics=service.metrics)]
    if config.cors_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.cors_origins),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=[HEADER, WORKER_HEADER, "retry-after"],
            )
        )
    if config.api_keys or config.admin_key:
        layers.append(Middleware(ApiKeys, keys=config.api_keys, admin_key=config.admin_key))
    layers.append(Middleware(BodyLimit, max_bytes=config.max_body_bytes))
    return layers

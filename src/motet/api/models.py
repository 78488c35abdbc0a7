"""`GET /v1/models` and `GET /v1/models/{id}`."""

import msgspec
from fastapi import APIRouter, Response

from motet.api.json_body import json_response
from motet.api.service import Service


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "motet"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


def models_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> Response:
        return json_response(ModelList(data=[_card(service)]))

    @router.get("/v1/models/{model:path}")
    async def get_model(model: str) -> Response:
        service.check_model(model)
        return json_response(_card(service))

    return router


def _card(service: Service) -> ModelCard:
    """Asked of the engine each time: workers that come and go may have other limits."""
    info = service.engine.info
    return ModelCard(id=service.model, created=service.created, root=info.model, max_model_len=info.max_model_len)

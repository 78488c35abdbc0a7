"""`GET /v1/models` and `GET /v1/models/{id}`."""

import msgspec
from fastapi import APIRouter, Response

from motet.api.json_body import json_response
from motet.api.served import ServedModel, TextModel, model_named
from motet.api.service import Service
from motet.errors import NoWorkerError


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "motet"
    root: str
    parent: str | None = None
    max_model_len: int | None
    """None: not known, or not now."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


def models_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> Response:
        return json_response(ModelList(data=[_card(model) for model in service.models.all()]))

    @router.get("/v1/models/{model:path}")
    async def get_model(model: str) -> Response:
        return json_response(_card(model_named(service.models, model)))

    return router


def _card(model: ServedModel | TextModel) -> ModelCard:
    if isinstance(model, TextModel):
        return ModelCard(id=model.name, created=model.created, root=model.root, max_model_len=model.max_model_len)
    return ModelCard(
        id=model.name,
        created=model.created,
        root=model.info.model if model.root is None else model.root,
        parent=model.parent,
        max_model_len=_length(model),
    )


def _length(model: ServedModel) -> int | None:
    """Asked of the engine each time: workers that come and go may have other limits."""
    try:
        return model.info.max_model_len
    except NoWorkerError:
        return None

"""`GET /v1/models` and `GET /v1/models/{id}`: the models that are served."""

from datetime import UTC, datetime
from typing import TypedDict

from fastapi import APIRouter, Request, Response

from motet.api.http.dialect import MODELS, speaks_anthropic
from motet.api.http.routes import json_response, new_router
from motet.api.served import ServedModel, TextModel, model_named
from motet.api.service import Service
from motet.errors import NoWorkerError


class ModelObject(TypedDict):
    """A model in OpenAI's shape, with fields that vLLM and Motet add."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str | None
    parent: str | None
    max_model_len: int | None
    weight_version: str | None


def models_router(service: Service) -> APIRouter:
    router = new_router()

    @router.get(MODELS)
    async def list_models(request: Request) -> Response:
        cards = [_card(model) for model in service.models().values()]
        if not speaks_anthropic(request.scope):
            return json_response({"object": "list", "data": cards})
        first, last = (cards[0]["id"], cards[-1]["id"]) if cards else (None, None)
        page = {"has_more": False, "first_id": first, "last_id": last}
        return json_response({"data": [*map(_as_anthropic, cards)], **page})

    @router.get(MODELS + "/{model:path}")
    async def get_model(model: str, request: Request) -> Response:
        card = _card(model_named(service.models(), model))
        return json_response(_as_anthropic(card) if speaks_anthropic(request.scope) else card)

    return router


def _as_anthropic(card: ModelObject) -> dict[str, object]:
    """Returns a model in the shape of Anthropic's API. The prompt and the answer share the model's length."""
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": datetime.fromtimestamp(card["created"], UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": card["max_model_len"],
        "max_tokens": card["max_model_len"],
    }


def _card(model: ServedModel | TextModel) -> ModelObject:
    """Returns a model in OpenAI's shape. Its length is read from the engine each time, since workers join and leave;
    None if it has no worker now."""
    root, version = model.root, None
    if isinstance(model, TextModel):
        length = model.max_model_len
    else:
        root = model.info.model if root is None else root
        try:
            length, version = model.info.max_model_len, model.info.weight_version
        except NoWorkerError:
            length = None
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "motet",
        "root": root,
        "parent": model.parent,
        "max_model_len": length,
        "weight_version": version,
    }

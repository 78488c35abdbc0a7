"""vLLM's routes that load and unload LoRA adapters, on a gateway with vLLM workers. They are for operators: adapters
take memory that all clients share, and a worker reads the path of an adapter from its disk or from a hub."""

from typing import Annotated

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from pydantic import Field

from motet.api.http.routes import new_router
from motet.api.http.schema import Schema
from motet.api.service import Service
from motet.control.adapters import AdapterControl

MAX_NAME_CHARS = 256
MAX_PATH_CHARS = 4096

AdapterName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class LoadAdapterBody(Schema):
    """The body of /v1/load_lora_adapter."""

    lora_name: AdapterName
    lora_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARS)]
    load_inplace: bool = False
    """True to replace an adapter with this name."""
    base_model_name: str | None = None
    """Base model of the adapter, needed only if the vLLM workers have several models."""


class UnloadAdapterBody(Schema):
    """The body of /v1/unload_lora_adapter."""

    ignored = frozenset({"lora_int_id"})

    lora_name: AdapterName


def adapter_router(service: Service) -> APIRouter:
    router, adapters = new_router("/v1"), AdapterControl(lambda: service.workers())

    @router.post("/load_lora_adapter", response_class=PlainTextResponse)
    async def load_lora_adapter(body: LoadAdapterBody) -> Response:
        """Loads an adapter on all vLLM workers of its base model. Returns when it can be requested as a model."""
        base = body.base_model_name
        await adapters.load(body.lora_name, body.lora_path, base=base, in_place=body.load_inplace)
        return _text(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload_lora_adapter(body: UnloadAdapterBody) -> Response:
        await adapters.unload(body.lora_name)
        return _text(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router


def _text(message: str) -> Response:
    """Returns the answer in vLLM's words, which clients compare."""
    return PlainTextResponse(message)

"""The routes that load and unload LoRA adapters, with vLLM's bodies and answers. They are for operators and trainers:
adapters take memory that all clients share, and a server reads the path of an adapter from its disk.

    POST /v1/load_lora_adapter     a folder, a file in another process's memory, or the tensors themselves
    POST /v1/unload_lora_adapter"""

from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from anyio import to_thread
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import AfterValidator, Field

from motet.api.control_bodies import Version
from motet.api.http.body import is_tensors
from motet.api.http.failure import invalid_value, missing_parameter
from motet.api.http.routes import new_router, with_body
from motet.api.http.schema import Schema
from motet.api.service import Service
from motet.api.tensor_bodies import read_tensors
from motet.control.adapters import AdapterControl, AdapterSource
from motet.errors import ModelLoadError, NotFoundError, RequestError
from motet.models.adapter_file import config_in
from motet.models.memory_file import MemoryFile, is_memory_file
from motet.models.safetensors_header import check_safetensors
from motet.settings.named_adapter import MAX_NAME_CHARS, name_fault

MAX_PATH_CHARS = 4096
VERSION_HEADER = "x-motet-weight-version"
"""Header of the answer with the version of the adapter, percent-encoded like a part of a URL."""


def _check_name(name: str) -> str:
    if fault := name_fault(name):
        raise ValueError(fault)
    return name


AdapterName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS), AfterValidator(_check_name)]


class LoadAdapterBody(Schema):
    """The body of /v1/load_lora_adapter, if it is JSON."""

    lora_name: AdapterName
    lora_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARS)]
    """A folder on the machine of the engines, or /proc/PID/fd/FD: a sealed file in the memory of a process on this
    machine."""
    load_inplace: bool = False
    """True to replace an adapter with this name."""
    base_model_name: str | None = None
    """Base model of the adapter, needed only if the workers have several models."""
    weight_version: Version | None = None
    """Version of the adapter; None for the number of adapters that were loaded so far."""


class UnloadAdapterBody(Schema):
    """The body of /v1/unload_lora_adapter."""

    ignored = frozenset({"lora_int_id"})

    lora_name: AdapterName


def adapter_router(service: Service) -> APIRouter:
    router = new_router("/v1")
    from_json = with_body(LoadAdapterBody, lambda body, _: _load(service, body))

    @router.post("/load_lora_adapter", response_class=PlainTextResponse)
    async def load_lora_adapter(
        request: Request,
        *,
        lora_name: Annotated[AdapterName | None, Query()] = None,
        load_inplace: bool = False,
        base_model_name: str | None = None,
        weight_version: Annotated[Version | None, Query()] = None,
    ) -> Response:
        """Loads an adapter on all engines of its base model. Returns when it can be requested as a model. The
        parameters of the query are for a body of tensors: a safetensors file with `adapter_config` in its metadata."""
        if not is_tensors(request.headers):
            return await from_json(request)
        if lora_name is None:
            raise missing_parameter("lora_name")
        _adapters(service)
        file, _ = await read_tensors(request, service.tensor_memory)
        body = LoadAdapterBody(
            lora_name=lora_name,
            lora_path=str(file.path),
            load_inplace=load_inplace,
            base_model_name=base_model_name,
            weight_version=weight_version,
        )
        return await _load_source(service, body, source=await _in_memory(file, param="body"))

    @router.post("/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload_lora_adapter(body: UnloadAdapterBody) -> Response:
        await _adapters(service).unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router


async def _load(service: Service, body: LoadAdapterBody) -> Response:
    _adapters(service)
    path = Path(body.lora_path)
    if not is_memory_file(path):
        return await _load_source(service, body, source=AdapterSource(path))
    try:
        file = await to_thread.run_sync(MemoryFile.opened, path)
    except ModelLoadError as error:
        raise invalid_value("lora_path", error.message) from error
    return await _load_source(service, body, source=await _in_memory(file, param="lora_path"))


async def _in_memory(file: MemoryFile, *, param: str) -> AdapterSource:
    """Returns the adapter in a file, and owns the file. Raises RequestError."""

    def config() -> str:
        check_safetensors(file.path, received_as="it")
        return config_in(file.path)

    try:
        return AdapterSource(file.path, file, await to_thread.run_sync(config))
    except BaseException as error:
        file.close()
        if isinstance(error, ModelLoadError):
            raise invalid_value(param, error.message) from error
        raise


async def _load_source(service: Service, body: LoadAdapterBody, *, source: AdapterSource) -> Response:
    """Loads an adapter. The answer has vLLM's text, which clients compare."""
    name, known = body.lora_name, service.models().get(body.lora_name)
    load = partial(_adapters(service).load, name, source, in_place=body.load_inplace)
    if known is not None and known.parent is None:
        source.close()
        raise RequestError(f"{name!r} is the name of a base model.", param="lora_name", code="invalid_value")
    version = await load(base=body.base_model_name, version=body.weight_version)
    message = f"Success: LoRA adapter '{name}' added successfully."
    return PlainTextResponse(message, HTTPStatus.OK, {VERSION_HEADER: quote(version)})


def _adapters(service: Service) -> AdapterControl:
    adapters = service.adapter_control().adapters
    if adapters.fixed:
        raise NotFoundError(adapters.fixed, code="no_adapters")
    return adapters

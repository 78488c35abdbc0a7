"""`/workers`: who they are, who joins and who leaves. For operators: joining makes the server connect to addresses."""

import re
from enum import StrEnum
from typing import Annotated, TypeVar

import msgspec
from fastapi import APIRouter, Query, Response

from motet.api.json_body import json_response
from motet.api.membership import Membership
from motet.api.schema_shared import Schema
from motet.api.service import Service
from motet.api.status import WorkerStatus, look_at_all, worker_status
from motet.engines.base import WorkerState
from motet.errors import ForbiddenError, NotFoundError, RequestError
from motet.settings.named_worker import NamedWorker, is_http_url, server_url
from motet.types import EngineKind, Role

Word = TypeVar("Word", bound=StrEnum)

ID = re.compile(r"[A-Za-z0-9._:-]{1,100}")
"""Ids stand in headers, in lists with commas and in paths."""

DrainTimeout = Annotated[float | None, Query(ge=0, allow_inf_nan=False)]


class NewWorker(Schema):
    url: str
    role: str | None = None
    kind: str | None = None
    id: str | None = None


class WorkerList(msgspec.Struct, frozen=True):
    workers: list[WorkerStatus]


class WorkerChange(msgspec.Struct, frozen=True):
    """What has become of a worker by now."""

    id: str
    state: WorkerState


def membership_router(service: Service) -> APIRouter:
    router = APIRouter(prefix="/workers")

    @router.get("")
    async def list_workers() -> Response:
        return json_response(WorkerList([worker_status(seen) for seen in await look_at_all(service)]))

    @router.post("")
    async def join(body: NewWorker) -> Response:
        membership = _membership(service)
        id = await membership.join(_named(body), body.id)
        return json_response(WorkerChange(id, WorkerState.STARTING), status=201)

    @router.delete("/{id}")
    async def leave(id: str, drain_timeout: DrainTimeout = None) -> Response:
        """Its groups may end, for `drain_timeout` seconds."""
        drain_s = service.config.drain_timeout_s if drain_timeout is None else drain_timeout
        await _membership(service).leave(id, drain_s)
        return json_response(WorkerChange(id, WorkerState.DRAINING), status=202)

    @router.post("/{id}/drain")
    async def drain(id: str) -> Response:
        await _membership(service).drain(id)
        return json_response(WorkerChange(id, WorkerState.DRAINING), status=202)

    return router


def _membership(service: Service) -> Membership:
    """Raises unless workers may be changed. Who got this far with an admin key set has shown it (`auth`)."""
    if service.membership is None:
        raise NotFoundError(
            "The workers of this server are fixed; a server that others may join is started with `motet gateway`.",
            code="fixed_workers",
        )
    if not service.config.admin_key:
        raise ForbiddenError(
            "Without an admin key workers are neither joined nor removed, for the server would connect to whatever "
            "address a client names. Start it with --admin-key and send that key.",
            code="admin_key_required",
        )
    return service.membership


def _named(body: NewWorker) -> NamedWorker:
    """Raises RequestError for what cannot be a worker."""
    if not is_http_url(body.url):
        raise RequestError(
            f"Invalid 'url': {body.url!r} is no address such as http://10.0.0.1:8000.",
            param="url",
            code="invalid_value",
        )
    if body.id is not None and ID.fullmatch(body.id) is None:
        raise RequestError(
            f"Invalid 'id': {body.id!r}. Up to 100 letters, digits and . _ : - are allowed.",
            param="id",
            code="invalid_value",
        )
    return NamedWorker(server_url(body.url), _one_of(Role, body.role, "role"), _one_of(EngineKind, body.kind, "kind"))


def _one_of(words: type[Word], said: str | None, param: str) -> Word | None:
    if said is not None and said not in tuple(words):
        raise RequestError(
            f"Invalid '{param}': {said!r}. Supported values are: {', '.join(words)}.",
            param=param,
            code="invalid_value",
        )
    return None if said is None else words(said)

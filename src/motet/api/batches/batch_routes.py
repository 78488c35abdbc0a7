"""`/v1/batches`: requests in a file that run in the background, within 24 hours.

    POST /v1/batches                  creates a batch of an uploaded file
    GET  /v1/batches                  a page of the list, the youngest first
    GET  /v1/batches/{id}             its state and, at its end, the ids of its output and error file
    POST /v1/batches/{id}/cancel      ends it; results so far stay available

A batch of another owner is a 404, like a batch that does not exist."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from motet.api.batches.file_routes import MAX_KEEP_S, MIN_KEEP_S, owner_of, page_response, store_of
from motet.api.batches.records import WINDOW_S, BatchRecord, batch_shown, new_batch_id, new_file_id
from motet.api.control_bodies import NoOptions
from motet.api.http.failure import invalid_value
from motet.api.http.routes import json_response, new_router, post
from motet.api.http.schema import Schema
from motet.api.service import Service
from motet.batch.lines import BATCH_URLS

MAX_METADATA = 16


class OutputExpiry(Schema):
    """Time in seconds after the end of a batch at which its output and error file expire."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_KEEP_S, le=MAX_KEEP_S)


class BatchBody(Schema):
    """A new batch: OpenAI's fields."""

    input_file_id: str = Field(max_length=200)
    endpoint: str
    """The route of all lines."""
    completion_window: Literal["24h"]
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        None, max_length=MAX_METADATA
    )
    output_expires_after: OutputExpiry | None = None
    """Time after which the output and error file are removed."""


def batch_router(service: Service) -> APIRouter:
    router = new_router()

    @post(router, "/v1/batches", body=BatchBody, summary="Runs the requests in a file in the background")
    async def create(body: BatchBody, request: Request) -> Response:
        store, owner = store_of(service), owner_of(service, request)
        if body.endpoint not in BATCH_URLS:
            raise invalid_value("endpoint", f"expected one of {', '.join(BATCH_URLS)}")
        created_s, expiry = int(store.clock()), body.output_expires_after
        record = BatchRecord(
            id=new_batch_id(),
            owner=owner,
            endpoint=body.endpoint,
            input_id=body.input_file_id,
            output_id=new_file_id(),
            error_id=new_file_id(),
            created_s=created_s,
            expires_s=created_s + WINDOW_S,
            metadata=body.metadata,
            output_keep_s=None if expiry is None else expiry.seconds,
        )
        return json_response(batch_shown((await store.add(record)).record))

    @router.get("/v1/batches")
    async def list_batches(
        request: Request, *, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
    ) -> Response:
        """Lists the batches, the youngest first."""
        store = store_of(service)
        found = await store.batches(owner_of(service, request), after=after, limit=limit + 1)
        # A batch can have 50 errors, so a page can have megabytes.
        return await store.call(lambda _: page_response([batch_shown(record) for record in found], limit))

    @router.get("/v1/batches/{id}")
    async def get_batch(id: str, request: Request) -> Response:
        record = await store_of(service).batch(id, owner=owner_of(service, request))
        return json_response(batch_shown(record))

    @router.post("/v1/batches/{id}/cancel")
    async def cancel(id: str, request: Request, *, body: NoOptions | None = None) -> Response:
        """Ends a batch. Its results so far stay available."""
        record = await store_of(service).cancel(id, owner=owner_of(service, request))
        return json_response(batch_shown(record))

    return router

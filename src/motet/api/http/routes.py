"""The routes of this server: a router, a route with a JSON body, and a JSON response."""

import json
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from itertools import islice
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from msgspec.json import encode as json_bytes
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import Scope

from motet.api.http.body import JSON_TYPE, Body, check_counts, is_short, read_json
from motet.api.http.failure import validation_failure
from motet.api.http.long_work import in_thread, work_client
from motet.api.http.schema import MAX_VALUES, ignored_paths
from motet.api.http.unknown_fields import ignored_fields, without_ignored
from motet.errors import RequestError

log = logging.getLogger("motet.api")

MAX_NAMES, MAX_NAME_CHARS = 20, 100
"""Limits on log lines with the client's names of fields and routes."""

Handler = Callable[[Request], Awaitable[Response]]
Answer = Callable[[Body, Request], Awaitable[Response]]
"""Answers a request with a checked body."""


class CheckedRoute(APIRoute):
    """A route whose body, if it has one, is read by FastAPI on the event loop. The parts of a long body are counted
    before, in the thread for long work."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            if not is_short(raw := await request.body()):
                await in_thread(partial(check_counts, raw, max_values=MAX_VALUES), client=work_client(request.scope))
            body = self.body_field
            return await handle(
                request if body is None else without_ignored(request, raw, annotation=body.field_info.annotation)
            )

        return handle if self.body_field is None else checked


def new_router(prefix: str = "", *, documented: bool = True) -> APIRouter:
    """Returns a router that accepts JSON without a content type. `documented`: True to list its routes in OpenAPI."""
    return APIRouter(
        prefix=prefix,
        redirect_slashes=False,
        strict_content_type=False,
        include_in_schema=documented,
        route_class=CheckedRoute,
    )


async def body_of(request: Request) -> bytes:
    """Returns the body. The request keeps it for later readers, until `drop_body`."""
    state = request.scope["state"]
    if "body" not in state:
        try:
            state["body"] = b"".join([piece async for piece in request.stream()])
        except ClientDisconnect as error:
            raise RequestError("The client left before the body was complete.") from error
    body: bytes = state["body"]
    return body


def drop_body(request: Request) -> None:
    """Frees the body and its share of the memory limit. The request itself exists until its answer has been sent."""
    request.scope["state"].pop("body", None)
    request.scope["state"]["release_body"]()


class PostRoute(Route):
    """A route that reads its body without FastAPI, which is faster."""

    def __init__(self, path: str, handle: Handler, *, body: type[BaseModel], summary: str) -> None:
        """`body`, `summary`: for the OpenAPI document."""
        super().__init__(path, handle, methods=["POST"])
        self.body = body
        self.summary = summary

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        return match, {**found, "route": self}  # HTTP metrics have its path, like the paths of FastAPI's routes


async def read_body(request: Request, schema: type[Body]) -> Body:
    """Returns the request's JSON body, checked against its schema. Raises RequestError for a body that does not match,
    and for a content type other than JSON: browsers allow pages of any site to post other types."""
    content_type = request.headers.get("content-type", "")
    if content_type.strip() and not JSON_TYPE.match(content_type):
        message = f"Unsupported content type {content_type[:MAX_NAME_CHARS]!r}: the body must be application/json."
        raise RequestError(message, code="invalid_content_type")
    try:
        client, ignored = work_client(request.scope), ignored_fields(request)
        body = await read_json(await body_of(request), schema, client=client, ignored=ignored)
    except (ValueError, RecursionError) as error:  # the body is not JSON
        raise validation_failure([{"type": "json_invalid", "loc": ("body",)}]) from error
    if log.isEnabledFor(logging.DEBUG):
        raw = await body_of(request)
        logged = partial(_log_ignored, raw, body, request=request)
        logged() if is_short(raw) else await in_thread(logged, client=work_client(request.scope))
    return body


def with_body(schema: type[Body], answer: Answer[Body]) -> Handler:
    """Returns a handler that reads the body, calls `answer`, and frees the body before the response is sent."""

    async def handle(request: Request) -> Response:
        response = await answer(await read_body(request, schema), request)
        drop_body(request)
        return response

    return handle


def post(router: APIRouter, path: str, *, body: type[Body], summary: str) -> Callable[[Answer[Body]], Answer[Body]]:
    """Returns a decorator that adds a `PostRoute` which answers requests `with_body`."""

    def add(answer: Answer[Body]) -> Answer[Body]:
        router.routes.append(PostRoute(path, with_body(body, answer), body=body, summary=summary))
        return answer

    return add


def _log_ignored(raw: bytes, body: BaseModel, *, request: Request) -> None:
    """Logs one line with the paths of the ignored fields, if any."""
    paths = [*islice(ignored_paths(json.loads(raw), body), MAX_NAMES + 1)]
    if paths:
        names = ", ".join(path[:MAX_NAME_CHARS] for path in paths[:MAX_NAMES]) + ", ..." * (len(paths) > MAX_NAMES)
        fields = {"request_id": request.state.trace, "route": request.url.path, "ignored": names}
        log.debug("fields of a request are ignored", extra={"fields": fields})


def json_response(body: object, status: int = 200) -> Response:
    return Response(json_bytes(body), status, media_type="application/json")

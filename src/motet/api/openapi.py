"""`GET /openapi.json`: the routes for clients and operators as an OpenAPI document, made from the routes themselves.

The schemas of the bodies are the schemas that check them: the fields that are read, the fields that are accepted and
not used, and the fields with few accepted values. All other rules are in docs/api.md."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute

from motet import __version__
from motet.api.http.dialect import of_messages
from motet.api.http.routes import PostRoute, json_response, new_router
from motet.api.service import Service

REF_TEMPLATE = "#/components/schemas/{model}"
Json = dict[str, Any]
Paths = dict[str, dict[str, Json]]


def _object(properties: Json) -> Json:
    """Returns the schema of an object that has all these properties."""
    return {"type": "object", "required": [*properties], "properties": properties}


def _refusal(dialect: str, schema: Json) -> Json:
    return {"description": f"An error, in {dialect}'s shape", "content": {"application/json": {"schema": schema}}}


TEXT, TEXT_OR_NULL = {"type": "string"}, {"type": ["string", "null"]}
PARAM = {**TEXT_OR_NULL, "description": "The field that is wrong."}
ERROR = _object({"error": _object({"message": TEXT, "type": TEXT, "param": PARAM, "code": TEXT_OR_NULL})})
MESSAGE_ERROR = _object(
    {"type": {"const": "error"}, "error": _object({"type": TEXT, "message": TEXT}), "request_id": TEXT}
)
REFUSED, MESSAGE_REFUSED = _refusal("OpenAI", ERROR), _refusal("Anthropic", MESSAGE_ERROR)


def openapi_router(service: Service) -> APIRouter:
    router = new_router()
    documents: dict[tuple[bool, str], Response] = {}
    """The documents with and without API keys, for each `root_path`, each made at its first request."""

    @router.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        keys, path = bool(service.config.api_keys), service.config.root_path
        if (keys, path) not in documents:
            documents[keys, path] = json_response(document_of(request.app.routes, keys=keys, root_path=path))
        return documents[keys, path]

    return router


def document_of(routes: Sequence[BaseRoute], *, keys: bool, root_path: str = "") -> Mapping[str, object]:
    """Returns the document. `keys`: True if requests need an API key; `root_path`: path in front of all routes."""
    plain = get_openapi(
        title="Motet",
        version=__version__,
        description="An OpenAI-compatible server for large language models, for many samples of one prompt.",
        servers=[{"url": root_path}] if root_path else None,
        routes=[route for route in routes if isinstance(route, APIRoute)],
    )
    posts = [route for route in routes if isinstance(route, PostRoute)]
    _, bodies = models_json_schema([(route.body, "validation") for route in posts], ref_template=REF_TEMPLATE)
    schemas = plain.pop("components", {}).get("schemas", {}) | bodies["$defs"]
    paths: Paths = plain["paths"]
    for route in posts:
        paths.setdefault(route.path, {})["post"] = _operation(route)
    for path, operation in ((path, operation) for path, methods in paths.items() for operation in methods.values()):
        refused = MESSAGE_REFUSED if of_messages(path) else REFUSED
        operation["responses"] = {"200": operation["responses"]["200"], "4XX": refused, "5XX": refused}
    for unused in ("HTTPValidationError", "ValidationError"):  # FastAPI's own errors, which no route returns
        schemas.pop(unused, None)
    components: dict[str, object] = {"schemas": schemas}
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        plain["security"] = [{"key": []}]
    return {**plain, "components": components}


def _operation(route: PostRoute) -> Json:
    content = {"application/json": {"schema": {"$ref": REF_TEMPLATE.format(model=route.body.__name__)}}}
    answers: dict[str, object] = {"application/json": {}}
    if "stream" in route.body.model_fields:
        answers["text/event-stream"] = {}
    return {
        "summary": route.summary,
        "operationId": route.path.strip("/").replace("/", "_"),
        "requestBody": {"required": True, "content": content},
        "responses": {"200": {"description": "The answer", "content": answers}},
    }

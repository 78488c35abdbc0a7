"""`GET /openapi.json`: the routes for clients and operators as an OpenAPI document, made from the routes themselves.

The schemas of the bodies are the schemas that check them: the fields that are read, the fields that are accepted and
not used, and the fields with few accepted values. All other rules are in docs/api.md."""

import re
from collections.abc import Mapping, Sequence

from fastapi import APIRouter, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute

from motet import __version__
from motet.api.answer_schemas import ERROR, MESSAGE_ERROR, TEXT, Json, answer_schema
from motet.api.http.dialect import of_messages
from motet.api.http.routes import PostRoute, json_response, new_router
from motet.api.operators.adapter_routes import LoadAdapterBody
from motet.api.service import Service
from motet.api.trainers.weight_routes import UpdateWeightsBody
from motet.engines.wire import TENSORS

REF_TEMPLATE = "#/components/schemas/{model}"
Paths = dict[str, dict[str, Json]]


def _refusal(dialect: str, name: str) -> Json:
    schema = {"$ref": REF_TEMPLATE.format(model=name)}
    return {"description": f"An error, in {dialect}'s shape", "content": {"application/json": {"schema": schema}}}


REFUSED, MESSAGE_REFUSED = _refusal("OpenAI", "Error"), _refusal("Anthropic", "MessageError")


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
    documented: list[type[BaseModel]] = [*(route.body for route in posts), *TENSOR_BODIES.values()]
    _, bodies = models_json_schema([(body, "validation") for body in documented], ref_template=REF_TEMPLATE)
    schemas = plain.pop("components", {}).get("schemas", {}) | bodies["$defs"]
    paths: Paths = plain["paths"]
    for route in posts:
        paths.setdefault(route.path_format, {})["post"] = _operation(route)
    for path, methods in paths.items():
        for method, operation in methods.items():
            _complete(operation, method, path=path)
    schemas |= {"Error": ERROR, "MessageError": MESSAGE_ERROR}
    for unused in ("HTTPValidationError", "ValidationError"):  # FastAPI's own errors, which no route returns
        schemas.pop(unused, None)
    components: dict[str, object] = {"schemas": schemas}
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        plain["security"] = [{"key": []}]
    return {**plain, "components": components}


def _operation(route: PostRoute) -> Json:
    answers: dict[str, object] = {"application/json": {}}
    if "stream" in route.body.model_fields:
        answers["text/event-stream"] = {"schema": TEXT}
    return {
        "summary": route.summary,
        "operationId": re.sub(r"\W+", "_", route.path_format).strip("_"),
        "requestBody": {"required": True, "content": _content_of(route.body)},
        "responses": {"200": {"description": "The answer", "content": answers}},
    }


TENSOR_BODIES: Mapping[str, type[BaseModel]] = {
    "/update_weights": UpdateWeightsBody,
    "/v1/load_lora_adapter": LoadAdapterBody,
}
"""The JSON bodies of routes that also take tensors, by path."""


def _content_of(body: type[BaseModel]) -> Json:
    return {"application/json": {"schema": {"$ref": REF_TEMPLATE.format(model=body.__name__)}}}


def _complete(operation: Json, method: str, *, path: str) -> None:
    """Adds what neither FastAPI nor `_operation` knows: parameters in the path that the route reads from the request
    itself, the schema of the answer, and the errors."""
    parameters = operation.get("parameters", [])
    known = {parameter["name"] for parameter in parameters if parameter["in"] == "path"}
    for name in re.findall(r"{(\w+)}", path):
        if name not in known:
            parameters.append({"name": name, "in": "path", "required": True, "schema": TEXT})
    if parameters:
        operation["parameters"] = parameters
    if (body := TENSOR_BODIES.get(path)) is not None:
        tensors = {TENSORS: {"schema": {"type": "string", "format": "binary"}}}
        operation["requestBody"] = {"required": True, "content": _content_of(body) | tensors}
    ((status, answer),) = ((code, answer) for code, answer in operation["responses"].items() if code.startswith("2"))
    if "application/json" in answer["content"]:
        answer["content"]["application/json"] = {"schema": answer_schema(method, path)}
    refused = MESSAGE_REFUSED if of_messages(path) else REFUSED
    operation["responses"] = {status: answer, "4XX": refused, "5XX": refused}

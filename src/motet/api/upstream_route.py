"""Requests for text models go past our own schemas: the body's `model` is read first, and says which way it goes.

the server has text models   and one is named   to a text upstream, fields as they are (`upstream_groups`)
else                                            as on every server: parsed, checked, tokenised here
"""

import time
from collections.abc import Awaitable, Callable

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from motet.api.answer import Answer
from motet.api.caller import caller_of
from motet.api.counts import Counts
from motet.api.schema_upstream import check_fields, name_in, prompts_in, read_fields
from motet.api.served import TextModel
from motet.api.service import Service
from motet.api.upstream_groups import UpstreamGroups
from motet.api.upstream_writers import TextBody, TextChunks, TextHead, kind_of
from motet.config import ServerConfig
from motet.engines.upstream.base import Fields, TextRequest, TextRoute, TextStep, TextUsage
from motet.ids import new_request_id

Handler = Callable[[Request], Awaitable[Response]]
UpstreamAnswer = Answer[TextStep, TextUsage | None]

ID_PREFIXES = {TextRoute.CHAT: "chatcmpl", TextRoute.COMPLETIONS: "cmpl"}
PROMPT_PARAMS = {TextRoute.CHAT: "messages", TextRoute.COMPLETIONS: "prompt"}


def text_models_first(service: Service, path: TextRoute) -> type[APIRoute]:
    """The class of the routes of a router that has this path alone."""

    class Route(APIRoute):
        def get_route_handler(self) -> Handler:  # type: ignore[override]  # FastAPI says Coroutine, and awaits it
            ours = super().get_route_handler()

            async def handle(request: Request) -> Response:
                models = service.models.all()
                if not any(isinstance(model, TextModel) for model in models):
                    return await ours(request)
                fields = read_fields(await _body(request))
                name = None if fields is None else name_in(fields)
                model = models[0] if name is None and len(models) == 1 else service.models.get(name or "")
                if fields is None or not isinstance(model, TextModel):
                    return await ours(request)
                return _answer(service, model, path, fields, request)

            return handle

    return Route


async def _body(request: Request) -> bytes:
    """Kept in the request for whoever reads it next."""
    try:
        return await request.body()
    except ClientDisconnect as error:
        raise HTTPException(400, "There was an error parsing the body") from error


def _answer(service: Service, model: TextModel, path: TextRoute, fields: Fields, request: Request) -> Response:
    asked, caller = check_fields(fields), caller_of(request)
    prompts = prompts_in(fields, path)
    wanted = TextRequest(
        route=path,
        body=fields,
        model=model.name,
        n=asked.n,
        prompts=prompts,
        seed=asked.seed,
        stream=asked.stream,
        best_of=asked.best_of,
        trace=caller.trace,
        session_id=caller.session_id,
        authorization=_may_go_on(request, service.config),
    )
    Counts(
        num_prompts=wanted.num_prompts,
        num_choices=asked.n,
        most_choices=service.config.max_n,
        prompt_param=PROMPT_PARAMS[path],
    ).check(service.config)
    service.check_room(caller.client, num_groups=wanted.num_prompts, num_choices=wanted.num_choices)
    head = TextHead(new_request_id(ID_PREFIXES[path]), kind_of(path, stream=asked.stream), int(time.time()), model.name)
    writer = TextChunks(head, include_usage=asked.include_usage) if asked.stream else TextBody(head)
    groups = UpstreamGroups(service, model.source, wanted, name=head.id, client=caller.client)
    return UpstreamAnswer(groups, writer)


def _may_go_on(request: Request, config: ServerConfig) -> str:
    """The client's `Authorization`, unless it may be a key of this server."""
    return "" if config.api_keys or config.admin_key else request.headers.get("authorization", "")

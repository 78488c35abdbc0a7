"""`/v1/groups`: a client inspects its groups, ends choices, and requests more choices.

    GET    /v1/groups/{id}                the state of each choice, with the number of output tokens where it is known
    POST   /v1/groups/{id}/more           an answer with more choices of the same prompt; indices and seeds continue
    DELETE /v1/groups/{id}/choices/{i}    ends one choice with the output it has
    DELETE /v1/groups/{id}                ends all choices, and removes the group from the groups that can be found

The id is the answer's id; with several prompts it is followed by `-0`, `-1` and so on. For the group of another client
the answer is a 404, as for a group that does not exist."""

from functools import partial

from fastapi import APIRouter, Request, Response
from pydantic import Field

from motet.api.generation.json_pieces import JsonArray, encode_json
from motet.api.generation.request_fields import StreamingFields
from motet.api.http.caller import caller_of
from motet.api.http.failure import unsupported_parameter
from motet.api.http.routes import json_response, new_router, post
from motet.api.known_groups import REPORTS, KnownGroup, MoreChoices
from motet.api.service import Service
from motet.errors import NotFoundError
from motet.loop_budget import batched_within_loop_budget, within_loop_budget

MAX_INDEX_DIGITS = 10
"""Maximum number of digits of a choice's index in a path."""


class MoreChoicesBody(StreamingFields):
    n: int = Field(ge=1)
    """Number of choices to add."""


def group_router(service: Service) -> APIRouter:
    router = new_router()

    def found(request: Request) -> KnownGroup:
        return service.groups.find(request.path_params["id"], client=caller_of(request).client)

    @router.get("/v1/groups/{id}")
    async def get_group(request: Request) -> Response:
        group = found(request)
        report = {
            "id": group.id,
            "object": "group",
            "created": group.created,
            "model": group.model,
            "state": "writing" if group.open else "over",
            "prompt_tokens": group.prompt_tokens,
            "kept_s": service.groups.left_s(group),
        }
        choices = JsonArray()
        for reports in await batched_within_loop_budget(group.choices(), REPORTS):
            await within_loop_budget(partial(choices.add, reports))
        body = await within_loop_budget(lambda: b"".join(encode_json({**report, "choices": choices.json()})))
        return Response(body, media_type="application/json")

    @post(router, "/v1/groups/{id}/more", body=MoreChoicesBody, summary="More choices of the group's prompt")
    async def more(body: MoreChoicesBody, request: Request) -> Response:
        group = found(request)
        if group.more is None:
            no_more = "several prompts, best_of or a scored prompt, or its model is on a server that takes texts"
            why = f"is for groups that can have more choices: this group cannot, since its request has {no_more}"
            raise unsupported_parameter("n", why)
        span = caller_of(request).span
        return group.more(group, MoreChoices(body.n, body.stream, body.include_usage, body.continuous_usage, span=span))

    @router.delete("/v1/groups/{id}/choices/{index}")
    async def end_choice(index: str, request: Request) -> Response:
        group = found(request)
        if not (index.isascii() and index.isdigit() and len(index) <= MAX_INDEX_DIGITS):
            raise NotFoundError(f"Group {group.id} has no choice {index!r}.", code="choice_not_found")
        ended = await group.end_choice(int(index))
        return json_response({"id": group.id, "object": "group.choice", "index": int(index), "ended": ended})

    @router.delete("/v1/groups/{id}")
    async def end_group(request: Request) -> Response:
        group = found(request)
        service.groups.forget(group)
        for answer in list(group.open):
            await answer.end_all()
        return json_response({"id": group.id, "object": "group.deleted", "deleted": True})

    return router

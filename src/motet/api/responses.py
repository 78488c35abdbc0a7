"""`POST /v1/responses`: one answer, on the way of a chat, in the shape of OpenAI's Responses. Nothing of it is kept."""

from fastapi import APIRouter, Request, Response

from motet.api.caller import caller_of
from motet.api.chat import chat_extras, chat_wanted, plan_chat
from motet.api.kv_params import read_kv_params
from motet.api.open_groups import GroupsAnswer, OpenGroups
from motet.api.plan import Wanted
from motet.api.responses_echo import echo_json
from motet.api.responses_request import chat_request, in_its_own_words
from motet.api.responses_writers import ID_PREFIX, ResponseBody, ResponseEvents, ResponseText
from motet.api.schema_chat import ChatRequest
from motet.api.schema_responses import NOT_KEPT, ResponsesRequest
from motet.api.service import Service
from motet.errors import NotFoundError

KEPT_ELSEWHERE = (
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("GET", "/v1/responses/{response_id}/input_items"),
)
"""What OpenAI's API has for responses that it keeps."""


def responses_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        with in_its_own_words():
            chat = chat_request(body)
            async with read_kv_params(service, chat, num_choices=1) as asked:
                wanted = chat_wanted(chat, caller_of(request), asked, prefix=ID_PREFIX, prompt_param="input")
                return await _answer(service, body, chat, wanted)

    async def not_kept(response_id: str) -> Response:
        raise NotFoundError(
            f"Response with id '{response_id}' not found: {NOT_KEPT}.", param="response_id", code="not_found"
        )

    for method, path in KEPT_ELSEWHERE:
        router.add_api_route(path, not_kept, methods=[method])
    return router


async def _answer(service: Service, body: ResponsesRequest, chat: ChatRequest, wanted: Wanted) -> GroupsAnswer:
    echo = echo_json(body)
    plan = await plan_chat(service, chat, wanted)
    text = ResponseText(plan.head, echo, wanted.served.tokenizer, chat_extras(chat))
    groups = OpenGroups(service, plan)
    if not body.stream:
        return GroupsAnswer(groups, ResponseBody(text))
    events = ResponseEvents(text)
    return GroupsAnswer(groups, events, break_off=events.fail)

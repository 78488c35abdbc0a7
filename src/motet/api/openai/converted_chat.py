"""Converts a request for one answer (`/v1/messages`, `/v1/responses`) to a request for a chat.

    body ─► ChatRequest ─► the plan of the chat ─► its choice, in the shape of the route
                 │                     │
                 └─────────────────────┴─► errors name a field of the chat; the client gets its own name (`FIELDS`)

`messages` and `responses` have the conversion of the fields, and the shape of the answers."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from fastapi import Request, Response
from pydantic import ValidationError

from motet.api.generation.answer_form import StructuredFields
from motet.api.generation.answer_writer import GroupsWriter
from motet.api.generation.known_answers import answer_plan
from motet.api.generation.kv_params import request_context
from motet.api.generation.plan import Plan
from motet.api.generation.request_fields import RequestFields, SamplingFields, StreamingFields
from motet.api.http.caller import Caller, caller_of
from motet.api.http.failure import MakeNames, Names, names_table, renamed, schema_failure
from motet.api.openai.chat_plan import chat_prompt, check_answer_format, plan_chat
from motet.api.openai.chat_schema import ChatRequest
from motet.api.service import Service
from motet.errors import RequestError

SHARED = (StructuredFields, SamplingFields, RequestFields, StreamingFields)
PASSED_ON = {"chat_template_kwargs"}.union(*(schema.model_fields for schema in SHARED))
"""Members that are the same in a chat."""

FIELDS: Sequence[tuple[str, str, str]] = (
    (r"messages.*|prompt|n|continue_final_message|chat_template", "messages", "input"),
    (r"max_(?:completion_)?tokens", "max_tokens", "max_output_tokens"),
    (r"stop", "stop_sequences", "stop"),
    (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema", r"tools[\1].parameters"),
    (r"tools\[(\d+)\]\.function", r"tools[\1]", r"tools[\1]"),
    (r"tool_choice\.function", "tool_choice", "tool_choice"),
    (r"tool_choice\.allowed_tools\.tools\[(\d+)\]\.function", "tool_choice", r"tool_choice.tools[\1]"),
    (r"tool_choice\.allowed_tools", "tool_choice", "tool_choice"),
    (r"response_format(?:\.json_schema)?", "output_config.format", "text.format"),
    (r"reasoning_effort", "output_config.effort", "reasoning.effort"),
    (r"parallel_tool_calls", "tool_choice.disable_parallel_tool_use", "parallel_tool_calls"),
)
"""The start of a field's name in a chat or in an engine's error; its name in a message; its name in a Response."""
MESSAGE_NAMES: Names = names_table((chat, message) for chat, message, _ in FIELDS)
RESPONSE_NAMES: Names = names_table((chat, response) for chat, _, response in FIELDS)


@dataclass(frozen=True, kw_only=True)
class ConvertedRequest:
    make: Callable[[], ChatRequest]
    """Makes the chat. Raises the errors of the chat's schema."""
    names: MakeNames
    """Returns the client's names of the chat's fields."""
    prompt_param: str
    """The field with the turns."""

    async def answer(
        self, service: Service, request: Request, *, prefix: str, writer: Callable[[Plan, ChatRequest], GroupsWriter]
    ) -> Response:
        async with self.planned(service, request, prefix=prefix) as (plan, chat):
            made = await caller_of(request).in_thread_if_long(partial(writer, plan, chat))
            return answer_plan(service, plan, writer=made, names=self.names)

    @asynccontextmanager
    async def planned(
        self, service: Service, request: Request, *, prefix: str
    ) -> AsyncIterator[tuple[Plan, ChatRequest]]:
        """Yields the plan of the chat. If the block raises an error, its tickets are released."""
        async with self._client_names(caller_of(request)):
            chat = await self._chat(caller_of(request))
            caller = caller_of(request, session=chat.session_id, cache_salt=chat.cache_salt)
            async with request_context(service, chat, caller=caller, num_choices=1) as context:
                param = self.prompt_param
                yield await plan_chat(service, chat, context=context, prefix=prefix, prompt_param=param), chat

    async def num_tokens(self, service: Service, request: Request) -> int:
        caller = caller_of(request)
        async with self._client_names(caller):
            chat = await self._chat(caller)
            served = service.served(chat.model)
            check_answer_format(served, chat)
            config = service.config
            ids = await chat_prompt(served.preparer, chat, caller=caller, config=config, param=self.prompt_param)
            return len(ids)

    async def _chat(self, caller: Caller) -> ChatRequest:
        def made() -> ChatRequest:
            try:
                return self.make()
            except ValidationError as error:
                raise schema_failure(error) from error

        return await caller.in_thread_if_long(made)

    @asynccontextmanager
    async def _client_names(self, caller: Caller) -> AsyncIterator[None]:
        """Gives errors of the chat the client's names of the fields."""
        try:
            yield
        except RequestError as error:
            # A pattern for each of 128 tools takes 20 ms.
            raise await caller.in_thread_if_long(partial(_renamed, error, self.names)) from error


def _renamed(error: RequestError, names: MakeNames) -> RequestError:
    return renamed(error, names())

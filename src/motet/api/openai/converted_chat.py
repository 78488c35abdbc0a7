"""What `/v1/messages` and `/v1/responses` share: a request for one answer becomes a request for a chat.

    body ─► ChatRequest ─► the plan of the chat ─► its choice, written in the shape of the route
                 │                     │
                 └─────────────────────┴─► an error names a field of the chat; the client gets its own name (`FIELDS`)

What the fields become, and what the answers look like, is in `messages` and `responses`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import msgspec
from fastapi import Request, Response
from pydantic import ValidationError

from motet.api.generation.answer import GroupsWriter
from motet.api.generation.answer_form import StructuredFields
from motet.api.generation.known_answers import answer_plan
from motet.api.generation.kv_params import request_context
from motet.api.generation.plan import Plan
from motet.api.generation.request_fields import GeneratingFields
from motet.api.http.body import in_turn
from motet.api.http.caller import caller_of
from motet.api.http.failure import Names, names_table, renamed, schema_failure
from motet.api.openai.chat_plan import chat_prompt, check_reading, plan_chat
from motet.api.openai.chat_schema import ChatRequest
from motet.api.service import Service
from motet.errors import RequestError
from motet.text.choice import ChoiceEvent
from motet.text.text_group import GroupStep
from motet.types import Usage

PASSED_ON = {*StructuredFields.model_fields, *GeneratingFields.model_fields, "chat_template_kwargs"}
"""Members that are the same in a chat."""
FEW_PARTS = 50
"""More blocks or items are made into turns in a thread: each takes 40 us."""

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
"""How the name of a field of a chat, or of an engine, begins; what that is called in a message; and in a Response."""
MESSAGE_NAMES: Names = names_table((there, here) for there, here, _ in FIELDS)
RESPONSE_NAMES: Names = names_table((there, here) for there, _, here in FIELDS)

MakeNames = Callable[[], Names]
"""Returns the client's names of the fields of a chat, once there is an error."""
MakeWriter = Callable[[Plan, ChatRequest], GroupsWriter]


@dataclass(frozen=True, kw_only=True)
class ConvertedRequest:
    """A request that becomes a chat."""

    make: Callable[[], ChatRequest]
    """Raises what the chat's schema raises."""
    num_parts: int
    """Blocks or items to be made into turns."""
    names: MakeNames
    prompt_param: str
    """The field with the turns."""

    async def answer(self, service: Service, request: Request, *, prefix: str, writer: MakeWriter) -> Response:
        """`prefix`: begins the answer's id."""
        with self._named_as_asked():
            chat = await self._chat()
            caller = caller_of(request, session=chat.session_id)
            async with request_context(service, chat, caller=caller, num_choices=1) as context:
                plan = await plan_chat(service, chat, context=context, prefix=prefix, prompt_param=self.prompt_param)
                return answer_plan(service, plan, writer=writer(plan, chat))

    async def num_tokens(self, service: Service) -> int:
        """Returns the number of tokens of the prompt."""
        with self._named_as_asked():
            chat = await self._chat()
            served = service.served(chat.model)
            check_reading(served, chat)
            return len(await chat_prompt(served.preparer, chat, param=self.prompt_param))

    async def _chat(self) -> ChatRequest:
        return self.make() if self.num_parts <= FEW_PARTS else await in_turn(self.make)

    @contextmanager
    def _named_as_asked(self) -> Iterator[None]:
        """Makes errors of the chat name the fields of the request."""
        try:
            yield
        except ValidationError as error:
            raise renamed(schema_failure(error), self.names()) from error
        except RequestError as error:
            raise renamed(error, self.names()) from error


class NamedEvent(msgspec.Struct, frozen=True):
    """An event of a stream. Its name is its type too."""

    name: str
    fields: Mapping[str, object] = {}

    def sent(self, **numbers: int) -> bytes:
        """Returns the event as it is sent. `numbers`: members that come first."""
        data = msgspec.json.encode({**numbers, "type": self.name, **self.fields})
        return b"event: %b\ndata: %b\n\n" % (self.name.encode(), data)


class Output(Protocol):
    """The content of an answer, made of the events of its choice."""

    def feed(self, event: ChoiceEvent) -> list[NamedEvent]: ...


class WholeOutput(GroupsWriter):
    """Writes the only choice of an answer in one piece. What streams it is a subclass, so the two cannot differ."""

    content_type = "application/json"
    streams = False

    def __init__(self, output: Output, names: MakeNames) -> None:
        self._fed = output.feed
        self._names = names

    def as_asked(self, error: RequestError) -> RequestError:
        return renamed(error, self._names())

    def feed(self, steps: Sequence[GroupStep], usage: Callable[[], Usage]) -> bytes:
        self._feed(steps)
        return b""

    def _feed(self, steps: Sequence[GroupStep]) -> list[NamedEvent]:
        return [told for step in steps for event in step.events for told in self._fed(event)]

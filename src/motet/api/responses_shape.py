"""A Response and the items of its output, as OpenAI writes them."""

from enum import StrEnum
from typing import Literal

import msgspec

from motet.text.logprobs import ChatLogprob
from motet.text.usage import Usage


class Status(StrEnum):
    """Of a Response, and (without `FAILED`) of an item of its output."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: tuple[()] = ()
    """Of what a server looked up; ours looks nothing up."""
    logprobs: tuple[ChatLogprob, ...] = ()


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: tuple[OutputText, ...] = ()


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: Status
    summary: tuple[()] = ()
    """The thoughts themselves are there."""
    content: tuple[ReasoningText, ...] = ()


class FunctionCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str = ""


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0
    """Tokens that are paid for as written to a cache: ours costs nothing."""


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    message: str
    code: Literal["server_error"] = "server_error"
    """The only one of OpenAI's codes that fits; the `error` event before it has ours."""


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens", "content_filter"]


class ResponseState(msgspec.Struct, frozen=True, kw_only=True):
    """What changes while a response is made. The rest of it (`Echo`) is what the request said."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    status: Status
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    output: tuple[OutputItem, ...] = ()
    usage: ResponseUsage | None = None


class Echo(msgspec.Struct, frozen=True, kw_only=True):
    """What a Response repeats of its request, and what the server answers to fields that it does not have."""

    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: dict[str, str | None]
    temperature: float
    text: dict[str, object]
    tool_choice: object
    tools: list[dict[str, object]]
    top_logprobs: int
    top_p: float
    background: bool = False
    max_tool_calls: int | None = None
    previous_response_id: str | None = None
    service_tier: Literal["default"] = "default"
    store: bool = False
    truncation: Literal["disabled"] = "disabled"


def response_usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(usage.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )

"""The bodies of `POST /v1/messages` and `POST /v1/messages/count_tokens`, Anthropic's Messages.

Each block of content is read by its type. Errors name unsupported types: pictures, documents, the server's tools."""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from motet.api.generation.answer_form import StructuredFields
from motet.api.generation.request_fields import (
    NO_REPETITION_DETECTION,
    OTHER_SERVERS_NEUTRAL,
    TO_THE_LIMIT,
    RequestFields,
    SamplingFields,
    StopStrings,
    StreamingFields,
)
from motet.api.http.failure import (
    FieldError,
    invalid_type,
    invalid_value,
    missing_parameter,
    unknown_parameter,
    unsupported_parameter,
)
from motet.api.http.schema import JsonObject, Neutral, OpenSchema, Schema, check_unicode
from motet.api.openai.chat_schema import MAX_TOOLS
from motet.errors import RequestError

MIN_BUDGET = 1024
"""Anthropic's minimum `budget_tokens`."""


class TextBlock(OpenSchema):
    type: Literal["text"]
    text: str


class ThinkingBlock(OpenSchema):
    """Reasoning of an earlier turn. Its `signature` is ignored."""

    type: Literal["thinking"]
    thinking: str


class RedactedBlock(OpenSchema):
    """Encrypted reasoning of Anthropic's own model, from the start of the conversation. The prompt omits it."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(OpenSchema):
    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: JsonObject

    neutral: ClassVar[Neutral] = {"caller": ({"type": "direct"},)}


def _unsupported_block(param: str, why: str) -> RequestError:
    return RequestError(f"Unsupported content block: '{param}' {why}.", param=param, code="unsupported_value")


def _only(known: Sequence[str]) -> str:
    return f"and here only {', '.join(map(repr, known))} {'are' if len(known) > 1 else 'is'} supported"


def _kind_of(value: object, known: Sequence[str]) -> str:
    """Returns the type of a block. Raises FieldError unless it is in `known`."""
    if not isinstance(value, dict):
        raise FieldError(invalid_type, None, "an object, or a string instead of the list")
    if (kind := value.get("type")) is None:
        raise FieldError(missing_parameter, "type")
    if not isinstance(kind, str) or kind not in known:
        raise FieldError(_unsupported_block, "type", f"is {kind!r}, {_only(known)}")
    return kind


def _read_text(value: object) -> TextBlock:
    _kind_of(value, ("text",))
    return TextBlock.model_validate(value)


def _as_blocks(value: object) -> object:
    """Turns a string into a block of text."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


AS_BLOCKS = BeforeValidator(_as_blocks, json_schema_input_type=str | list[object])
Texts = Annotated[list[Annotated[TextBlock, PlainValidator(_read_text)]], AS_BLOCKS]
"""A string, or blocks of text."""


class ToolResultBlock(OpenSchema):
    """The result of a tool. `is_error` is ignored: a chat has no field for it, so the content must state an error."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: Texts = Field(default_factory=list)


Block = TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock

BLOCKS: Mapping[str, type[Block]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
}
OF_ROLE: Mapping[str, Sequence[str]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""The types of blocks that a turn can have."""


def _read_block(value: object) -> Block:
    """Reads a block by its type, so that errors name the fields of this type."""
    return BLOCKS[_kind_of(value, (*BLOCKS,))].model_validate(value)


class TurnInput(OpenSchema):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Annotated[Block, PlainValidator(_read_block)]], AS_BLOCKS]

    @model_validator(mode="after")
    def check_content(self) -> Self:
        if not self.content and self.role != "assistant":
            raise FieldError(invalid_value, "content", "it is empty; only a turn of the assistant may be")
        known = OF_ROLE[self.role]
        for number, block in enumerate(self.content):
            if block.type not in known:
                why = f"is '{block.type}' in a turn of the {self.role}, {_only(known)}"
                raise FieldError(_unsupported_block, f"content[{number}].type", why)
        return self


class MessageTool(OpenSchema):
    """A function of the client. Tools of the model or of the server have other types."""

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: JsonObject
    strict: bool = False

    refused = frozenset({"input_examples"})
    neutral: ClassVar[Neutral] = {"allowed_callers": (["direct"],), "defer_loading": (False,)}


def _read_tool(value: object) -> MessageTool:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in (None, "custom"):
        supported = "only tools of type 'custom', with an 'input_schema', are supported"
        raise FieldError(unsupported_parameter, "type", f"is {kind!r}, and this server has no such tool; {supported}")
    return MessageTool.model_validate(value)


class MessageToolChoice(Schema):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def check_name(self) -> Self:
        if (given := self.name is not None) != (self.type == "tool"):
            raise FieldError(unknown_parameter if given else missing_parameter, "name")
        return self


class ThinkingField(Schema):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=MIN_BUDGET)
    """Checked as Anthropic checks it, but without effect: reasoning counts towards `max_tokens`."""
    display: Literal["summarized", "omitted", "updates"] | None = None

    @model_validator(mode="after")
    def check_budget(self) -> Self:
        if (given := self.budget_tokens is not None) != (self.type == "enabled"):
            raise FieldError(unknown_parameter if given else missing_parameter, "budget_tokens")
        return self

    @property
    def shown(self) -> bool:
        """True if the answer has the reasoning."""
        return self.type != "disabled" and self.display != "omitted"


class OutputFormat(Schema):
    type: Literal["json_schema"]
    definition: JsonObject = Field(alias="schema")


class OutputConfig(Schema):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


ONE_ANSWER = "a message is one answer; /v1/chat/completions gives n choices of one prompt"
KEEP_ALL = {"type": "clear_thinking_20251015", "keep": "all"}
"""The edit of a conversation that clears nothing."""


class MessagePrompt(Schema):
    """The fields from which the prompt is made, for an answer and for the number of its tokens."""

    ignored = frozenset({"cache_control", "metadata"})
    refused = frozenset(
        {"container", "diagnostics", "group", "inference_geo", "user_profile_id", "workspace_id"}
        | {"kv_transfer_params", "logprob_token_ids", "repetition_detection", "stop", "stream_options"}
    )
    neutral: ClassVar[Neutral] = {
        **OTHER_SERVERS_NEUTRAL,
        "truncate_prompt_tokens": (TO_THE_LIMIT,),
        "context_management": ({"edits": []}, {"edits": [KEEP_ALL]}),
        "mcp_servers": ([],),
        "n": (1,),
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
    }
    advice: ClassVar[Mapping[str, str]] = {
        "container": "it runs no tools",
        "context_management": "it changes no conversation; send what the model is to see",
        "group": ONE_ANSWER,
        "logprob_token_ids": "a message has no log-probabilities",
        "mcp_servers": "it runs no tools; connect to MCP servers in the client, and send their tools",
        "n": ONE_ANSWER,
        "repetition_detection": NO_REPETITION_DETECTION,
        "stop": "here it is called 'stop_sequences'",
        "stream_options": "the last events of a stream always have the usage",
    }

    model: str | None = None
    system: Annotated[Texts, BeforeValidator(check_unicode)] = Field(default_factory=list)
    messages: list[TurnInput] = Field(min_length=1)
    tools: list[Annotated[MessageTool, PlainValidator(_read_tool)]] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingField | None = None
    output_config: OutputConfig = OutputConfig()
    chat_template_kwargs: dict[str, object] = Field(default_factory=dict)

    @property
    def continues(self) -> bool:
        """True if the answer continues the last turn."""
        return self.messages[-1].role == "assistant"

    @model_validator(mode="after")
    def check_end(self) -> Self:
        for number in reversed(range(len(self.messages))):
            if self.messages[number].role != "assistant":
                break
            if any(isinstance(block, ToolUseBlock) for block in self.messages[number].content):
                why = "a call of a tool cannot be continued; send its tool_result in a turn of the user"
                raise FieldError(invalid_value, f"messages[{number}].content", why)
        return self


class MessagesRequest(MessagePrompt, StructuredFields, SamplingFields, RequestFields, StreamingFields):
    max_tokens: int = Field(ge=1)
    stop_sequences: StopStrings = Field(default_factory=list)

    @model_validator(mode="after")
    def check_thinking_fits(self) -> Self:
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise FieldError(invalid_value, "thinking.budget_tokens", "it must be less than 'max_tokens'")
        return self

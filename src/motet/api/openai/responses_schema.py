"""The body of `POST /v1/responses`.

The server stores no Responses, so fields that refer to an earlier or a later request are refused."""

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from motet.api.generation.answer_form import StructuredFields
from motet.api.generation.extensions import NvExtFields
from motet.api.generation.request_fields import (
    IGNORED_FIELDS,
    NO_REPETITION_DETECTION,
    OTHER_SERVERS_NEUTRAL,
    TO_THE_LIMIT,
    RequestFields,
    SamplingFields,
    StreamingFields,
    in_range,
)
from motet.api.http.failure import FieldError, invalid_type, invalid_value, missing_parameter, unsupported_parameter
from motet.api.http.schema import UNICODE, Neutral, OpenSchema, Schema
from motet.api.openai.chat_schema import MAX_TOOLS, ContentPart, as_choice, as_parts
from motet.errors import RequestError


class TextPart(ContentPart):
    """A part of a message, or of a tool's output."""

    texts = ("input_text", "output_text")


TextParts = Annotated[list[TextPart], as_parts("input_text", TextPart)]
"""A string, or parts."""


class MessageInput(OpenSchema):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextParts


class CallInput(OpenSchema):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str

    neutral: ClassVar[Neutral] = {"async": (False,), "caller": ({"type": "direct"},)}


class CallOutputInput(OpenSchema):
    type: Literal["function_call_output"]
    call_id: str
    output: TextParts

    neutral: ClassVar[Neutral] = {"caller": ({"type": "direct"},)}


class CustomCallInput(OpenSchema):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class CustomOutputInput(OpenSchema):
    type: Literal["custom_tool_call_output"]
    call_id: str
    output: TextParts


class ThoughtItem(OpenSchema):
    type: Literal["reasoning_text", "text"]
    text: str


class Summary(OpenSchema):
    type: Literal["summary_text"]
    text: str


class ReasoningInput(OpenSchema):
    type: Literal["reasoning"]
    content: list[ThoughtItem] = Field(default_factory=list)
    summary: list[Summary] = Field(default_factory=list)
    """The summary of reasoning that was not shown; used if there is no `content`."""

    refused = frozenset({"encrypted_content"})

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary)


InputItem = MessageInput | CallInput | CallOutputInput | CustomCallInput | CustomOutputInput | ReasoningInput

ITEMS: Mapping[str, type[InputItem]] = {
    "message": MessageInput,
    "function_call": CallInput,
    "function_call_output": CallOutputInput,
    "custom_tool_call": CustomCallInput,
    "custom_tool_call_output": CustomOutputInput,
    "reasoning": ReasoningInput,
}


def read_item(value: object) -> InputItem:
    """Reads an item by its type, so that errors name the fields of this type."""
    if not isinstance(value, dict):
        raise FieldError(invalid_type, None, "an object, or a string instead of the list")
    kind = value.get("type")
    item_class = ITEMS.get("message" if kind is None else kind) if isinstance(kind, str | None) else None
    if item_class is None:
        known = ", ".join(map(repr, ITEMS))
        advice = "it stores no items, so send the item itself" if kind == "item_reference" else f"only {known} are"
        raise FieldError(_unsupported_item, "type", f"{kind!r} is not supported by this server: {advice}")
    return item_class.model_validate(value)


def _unsupported_item(param: str, why: str) -> RequestError:
    return RequestError(f"Unsupported item: '{param}' {why}.", param=param, code="unsupported_value")


def as_items(value: object) -> object:
    """Turns a string into a message."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


NOT_KEPT = "this server stores no responses; send the complete conversation in 'input'"


class FunctionTool(OpenSchema):
    """A tool in its flat form."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, object] = Field(default_factory=dict)
    strict: bool = False

    neutral: ClassVar[Neutral] = {
        "allowed_callers": (["direct"],),
        "async": (False,),
        "defer_loading": (False,),
        "output_schema": (),
    }


class CustomFormat(OpenSchema):
    """The form of a custom tool's input, which the prompt describes. A grammar is not enforced."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Annotated[str, UNICODE] | None = None

    @model_validator(mode="after")
    def check_grammar(self) -> Self:
        for name in ("syntax", "definition") if self.type == "grammar" else ():
            if getattr(self, name) is None:
                raise FieldError(missing_parameter, name)
        return self

    @property
    def text(self) -> str:
        """The form in words; empty for any text."""
        return f"The input follows this {self.syntax} grammar:\n{self.definition}" if self.type == "grammar" else ""


class CustomTool(OpenSchema):
    """A tool of the client whose input is free text, such as Codex's `apply_patch`. The model gets it as a function
    with this text as its only argument."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: CustomFormat | None = None

    def function(self) -> dict[str, object]:
        """Returns the function of a chat."""
        texts = (self.description, None if self.format is None else self.format.text)
        description = "\n\n".join(text for text in texts if text)
        described = {"description": description} if description else {}
        return {"name": self.name, **described, "parameters": FREE_TEXT}


FREE_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The input of the tool, as plain text."}},
    "required": ["input"],
    "additionalProperties": False,
}
"""The parameters of the function that stands for a custom tool."""


class BuiltInTool(Schema):
    """A tool that OpenAI runs. This server does not have it: the prompt omits it."""

    model_config = ConfigDict(extra="ignore")

    type: str


BUILT_IN = frozenset(
    {"apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search", "image_generation"}
    | {"local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search"}
    | {"web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"}
)
"""Types of tools that the prompt omits; refused if a call is required."""


ClientTool = FunctionTool | CustomTool
"""A tool that the client runs."""


def shown(tool: ClientTool) -> dict[str, object]:
    """Returns the object that a Response repeats."""
    return tool.model_dump(exclude_none=isinstance(tool, CustomTool))


def read_inner_tool(value: object) -> ClientTool | BuiltInTool:
    """Reads a tool by its type, so that errors name the fields of this type."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "custom":
        return CustomTool.model_validate(value)
    form = BuiltInTool if isinstance(kind, str) and kind in BUILT_IN else FunctionTool
    return form.model_validate(value)


class NamespaceTool(Schema):
    """Functions under a common name, as Codex groups the functions of an MCP server."""

    type: Literal["namespace"]
    name: str
    description: str = ""
    tools: list[Annotated[ClientTool | BuiltInTool, PlainValidator(read_inner_tool)]] = Field(max_length=MAX_TOOLS)

    def members(self) -> dict[str, object]:
        """Returns the object that a Response repeats."""
        tools = [shown(tool) for tool in self.tools if isinstance(tool, ClientTool)]
        return {**self.model_dump(exclude={"tools"}), "tools": tools}


AnyTool = ClientTool | NamespaceTool | BuiltInTool


def read_tool(value: object) -> AnyTool:
    namespace = isinstance(value, dict) and value.get("type") == "namespace"
    return NamespaceTool.model_validate(value) if namespace else read_inner_tool(value)


class PlacedTool(NamedTuple):
    """A tool of the client or a built-in tool, with its path in the body and its namespace."""

    param: str
    namespace: str | None
    tool: ClientTool | BuiltInTool


def chat_name(name: str, namespace: str | None) -> str:
    """Returns the name of a function in the chat, such as `crm__find` for `find` in namespace `crm`."""
    return name if namespace is None else f"{namespace}{name if namespace.endswith('__') else f'__{name}'}"


class TextFormat(Schema):
    """The form of the text as a flat object. The chat's schema checks which fields belong to which type."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, object] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextField(Schema):
    format: TextFormat | None = None
    verbosity: Literal["medium"] = "medium"


class ReasoningField(Schema):
    effort: str | None = None
    summary: Literal["auto"] | None = None
    """Accepted without effect: the answer has the reasoning itself."""
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""Only log-probabilities have an effect. Encrypted reasoning is for servers that hide reasoning: this server shows its
reasoning, and accepts it as input. The others are about built-in tools, which the prompt omits."""


class ResponsesRequest(StructuredFields, SamplingFields, RequestFields, NvExtFields, StreamingFields):
    ignored = (IGNORED_FIELDS - {"metadata"}) | {"client_metadata", "max_tool_calls"}
    # The first four refer to data that the server would have to store.
    refused = frozenset(
        {"conversation", "previous_response_id", "prompt", "prompt_cache_options"}
        | {"access_programs", "image", "repetition_detection", "kv_transfer_params", "max_tokens", "moderation"}
    )
    neutral: ClassVar[Neutral] = {
        **OTHER_SERVERS_NEUTRAL,
        "truncate_prompt_tokens": (TO_THE_LIMIT,),
        "background": (False,),
        "context_management": ([],),
        "enable_response_messages": (False,),
        "n": (1,),
        "truncation": ("disabled",),
    }
    advice: ClassVar[Mapping[str, str]] = {
        "background": NOT_KEPT,
        "conversation": NOT_KEPT,
        "max_tokens": "here it is called 'max_output_tokens'",
        "n": "a response is one answer; /v1/chat/completions gives n choices of one prompt",
        "previous_response_id": NOT_KEPT,
        "repetition_detection": NO_REPETITION_DETECTION,
        "prompt": "this server stores no prompts; send it in 'input' and 'instructions'",
        "truncation": "an input that is too long is refused; leave it out, or send 'disabled'",
    }

    input: Annotated[
        list[Annotated[InputItem, PlainValidator(read_item)]],
        BeforeValidator(as_items, json_schema_input_type=str | list[object]),
        Field(min_length=1),
    ]
    instructions: Annotated[str, UNICODE] | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextField = TextField()
    reasoning: ReasoningField = ReasoningField()
    tools: list[Annotated[AnyTool, PlainValidator(read_tool)]] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: Annotated[
        dict[str, object] | None, BeforeValidator(as_choice, json_schema_input_type=str | dict[str, object])
    ] = None
    """The tool choice of a chat, whose schema checks it, but with the names one level higher."""
    parallel_tool_calls: bool = True
    include: list[Included] = Field(default_factory=list)
    top_logprobs: int = in_range("logprobs", 0)
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] = Field(
        {}, max_length=16
    )
    chat_template_kwargs: dict[str, object] = Field(default_factory=dict)
    include_reasoning: bool = True
    separate_reasoning: bool = True

    @property
    def logprobs(self) -> bool:
        return "message.output_text.logprobs" in self.include

    @model_validator(mode="after")
    def check_built_in(self) -> Self:
        choice = (self.tool_choice or {}).get("type")
        if isinstance(choice, str) and choice in BUILT_IN:
            why = f"is '{choice}', and this server has no such tool"
            raise FieldError(unsupported_parameter, "tool_choice.type", why)
        for param, _, tool in placed_tools(self) if choice == "required" else ():
            if isinstance(tool, BuiltInTool):
                why = f"is '{tool.type}', and this server has no such tool; leave it out where a call is required"
                raise FieldError(unsupported_parameter, f"{param}.type", why)
        return self

    @model_validator(mode="after")
    def check_top_logprobs(self) -> Self:
        for name in ("top_logprobs", "logprob_token_ids"):
            if getattr(self, name) and not self.logprobs:
                why = "'include' must have 'message.output_text.logprobs' when it is given"
                raise FieldError(invalid_value, name, why)
        return self

    @model_validator(mode="after")
    def check_continuous_usage(self) -> Self:
        if self.stream_options is not None and self.stream_options.continuous_usage_stats:
            param = "stream_options.continuous_usage_stats"
            raise FieldError(unsupported_parameter, param, "is for chunks; here the last event has the usage")
        return self


def placed_tools(request: ResponsesRequest) -> Iterator[PlacedTool]:
    """Yields the tools of a request one by one, including tools in namespaces."""
    for number, tool in enumerate(request.tools):
        if not isinstance(tool, NamespaceTool):
            yield PlacedTool(f"tools[{number}]", None, tool)
            continue
        for inner_number, inner in enumerate(tool.tools):
            yield PlacedTool(f"tools[{number}].tools[{inner_number}]", tool.name, inner)

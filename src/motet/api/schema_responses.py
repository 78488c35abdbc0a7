"""The body of `POST /v1/responses`.

Nothing of it is kept when it has been answered, so what asks for anything of an earlier or later request is refused.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from motet.api.schema_chat import MAX_TOP_LOGPROBS
from motet.api.schema_responses_input import InputItem, read_input
from motet.api.schema_shared import IGNORED_FIELDS, GeneratingFields, Schema
from motet.api.schema_structured import StructuredFields
from motet.api.schema_tools import MAX_TOOLS, as_choice
from motet.errors import RequestError

NOT_KEPT = "this server keeps no responses; send the whole conversation in 'input'"
REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "background": ((False,), NOT_KEPT),
    "conversation": ((), NOT_KEPT),
    "max_tokens": ((), "here it is called 'max_output_tokens'"),
    "n": ((1,), "a response is one answer; /v1/chat/completions gives n choices of one prompt"),
    "previous_response_id": ((), NOT_KEPT),
    "prompt": ((), "this server keeps no prompts; send it in 'input' and 'instructions'"),
    "store": ((False,), "this server keeps no responses; leave it out, or send false"),
    "truncation": (("disabled",), "an input that is too long is refused; leave it out, or send 'disabled'"),
}
"""Field to the values with which it asks for nothing, and why it has no other."""


class FunctionTool(Schema):
    """A tool in its flat form."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, object] = Field(default_factory=dict)
    strict: bool = False

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "allowed_callers": (["direct"],),
        "async": (False,),
        "defer_loading": (False,),
        "output_schema": (),
    }


class NamedTool(Schema):
    type: Literal["function"]
    name: str


class FlatToolChoice(Schema):
    """As in a chat, with the names one step further out."""

    type: Literal["none", "auto", "required", "function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[NamedTool] | None = None

    @model_validator(mode="after")
    def check_type(self) -> Self:
        for field, kind in (("name", "function"), ("mode", "allowed_tools"), ("tools", "allowed_tools")):
            given, name = getattr(self, field) is not None, f"tool_choice.{field}"
            if given and self.type != kind:
                raise RequestError(f"Unknown parameter: '{name}'.", param=name, code="unknown_parameter")
            if not given and self.type == kind:
                raise RequestError(
                    f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
                )
        return self


class TextFormat(Schema):
    """What the text must be, in its flat form; the chat's schema knows what belongs to which type."""

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
    """None is made: the thoughts themselves are in the answer."""
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
"""The second is for thoughts that are not shown; ours are, and are taken back as they are."""

MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class ResponsesRequest(StructuredFields, GeneratingFields):
    ignored = (IGNORED_FIELDS - {"metadata"}) | {"max_tool_calls"}
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "access_programs": (),
        "context_management": ([],),
        "image": (),
        "kv_transfer_params": (),
        "moderation": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory",),
    }

    input: Annotated[list[InputItem], BeforeValidator(read_input), Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextField = TextField()
    reasoning: ReasoningField = ReasoningField()
    tools: list[FunctionTool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: Annotated[FlatToolChoice | None, BeforeValidator(as_choice)] = None
    parallel_tool_calls: bool = True
    include: list[Included] = Field(default_factory=list)
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    metadata: dict[MetadataKey, MetadataValue] = Field(default_factory=dict, max_length=16)
    chat_template_kwargs: dict[str, object] = Field(default_factory=dict)
    include_reasoning: bool = True
    separate_reasoning: bool = True

    @property
    def logprobs(self) -> bool:
        return "message.output_text.logprobs" in self.include

    @classmethod
    def _asks_nothing(cls, name: str, value: object) -> bool:
        if name not in REFUSED:
            return super()._asks_nothing(name, value)
        passing, why = REFUSED[name]
        if any(type(value) is type(allowed) and value == allowed for allowed in passing):
            return True
        raise RequestError(
            f"Unsupported parameter: '{name}' is not supported by this server: {why}.",
            param=name,
            code="unsupported_parameter",
        )

    @model_validator(mode="after")
    def check_top_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise RequestError(
                "Invalid 'top_logprobs': 'include' must have 'message.output_text.logprobs' when it is given.",
                param="top_logprobs",
            )
        return self

    @model_validator(mode="after")
    def check_continuous_usage(self) -> Self:
        if self.continuous_usage:
            raise RequestError(
                "Unsupported parameter: 'stream_options.continuous_usage_stats' is for chunks; here the last event "
                "has the usage.",
                param="stream_options.continuous_usage_stats",
                code="unsupported_parameter",
            )
        return self

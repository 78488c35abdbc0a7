"""The body of `POST /v1/chat/completions`: the messages, the tools, the tool choice, and the fields of the answer."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from motet.api.generation.answer_form import check_named_logprobs
from motet.api.generation.group_schema import check_keep
from motet.api.generation.request_fields import TokenIds, in_range, neutral_except
from motet.api.http.body import check_json_strings
from motet.api.http.failure import (
    FieldError,
    invalid_value,
    missing_parameter,
    unknown_parameter,
    unsupported_parameter,
)
from motet.api.http.schema import UNICODE, JsonObject, Neutral, OpenSchema, Schema, TextOrObject, check_num_values
from motet.api.openai.openai_request import OpenAIRequest
from motet.errors import RequestError
from motet.text.tools.tool_format import Tool, ToolMode, ToolRules


class ContentPart(OpenSchema):
    """A part of a message, or of an item of a Response. Only text is accepted; the error names any other kind."""

    texts: ClassVar[tuple[str, ...]] = ("text",)
    """The types of parts that are text, in addition to a refusal."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def check_type(self) -> Self:
        if self.type not in (*self.texts, "refusal"):
            raise FieldError(_no_text, None, self.type)
        name = "refusal" if self.type == "refusal" else "text"
        if getattr(self, name) is None:
            raise FieldError(missing_parameter, name)
        return self


def _no_text(param: str, kind: str) -> RequestError:
    message = f"Invalid content part '{param}': '{kind}' is not supported by this model; only text is."
    return RequestError(message, param=param, code="unsupported_value")


def joined(parts: Sequence[ContentPart]) -> str:
    return "\n".join((part.text if part.text is not None else part.refusal) or "" for part in parts)


class CalledFunction(OpenSchema):
    name: str
    arguments: TextOrObject = "{}"
    """JSON text as in the answer, or the object."""


class CalledTool(OpenSchema):
    """A tool call of an earlier turn, as in the answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, object]:
        return self.model_dump(exclude={"id"} if self.id is None else None)


def as_parts(kind: str, part: type[ContentPart]) -> BeforeValidator:
    """Returns a validator that turns content that is a string into a part of this type."""

    def parts(content: object) -> object:
        return [{"type": kind, "text": content}] if isinstance(content, str) else content

    return BeforeValidator(parts, json_schema_input_type=str | list[part])  # type: ignore[valid-type]


CLIENT_LINES = re.compile(r"(?:x-anthropic-[a-z0-9-]+:[^\n]*(?:\n|\Z))+")
"""Lines at the start of a system message that are not for the model. Claude Code sends `x-anthropic-billing-header`,
also through proxies that convert its requests. Its value changes with each request, so no prefix would be cached."""


class Message(OpenSchema):
    """One turn. A client can send an answer of this server as a message without changing it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[ContentPart], as_parts("text", ContentPart)] = Field(default_factory=list)
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[CalledTool] = Field(default_factory=list)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of `reasoning_content`, which takes precedence."""

    refused = frozenset({"audio", "function_call"})

    @model_validator(mode="after")
    def check_content_given(self) -> Self:
        """Checks that there is content, which can be empty."""
        if "content" not in self.model_fields_set and not self.tool_calls and self.role != "assistant":
            raise FieldError(missing_parameter, "content")
        return self

    @property
    def text(self) -> str:
        return joined(self.content)

    def for_template(self) -> dict[str, object]:
        """Returns the turn for the chat template, with its parts joined to one string."""
        content = self.text if self.content else (self.refusal or "")
        if self.role in ("system", "developer") and (lines := CLIENT_LINES.match(content)):
            content = content[lines.end() :]
        turn = {
            "role": self.role,
            "content": content,
            "name": self.name,
            "reasoning_content": self.reasoning if self.reasoning_content is None else self.reasoning_content,
            "tool_calls": [call.for_template() for call in self.tool_calls] or None,
            "tool_call_id": self.tool_call_id,
        }
        return {key: value for key, value in turn.items() if value is not None}


MAX_TOOLS = 128

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
"""OpenAI allows 64 characters, Anthropic 128. Names of MCP servers' tools are often longer than 64."""


class FunctionField(OpenSchema):
    name: FunctionName
    description: Annotated[str, UNICODE] | None = None
    parameters: JsonObject = Field(default_factory=dict)
    """A JSON Schema of an object. Without one, the function has no parameters."""
    strict: bool = False

    @model_validator(mode="after")
    def check_parameters(self) -> Self:
        kind = self.parameters.get("type", "object")
        if kind != "object":
            raise FieldError(partial(_no_object, kind=repr(kind)), "parameters", self.name)
        return self


NO_PARAMETERS: Mapping[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}


def _no_object(param: str, name: str, *, kind: str) -> RequestError:
    rule = f"schema must be a JSON Schema of 'type: \"object\"', got 'type: {kind}'"
    message = f"Invalid schema for function '{name}': '{param}': {rule}."
    return RequestError(message, param=param, code="invalid_function_parameters")


class ToolField(OpenSchema):
    type: Literal["function"]
    function: FunctionField

    def for_template(self) -> dict[str, object]:
        """Returns the tool for the chat template: the fields that the client sent, in the order of models' training."""
        function = self.function.model_dump(include={"name", "description", "parameters"}, exclude_defaults=True)
        return {"type": self.type, "function": function}

    def tool(self) -> Tool:
        parameters = self.function.parameters
        return Tool(
            name=self.function.name,
            parameters={"type": "object", **parameters} if parameters else NO_PARAMETERS,
            strict=self.function.strict,
        )


class NamedFunction(Schema):
    name: str


class AllowedFunction(OpenSchema):
    name: str


class AllowedTool(OpenSchema):
    """A tool by its name. Clients also send its complete definition, as OpenAI describes it."""

    type: Literal["function"]
    function: AllowedFunction


class AllowedTools(Schema):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool] = Field(min_length=1)


ToolModeName = Literal["none", "auto", "required"]


def as_choice(value: object) -> object:
    """Turns a tool choice that is a string into an object."""
    return {"type": value} if isinstance(value, str) else value


class ToolChoice(Schema):
    """`none`, `auto`, `required`, one function, or some functions (`allowed_tools`) with `auto` or `required`."""

    type: Literal["none", "auto", "required", "function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def check_type(self) -> Self:
        for field in ("function", "allowed_tools"):
            if (given := getattr(self, field) is not None) != (self.type == field):
                raise FieldError(unknown_parameter if given else missing_parameter, field)
        return self

    @property
    def mode(self) -> ToolMode | None:
        """The mode; None if no tool can be called."""
        if self.allowed_tools is not None:
            return ToolMode(self.allowed_tools.mode)
        if self.function is not None:
            return ToolMode.REQUIRED
        return None if self.type == "none" else ToolMode(self.type)

    def named(self) -> Iterator[tuple[str, str]]:
        """Yields the name of each named tool, and its path in the body."""
        if self.function is not None:
            yield self.function.name, "tool_choice.function.name"
        for number, tool in enumerate(self.allowed_tools.tools if self.allowed_tools else ()):
            yield tool.function.name, f"tool_choice.allowed_tools.tools[{number}].function.name"


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


MAX_TEMPLATE_CHARS = 65_536
NOT_VARIABLES = frozenset({"chat_template", "messages", "tokenize"})
"""Names that `chat_template_kwargs` cannot have: arguments of functions that render templates."""


ToolFields = Annotated[list[ToolField], Field(max_length=MAX_TOOLS)]
ToolChoiceField = Annotated[
    ToolChoice | None, BeforeValidator(as_choice, json_schema_input_type=ToolModeName | ToolChoice)
]


def check_tools(tools: Sequence[ToolField], choice: ToolChoice | None) -> None:
    """Raises FieldError for two tools of one name, and for a choice of other tools."""
    names: set[str] = set()
    for number, tool in enumerate(tools):
        if tool.function.name in names:
            param = f"tools[{number}].function.name"
            raise FieldError(invalid_value, param, f"there is a tool named '{tool.function.name}' already")
        names.add(tool.function.name)
    if choice is not None and not names and choice.type not in ("none", "auto"):
        raise FieldError(invalid_value, "tool_choice", "it is only allowed when 'tools' are specified")
    for name, param in choice.named() if choice is not None else ():
        if name not in names:
            raise FieldError(invalid_value, param, f"there is no tool named '{name}' in 'tools'")


def tool_rules_of(tools: Sequence[ToolField], choice: ToolChoice | None, *, parallel: bool) -> ToolRules | None:
    """Returns the rules for tool calls, if any can be made. A named function is called exactly once, as in OpenAI's
    API. `parallel`: True if a choice can have several calls."""
    mode = choice.mode if choice else ToolMode.AUTO
    if not tools or mode is None:
        return None
    every = tuple(tool.tool() for tool in tools)
    named = {name for name, _ in choice.named()} if choice else set()
    return ToolRules(
        callable=tuple(tool for tool in every if tool.name in named) if named else every,
        mode=mode,
        parallel=parallel and (choice is None or choice.function is None),
    )


class ChatPrompt(Schema):
    """The fields from which the prompt is made, for an answer and for `/tokenize`."""

    aliases: ClassVar[Mapping[str, str]] = {"chat_template_args": "chat_template_kwargs"}  # in Dynamo

    messages: list[Message] = Field(default_factory=list)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    """True if the tokenizer adds its special tokens to the chat template's. None means False for a chat."""
    chat_template: Annotated[str, UNICODE] | None = Field(None, min_length=1, max_length=MAX_TEMPLATE_CHARS)
    """Template in place of the model's, where the server trusts its clients."""
    chat_template_kwargs: Annotated[dict[str, object], AfterValidator(check_num_values)] = Field(default_factory=dict)
    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = None
    """Variable of the chat template, as in LMDeploy; `chat_template_kwargs` takes precedence."""
    documents: list[JsonObject] = Field(default_factory=list)
    """Documents for the chat template."""
    tools: ToolFields = Field(default_factory=list)
    tool_choice: ToolChoiceField = None
    """None means `auto` if there are tools."""
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def check_template_kwargs(self) -> Self:
        for name in NOT_VARIABLES & self.chat_template_kwargs.keys():
            raise FieldError(unsupported_parameter, f"chat_template_kwargs.{name}", "is not a variable of a template")
        return self

    @model_validator(mode="after")
    def check_arguments(self) -> Self:
        """Limits the JSON in the arguments of earlier calls."""
        check_json_strings(
            {
                f"messages[{i}].tool_calls[{j}].function.arguments": call.function.arguments
                for i, message in enumerate(self.messages)
                for j, call in enumerate(message.tool_calls)
                if isinstance(call.function.arguments, str)
            }
        )
        return self

    @model_validator(mode="after")
    def check_end_of_prompt(self) -> Self:
        given = "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt
        if self.continue_final_message and given:
            why = "it and 'add_generation_prompt' cannot both be true"
            raise FieldError(invalid_value, "continue_final_message", why)
        return self

    @model_validator(mode="after")
    def check_tool_fields(self) -> Self:
        check_tools(self.tools, self.tool_choice)
        return self

    @property
    def tool_rules(self) -> ToolRules | None:
        return tool_rules_of(self.tools, self.tool_choice, parallel=self.parallel_tool_calls)

    def turns(self) -> list[dict[str, object]]:
        """Returns the messages for the chat template, without system messages that have only `CLIENT_LINES`."""
        turns = [message.for_template() for message in self.messages]
        given = zip(self.messages, turns, strict=True)
        shown = [turn for message, turn in given if turn["content"] or not CLIENT_LINES.match(message.text)]
        return shown or turns


MAX_BUDGET = 2**31 - 1


class ChatRequest(ChatPrompt, OpenAIRequest):
    has_token_ids = True
    aliases: ClassVar[Mapping[str, str]] = {**ChatPrompt.aliases, **OpenAIRequest.aliases}
    ignored = OpenAIRequest.ignored
    refused = OpenAIRequest.refused | {
        *("audio", "moderation", "prediction", "prompt_cache_options", "web_search_options")
    }
    neutral: ClassVar[Neutral] = {
        **neutral_except("return_token_offsets", "thinking_token_budget"),
        "best_of": (1,),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"], []),
        "verbosity": ("medium",),
    }
    advice: ClassVar[Mapping[str, str]] = {
        "function_call": "use 'tool_choice'",
        "functions": "use 'tools'",
        **OpenAIRequest.advice,
    }

    messages: list[Message] = Field(min_length=1)
    prompt_token_ids: TokenIds | None = None
    """The prompt, in place of the rendered messages."""
    logprobs: bool = False
    top_logprobs: int | None = in_range("logprobs", None)
    thinking_token_budget: int | None = Field(None, ge=-1, le=MAX_BUDGET)
    """Maximum number of tokens of reasoning; -1 means no maximum."""
    include_reasoning: bool = True
    """True if the answer has the model's reasoning."""
    separate_reasoning: bool = True
    """True if reasoning is separated from the content."""

    @property
    def thinking_budget(self) -> int | None:
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives to each token; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def without_answer(self) -> Self:
        """Returns the request without the fields about an answer, for a prefill."""
        return self.model_copy(update={"n": 1, "logprobs": False, "top_logprobs": None, "prompt_logprobs": None})

    def planned(self) -> Self:
        unset: dict[str, object] = {"messages": [], "prompt_token_ids": None, "documents": []}
        unset["chat_template_kwargs"] = {}
        return super().planned().model_copy(update=unset)

    @model_validator(mode="after")
    def check_top_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise FieldError(invalid_value, "top_logprobs", "'logprobs' must be true when 'top_logprobs' is given")
        check_named_logprobs(self, self.num_logprobs)
        check_keep(self, self.group)
        return self

"""The tools of a chat and which of them may be called, in OpenAI's shapes."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from motet.api.schema_shared import Schema, schema_text
from motet.errors import RequestError
from motet.text.tools.base import Tool, ToolMode, ToolRules

MAX_TOOLS = 128

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class FunctionField(Schema):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, object] = Field(default_factory=dict)
    """A JSON Schema of an object; empty: any object."""
    strict: bool = False

    def check(self, param: str) -> None:
        """Raises `RequestError`; `param` is where the function stands in the body."""
        for name, told in (("description", self.description), ("parameters", self.parameters)):
            schema_text(told, f"{param}.{name}")
        kind = self.parameters.get("type", "object")
        if kind != "object":
            raise RequestError(
                f"Invalid schema for function '{self.name}': schema must be a JSON Schema of 'type: \"object\"', "
                f"got 'type: {kind!r}'.",
                param=f"{param}.parameters",
                code="invalid_function_parameters",
            )


class ToolField(Schema):
    type: Literal["function"]
    function: FunctionField

    def for_template(self) -> dict[str, object]:
        """In the order in which templates are trained with; what the client left out stays away."""
        told: dict[str, object] = {"name": self.function.name}
        if self.function.description is not None:
            told["description"] = self.function.description
        if self.function.parameters:
            told["parameters"] = self.function.parameters
        return {"type": self.type, "function": told}

    def tool(self) -> Tool:
        parameters = self.function.parameters
        return Tool(
            name=self.function.name,
            parameters={"type": "object", **parameters} if parameters else {},
            strict=self.function.strict,
        )


class NamedFunction(Schema):
    name: str


class NamedTool(Schema):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Schema):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


def as_choice(value: object) -> object:
    """A choice that is one word, as the object that it stands for."""
    return {"type": value} if isinstance(value, str) else value


class ToolChoice(Schema):
    """One of three words, one function, or some of them and one of two words."""

    type: Literal["none", "auto", "required", "function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def check_type(self) -> Self:
        for field in ("function", "allowed_tools"):
            given = getattr(self, field) is not None
            if given == (self.type == field):
                continue
            name = f"tool_choice.{field}"
            if given:
                raise RequestError(f"Unknown parameter: '{name}'.", param=name, code="unknown_parameter")
            raise RequestError(f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")
        return self

    @property
    def mode(self) -> ToolMode | None:
        """None: no tool may be called."""
        if self.allowed_tools is not None:
            return ToolMode(self.allowed_tools.mode)
        if self.function is not None:
            return ToolMode.REQUIRED
        return None if self.type == "none" else ToolMode(self.type)

    def named(self) -> Iterator[tuple[str, str]]:
        """(tool, where it is named in the body)."""
        if self.function is not None:
            yield self.function.name, "tool_choice.function.name"
        for number, tool in enumerate(self.allowed_tools.tools if self.allowed_tools else ()):
            yield tool.function.name, f"tool_choice.allowed_tools.tools[{number}].function.name"


class ToolFields(Schema):
    tools: list[ToolField] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(as_choice)] = None
    """None: `auto` if there are tools."""
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def check_tools(self) -> Self:
        names: set[str] = set()
        for number, tool in enumerate(self.tools):
            param = f"tools[{number}].function"
            tool.function.check(param)
            if tool.function.name in names:
                raise RequestError(
                    f"Invalid '{param}.name': there is a tool named '{tool.function.name}' already.",
                    param=f"{param}.name",
                    code="invalid_value",
                )
            names.add(tool.function.name)
        if self.tool_choice is not None:
            _check_choice(self.tool_choice, names)
        return self

    @property
    def tool_rules(self) -> ToolRules | None:
        """None: no tool may be called."""
        choice = self.tool_choice
        mode = choice.mode if choice else ToolMode.AUTO
        if not self.tools or mode is None:
            return None
        tools = tuple(tool.tool() for tool in self.tools)
        named = {name for name, _ in choice.named()} if choice else set()
        return ToolRules(
            callable=tuple(tool for tool in tools if tool.name in named) if named else tools,
            mode=mode,
            parallel=self.parallel_tool_calls,
        )

    @property
    def told_tools(self) -> list[dict[str, object]]:
        """What the chat template is told: nothing where no tool may be called, and else of all."""
        return [] if self.tool_rules is None else [tool.for_template() for tool in self.tools]


def _check_choice(choice: ToolChoice, names: set[str]) -> None:
    if not names and choice.type not in ("none", "auto"):
        raise RequestError(
            "Invalid 'tool_choice': it is only allowed when 'tools' are specified.",
            param="tool_choice",
            code="invalid_value",
        )
    for name, param in choice.named():
        if name not in names:
            raise RequestError(
                f"Invalid '{param}': there is no tool named '{name}' in 'tools'.", param=param, code="invalid_value"
            )

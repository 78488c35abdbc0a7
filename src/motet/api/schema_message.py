"""The messages of a chat: what was said, thought and called in earlier turns."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from motet.api.schema_parts import ContentPart, check_parts, joined
from motet.api.schema_shared import Schema
from motet.errors import RequestError


class CalledFunction(Schema):
    name: str
    arguments: str | dict[str, object] = "{}"
    """JSON as it was answered, or what it says."""

    ignored = frozenset({"parsed_arguments"})


class CalledTool(Schema):
    """A call of an earlier turn, as it was answered then; what clients add to it is passed over."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    ignored = frozenset({"index"})

    def for_template(self) -> dict[str, object]:
        call: dict[str, object] = {
            "type": self.type,
            "function": {"name": self.function.name, "arguments": self.function.arguments},
        }
        return call if self.id is None else {"id": self.id, **call}


def _as_parts(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Message(Schema):
    """One turn. An answer of this server may be sent back as it came."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[ContentPart], BeforeValidator(_as_parts)] = Field(default_factory=list)
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[CalledTool] = Field(default_factory=list)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name for the same; the first one wins."""

    ignored = frozenset({"annotations", "parsed"})
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"audio": (), "function_call": ()}

    def check(self, param: str) -> None:
        """Raises `RequestError`; `param` is where the message stands in the body."""
        check_parts(self.content, f"{param}.content")
        if not self.content and not self.tool_calls and self.role != "assistant":
            raise RequestError(
                f"Missing required parameter: '{param}.content'.",
                param=f"{param}.content",
                code="missing_required_parameter",
            )

    @property
    def text(self) -> str:
        return joined(self.content)

    def for_template(self) -> dict[str, object]:
        """The turn as the chat template gets it, its parts joined to one string."""
        turn: dict[str, object] = {"role": self.role, "content": self.text if self.content else (self.refusal or "")}
        thought = self.reasoning if self.reasoning_content is None else self.reasoning_content
        optional: dict[str, object] = {
            "name": self.name,
            "reasoning_content": thought,
            "tool_calls": [call.for_template() for call in self.tool_calls] or None,
            "tool_call_id": self.tool_call_id,
        }
        return turn | {key: value for key, value in optional.items() if value is not None}

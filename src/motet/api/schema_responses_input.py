"""The items of `input` of `POST /v1/responses`: what was said, thought, called and answered in earlier turns.

Items of an output may be sent back as they came.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationError

from motet.api.failure import validation_failure
from motet.api.schema_parts import ContentPart, check_parts
from motet.api.schema_shared import Schema
from motet.errors import RequestError

OF_ITEMS = frozenset({"id", "status"})


class TextPart(ContentPart):
    """Of a message, or of a tool's output."""

    texts = ("input_text", "output_text")
    ignored = frozenset({"annotations", "logprobs", "parsed"})


def _as_parts(content: object) -> object:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


TextParts = Annotated[list[TextPart], BeforeValidator(_as_parts)]
"""A string, or parts."""


class MessageInput(Schema):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextParts

    ignored = OF_ITEMS | {"phase"}

    def check(self, param: str) -> None:
        """Raises `RequestError`; `param` is where the item stands in the body."""
        check_parts(self.content, f"{param}.content")


class CallInput(Schema):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    ignored = OF_ITEMS | {"parsed_arguments"}
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "async": (False,),
        "caller": ({"type": "direct"},),
        "namespace": (),
    }

    def check(self, param: str) -> None:
        """Nothing that its fields do not say."""


class CallOutputInput(Schema):
    type: Literal["function_call_output"]
    call_id: str
    output: TextParts

    ignored = OF_ITEMS | {"name"}
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"caller": ({"type": "direct"},), "namespace": ()}

    def check(self, param: str) -> None:
        """Raises `RequestError`; `param` is where the item stands in the body."""
        check_parts(self.output, f"{param}.output")


class Thought(Schema):
    type: Literal["reasoning_text", "text"]
    text: str


class Summary(Schema):
    type: Literal["summary_text"]
    text: str


class ReasoningInput(Schema):
    type: Literal["reasoning"]
    content: list[Thought] = Field(default_factory=list)
    summary: list[Summary] = Field(default_factory=list)
    """Of a model whose thoughts were not shown; read where there is no `content`."""

    ignored = OF_ITEMS
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"encrypted_content": ()}

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary)

    def check(self, param: str) -> None:
        """Nothing that its fields do not say."""


InputItem = MessageInput | CallInput | CallOutputInput | ReasoningInput

ITEMS: Mapping[str, type[InputItem]] = {
    "message": MessageInput,
    "function_call": CallInput,
    "function_call_output": CallOutputInput,
    "reasoning": ReasoningInput,
}
KNOWN = ", ".join(map(repr, ITEMS))


def read_input(value: object) -> object:
    """The items of a field that has a string or a list. Raises `RequestError` that names the item at fault."""
    if isinstance(value, str):
        return [MessageInput.model_validate({"role": "user", "content": value})]
    if not isinstance(value, list):
        return value
    return [_item(item, number) for number, item in enumerate(value)]


def _item(value: object, number: int) -> InputItem:
    """Read by the type it has, so errors are about the fields of that type."""
    param = f"input[{number}]"
    if not isinstance(value, dict):
        raise RequestError(
            f"Invalid type for '{param}': expected an object or a string in place of the list.",
            param=param,
            code="invalid_type",
        )
    form = _form_of(value, param)
    try:
        item = form.model_validate(value)
    except ValidationError as error:
        raise validation_failure(
            [{**problem, "loc": ("body", "input", number, *problem["loc"])} for problem in error.errors()]
        ) from error
    except RequestError as error:
        raise RequestError(error.message, param=f"{param}.{error.param}", code=error.code) from error
    item.check(param)
    return item


def _form_of(value: Mapping[str, object], param: str) -> type[InputItem]:
    kind = value.get("type")
    form = ITEMS.get("message" if kind is None else kind) if isinstance(kind, str | None) else None
    if form is not None:
        return form
    advice = "it keeps no items, so send the item itself" if kind == "item_reference" else f"only {KNOWN} are"
    raise RequestError(
        f"Unsupported item '{param}': {kind!r} is not supported by this server: {advice}.",
        param=f"{param}.type",
        code="unsupported_value",
    )

"""Content that is a string or a list of parts, as messages of a chat and items of a Response have it."""

from collections.abc import Sequence
from typing import ClassVar

from pydantic import ConfigDict

from motet.api.schema_shared import Schema
from motet.errors import RequestError

REFUSAL = "refusal"


class ContentPart(Schema):
    """One part; only text is read, so that any other kind can be named in the answer."""

    model_config = ConfigDict(extra="allow")

    texts: ClassVar[tuple[str, ...]] = ("text",)
    """Types of parts that are text; a refusal is, everywhere."""

    type: str
    text: str | None = None
    refusal: str | None = None

    def check(self, param: str) -> None:
        """Raises `RequestError`; `param` is where the part stands in the body."""
        if self.type not in (*self.texts, REFUSAL):
            raise RequestError(
                f"Invalid content part '{param}': '{self.type}' is not supported by this model; only text is.",
                param=param,
                code="unsupported_value",
            )
        name, said = (REFUSAL, self.refusal) if self.type == REFUSAL else ("text", self.text)
        if said is None:
            missing = f"{param}.{name}"
            raise RequestError(
                f"Missing required parameter: '{missing}'.", param=missing, code="missing_required_parameter"
            )
        for extra in self.model_extra or {}:
            raise RequestError(
                f"Unknown parameter: '{param}.{extra}'.", param=f"{param}.{extra}", code="unknown_parameter"
            )


def check_parts(parts: Sequence[ContentPart], param: str) -> None:
    """Raises `RequestError`; `param` is where the list stands in the body."""
    for number, part in enumerate(parts):
        part.check(f"{param}[{number}]")


def joined(parts: Sequence[ContentPart]) -> str:
    return "\n".join((part.text if part.text is not None else part.refusal) or "" for part in parts)

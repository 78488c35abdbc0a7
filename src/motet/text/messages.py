"""Chat messages as templates expect them: plain text content, roles the template knows."""

from collections.abc import Mapping, Sequence

from motet.errors import RequestError

Message = Mapping[str, object]
"""One message of a conversation, as the client sent it."""


def for_template(messages: Sequence[Message], *, knows_developer: bool) -> list[dict[str, object]]:
    """Copies with text parts joined by a newline, and role `developer` as `system` where the template needs it."""
    if not messages:
        raise RequestError("messages is empty; at least one message is needed", param="messages")
    return [_plain(message, f"messages[{i}]", knows_developer) for i, message in enumerate(messages)]


def _plain(message: Message, param: str, knows_developer: bool) -> dict[str, object]:
    plain = dict(message)
    if plain.get("role") == "developer" and not knows_developer:
        plain["role"] = "system"
    content = plain.get("content")
    if content is None:
        plain["content"] = None if plain.get("tool_calls") else ""
    elif isinstance(content, list | tuple):
        plain["content"] = "\n".join(_part_text(part, f"{param}.content[{i}]") for i, part in enumerate(content))
    elif not isinstance(content, str):
        raise RequestError(
            f"{param}.content is {type(content).__name__}; a string or a list of text parts is needed",
            param=f"{param}.content",
        )
    return plain


def _part_text(part: object, param: str) -> str:
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) and kind == "text" else None
    if not isinstance(text, str):
        raise RequestError(
            f"{param} is of type {kind!r}; this model takes text only: {{'type': 'text', 'text': ...}}", param=param
        )
    return text

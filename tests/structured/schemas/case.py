"""A case of the suite: a JSON Schema, texts that follow it and texts that do not."""

from dataclasses import dataclass

Schema = dict[str, object]


@dataclass(frozen=True)
class SchemaCase:
    """A schema with texts."""

    name: str
    schema: Schema
    good: tuple[str, ...]
    """Texts that follow it."""
    bad: tuple[str, ...]
    """Texts that do not follow it, each because of what the case is about."""
    ask: str = "Give me an example."
    """The question that a model is asked with this schema."""
    few: bool = False
    """True if there are so few answers that several choices may well agree."""


def closed(**properties: object) -> Schema:
    """Returns the schema of an object with exactly these properties, as OpenAI's strict mode wants it."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def of_value(
    name: str,
    schema: object,
    good: tuple[str, ...],
    bad: tuple[str, ...],
    *,
    ask: str = SchemaCase.ask,
    few: bool = False,
) -> SchemaCase:
    """Returns the case of an object with one value, `v`; `good` and `bad` are texts of that value."""
    texts, others = (tuple(f'{{"v":{value}}}' for value in values) for values in (good, bad))
    return SchemaCase(name, closed(v=schema), texts, others, ask, few)


def text(max_length: int = 20) -> Schema:
    """Returns the schema of a string so short that a small model does not run out of tokens."""
    return {"type": "string", "maxLength": max_length}

"""What the suite holds of a JSON Schema: the schema, and texts of which it is known whether they follow it."""

from dataclasses import dataclass

Schema = dict[str, object]


@dataclass(frozen=True)
class SchemaCase:
    """One schema."""

    name: str
    schema: Schema
    good: tuple[str, ...]
    """Texts that follow it."""
    bad: tuple[str, ...]
    """Texts that do not, each by what the case is about."""
    ask: str = "Give me an example."
    """What a model is asked for it."""
    few: bool = False
    """There are only a few answers, so several choices may well agree."""


def closed(**properties: object) -> Schema:
    """An object with exactly these properties, as OpenAI's strict mode wants it."""
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
    """An object with one value in it, `v`; `good` and `bad` are texts of the value."""
    texts, others = (tuple(f'{{"v":{value}}}' for value in values) for values in (good, bad))
    return SchemaCase(name, closed(v=schema), texts, others, ask, few)


def text(max_length: int = 20) -> Schema:
    """A string that ends before it has used up a small model's tokens."""
    return {"type": "string", "maxLength": max_length}

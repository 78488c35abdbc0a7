"""A case of the suite: a JSON Schema, texts that follow it, and texts that do not."""

from dataclasses import dataclass

Schema = dict[str, object]


@dataclass(frozen=True)
class SchemaCase:
    """A schema with texts."""

    name: str
    schema: Schema
    good: tuple[str, ...]
    """Texts that follow the schema."""
    bad: tuple[str, ...]
    """Texts that do not follow the schema. Each violates the keyword that the case tests."""
    message: str = "Give me an example."
    """User message for a request to a model with this schema."""
    few_answers: bool = False
    """True if the schema allows so few answers that several choices can be equal."""


def closed(**properties: object) -> Schema:
    """Returns the schema of an object with exactly these properties, in the form that OpenAI's strict mode requires."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def of_value(
    name: str,
    schema: object,
    good: tuple[str, ...],
    bad: tuple[str, ...],
    *,
    message: str = SchemaCase.message,
    few_answers: bool = False,
) -> SchemaCase:
    """Returns the case of an object with one value, `v`; `good` and `bad` are texts of this value."""
    good_texts, bad_texts = (tuple(f'{{"v":{value}}}' for value in values) for values in (good, bad))
    return SchemaCase(name, closed(v=schema), good_texts, bad_texts, message, few_answers)


def text(max_length: int = 20) -> Schema:
    """Returns the schema of a string so short that a small model does not reach `max_tokens`."""
    return {"type": "string", "maxLength": max_length}

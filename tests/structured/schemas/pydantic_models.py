"""Schemas in the form that pydantic generates, with titles, defaults, `$defs` and unions."""

from datetime import date
from enum import Enum
from typing import Annotated, Literal, Optional

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from tests.structured.schemas.case import SchemaCase

Short = Annotated[str, StringConstraints(max_length=16)]


class Level(Enum):
    """Pydantic gives an enum its own entry in `$defs`."""

    LOW = "low"
    HIGH = "high"


class Address(BaseModel):
    """A model that is part of another one."""

    street: Short
    city: Short
    country: Annotated[str, StringConstraints(pattern="^[A-Z]{2}$")] = "DE"


class Person(BaseModel):
    """Optional fields have defaults and can be omitted."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, StringConstraints(min_length=1, max_length=16)]
    born: date | None = None
    address: Address


class Email(BaseModel):
    """One of two kinds of action."""

    kind: Literal["email"]
    to: Short


class Call(BaseModel):
    """The other kind of action."""

    kind: Literal["call"]
    minutes: Annotated[int, Field(ge=1, le=60)]


class Plan(BaseModel):
    """A union with a tag, its kind (`oneOf` with a discriminator)."""

    model_config = ConfigDict(extra="forbid")

    action: Annotated[Email | Call, Field(discriminator="kind")]
    level: Level


class Measured(BaseModel):
    """Numbers, a tuple and a map."""

    model_config = ConfigDict(extra="forbid")

    share: Annotated[float, Field(ge=0, le=1)]
    place: tuple[Annotated[int, Field(ge=-90, le=90)], Annotated[int, Field(ge=-180, le=180)]]
    counts: Annotated[dict[str, Annotated[int, Field(ge=0, le=99)]], Field(max_length=2)]


class Folder(BaseModel):
    """A model that contains itself."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, StringConstraints(max_length=10)]
    parent: Optional["Folder"] = None


class Invoice(BaseModel):
    """A list of models."""

    class Line(BaseModel):
        """A model inside a model."""

        model_config = ConfigDict(extra="forbid")

        what: Short
        cents: Annotated[int, Field(gt=0, lt=100_000)]

    model_config = ConfigDict(extra="forbid")

    number: Annotated[str, StringConstraints(pattern=r"^INV-\d{4}$")]
    lines: Annotated[list[Line], Field(min_length=1, max_length=2)]
    paid: bool


def case(model: type[BaseModel], ask: str, good: tuple[str, ...], bad: tuple[str, ...]) -> SchemaCase:
    return SchemaCase(f"pydantic_{model.__name__.lower()}", model.model_json_schema(), good, bad, ask)


CASES = (
    case(
        Person,
        "Who are you, and where do you live?",
        (
            '{"name":"Ada","address":{"street":"Main","city":"Rome"}}',
            '{"name":"Ada","born":null,"address":{"street":"","city":""}}',
        ),
        (
            '{"name":"","address":{"street":"Main","city":"Rome"}}',
            '{"name":"Ada","born":"1815","address":{"street":"","city":""}}',
        ),
    ),
    case(
        Plan,
        "What should I do?",
        (
            '{"action":{"kind":"call","minutes":5},"level":"low"}',
            '{"action":{"kind":"email","to":"Bob"},"level":"high"}',
        ),
        ('{"action":{"kind":"call","minutes":61},"level":"low"}', '{"action":{"kind":"visit"},"level":"low"}'),
    ),
    case(
        Measured,
        "What was measured?",
        ('{"share":0.5,"place":[52,-13],"counts":{"cats":2}}', '{"share":0,"place":[0,0],"counts":{}}'),
        (
            '{"share":1.5,"place":[52,13],"counts":{}}',
            '{"share":0.5,"place":[52],"counts":{}}',
            '{"share":0.5,"place":[52,13],"counts":{"a":-1}}',
        ),
    ),
    case(
        Folder,
        "A folder inside another one.",
        ('{"name":"a"}', '{"name":"a","parent":{"name":"b","parent":null}}'),
        ('{"parent":null}', '{"name":"a","parent":{"name":1}}'),
    ),
    case(
        Invoice,
        "An invoice for a hammer.",
        ('{"number":"INV-0042","lines":[{"what":"hammer","cents":1999}],"paid":true}',),
        (
            '{"number":"INV-42","lines":[{"what":"hammer","cents":1999}],"paid":true}',
            '{"number":"INV-0042","lines":[],"paid":true}',
        ),
    ),
)

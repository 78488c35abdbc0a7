"""What a request may say of the form of its answers: OpenAI's `response_format`, vLLM's `structured_outputs`."""

import json
from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from motet.api.schema_shared import SamplingFields, Schema, schema_text
from motet.constraint import Grammar, GrammarKind
from motet.errors import RequestError

ANY_OBJECT = '{"type":"object"}'

FORMER_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}
"""Of vLLM before 0.12 -> the key in `structured_outputs`."""


class Form(NamedTuple):
    """What answers must be, and how errors speak of it."""

    grammar: Grammar
    param: str
    """Of the field that says so, inside the fields of sampling."""
    called: str = ""
    """`schema for response_format 'answer'`; empty: as `param`."""


class JsonSchemaFormat(Schema):
    """`strict` changes nothing: a schema is always held to, or refused."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    strict: bool = False
    wanted: dict[str, object] = Field(alias="schema")


class ResponseFormat(Schema):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def check_schema_given(self) -> Self:
        if (self.type == "json_schema") is not (self.json_schema is not None):
            name = "response_format.json_schema"
            what = "Missing required" if self.json_schema is None else f"With type '{self.type}' there is no"
            raise RequestError(f"{what} parameter: '{name}'.", param=name, code="missing_required_parameter")
        return self

    @property
    def form(self) -> Form | None:
        if self.json_schema is not None:
            called = f"schema for response_format '{self.json_schema.name}'"
            return Form(_json(self.json_schema.wanted, "response_format"), "response_format", called)
        if self.type == "json_object":
            return Form(Grammar(GrammarKind.JSON, ANY_OBJECT), "response_format")
        return None


class StructuredOutputs(Schema):
    ignored = frozenset({"disable_fallback"})
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "disable_additional_properties": (False,),
        "disable_any_whitespace": (False,),
        "structural_tag": (),
        "whitespace_pattern": (),
    }

    json_wanted: dict[str, object] | str | None = Field(None, alias="json")
    regex: str | None = Field(None, min_length=1)
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = Field(None, min_length=1)
    json_object: bool | None = None

    @model_validator(mode="after")
    def check_one_given(self) -> Self:
        if self.json_object is False or len(self._given()) != 1:
            raise RequestError(
                "Invalid 'structured_outputs': exactly one of json, regex, choice, grammar and json_object (which can "
                "only be true) must be given.",
                param="structured_outputs",
                code="invalid_value",
            )
        return self

    def _given(self) -> dict[str, object]:
        names = {"json": self.json_wanted, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        return {name: value for name, value in {**names, "json_object": self.json_object}.items() if value is not None}

    @property
    def form(self) -> Form:
        ((name, value),) = self._given().items()
        param = f"structured_outputs.{name}"
        if isinstance(value, str):
            schema_text(value, param)
            kinds = {"json": GrammarKind.JSON, "regex": GrammarKind.REGEX, "grammar": GrammarKind.LARK}
            grammar = Grammar(kinds[name], value)
        elif isinstance(value, list):
            grammar = Grammar(GrammarKind.CHOICE, json.dumps(value, ensure_ascii=False))
        else:
            grammar = Grammar(GrammarKind.JSON, ANY_OBJECT) if value is True else _json(value, param)
        return Form(grammar, param)


class StructuredFields(SamplingFields):
    """The fields of sampling, and what every choice must be."""

    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse_former_names(cls, data: object) -> object:
        given = {name for name, value in data.items() if value is not None} if isinstance(data, dict) else set()
        for name in sorted(given & FORMER_NAMES.keys()):
            raise RequestError(
                f"Unsupported parameter: '{name}' is now 'structured_outputs': {{'{FORMER_NAMES[name]}': ...}}.",
                param=name,
                code="unsupported_parameter",
            )
        return data

    @property
    def form(self) -> Form | None:
        return None if self.structured_outputs is None else self.structured_outputs.form


class FormattedFields(StructuredFields):
    """Those of the routes whose answers are texts."""

    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def check_one_form(self) -> Self:
        if self.structured_outputs is not None and self.response_format is not None:
            raise RequestError(
                "'response_format' and 'structured_outputs' both say what an answer must be; give one of them.",
                param="structured_outputs",
            )
        return self

    @property
    def form(self) -> Form | None:
        return super().form if self.response_format is None else self.response_format.form


def _json(schema: object, param: str) -> Grammar:
    return Grammar(GrammarKind.JSON, schema_text(schema, param))

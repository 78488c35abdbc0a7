"""The form that a request requires of its answers: `response_format`, or vLLM's `structured_outputs`."""

import json
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

import msgspec
from pydantic import BeforeValidator, Field, model_validator

from motet.api.generation.request_fields import SamplingFields
from motet.api.http.failure import FieldError, invalid_value, missing_parameter, unsupported_parameter
from motet.api.http.schema import UNICODE, JsonObject, Neutral, Schema, TextOrObject, schema_text
from motet.grammar.limits import MAX_SOURCE_CHARS
from motet.grammar.schema.client_schema import closed_source
from motet.types import Grammar, GrammarKind

ANY_OBJECT = '{"type":"object"}'


class AnswerForm(NamedTuple):
    """The grammar that answers must follow, and how errors name it."""

    grammar: Grammar
    param: str
    """The field with the form, relative to the sampling fields."""
    called: str = ""
    """The name in errors, such as `schema for response_format 'answer'`; empty for `param`."""
    closed: bool = False
    """True if the client requires closed objects, whatever the server's setting is."""
    clients_own: bool = False
    """True if the client sent the rules of the grammar themselves, and not a schema, a regex or choices."""

    def closed_for(self, *, closes_objects: bool) -> "AnswerForm":
        """Returns the form with the objects of its JSON schema closed, if the client or the server requires this."""
        if self.grammar.kind is not GrammarKind.JSON or not (self.closed or closes_objects):
            return self
        return self._replace(grammar=msgspec.structs.replace(self.grammar, source=closed_source(self.grammar.source)))


class JsonSchemaFormat(Schema):
    """A JSON schema. `strict` has no effect: answers always follow the schema, or the request is refused."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    strict: bool = False
    definition: JsonObject = Field(alias="schema")


class ResponseFormat(Schema):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    definition: JsonObject | None = Field(None, alias="schema")
    """The schema of `json_object`, as llama.cpp and hosted APIs accept it; None for any object."""

    @model_validator(mode="after")
    def check_schema_given(self) -> Self:
        if self.definition is not None and self.type != "json_object":
            raise FieldError(unsupported_parameter, "schema", f"cannot be combined with type '{self.type}'")
        if self.json_schema is None and self.type == "json_schema":
            raise FieldError(missing_parameter, "json_schema")
        if self.json_schema is not None and self.type != "json_schema":
            raise FieldError(unsupported_parameter, "json_schema", f"cannot be combined with type '{self.type}'")
        return self

    @property
    def form(self) -> AnswerForm | None:
        if self.json_schema is not None:
            grammar = Grammar(GrammarKind.JSON, schema_text(self.json_schema.definition))
            return AnswerForm(grammar, "response_format", f"schema for response_format '{self.json_schema.name}'")
        if self.definition is not None:
            grammar = Grammar(GrammarKind.JSON, schema_text(self.definition))
            return AnswerForm(grammar, "response_format.schema")
        if self.type == "json_object":
            return AnswerForm(Grammar(GrammarKind.JSON, ANY_OBJECT), "response_format")
        return None


def sglang_form(regex: str | None, ebnf: str | None) -> AnswerForm | None:
    """Returns the form that SGLang's fields describe. At most one of the two is given."""
    if regex is not None:
        return AnswerForm(Grammar(GrammarKind.REGEX, regex), "regex")
    return None if ebnf is None else AnswerForm(Grammar(GrammarKind.LARK, ebnf), "ebnf", clients_own=True)


def _check_choices(value: object) -> object:
    if isinstance(value, list) and sum(len(text) for text in value if isinstance(text, str)) > MAX_SOURCE_CHARS:
        raise FieldError(invalid_value, None, f"the choices can have at most {MAX_SOURCE_CHARS} characters together")
    return value


class StructuredOutputs(Schema):
    ignored = frozenset({"disable_fallback"})
    refused = frozenset({"structural_tag", "whitespace_pattern"})
    neutral: ClassVar[Neutral] = {"disable_any_whitespace": (False,)}

    disable_additional_properties: bool = False
    json_schema: TextOrObject | None = Field(None, alias="json")
    regex: Annotated[str, UNICODE] | None = Field(None, min_length=1)
    choice: Annotated[list[str], UNICODE, BeforeValidator(_check_choices)] | None = Field(None, min_length=1)
    grammar: Annotated[str, UNICODE] | None = Field(None, min_length=1)
    json_object: bool | None = None

    @model_validator(mode="after")
    def check_one_given(self) -> Self:
        if self.json_object is False or len(self._given()) != 1:
            why = "exactly one of json, regex, choice, grammar and json_object (which can only be true) must be given"
            raise FieldError(invalid_value, None, why)
        return self

    def _given(self) -> dict[str, object]:
        return self.model_dump(by_alias=True, exclude_unset=True, exclude={"disable_additional_properties"})

    @property
    def form(self) -> AnswerForm:
        ((name, value),) = self._given().items()
        param, closed = f"structured_outputs.{name}", self.disable_additional_properties
        if isinstance(value, str):
            kinds = {"json": GrammarKind.JSON, "regex": GrammarKind.REGEX, "grammar": GrammarKind.LARK}
            return AnswerForm(Grammar(kinds[name], value), param, closed=closed, clients_own=name == "grammar")
        if isinstance(value, list):
            return AnswerForm(Grammar(GrammarKind.CHOICE, json.dumps(value, ensure_ascii=False)), param)
        source = ANY_OBJECT if value is True else schema_text(value)
        return AnswerForm(Grammar(GrammarKind.JSON, source), param, closed=closed)


def _none_if_empty(value: object) -> object:
    """Reads an object as no form if it has neither a form nor an option that is on."""
    if not isinstance(value, dict):
        return value
    off = (inner is None or (inner is False and name != "json_object") for name, inner in value.items())
    return None if all(off) else value


StructuredOutputsField = Annotated[StructuredOutputs | None, BeforeValidator(_none_if_empty)]


FORM_KEYS = ("json", "regex", "choice", "grammar", "json_object")
FORMER_NAMES = frozenset(f"guided_{key}" for key in FORM_KEYS)
"""The fields that vLLM had before 0.12 in place of `structured_outputs`."""


def refuse_former_names(cls: type[Schema], data: object) -> object:
    """Checks that a body has none of `FORMER_NAMES`."""
    for key in FORM_KEYS:
        name = f"guided_{key}"
        if isinstance(data, dict) and data.get(name) is not None:
            raise FieldError(unsupported_parameter, name, f"is now 'structured_outputs': {{'{key}': ...}}")
    return data


class StructuredFields(Schema):
    """The form of answers, on routes whose answers are not OpenAI's texts."""

    former = FORMER_NAMES

    structured_outputs: StructuredOutputsField = None

    _refuse_former_names = model_validator(mode="before")(refuse_former_names)

    @property
    def form(self) -> AnswerForm | None:
        return None if self.structured_outputs is None else self.structured_outputs.form


def check_named_logprobs(sampling: SamplingFields, num_top: int | None) -> None:
    """Refuses `logprob_token_ids` in a request without log-probabilities."""
    if sampling.logprob_token_ids and num_top is None:
        raise FieldError(invalid_value, "logprob_token_ids", "'logprobs' must be set when it is given")


class FormattedFields(Schema):
    """The form of answers on OpenAI's routes."""

    former = FORMER_NAMES

    structured_outputs: StructuredOutputsField = None

    response_format: ResponseFormat | None = None
    regex: Annotated[str, UNICODE] | None = Field(None, min_length=1)
    ebnf: Annotated[str, UNICODE] | None = Field(None, min_length=1)
    """SGLang's names of `structured_outputs.regex` and `structured_outputs.grammar`."""

    _refuse_former_names = model_validator(mode="before")(refuse_former_names)

    @model_validator(mode="after")
    def check_one_form(self) -> Self:
        if len(given := self._given_forms()) > 1:
            why = f"it cannot be combined with '{given[0]}'; only one of both can be given"
            raise FieldError(invalid_value, given[1], why, given[0])
        return self

    def _given_forms(self) -> list[str]:
        fields = ("response_format", "structured_outputs", "regex", "ebnf")
        return [name for name in fields if getattr(self, name) is not None]

    @property
    def has_form(self) -> bool:
        return bool(self._given_forms())

    def planned(self) -> Self:
        """Returns the request without the fields that only its plan reads and that can have thousands of objects. A
        group holds its request as long as it runs or is kept, and full garbage collections visit all objects."""
        return self.model_copy(update={"structured_outputs": None, "response_format": None})

    @property
    def form(self) -> AnswerForm | None:
        if self.response_format is not None:
            return self.response_format.form
        if self.regex is not None or self.ebnf is not None:
            return sglang_form(self.regex, self.ebnf)
        return None if self.structured_outputs is None else self.structured_outputs.form

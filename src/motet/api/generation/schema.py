"""What the bodies of all routes have in common: strict types, and no field that is accepted and then not honoured.

A field whose value is null counts as absent. Any other is either a field of the model, or ignored (listed in
docs/api.md), or accepted only with a value that asks for nothing, or refused with a 400 that names it. Inside messages,
items and tools (`OpenSchema`) a field that the model lacks is ignored.
"""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    create_model,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from motet.api.http.failure import (
    FieldError,
    invalid_type,
    invalid_value,
    missing_parameter,
    unknown_parameter,
    unsupported_parameter,
)
from motet.errors import RequestError
from motet.grammar.limits import MAX_SOURCE_CHARS
from motet.types import MAX_NAMED_LOGPROBS, SAMPLING_FIELDS, VERBATIM_FIELDS, Grammar, GrammarKind, SamplingParams

IGNORED_FIELDS = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields that OpenAI's clients send and a server of one model has no use for."""

IGNORED_OF_VLLM = frozenset({"routed_experts_prompt_start"})
"""Fields of vLLM about data that no answer of ours has."""

MAX_SEED = 2**64 - 1
MIN_SEED = -(2**63)
MAX_VERSION_CHARS = 200
"""Characters in the name of a version of weights."""
MAX_KEEP_S = 3600.0
"""Seconds for which a prompt may be kept."""
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_CHARS_TOGETHER = 8192
"""Their search is prepared in 7 ms."""
MAX_STOP_TOKENS = 1024
MAX_BIASES = 16_384
MAX_ALLOWED = 16_384
MAX_FIELDS = 256
"""More than any schema has: an object with more has unknown ones, and is not read to its end."""

T = TypeVar("T")


def _failing_fast(core: CoreSchema) -> CoreSchema:
    """Makes lists stop at their first error, the only one that is told: a list may have millions."""
    parts: list[object] = [core]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            if part.get("type") == "list":
                part["fail_fast"] = True
            parts += part.values()
        elif isinstance(part, list | tuple):
            parts += part
    return core


class Schema(BaseModel):
    """A JSON object of a request: exact types, no unknown names, nulls dropped."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    ignored: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Fields not supported, and the values with which they ask for nothing."""
    refused: ClassVar[frozenset[str]] = frozenset()
    """Fields not supported, whatever their value."""
    advice: ClassVar[Mapping[str, str]] = {}
    """The end of the error for such a field, if naming the accepted values is not enough."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        return _failing_fast(handler(source))

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Adds the fields that are no field of the model, and yet accepted."""
        told = handler(core)
        inside = handler.resolve_ref_schema(told).setdefault("properties", {})
        for name in sorted(cls.ignored):
            inside[name] = {"description": "Accepted, and not used."}
        for name, values in cls.neutral.items():
            inside[name] = {"enum": list(values), "description": "Another value is refused."}
        return told

    @model_validator(mode="before")
    @classmethod
    def drop_what_asks_for_nothing(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:
            raise FieldError(unknown_parameter, next(name for name in data if name not in cls.model_fields))
        return {name: value for name, value in data.items() if value is not None and not cls._asks_nothing(name, value)}

    @classmethod
    def _asks_nothing(cls, name: str, value: object) -> bool:
        if name in cls.ignored:
            return True
        if name not in cls.neutral and name not in cls.refused:
            return False
        passing = cls.neutral.get(name, ())
        if any(type(value) is type(allowed) and value == allowed for allowed in passing):
            return True
        others = f" (other than {' or '.join(map(repr, passing))})" if passing else ""
        why = f": {cls.advice[name]}" if name in cls.advice else others
        raise FieldError(unsupported_parameter, name, f"is not supported by this server{why}")


class OpenSchema(Schema):
    """A message, an item, a tool, or a part of one. Clients add fields of their own, which are ignored."""

    model_config = ConfigDict(extra="ignore")


def ignored_paths(given: object, body: object, *, path: str = "") -> Iterator[str]:
    """Yields where the JSON of a request has fields that its checked body ignores, or that an `OpenSchema` lacks."""
    if isinstance(given, dict) and isinstance(body, Schema):
        for name, value in given.items():
            inner = f"{path}.{name}" if path else name
            if name in type(body).model_fields:
                yield from ignored_paths(value, getattr(body, name), path=inner)
            elif value is not None and (isinstance(body, OpenSchema) or name in body.ignored):
                yield inner
    elif isinstance(given, list) and isinstance(body, list):
        for number, (value, read) in enumerate(zip(given, body, strict=False)):
            yield from ignored_paths(value, read, path=f"{path}[{number}]")


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


def _stop_strings(value: object) -> object:
    if isinstance(value, list) and sum(len(one) for one in value if isinstance(one, str)) > MAX_STOP_CHARS_TOGETHER:
        raise FieldError(invalid_value, None, f"the strings may have {MAX_STOP_CHARS_TOGETHER} characters together")
    return [value] if isinstance(value, str) else value


StopStrings = Annotated[
    list[StopString],
    BeforeValidator(_stop_strings, json_schema_input_type=StopString | list[StopString]),
    Field(max_length=MAX_STOP_STRINGS),
]
"""One string or a list of up to 64."""


def schema_text(schema: object) -> str:
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def check_told(value: T) -> T:
    try:
        (value if isinstance(value, str) else schema_text(value)).encode()
    except UnicodeEncodeError as exc:
        raise FieldError(invalid_value, None, "it is not valid Unicode") from exc
    except (RecursionError, ValueError) as exc:
        raise FieldError(invalid_value, None, f"it cannot be read: {exc}") from exc
    return value


TOLD = AfterValidator(check_told)
"""Refuses a field with half a surrogate pair in a string, which JSON can write and no engine can be sent: for fields
that somebody else reads, so that no schema looks at the strings inside them."""

JsonObject = Annotated[dict[str, object], TOLD]


def _text_or_object(value: object) -> object:
    if not isinstance(value, str | dict):
        raise FieldError(invalid_type, None, "a string or an object")
    return check_told(value)


TextOrObject = Annotated[str | dict[str, object], PlainValidator(_text_or_object)]


TokenId = Annotated[int, Field(ge=0)]


def _token_ids(value: object) -> object:
    """Checks them one by one in Python, which lets other threads run: pydantic would not, for 100 ms and a million."""
    if not isinstance(value, list):
        raise FieldError(invalid_type, None, "an array of token ids, which are integers")
    for number, token in enumerate(value):
        if type(token) is not int:
            raise FieldError(invalid_type, number, "a token id, which is an integer")
        if token < 0:
            raise FieldError(invalid_value, number, "token ids are not negative")
    return value


TokenIds = Annotated[list[int], PlainValidator(_token_ids, json_schema_input_type=list[TokenId])]


def _text_or_number(value: object) -> object:
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise FieldError(invalid_type, None, "a string or an integer")
    return value


SessionId = Annotated[str | int | None, PlainValidator(_text_or_number, json_schema_input_type=str | int)]


class StreamOptions(Schema):
    ignored = frozenset({"include_obfuscation"})

    include_usage: bool = False
    continuous_usage_stats: bool = False


def in_range(name: str, default: object) -> Any:
    """Returns a field with the range of the field of `SamplingParams` that has this name."""
    declared = SAMPLING_FIELDS[name]
    at_least, above = (None, declared.low) if declared.above_low else (declared.low, None)
    return Field(default, ge=at_least, gt=above, le=declared.high)


if TYPE_CHECKING:

    class DrawingFields(Schema):
        """For mypy: the fields that code reads by name."""

        temperature: float = 1.0
        top_p: float = 1.0
else:
    DrawingFields = create_model(
        "DrawingFields",
        __base__=Schema,
        **{
            name: (get_type_hints(SamplingParams)[name], in_range(name, getattr(SamplingParams(max_tokens=1), name)))
            for name in VERBATIM_FIELDS
        },
    )
    """The fields of `SamplingParams` that requests have under the same name and with the same meaning."""


def _check_biases(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise FieldError(invalid_value, None, f"it may have {MAX_BIASES} tokens, and has {len(value)}")
    return value


class SamplingFields(DrawingFields):
    """How choices are drawn and where they end; the same names on every route that generates."""

    n: int = Field(1, ge=1)
    top_k: int = Field(0, ge=-1)
    """-1 and 0: off."""
    logit_bias: Annotated[dict[str, Annotated[float, in_range("logit_bias", ...)]], BeforeValidator(_check_biases)] = (
        Field(default_factory=dict)
    )
    """Token id, as a JSON key -> the number that is added to its logit."""
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1, max_length=MAX_ALLOWED)
    """The only tokens that can be drawn; None: all."""
    logprob_token_ids: list[TokenId] = Field(default_factory=list, max_length=MAX_NAMED_LOGPROBS)
    """Tokens whose log-probabilities are told beside the drawn one's, in place of the likeliest."""
    seed: int | None = Field(None, ge=MIN_SEED, le=MAX_SEED)
    stop: StopStrings = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=MAX_STOP_TOKENS)
    min_tokens: int = Field(0, ge=0)
    max_tokens: int | None = Field(None, ge=1)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def max_tokens_asked(self) -> int | None:
        return self.max_tokens

    def listed(self, num_top: int | None) -> int | None:
        """Returns how many tokens are told beside a drawn one if `num_top` of the likeliest are asked for; None without
        log-probabilities. Named tokens come behind the drawn one itself."""
        return 1 + len(self.logprob_token_ids) if self.logprob_token_ids and num_top is not None else num_top

    def refuse_without_logprobs(self, num_top: int | None) -> None:
        if self.logprob_token_ids and num_top is None:
            raise FieldError(invalid_value, "logprob_token_ids", "'logprobs' must be set when it is given")


class StreamingFields(Schema):
    """How an answer is sent."""

    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise FieldError(_only_streamed, "stream_options")
        return self

    def refuse_if_streamed(self, param: str, asked: object) -> None:
        """Refuses a field that only whole answers have room for; None: it is not asked for."""
        if self.stream and asked is not None:
            raise FieldError(invalid_value, param, "it cannot be used with 'stream'")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats


def _only_streamed(param: str) -> RequestError:
    return RequestError(f"The '{param}' parameter is only allowed when 'stream' is enabled.", param=param)


class GeneratingFields(StreamingFields):
    """The fields beside the sampling: the model, streaming, and how the group is scheduled and cached."""

    model: str | None = None
    session_id: SessionId = None
    """The conversation, for clients that cannot set the header `x-session-id`, which wins; -1: none, as in LMDeploy."""
    cache_salt: Annotated[str, TOLD] = ""
    keep_s: float = Field(0.0, ge=0, le=MAX_KEEP_S)
    priority: int = Field(0, ge=MIN_SEED, le=2**63 - 1)
    kv_transfer_params: object = None
    """`kv_params` reads it: the values that it may have depend on the server."""


ANY_OBJECT = '{"type":"object"}'

FORMER_PREFIX = "guided_"
"""vLLM before 0.12 had fields of this prefix in place of the keys of `structured_outputs`."""


class AnswerForm(NamedTuple):
    """The grammar that answers must follow, and how errors name it."""

    grammar: Grammar
    param: str
    """The name of the field that says so, inside the fields of sampling."""
    called: str = ""
    """`schema for response_format 'answer'`; empty: as `param`."""
    closed: bool = False
    """True if the client wants objects closed, whatever the server does."""
    clients_own: bool = False
    """True if the client wrote the rules of the grammar."""


class JsonSchemaFormat(Schema):
    """`strict` changes nothing: answers always follow the schema, or it is refused."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    strict: bool = False
    wanted: JsonObject = Field(alias="schema")


class ResponseFormat(Schema):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def check_schema_given(self) -> Self:
        if self.json_schema is None and self.type == "json_schema":
            raise FieldError(missing_parameter, "json_schema")
        if self.json_schema is not None and self.type != "json_schema":
            raise FieldError(unsupported_parameter, "json_schema", f"does not go with type '{self.type}'")
        return self

    @property
    def form(self) -> AnswerForm | None:
        if self.json_schema is not None:
            called = f"schema for response_format '{self.json_schema.name}'"
            return AnswerForm(
                Grammar(GrammarKind.JSON, schema_text(self.json_schema.wanted)), "response_format", called
            )
        if self.type == "json_object":
            return AnswerForm(Grammar(GrammarKind.JSON, ANY_OBJECT), "response_format")
        return None


def _check_choices(value: object) -> object:
    if isinstance(value, list) and sum(len(one) for one in value if isinstance(one, str)) > MAX_SOURCE_CHARS:
        raise FieldError(invalid_value, None, f"the choices may have {MAX_SOURCE_CHARS} characters together")
    return value


class StructuredOutputs(Schema):
    ignored = frozenset({"disable_fallback"})
    refused = frozenset({"structural_tag", "whitespace_pattern"})
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"disable_any_whitespace": (False,)}

    disable_additional_properties: bool = False
    json_wanted: TextOrObject | None = Field(None, alias="json")
    regex: Annotated[str, TOLD] | None = Field(None, min_length=1)
    choice: Annotated[list[str], TOLD, BeforeValidator(_check_choices)] | None = Field(None, min_length=1)
    grammar: Annotated[str, TOLD] | None = Field(None, min_length=1)
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


class StructuredFields(SamplingFields):
    """The fields of sampling, and the grammar that every choice must follow."""

    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse_former_names(cls, data: object) -> object:
        for key in ("json", "regex", "choice", "grammar", "json_object"):
            name = FORMER_PREFIX + key
            if isinstance(data, dict) and data.get(name) is not None:
                raise FieldError(unsupported_parameter, name, f"is now 'structured_outputs': {{'{key}': ...}}")
        return data

    @property
    def form(self) -> AnswerForm | None:
        return None if self.structured_outputs is None else self.structured_outputs.form


class FormattedFields(StructuredFields):
    """The fields of the routes whose answers are texts."""

    response_format: ResponseFormat | None = None
    prompt_logprobs: int | None = in_range("prompt_logprobs", None)
    """Alternatives beside each token of the prompt."""

    @model_validator(mode="after")
    def check_one_form(self) -> Self:
        if self.structured_outputs is not None and self.response_format is not None:
            why = "it and 'response_format' both say what an answer must be; give one of them"
            raise FieldError(invalid_value, "structured_outputs", why, "response_format")
        return self

    @property
    def form(self) -> AnswerForm | None:
        return super().form if self.response_format is None else self.response_format.form

"""What the bodies of all routes have in common: strict types, and no field that is read and then not honoured.

A field whose value is null counts as absent. Of the rest, a name is either a field of the model, or ignored (listed in
docs/api.md), or accepted only with a value that asks for nothing, or refused with a 400 that names it.
"""

import json
from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from motet.errors import RequestError

IGNORED_FIELDS = frozenset({"user", "metadata", "service_tier", "prompt_cache_key", "safety_identifier"})
"""What OpenAI's clients send and a server of one model has no use for."""

MAX_SEED = 2**64 - 1
MIN_SEED = -(2**63)
MAX_STOP_STRINGS = 4


class Schema(BaseModel):
    """A JSON object of a request: exact types, no unknown names, nulls dropped."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    ignored: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Fields not supported, and the values with which they ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def drop_what_asks_for_nothing(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None and not cls._asks_nothing(name, value)}

    @classmethod
    def _asks_nothing(cls, name: str, value: object) -> bool:
        if name in cls.ignored:
            return True
        if name not in cls.neutral:
            return False
        if any(type(value) is type(allowed) and value == allowed for allowed in cls.neutral[name]):
            return True
        raise RequestError(
            f"Unsupported parameter: '{name}' is not supported by this server{_or_leave(cls.neutral[name])}.",
            param=name,
            code="unsupported_parameter",
        )


def _or_leave(allowed: tuple[object, ...]) -> str:
    return f" (other than {' or '.join(repr(value) for value in allowed)})" if allowed else ""


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


StopStrings = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    BeforeValidator(_as_list),
    Field(min_length=1, max_length=MAX_STOP_STRINGS),
]
"""One string or a list of 1 to 4."""


def _check_unicode(text: str, field: ValidationInfo) -> str:
    """JSON can write half a surrogate pair, and no engine can be sent one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"Invalid '{field.field_name}': it is not valid Unicode: {error.reason} at {error.start}.",
            param=field.field_name,
            code="invalid_value",
        ) from error
    return text


def schema_text(schema: object, param: str) -> str:
    """A JSON Schema, or what else is told beside it, as text. Raises `RequestError` naming `param`: strings inside it
    have not been looked at, and JSON can write half a surrogate pair."""
    try:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        text.encode()
    except UnicodeEncodeError as exc:
        raise RequestError(f"Invalid '{param}': it is not valid Unicode.", param=param, code="invalid_value") from exc
    except (RecursionError, ValueError) as exc:
        raise RequestError(f"Invalid '{param}': the schema cannot be read: {exc}.", param=param) from exc
    return text


TokenId = Annotated[int, Field(ge=0)]


class StreamOptions(Schema):
    ignored = frozenset({"include_obfuscation"})

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(Schema):
    """How choices are drawn and where they end; the same names on every route that generates."""

    n: int = Field(1, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    """-1 and 0: off."""
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = {}
    """Token id, as a JSON key, to what is added to its logit."""
    seed: int | None = Field(None, ge=MIN_SEED, le=MAX_SEED)
    stop: StopStrings = []
    stop_token_ids: list[TokenId] = []
    min_tokens: int = Field(0, ge=0)
    max_tokens: int | None = Field(None, ge=1)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def max_tokens_asked(self) -> int | None:
        return self.max_tokens


class StreamingFields(Schema):
    """How an answer is sent."""

    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "The 'stream_options' parameter is only allowed when 'stream' is enabled.", param="stream_options"
            )
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class GeneratingFields(StreamingFields):
    """What surrounds the sampling: the model, streaming, and how the group is scheduled and cached."""

    model: str | None = None
    cache_salt: Annotated[str, AfterValidator(_check_unicode)] = ""
    priority: int = Field(0, ge=MIN_SEED, le=2**63 - 1)
    kv_transfer_params: object = None
    """Read by `kv_params`: what it may be depends on the server."""

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

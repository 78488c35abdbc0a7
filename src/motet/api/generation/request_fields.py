"""The fields of a request that do not concern sampling: streaming, the model, scheduling and caching."""

from typing import Annotated, Self

from pydantic import Field, PlainValidator, model_validator

from motet.api.http.failure import FieldError, invalid_type, invalid_value
from motet.api.http.schema import UNICODE, Schema
from motet.errors import RequestError

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
"""Fields that OpenAI's clients send and that have no meaning for this server."""

IGNORED_OF_VLLM = frozenset({"routed_experts_prompt_start"})
"""Fields of vLLM about data that Motet's answers do not have."""

MIN_PRIORITY, MAX_PRIORITY = -(2**63), 2**63 - 1
MAX_KEEP_S = 3600.0
"""Maximum time in seconds for which a prompt is kept."""


def _text_or_number(value: object) -> object:
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise FieldError(invalid_type, None, "a string or an integer")
    return value


SessionId = Annotated[str | int | None, PlainValidator(_text_or_number, json_schema_input_type=str | int)]


class StreamOptions(Schema):
    ignored = frozenset({"include_obfuscation"})

    include_usage: bool = False
    continuous_usage_stats: bool = False


class StreamingFields(Schema):
    """How an answer is sent: in one piece, or streamed."""

    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise FieldError(_only_streamed, "stream_options")
        return self

    def refuse_if_streamed(self, param: str, value: object) -> None:
        """Refuses a field that only unstreamed answers support. `value`: None if the request does not use it."""
        if self.stream and value is not None:
            raise FieldError(invalid_value, param, "it cannot be used with 'stream'")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats


def _only_streamed(param: str) -> RequestError:
    return RequestError(f"The '{param}' parameter is only allowed when 'stream' is enabled.", param=param)


class RequestFields(Schema):
    """The model, and how the groups of a request are scheduled and cached."""

    model: str | None = None
    session_id: SessionId = None
    """The conversation, for clients that cannot set the header `x-session-id`, which takes precedence. -1 means none,
    as in LMDeploy."""
    cache_salt: Annotated[str, UNICODE] = ""
    keep_s: float = Field(0.0, ge=0, le=MAX_KEEP_S)
    priority: int = Field(0, ge=MIN_PRIORITY, le=MAX_PRIORITY)
    kv_transfer_params: object = None
    """Read by `kv_params`, since the values that it can have depend on the server."""

"""The fields of requests, with the same names, ranges and defaults on every route that generates."""

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator

from motet.api.http.failure import FieldError, invalid_type, invalid_value, unsupported_parameter
from motet.api.http.schema import UNICODE, JsonObject, Neutral, Schema, as_integer, schema_text
from motet.engine_info import FIRST_VERSION
from motet.errors import RequestError
from motet.text.choice import WeightSpan
from motet.types import MAX_NAMED_LOGPROBS, SAMPLING_FIELDS, SamplingParams

MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_TOTAL_STOP_CHARS = 8192
"""Maximum number of characters of all stop strings. Preparing the search for them takes 7 ms."""
MAX_STOP_TOKENS = 1024
MAX_BIASES = 16_384
MAX_ALLOWED = 16_384

DEFAULTS = SamplingParams(max_tokens=1)


def declared(name: str) -> Any:
    """Returns a field with the range and the default of the field of `SamplingParams` that has this name."""
    return in_range(name, getattr(DEFAULTS, name))


def in_range(name: str, default: object) -> Any:
    """Returns a field with the range of the field of `SamplingParams` that has this name."""
    field = SAMPLING_FIELDS[name]
    at_least, above = (None, field.low) if field.above_low else (field.low, None)
    return Field(default, ge=at_least, gt=above, le=field.high)


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


def _stop_strings(value: object) -> object:
    if isinstance(value, list) and sum(len(text) for text in value if isinstance(text, str)) > MAX_TOTAL_STOP_CHARS:
        raise FieldError(
            invalid_value, None, f"the strings can have at most {MAX_TOTAL_STOP_CHARS} characters together"
        )
    return [value] if isinstance(value, str) else value


StopStrings = Annotated[
    list[StopString],
    BeforeValidator(_stop_strings, json_schema_input_type=StopString | list[StopString]),
    Field(max_length=MAX_STOP_STRINGS),
]
"""One string, or a list of strings."""


TokenId = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=MIN_SEED, le=MAX_SEED)]


def check_token_ids(value: object) -> object:
    """Checks token ids in Python, which lets other threads run: pydantic would hold the GIL for 100 ms per million."""
    if not isinstance(value, list):
        raise FieldError(invalid_type, None, "an array of token ids, which are integers")
    for number, token in enumerate(value):
        if type(token) is not int:
            return _whole_token_ids(value)
        if token < 0:
            raise FieldError(invalid_value, number, "token ids are not negative")
    return value


def _whole_token_ids(value: list[object]) -> object:
    """Returns the token ids of a list in which some are decimals, such as 2.0."""
    whole = list(map(as_integer, value))
    for number, token in enumerate(whole):
        if type(token) is not int:
            raise FieldError(invalid_type, number, "a token id, which is an integer")
    return check_token_ids(whole)


TokenIds = Annotated[list[int], PlainValidator(check_token_ids, json_schema_input_type=list[TokenId])]


def _check_biases(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise FieldError(invalid_value, None, f"it can have at most {MAX_BIASES} tokens, and has {len(value)}")
    return value


SAMPLING_NAMES: Mapping[str, str] = {
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "random_seed": "seed",
    "sampling_seed": "seed",
    "vllm_xargs": "extra_args",
}
"""The names of fields in LMDeploy, SGLang and vLLM."""
NO_REPETITION_DETECTION = "use 'repetition_penalty', 'frequency_penalty' or 'max_tokens'"
TO_THE_LIMIT = -1
"""The `truncate_prompt_tokens` that shortens a prompt to what the model's length leaves for it."""


MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 256, 8192
"""Limits on the number of bad words, and on their characters together."""
MAX_EXTRA_CHARS = 16_384
TRANSFER_PARAMS = frozenset({"ec_transfer_params", "kv_transfer_params"})
"""Members of `extra_args` that would bypass the checks of tickets."""


def _check_bad_words(words: list[str]) -> list[str]:
    for number, word in enumerate(words):
        if not word.strip():
            raise FieldError(invalid_value, number, "a word cannot be empty")
    if sum(map(len, words)) > MAX_BAD_WORD_CHARS:
        raise FieldError(invalid_value, None, f"the words can have at most {MAX_BAD_WORD_CHARS} characters together")
    return words


def _check_extra_args(values: dict[str, object]) -> dict[str, object]:
    if names := TRANSFER_PARAMS & values.keys():
        raise FieldError(invalid_value, None, f"it cannot have {' or '.join(sorted(names))}")
    if len(schema_text(values)) > MAX_EXTRA_CHARS:
        raise FieldError(invalid_value, None, f"its JSON can have at most {MAX_EXTRA_CHARS} characters")
    return values


class SamplingFields(Schema):
    """The fields that control the sampling of tokens and the ends of choices."""

    aliases = SAMPLING_NAMES

    # The fields of `SamplingParams` that a request has unchanged (`motet.types.VERBATIM_FIELDS`).
    temperature: float = declared("temperature")
    top_p: float = declared("top_p")
    min_p: float = declared("min_p")
    presence_penalty: float = declared("presence_penalty")
    frequency_penalty: float = declared("frequency_penalty")
    repetition_penalty: float = declared("repetition_penalty")
    ignore_eos: bool = declared("ignore_eos")

    # Fields from which `generation.plan` computes a field of `SamplingParams`, the choices, or the rules of their text.
    n: int = Field(1, ge=1)
    top_k: int = Field(0, ge=-1)
    """-1 and 0 mean off."""
    logit_bias: Annotated[dict[str, Annotated[float, in_range("logit_bias", ...)]], BeforeValidator(_check_biases)] = (
        Field(default_factory=dict)
    )
    """Token id, as a JSON key -> the number that is added to its logit."""
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1, max_length=MAX_ALLOWED)
    """The only tokens that can be sampled; None allows all."""
    logprob_token_ids: list[TokenId] = Field(default_factory=list, max_length=MAX_NAMED_LOGPROBS)
    """Tokens whose log-probabilities are reported with each sampled token, instead of the most likely tokens."""
    seed: Seed | None = None
    stop: StopStrings = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=MAX_STOP_TOKENS)
    bad_words: Annotated[
        list[Annotated[str, UNICODE]], Field(max_length=MAX_BAD_WORDS), AfterValidator(_check_bad_words)
    ] = Field(default_factory=list)
    """Texts that must not be generated."""
    extra_args: Annotated[JsonObject, AfterValidator(_check_extra_args)] = Field(default_factory=dict)
    """Arguments for extensions of vLLM workers."""
    min_tokens: int = Field(0, ge=0)
    max_tokens: int | None = Field(None, ge=1)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def requested_max_tokens(self) -> int | None:
        """The maximum number of output tokens of a choice; None if the request does not limit it."""
        return self.max_tokens


class TruncationFields(Schema):
    """Fields that shorten prompts which are too long, as in vLLM."""

    truncate_prompt_tokens: int | None = Field(None, ge=TO_THE_LIMIT)
    """Maximum number of tokens of a prompt."""
    truncation_side: Literal["left", "right"] = "left"
    """The end of the prompt from which tokens are removed."""

    @model_validator(mode="after")
    def check_truncation(self) -> Self:
        if self.truncate_prompt_tokens == 0:
            why = f"expected 1 or more, or {TO_THE_LIMIT} for the model's length"
            raise FieldError(invalid_value, "truncate_prompt_tokens", why)
        return self


IGNORED_FIELDS = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"}
)
"""Fields that OpenAI's clients send and that have no meaning for this server."""

OTHER_SERVERS_NEUTRAL: Neutral = {
    # vLLM
    "ec_transfer_params": ({},),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "return_mm_kwargs": (True,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "thinking_token_budget": (-1,),
    "use_beam_search": (False,),
    "watermarking": (False,),
    # SGLang
    "custom_labels": ({},),
    "custom_params": ({},),
    "images_config": ({},),
    "require_reasoning": (False,),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "routed_experts_start_len": (0,),
    "session_params": ({},),
    "stream_reasoning": (True,),
    "use_audio_in_video": (False,),
    # LMDeploy
    "do_preprocess": (True,),
}
"""Fields of other servers for features that this server does not have, and the values that request none of them."""


def neutral_except(*supported: str) -> Neutral:
    """Returns `OTHER_SERVERS_NEUTRAL` without the fields that a route supports."""
    return {name: values for name, values in OTHER_SERVERS_NEUTRAL.items() if name not in supported}


MIN_PRIORITY, MAX_PRIORITY = -(2**63), 2**63 - 1
MAX_KEEP_S = 3600.0
"""Maximum time in seconds for which a prompt is kept."""


def _text_or_number(value: object) -> object:
    value = as_integer(value)
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


class VersionsShown(Enum):
    """The answers of a request that have the weight versions of their choices."""

    NEVER = auto()
    IF_CHANGED = auto()
    """Only for tokens that were generated with other weights than the initial ones."""
    ALWAYS = auto()

    def includes(self, spans: Sequence[WeightSpan]) -> bool:
        """Returns True if the answer has these versions of a choice."""
        changed = self is VersionsShown.IF_CHANGED and any(span.version != FIRST_VERSION for span in spans)
        return changed or self is VersionsShown.ALWAYS


class ReturnedTokens(Schema):
    """Fields that add token ids and weight versions to an answer."""

    return_token_ids: bool = False
    return_weight_versions: bool | None = None
    """None means with `return_token_ids`, if the weights have changed."""

    @property
    def versions_shown(self) -> VersionsShown:
        if self.return_weight_versions is None:
            return VersionsShown.IF_CHANGED if self.return_token_ids else VersionsShown.NEVER
        return VersionsShown.ALWAYS if self.return_weight_versions else VersionsShown.NEVER


class PromptLogprobs(Schema):
    """The fields for log-probabilities of the prompt."""

    prompt_logprobs: int | None = in_range("prompt_logprobs", None)
    """Number of alternatives to each token of the prompt."""
    prompt_logprobs_from: int = Field(0, ge=0)
    """Place of the first token of the prompt whose log-probabilities are sent."""

    @model_validator(mode="after")
    def check_place(self) -> Self:
        if self.prompt_logprobs_from and self.prompt_logprobs is None:
            raise FieldError(invalid_value, "prompt_logprobs_from", "'prompt_logprobs' must be set when it is given")
        return self


class TokenNames(Schema):
    """Fields that choose the form of tokens in log-probabilities and in rendered requests."""

    return_tokens_as_token_ids: bool = False
    return_token_offsets: bool = False
    """True if a rendered request has the places of the prompt's tokens in its text."""

    def refuse_offsets(self) -> None:
        """Raises RequestError if the request has a field that only rendered requests have."""
        if self.return_token_offsets:
            raise unsupported_parameter("return_token_offsets", "is only for the render routes")

    def named(self, *, as_ids: bool) -> Self:
        """Returns the request with the server's default, unless it says itself how tokens are shown."""
        given = "return_tokens_as_token_ids" in self.model_fields_set
        return self if given or not as_ids else self.model_copy(update={"return_tokens_as_token_ids": True})


class RequestFields(Schema):
    """The model, and how the groups of a request are scheduled and cached."""

    model: str | None = None
    session_id: SessionId = None
    """Id of the conversation, for clients that do not send `x-session-id`. -1 means none, as in LMDeploy."""
    cache_salt: Annotated[str, UNICODE] = ""
    keep_s: float = Field(0.0, ge=0, le=MAX_KEEP_S)
    priority: int = Field(0, ge=MIN_PRIORITY, le=MAX_PRIORITY)
    kv_transfer_params: object = None
    """Read by `kv_params`, since the values that it can have depend on the server."""

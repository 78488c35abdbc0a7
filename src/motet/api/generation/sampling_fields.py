"""The sampling fields of a request, with the same names, ranges and defaults on every route that generates."""

from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from pydantic import BeforeValidator, Field, PlainValidator, create_model

from motet.api.http.failure import FieldError, invalid_type, invalid_value
from motet.api.http.schema import Schema
from motet.types import MAX_NAMED_LOGPROBS, SAMPLING_FIELDS, VERBATIM_FIELDS, SamplingParams

MAX_SEED = 2**64 - 1
MIN_SEED = -(2**63)
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_CHARS_TOGETHER = 8192
"""Their search is prepared in 7 ms."""
MAX_STOP_TOKENS = 1024
MAX_BIASES = 16_384
MAX_ALLOWED = 16_384


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

    def num_listed(self, num_top: int | None) -> int | None:
        """Returns the number of tokens listed with each sampled token, None without log-probabilities: the `num_top`
        most likely tokens, or the sampled token followed by `logprob_token_ids`."""
        return 1 + len(self.logprob_token_ids) if self.logprob_token_ids and num_top is not None else num_top

    def refuse_without_logprobs(self, num_top: int | None) -> None:
        if self.logprob_token_ids and num_top is None:
            raise FieldError(invalid_value, "logprob_token_ids", "'logprobs' must be set when it is given")

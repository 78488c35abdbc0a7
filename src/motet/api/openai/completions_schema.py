"""The body of `POST /v1/completions`."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from motet.api.generation.answer_form import FormattedFields
from motet.api.generation.group_schema import SteeredFields, check_keep
from motet.api.generation.prompts import Prompt, parse_prompts
from motet.api.generation.request_fields import (
    IGNORED_FIELDS,
    IGNORED_OF_VLLM,
    RequestFields,
    SamplingFields,
    StreamingFields,
    check_named_logprobs,
    in_range,
)
from motet.api.http.failure import FieldError, invalid_value

DEFAULT_MAX_TOKENS = 16


def _as_count(value: object) -> object:
    """Reads true as 1, as vLLM does, and false as None."""
    return (1 if value else None) if isinstance(value, bool) else value


class CompletionRequest(FormattedFields, SamplingFields, SteeredFields, RequestFields, StreamingFields):
    ignored = IGNORED_FIELDS | IGNORED_OF_VLLM
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "spaces_between_special_tokens": (True,),
        "suffix": ("",),
        "use_beam_search": (False,),
    }

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(parse_prompts)]
    max_tokens: int | None = Field(None, ge=0)
    """0, with `echo`, returns only the prompt and its log-probabilities."""
    best_of: int | None = Field(None, ge=1)
    echo: bool = False
    logprobs: Annotated[int | None, BeforeValidator(_as_count, json_schema_input_type=int | bool)] = in_range(
        "logprobs", None
    )
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    add_special_tokens: bool = True

    @property
    def num_generated(self) -> int:
        """Number of choices to generate for each prompt; the `n` best of them are sent."""
        return self.best_of if self.best_of is not None else self.n

    @property
    def ranked(self) -> bool:
        """True if the choices in the answer are the best of several."""
        return self.num_generated > self.n

    def without_answer(self) -> Self:
        """Returns the request without the fields about answers, for a prefill."""
        unset: dict[str, object] = {"n": 1, "best_of": None, "echo": False, "logprobs": None, "prompt_logprobs": None}
        return self.model_copy(update=unset)

    @property
    def requested_max_tokens(self) -> int | None:
        """The maximum number of output tokens. At least one token is sampled: it costs no step, since the logits of the
        prompt's last token exist anyway."""
        return 1 if self.prompt_only else self.max_tokens

    @property
    def prompt_only(self) -> bool:
        return self.max_tokens == 0

    @model_validator(mode="after")
    def check_max_tokens(self) -> Self:
        if self.prompt_only and not self.echo:
            raise FieldError(invalid_value, "max_tokens", "0 tokens are an answer only with 'echo'")
        check_named_logprobs(self, self.logprobs)
        if self.prompt_only and self.logprob_token_ids:
            raise FieldError(invalid_value, "logprob_token_ids", "an answer of 0 tokens has no log-probabilities")
        return self

    @model_validator(mode="after")
    def check_best_of(self) -> Self:
        self.refuse_if_streamed("prompt_logprobs", self.prompt_logprobs)
        check_keep(self, self.group)
        if self.best_of is None:
            return self
        if self.best_of < self.n:
            raise FieldError(invalid_value, "best_of", f"it must be at least 'n' ({self.n}), but got {self.best_of}")
        if self.stream and self.best_of > self.n:
            raise FieldError(invalid_value, "best_of", "greater than 'n' it cannot be used with 'stream'")
        if self.group is not None and self.best_of > self.n:
            raise FieldError(invalid_value, "best_of", "greater than 'n' it cannot be used with 'group'")
        return self

"""The body of vLLM's `POST /inference/v1/generate`."""

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from motet.api.generation.answer_form import StructuredFields
from motet.api.generation.group_schema import SteeredFields, check_keep
from motet.api.generation.request_fields import (
    IGNORED_OF_VLLM,
    MAX_SEED,
    MIN_SEED,
    RequestFields,
    SamplingFields,
    StreamingFields,
    TokenIds,
    in_range,
)
from motet.api.http.failure import FieldError, invalid_value
from motet.api.http.schema import Schema


class GenerateSampling(StructuredFields, SamplingFields):
    """vLLM's `SamplingParams` as JSON. Fields without a meaning for token ids are ignored."""

    ignored = IGNORED_OF_VLLM | {"detokenize", "output_kind", "skip_clone", "_all_stop_token_ids"}
    refused = frozenset({"truncate_prompt_tokens"})
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "bad_words": ([],),
        "extra_args": ({},),
        "flat_logprobs": (False,),
        "logits_processors": ([],),
        "skip_reading_prefix_cache": (False,),
        "spaces_between_special_tokens": (True,),
    }

    logprobs: int | None = in_range("logprobs", None)
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] | None = None
    """None for the server's setting."""
    prompt_logprobs: int | None = in_range("prompt_logprobs", None)

    @model_validator(mode="after")
    def check_logprob_token_ids(self) -> Self:
        if self.logprob_token_ids and self.logprobs not in (None, len(self.logprob_token_ids)):
            why = f"it names {len(self.logprob_token_ids)} tokens, and 'logprobs' is {self.logprobs}"
            raise FieldError(invalid_value, "logprob_token_ids", why)
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives to each token; None for no log-probabilities."""
        return len(self.logprob_token_ids) if self.logprobs is None and self.logprob_token_ids else self.logprobs


class StartedChoice(Schema):
    """A choice that continues after output tokens that it already has."""

    index: int = Field(ge=0, lt=2**31)
    seed: int | None = Field(None, ge=MIN_SEED, le=MAX_SEED)
    """None for the seed that the choice with this index has in a request without `choices`."""
    token_ids: TokenIds


class TokensRequest(SteeredFields, RequestFields, StreamingFields):
    refused = frozenset({"features"})
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"output_mode": ("tokens",)}

    token_ids: TokenIds
    sampling_params: GenerateSampling
    choices: list[StartedChoice] | None = Field(None, min_length=1)
    """The choices to continue; None for n new choices."""
    request_id: str | None = Field(None, min_length=1, max_length=200)
    return_token_ids: bool = False
    """True if the answer repeats the prompt's token ids. It always has the token ids of choices."""

    @property
    def num_choices(self) -> int:
        return self.sampling_params.n if self.choices is None else len(self.choices)

    @model_validator(mode="after")
    def check_choices(self) -> Self:
        indices: set[int] = set()
        for number, choice in enumerate(self.choices or ()):
            if choice.index in indices:
                raise FieldError(invalid_value, f"choices[{number}].index", f"there is a choice {choice.index} already")
            indices.add(choice.index)
        if indices and self.group is not None:
            raise FieldError(invalid_value, "group", "it cannot be used with 'choices': a policy needs entire answers")
        n = self.sampling_params.n
        if indices and "n" in self.sampling_params.model_fields_set and n != len(indices):
            raise FieldError(invalid_value, "sampling_params.n", f"it is {n}, and 'choices' are {len(indices)}")
        return self

    @model_validator(mode="after")
    def check_prompt_logprobs(self) -> Self:
        self.refuse_if_streamed("sampling_params.prompt_logprobs", self.sampling_params.prompt_logprobs)
        check_keep(self, self.group)
        return self

    def without_answer(self) -> Self:
        """Returns the request without the fields about an answer, for a prefill."""
        unset: dict[str, object] = {"n": 1, "logprobs": None, "logprob_token_ids": [], "prompt_logprobs": None}
        sampling = self.sampling_params.model_copy(update=unset)
        return self.model_copy(update={"sampling_params": sampling, "choices": None})

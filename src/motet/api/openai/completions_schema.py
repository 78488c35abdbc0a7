"""The bodies of `POST /v1/completions`, of vLLM's `POST /inference/v1/generate`, and of `/tokenize`, `/detokenize`."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from motet.api.generation.group_schema import SteeredFields
from motet.api.generation.schema import (
    IGNORED_FIELDS,
    IGNORED_OF_VLLM,
    MAX_SEED,
    MIN_SEED,
    FormattedFields,
    Schema,
    StructuredFields,
    TokenIds,
    in_range,
)
from motet.api.http.failure import FieldError, invalid_type, invalid_value
from motet.api.openai.chat_schema import ChatPrompt

DEFAULT_MAX_TOKENS = 16

Prompt = str | tuple[int, ...]
"""Text to be tokenised, or token ids."""


def parse_prompts(value: object) -> tuple[Prompt, ...]:
    """Reads a string, a list of strings, a list of token ids, or a list of such lists; all of one kind."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        kinds = "a string, an array of strings, an array of token ids or an array of such arrays"
        raise FieldError(invalid_type, None, kinds)
    if not value:
        raise FieldError(invalid_value, None, "the array is empty; at least one prompt is needed")
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(type(item) is int for item in value):
        return (tuple(value),)
    if all(isinstance(item, list) for item in value):
        return tuple(_token_ids(item, number) for number, item in enumerate(value))
    raise FieldError(invalid_type, None, "either strings, or token ids, or arrays of token ids in an array of prompts")


def _token_ids(item: list[object], number: int) -> tuple[int, ...]:
    ids = tuple(token for token in item if type(token) is int)
    if len(ids) != len(item):
        raise FieldError(invalid_type, number, "token ids, which are integers")
    return ids


def _as_count(value: object) -> object:
    """Reads true as 1, as vLLM does, and false as nothing asked for."""
    return (1 if value else None) if isinstance(value, bool) else value


class CompletionRequest(FormattedFields, SteeredFields):
    ignored = IGNORED_FIELDS | IGNORED_OF_VLLM
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "spaces_between_special_tokens": (True,),
        "suffix": ("",),
        "use_beam_search": (False,),
    }

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(parse_prompts)]
    max_tokens: int | None = Field(None, ge=0)
    """0, with `echo`: only the prompt comes back, and what it scored."""
    best_of: int | None = Field(None, ge=1)
    echo: bool = False
    logprobs: Annotated[int | None, BeforeValidator(_as_count, json_schema_input_type=int | bool)] = in_range(
        "logprobs", None
    )
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    add_special_tokens: bool = True

    @property
    def num_drawn(self) -> int:
        """Number of choices to make of each prompt; the `n` best of them are sent."""
        return self.best_of if self.best_of is not None else self.n

    def without_answer(self) -> Self:
        """Returns the same prompts without the fields about answers, since there will be none."""
        unasked: dict[str, object] = {"n": 1, "best_of": None, "echo": False, "logprobs": None, "prompt_logprobs": None}
        return self.model_copy(update=unasked)

    @property
    def max_tokens_asked(self) -> int | None:
        """A token is drawn also if nobody wants one: it costs no step, since the prompt's last row is there."""
        return 1 if self.prompt_only else self.max_tokens

    @property
    def prompt_only(self) -> bool:
        return self.max_tokens == 0

    @model_validator(mode="after")
    def check_max_tokens(self) -> Self:
        if self.prompt_only and not self.echo:
            raise FieldError(invalid_value, "max_tokens", "0 tokens are an answer only with 'echo'")
        self.refuse_without_logprobs(self.logprobs)
        if self.prompt_only and self.logprob_token_ids:
            raise FieldError(invalid_value, "logprob_token_ids", "an answer of 0 tokens has no log-probabilities")
        return self

    @model_validator(mode="after")
    def check_best_of(self) -> Self:
        self.refuse_if_streamed("prompt_logprobs", self.prompt_logprobs)
        if self.best_of is None:
            return self
        if self.best_of < self.n:
            raise FieldError(invalid_value, "best_of", f"it must be at least 'n' ({self.n}), but got {self.best_of}")
        if self.stream and self.best_of > self.n:
            raise FieldError(invalid_value, "best_of", "greater than 'n' it cannot be used with 'stream'")
        if self.group is not None and self.best_of > self.n:
            raise FieldError(invalid_value, "best_of", "greater than 'n' it cannot be used with 'group'")
        return self


class GenerateSampling(StructuredFields):
    """vLLM's `SamplingParams` as JSON. What has no meaning for token ids alone is ignored."""

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
    """None: as the server is set."""
    prompt_logprobs: int | None = in_range("prompt_logprobs", None)

    @model_validator(mode="after")
    def check_logprob_token_ids(self) -> Self:
        if self.logprob_token_ids and self.logprobs not in (None, len(self.logprob_token_ids)):
            why = f"it names {len(self.logprob_token_ids)} tokens, and 'logprobs' is {self.logprobs}"
            raise FieldError(invalid_value, "logprob_token_ids", why)
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives wanted for each token; None: no log-probabilities at all."""
        return len(self.logprob_token_ids) if self.logprobs is None and self.logprob_token_ids else self.logprobs


class StartedChoice(Schema):
    """A choice that goes on from the tokens that it has written before."""

    index: int = Field(ge=0, lt=2**31)
    seed: int | None = Field(None, ge=MIN_SEED, le=MAX_SEED)
    """None: the one that the choice of this index has in a request without `choices`."""
    token_ids: TokenIds


class TokensRequest(SteeredFields):
    refused = frozenset({"features"})
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"output_mode": ("tokens",)}

    token_ids: TokenIds
    sampling_params: GenerateSampling
    choices: list[StartedChoice] | None = Field(None, min_length=1)
    """The choices to write, if some have begun; None: n new ones."""
    request_id: str | None = Field(None, min_length=1, max_length=200)
    return_token_ids: bool = False
    """True if the answer repeats the prompt's token ids; those of choices are always in it."""

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
            raise FieldError(
                invalid_value, "group", "it cannot be used with 'choices': a policy looks at whole answers"
            )
        n = self.sampling_params.n
        if indices and "n" in self.sampling_params.model_fields_set and n != len(indices):
            raise FieldError(invalid_value, "sampling_params.n", f"it is {n}, and 'choices' are {len(indices)}")
        return self

    @model_validator(mode="after")
    def check_prompt_logprobs(self) -> Self:
        self.refuse_if_streamed("sampling_params.prompt_logprobs", self.sampling_params.prompt_logprobs)
        return self

    def without_answer(self) -> Self:
        """Returns the same prompt without the fields about an answer, since there will be none."""
        unasked: dict[str, object] = {"n": 1, "logprobs": None, "logprob_token_ids": [], "prompt_logprobs": None}
        sampling = self.sampling_params.model_copy(update=unasked)
        return self.model_copy(update={"sampling_params": sampling, "choices": None})


class TokenizeBody(ChatPrompt):
    """A text (`prompt`) or a chat (`messages` and the fields of a chat prompt), one of the two."""

    refused = frozenset({"chat_template"})
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"mm_processor_kwargs": ({},)}

    model: str | None = None
    prompt: str | None = None
    """`add_special_tokens`: None is True for a text."""
    return_token_strs: bool = False

    @model_validator(mode="after")
    def check_one_of_two(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise FieldError(invalid_value, "prompt", "exactly one of it and 'messages' must be given")
        return self


class DetokenizeBody(Schema):
    model: str | None = None
    tokens: TokenIds
